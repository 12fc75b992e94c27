// Package process is a worker process: it talks to the host's agent, builds an engine, a new one after each rollback, and
// calls the user's program where the engine asks for it.
//
// Package trainer fills a [Job] from the user's job, so this package knows neither layers nor data sets. [Worker.Serve] is the
// whole life of a worker; [Main] is Serve in a process that an agent has started.
//
// # Goroutines
//
// Serve computes in its caller. One goroutine receives what the agent says and passes it on, another sends heartbeats. Both end
// before Serve returns, and so do the checkpoint writer, the member of the gossip ring and the handlers of signals, which last
// as long as training.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/cma"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/internal/worker/model"
)

// Job is a training job as a worker runs it. The functions call user code: Stage's passes in as many goroutines as the worker has
// lanes, Load in as many as Readers says, all else one at a time.
type Job struct {
	rundir.Job // what job.json says of it

	Files           []rundir.DataFile // of the training data, then of the evaluation data
	CheckpointEvery time.Duration     // 0: no checkpoints, unless CheckpointSteps says when
	CheckpointSteps int               // 0: as CheckpointEvery says
	Params          *model.Params
	Config          []byte // content of config.json

	Input, Target tensor.Spec
	Rule          zero.Rule
	LR            func(step int) float64

	// Stage makes layers [lo, hi) run, whose parameters are held.
	Stage func(lo, hi int, pool *kernel.Pool) engine.Stage
	// OnePass says that stages run one pass at a time.
	OnePass bool
	// Memory is [engine.Config.Memory], and Free takes all back that it has returned. They are nil for memory of the heap.
	Memory func(n int) []float32
	Free   func()
	// Load reads sample i of the run or, where that is skipped, the one behind it in the data, by so many. The call is recorded in calls,
	// unless that is nil. Evaluate reads the i-th of Evaluations samples of an evaluation; it is nil where there is none.
	Load        func(calls *Calls, i uint64, skips int, in, target tensor.Tensor) error
	Readers     int                           // goroutines that may read at the same time; 0: one
	Index       func(i uint64, skips int) int // of that sample in the data
	Evaluate    func(i int, in, target tensor.Tensor) error
	Evaluations int
	Metrics     []string // names of what steps and evaluations add up beside the loss

	OnStep func(Call) error // nil for none
	OnEnd  func(End) error  // nil for none
}

// Call is a committed step that OnStep is called for.
type Call struct {
	control.Step
	Again bool // another process may have made the call
	Lines *Lines
}

// SampleError says that a sample could not be read, even when that was tried again.
type SampleError struct {
	Index int // of the sample in its data set
	Tries int
	Err   error
}

func (e *SampleError) Error() string {
	return fmt.Sprintf("sample %d of the data: %v (tried %d times)", e.Index, e.Err, e.Tries)
}
func (e *SampleError) Unwrap() error { return e.Err }

// End describes the end of a run to the worker that has collected the model.
type End struct {
	RunDir string
	Steps  int
	Whole  engine.Stage // has all layers; nil if no stage of this worker does
	Out    io.Writer
}

// Self identifies a worker and says how it reaches others.
type Self struct {
	Session   id.Session
	Transport transport.Transport
	Key       auth.Key // of the run

	// Ports are those at which it listens for other hosts, where Transport does.
	Ports ports.Range
	// Rejected counts the connections that are cut off before they are a link; nil counts none.
	Rejected *auth.Tally

	// own is set where the worker has the process for itself.
	own *ownProcess
}

// ownProcess is what a worker has that is alone in its process.
type ownProcess struct {
	progress *progress.Record // the agent reads it after the process's end; may be nil
	slow     chan os.Signal   // asks the process to read how slow it is to be
	leave    chan os.Signal   // asks it to leave the run
	quit     chan os.Signal   // asks it to write its stacks and exit
}

func (s Self) id() id.WorkerID { return s.Session.Worker }

// Alone is the only worker of a run, in the process of its agent.
func Alone() Self { return Self{Transport: transport.NewMem(), Key: auth.NewKey()} }

// Make makes the job, whose calls of user code are recorded in calls. It may tell the agent what takes long. Errors that are not
// the program's own fault are of type [*JobError].
type Make func(calls *Calls, note func(text string) error) (*Job, error)

// JobError is why there is no job to run.
type JobError struct {
	Kind control.FailKind // control.Usage or control.Help
	Err  error            // for the user
}

// ExitError is an error whose program has chosen the status of its exit, 1 to 255.
type ExitError struct {
	Status int
	Err    error
}

func (e *ExitError) Error() string { return e.Err.Error() }
func (e *ExitError) Unwrap() error { return e.Err }

func (e *JobError) Error() string { return e.Err.Error() }
func (e *JobError) Unwrap() error { return e.Err }

// PanicError is a panic in user code: a layer, a loss, a data set, a callback, or
// the function that makes the job.
type PanicError struct {
	Step  int    // in which it happened, from 1; 0 before the first
	Where string // what ran, such as `Forward of layer "0"`
	Value any
	Stack string
}

func (e *PanicError) Error() string {
	place := "before the first step"
	if e.Step > 0 {
		place = fmt.Sprintf("in step %d", e.Step)
	}
	if e.Where != "" {
		place += ", in " + e.Where
	}
	return fmt.Sprintf("panic %s: %v", place, e.Value)
}

// Panicked returns the error for the value v of a panic. It is called by the function that recovered it.
func Panicked(step int, where string, v any) *PanicError {
	stack := debug.Stack()
	if p, ok := v.(*kernel.Panic); ok {
		v, stack = p.Value, p.Stack
	}
	return &PanicError{Step: step, Where: where, Value: v, Stack: trimStack(stack)}
}

// passes returns how many passes a worker of so many threads runs at a time: each takes memory, so many threads share one pass, and
// there are no more than processors.
func (j *Job) passes(threads int) int {
	if j.OnePass || threads > engine.Lanes {
		return 1
	}
	return min(threads, runtime.NumCPU())
}

// laneOf returns the lane of a panic.
func laneOf(v any) int {
	if p, ok := v.(*kernel.Panic); ok {
		return p.Lane
	}
	return 0
}

// trimStack drops the frames of the panic machinery, which lie above the one
// that panicked.
func trimStack(stack []byte) string {
	lines := strings.Split(strings.TrimSpace(string(stack)), "\n")
	for i := len(lines) - 1; i > 0; i-- {
		if strings.HasPrefix(lines[i], "panic(") && i+2 < len(lines) {
			lines = append(lines[:1], lines[i+2:]...)
			break
		}
	}
	return strings.Join(lines, "\n")
}

// maxErrorText bounds what is told of an error: a program's may be of any length.
const maxErrorText = 4 << 10

// Failure returns the message that tells the agent of an error.
func Failure(err error, step int) (f control.Failed) {
	defer func() {
		if n := len(f.Text); n > maxErrorText {
			f.Text = fmt.Sprintf("%s... (%d bytes)", strings.ToValidUTF8(f.Text[:maxErrorText], ""), n)
		}
	}()
	f = control.Failed{Kind: control.Faulty, Text: err.Error(), Step: step}
	var panicked *PanicError
	var job *JobError
	switch {
	case errors.As(err, &panicked):
		f.Kind, f.Stack = control.UserPanic, panicked.Stack
	case errors.As(err, new(*SampleError)):
		f.Kind = control.NoSample
	case errors.As(err, new(*core.NonFiniteError)):
		f.Kind = control.NonFinite
	case errors.As(err, new(*core.MismatchError)):
		f.Kind = control.Mismatch
	case errors.As(err, new(*core.CorruptError)):
		f.Kind = control.Corrupt
	case errors.Is(err, comm.ErrLink), errors.Is(err, comm.ErrAborted), errors.Is(err, comm.ErrRefused):
		f.Kind = control.PeerLost
	case errors.As(err, &job):
		if f.Kind, f.Text = job.Kind, job.Error(); f.Kind == control.Usage {
			f.Text = strings.ReplaceAll(f.Text, "\n", "; ")
			if exit := new(ExitError); errors.As(err, &exit) {
				f.Exit = exit.Status
			}
		}
	}
	return f
}

// Exit statuses of a worker process.
const (
	exitFailed = 1
	exitQuit   = 2 // after SIGQUIT, as of every Go program
)

// envLinks is the environment variable that says what carries the links between workers of one host. An agent hands it on to all of its workers.
const envLinks = "SOLITON_LINKS"

// Main is the life of a worker process that an agent has started, from its identity on. It returns the exit status.
func Main(launched control.Identity, makeJob Make) int {
	signal.Ignore(os.Interrupt) // the agent decides what Ctrl-C means
	for _, fd := range launched.Canaries {
		if fd > 0 {
			_ = platform.KeepCanary(fd) // without one the end of the process is known a little later
		}
	}
	cma.AllowSiblings()
	own := &ownProcess{slow: make(chan os.Signal, 1), leave: make(chan os.Signal, 1), quit: make(chan os.Signal, 1)}
	signal.Notify(own.slow, chaos.SlowSignal)
	signal.Notify(own.leave, syscall.SIGTERM)
	signal.Notify(own.quit, syscall.SIGQUIT)
	ctx := context.Background()
	conn, key, err := launched.Connect(ctx) // says Hello
	if err != nil {
		complain(err)
		return exitFailed
	}
	defer conn.Close()
	if launched.Progress > 0 {
		f := os.NewFile(uintptr(launched.Progress), "progress")
		if own.progress, err = progress.Open(f); err != nil {
			complain(err)
			return exitFailed
		}
		_ = f.Close() // it stays mapped
	}
	session := id.Session{Worker: id.WorkerID(launched.WorkerID), Incarnation: launched.Incarnation}
	rejected := new(auth.Tally)
	links := transport.Host{Folder: launched.Links, Name: session.String()}
	switch how := os.Getenv(envLinks); how {
	case "":
	case "sockets":
		links.Sockets = true
	default:
		complain(fmt.Errorf("%s is %q: give sockets (no worker reads the memory of another), or nothing", envLinks, how))
		return exitFailed
	}
	if launched.Addr != "" {
		secure, err := transport.TLSFromSecret(key)
		if err != nil {
			complain(err)
			return exitFailed
		}
		links.Far = transport.TCP{Addr: launched.Addr, Ports: launched.Ports, TLS: secure, Rejected: rejected}
	}
	w := New(conn, Self{
		Session:   session,
		Transport: links,
		Key:       key,
		Ports:     launched.Ports,
		Rejected:  rejected,
		own:       own,
	})
	if launched.Addr != "" {
		defer find.Ask(w.sources)()
	}
	// The runtime's own handler cannot show the stack of a goroutine that computes without a pause.
	defer heed(own.quit, func() {
		writeStacks(os.Stderr, w.doing(w.calls.Oldest()))
		os.Exit(exitQuit)
	})()
	err = w.Serve(ctx, makeJob)
	var job *JobError
	if err != nil && !(errors.As(err, &job) && job.Kind == control.Help) {
		complain(err)
		return exitFailed
	}
	return 0
}

// complain writes to the worker's log.
func complain(err error) { fmt.Fprintf(os.Stderr, "%s: %v\n", filepath.Base(os.Args[0]), err) }

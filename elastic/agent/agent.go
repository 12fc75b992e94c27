package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/rundir"
	"github.com/soliton-train/soliton/internal/view"
)

// Config says how a run is kept. Its zero value is a run without files, view and output.
type Config struct {
	// RunDir is where the run's files go; nil means a run without files.
	// Serve closes it.
	RunDir *rundir.Dir

	// View shows the run; nil shows nothing. Serve closes it.
	View view.View

	// Output gets what the program wants on its standard output, after the
	// view has closed; nil drops it.
	Output io.Writer

	// Program is the program's name in messages, as people gave it. ""
	// means "the program".
	Program string

	// Executable is the file whose SHA-256 goes into job.json; "" leaves it out.
	Executable string

	// WorkerID and Incarnation are what the worker must say it is.
	WorkerID, Incarnation int

	// Threads is the worker's number of compute threads. 0 means one for
	// each core this process may use.
	Threads int

	// Reduction is how gradients are summed. "" means exact, which is the only
	// one so far.
	Reduction string

	// HelloTimeout is how long a worker may take until it calls
	// trainer.Main. 0 means 30 s, which is long for a process to start and short
	// for a person to wait.
	HelloTimeout time.Duration
}

// Validate reports every fault of the configuration, each on a line that names the
// field and what would be right.
func (c Config) Validate() error {
	var errs []error
	if c.Threads < 0 {
		errs = append(errs, fmt.Errorf("Threads is %d: give at least 1, or 0 for all cores", c.Threads))
	}
	if c.Reduction != "" && c.Reduction != "exact" {
		errs = append(errs, fmt.Errorf("Reduction is %q: this version has only exact", c.Reduction))
	}
	if c.HelloTimeout < 0 {
		errs = append(errs, fmt.Errorf("HelloTimeout is %v: give a positive time, or 0 for 30s", c.HelloTimeout))
	}
	if c.WorkerID < 0 || c.Incarnation < 0 {
		errs = append(errs, fmt.Errorf("worker is %d in incarnation %d: both count from 0", c.WorkerID, c.Incarnation))
	}
	return errors.Join(errs...)
}

func (c Config) withDefaults() Config {
	if c.Program == "" {
		c.Program = "the program"
	}
	if c.Threads == 0 {
		c.Threads = runtime.GOMAXPROCS(0)
	}
	if c.Reduction == "" {
		c.Reduction = "exact"
	}
	if c.HelloTimeout == 0 {
		c.HelloTimeout = 30 * time.Second
	}
	if c.Output == nil {
		c.Output = io.Discard
	}
	return c
}

// Reason says who asked a run to stop; it becomes stopped_by in summary.json.
type Reason string

const (
	Interrupt  Reason = "interrupt"  // Ctrl-C: exit 130
	Terminated Reason = "terminated" // SIGTERM or SIGHUP: exit 75
	Cancelled  Reason = "cancelled"  // the end of Serve's context: exit 130
)

// Agent keeps one run. Its methods may be called from any goroutine; Serve once.
type Agent struct {
	cfg   Config
	stops chan Reason
}

// New returns the agent for a valid configuration.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Agent{cfg: cfg.withDefaults(), stops: make(chan Reason, 2)}, nil
}

// Stop asks the run to stop: at the next commit the first time, at once the second
// time. It never waits.
func (a *Agent) Stop(r Reason) {
	select {
	case a.stops <- r:
	default: // two are under way, which is all that counts
	}
}

// CatchSignals makes the signals that end a program stop the run instead,
// until the returned function is called.
func (a *Agent) CatchSignals() (restore func()) {
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case s := <-ch:
				if s == os.Interrupt {
					a.Stop(Interrupt)
				} else {
					a.Stop(Terminated)
				}
			case <-quit:
				return
			}
		}
	}()
	return func() {
		signal.Stop(ch)
		close(quit)
		<-done
	}
}

// reapTime is how long Serve waits for a worker it has killed, and for one that has
// closed its connection to end by itself.
const reapTime = time.Second

// Serve keeps the run until the worker has ended, and closes the view and
// the run directory.
func (a *Agent) Serve(ctx context.Context, w Worker) Outcome {
	r := &run{
		cfg:    a.cfg,
		worker: w,
		events: make(chan event),
		send:   make(chan control.Message, 4),
		quit:   make(chan struct{}),
		s:      newSession(a.cfg),
	}
	return r.loop(ctx, a.stops)
}

// run is the loop around one session and its goroutines.
type run struct {
	cfg    Config
	worker Worker
	s      *session

	events chan event           // from the goroutines to the loop
	send   chan control.Message // from the loop to the sender; holds more than a session ever sends
	quit   chan struct{}        // closed when the loop has ended

	viewClosed bool
	early      []byte // output that came before the view was closed
	reap       <-chan time.Time
}

func (r *run) loop(ctx context.Context, stops <-chan Reason) Outcome {
	talk, hangUp := context.WithCancel(context.Background())
	talked := make(chan struct{})
	go func() {
		defer close(talked)
		r.talk(talk)
	}()

	hello := time.NewTimer(r.cfg.HelloTimeout)
	defer hello.Stop()
	cancelled := ctx.Done()
	exited := r.worker.Exited()

	for !r.s.over() {
		var e event
		select {
		case e = <-r.events:
		case reason := <-stops:
			e = stopAsked{reason}
		case <-cancelled:
			cancelled = nil
			e = stopAsked{Cancelled}
		case <-exited:
			exited = nil
			e = workerExited{r.worker.Status()}
		case <-hello.C:
			e = helloLate{}
		case <-r.reap:
			r.reap = nil
			e = reapLate{}
		}
		r.apply(r.s.step(time.Now(), e))
	}

	hangUp()
	close(r.quit)
	<-talked
	r.closeView()

	out := r.s.outcome()
	if r.s.lost {
		out.Detail = r.worker.LastOutput()
	}
	if r.cfg.RunDir != nil {
		if err := r.cfg.RunDir.Close(); err != nil && out.Err == nil {
			out.Err = &FileError{Err: err}
		}
	}
	return out
}

// talk connects and receives until the connection ends. It owns the sender.
func (r *run) talk(ctx context.Context) {
	post := func(e event) bool {
		select {
		case r.events <- e:
			return true
		case <-r.quit:
			return false
		}
	}
	nc, err := r.worker.Connect(ctx)
	if err != nil {
		post(connClosed{err})
		return
	}
	conn := control.New(nc)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for {
			select {
			case m := <-r.send:
				if conn.Send(m) != nil {
					return // the receiver sees the reason
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() { <-sent }()
	defer conn.Close() // ends a Send that waits

	// A closed connection must end the sender too, but only Serve cancels ctx;
	// so the connection's end is posted first and the loop does the rest.
	for {
		m, err := conn.Receive(ctx)
		if err != nil {
			post(connClosed{err})
			return
		}
		if !post(received{m}) {
			return
		}
	}
}

// apply carries out effects in their order. A file that cannot be written is one
// more event for the session.
func (r *run) apply(effects []effect) {
	for _, e := range effects {
		if err := r.do(e); err != nil {
			r.apply(r.s.step(time.Now(), fileFailed{err}))
			return
		}
	}
}

func (r *run) do(e effect) error {
	dir := r.cfg.RunDir
	switch e := e.(type) {
	case writeJob:
		if dir == nil {
			return nil
		}
		if r.cfg.Executable != "" {
			// Only a record: a program that was removed meanwhile still runs.
			e.job.ProgramSHA256, _ = rundir.FileSHA256(r.cfg.Executable)
		}
		return dir.WriteJob(e.job, e.data)
	case writeMetrics:
		if dir == nil {
			return nil
		}
		return dir.AddMetrics(e.m)
	case writeEvent:
		if dir == nil {
			return nil
		}
		return dir.AddEvent(e.e)
	case writeSummary:
		if dir == nil {
			return nil
		}
		return dir.WriteSummary(e.s)
	case sendMessage:
		r.send <- e.m
	case show:
		if r.cfg.View != nil {
			r.cfg.View.Show(e.e)
		}
	case closeView:
		r.closeView()
	case output:
		if r.viewClosed {
			_, _ = io.WriteString(r.cfg.Output, e.text)
		} else if len(r.early)+len(e.text) <= maxEarlyOutput {
			r.early = append(r.early, e.text...)
		}
	case kill:
		r.worker.Kill()
		r.reap = time.After(reapTime)
	case awaitExit:
		r.reap = time.After(reapTime)
	default:
		panic(fmt.Sprintf("agent: effect %T", e))
	}
	return nil
}

// maxEarlyOutput bounds what is kept for the time after the view; a program prints at its
// end, and what it prints between is in its log.
const maxEarlyOutput = 1 << 20

func (r *run) closeView() {
	if r.viewClosed {
		return
	}
	r.viewClosed = true
	if r.cfg.View != nil {
		r.cfg.View.Close()
	}
	_, _ = r.cfg.Output.Write(r.early)
	r.early = nil
}

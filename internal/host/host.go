package host

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/devices"
	"github.com/soliton-train/soliton/internal/host/ring"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Config says how a host keeps its part of a run. A run on one machine is a run of one host: Hosts and the fields below
// it stay empty.
type Config struct {
	session.Settings // the same on every host

	// Workers is the number of workers that a run of one host begins with. 0 means 1.
	Workers int

	// Start starts a worker of this host. It is called by several goroutines.
	Start func(worker, incarnation int) (spawn.Worker, error)

	// Fixed says that no worker can be started while the run goes on.
	Fixed bool

	// Executable is the file whose SHA-256 goes into job.json where a worker is in
	// this process; "" leaves it out.
	Executable string

	// RunDir is where the run's files go; nil means a run without files. One host alone closes it;
	// several have the same directory, which its owner closes.
	RunDir *rundir.Dir

	// Apart says that each of several hosts has a run directory of its own. The leader writes the records; the others get copies.
	Apart bool

	// Target is where checkpoints go beside the run directory, as Settings.Checkpoints names it; nil for nowhere.
	Target archive.Bucket

	// Inject injects a fault into a worker of this host, where hosts are Apart; nil refuses all. A fault is of no kind that the run
	// would know.
	Inject func(kind string, p rundir.Process, factor float64) error

	// Console shows the run. Where several hosts take turns, Lead returns what replaces it while this one leads in a
	// term; terms may overlap for a moment, and the greatest counts. Where hosts are Apart, tell has Shown called with the data on
	// every other host; on one that comes later too if the data are kept, which is for the newest of each name. It never waits.
	Console
	Lead  func(term uint64, tell func(keep string, data []byte)) (Console, error)
	Shown func(data []byte)

	// Clocks are the clocks of the devices that workers compute on, which are to be set; nil, the same on every host, leaves
	// all as it is.
	Clocks devices.Clocks

	// Hosts are the hosts with which the run began, in one order everywhere, and Self is the position of this one. With Enters they
	// are hosts of a run that has begun, and this one is none of them yet: Serve asks them to take it in.
	Hosts  []Addr
	Self   int
	Enters *Addr
	Secret []byte       // known to the hosts only
	Link   net.Listener // behind the Link address of this host; Serve closes it
	Ports  ports.Range  // of this host, for its member of the gossip ring

	// Rejected counts the connections that this host has rejected. Others of its process may count into it; nil counts none.
	Rejected *auth.Tally

	// TieBreak is the host that votes where there are two; "" means the first one.
	TieBreak string

	// Log opens the log of what the hosts agree on, for this host. nil means that of a host alone.
	Log func(self Addr) (agree.Log, error)

	// Done is told how the run has ended, by the host that leads. Where hosts are Apart, the others have then been Shown what Last
	// returns of it.
	Done func(term uint64, o session.Outcome)
	Last func(term uint64, o session.Outcome) []byte

	// Waits is told, in a sentence, what this host waits for when its workers hold because it
	// hears of no leader; it may be nil.
	Waits func(text string)

	agreed  func() agree.State // what this host knows to be; nil before Serve
	led     int                // the host that led when this one entered
	threads int                // of each worker of this host; 0: as Settings say
}

// Console is where a run is shown and measured. The host closes View and Telemetry.
type Console struct {
	View   view.View // nil shows nothing
	Output io.Writer // what the program prints, after the view has closed; nil drops it

	// Telemetry gets spans and measures of the run; nil has nothing measured.
	Telemetry Telemetry
}

// Telemetry takes in what is told of a run. No method but Close waits.
type Telemetry interface {
	// Begin says which run it is, before anything else. file appends a line to its traces.jsonl; it
	// is nil for a run without files.
	Begin(run trace.Run, program string, file func(line []byte) error)
	Spans([]trace.Span)
	Measure(trace.Measure)
	// Close returns when all is where it belongs, or why it is not. No file is written
	// after that.
	Close() error
}

// Addr is one of the hosts of a run.
type Addr struct {
	Name    string `json:"name"`
	Voter   bool   `json:"voter"`
	Agree   string `json:"agree"`   // address of its part in the agreement
	Link    string `json:"link"`    // where other hosts reach it
	Workers []int  `json:"workers"` // those with which the run begins on it

	Starts int `json:"starts,omitempty"` // workers that are started on it when it enters a run that has begun
}

// Validate reports every fault of the configuration, each on a line that names the field and what would be right.
func (c Config) Validate() error {
	errs := faults.List{c.Settings.Validate()}
	errs.If(c.Start == nil, "Start is nil: say how a worker is started")
	errs.If(c.Workers < 0 || c.Workers > session.MaxWorkers, "Workers is %d: give 1 to %d, or 0 for 1", c.Workers, session.MaxWorkers)
	errs.If(c.Respawn && c.Fixed, "Respawn and Fixed are both set: give one")
	errs.If(c.Apart && (c.RunDir == nil || c.Shown == nil || c.Last == nil), "Apart is set without RunDir, Shown or Last: give all three")
	return errs.Err()
}

func (c Config) withDefaults() Config {
	if len(c.Hosts) == 0 {
		all := make([]int, max(c.Workers, 1))
		for i := range all {
			all[i] = i
		}
		c.Hosts = []Addr{{Voter: true, Workers: all}}
	}
	c.Workers = 0
	for _, h := range c.Hosts {
		c.Workers += len(h.Workers)
	}
	if c.Apart && c.Threads == 0 {
		own := c.self()
		c.threads = c.Settings.WithDefaults(max(1, len(own.Workers)+own.Starts)).Threads
	}
	c.Settings = c.Settings.WithDefaults(c.Workers)
	return c
}

// alone reports whether this is the only host, and no other one can enter.
func (c *Config) alone() bool { return len(c.Hosts) == 1 && !c.Apart }

// times returns the policy of timeouts.
func (c *Config) times() timing.Policy { return timing.Of(c.Detect) }

// openLog opens the log of what the hosts agree on.
func (c *Config) openLog() (agree.Log, error) {
	if c.Log != nil {
		return c.Log(c.self())
	}
	path := ""
	if c.RunDir != nil {
		var err error
		if path, err = c.RunDir.MakeStore(); err != nil {
			return nil, &session.FileError{Err: err}
		}
	}
	log, err := agree.OpenLocal(path, "host-0", c.Resume.Newest().Generation)
	if err != nil {
		return nil, &session.FileError{Err: err}
	}
	if text := log.Dropped(); text != "" && c.Resume != nil {
		c.Resume.Note = append(c.Resume.Note, text)
	}
	return log, nil
}

// Host keeps a run, or its part of one. Its methods may be called from any goroutine; Run or Serve once.
type Host struct {
	c     Config
	asked *queue[session.Event] // StopAsked and WatchAsked
	leave chan struct{}
}

// New returns the host for a valid configuration.
func New(c Config) (*Host, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &Host{c: c.withDefaults(), asked: newQueue[session.Event](), leave: make(chan struct{}, 1)}, nil
}

// Stop asks the run to stop: at the next commit the first time, at once the second time. It never waits. Ask every host of a
// run that shares a run directory, any of one over several machines: the leader acts on it, and a later leader knows.
func (h *Host) Stop(r session.Reason) { h.asked.put(session.StopAsked{Reason: r}) }

// Watch turns timelines of steps on or off. While they are on, the view gets a view.Timeline of every worker for a few steps in
// a second. It never waits. Ask every host of a run that shares a run directory; of one over several machines those that want them.
func (h *Host) Watch(on bool) { h.asked.put(session.WatchAsked{On: on}) }

// ErrLeft means that this host has left the run, which others continue.
var ErrLeft = errors.New("host: it has left the run")

// Leave has this host leave a run of several: its workers hand over what they hold and exit, and Serve returns [ErrLeft]. After
// [timing.Drain] it leaves at once, as if its machine had failed. If no worker is left, the run stops. It never waits.
func (h *Host) Leave() {
	select {
	case h.leave <- struct{}{}:
	default:
	}
}

// CatchSignals makes the signals that end a program stop the run instead,
// until the returned function is called.
func (h *Host) CatchSignals() (restore func()) { return CatchSignals(h.Stop) }

// CatchSignals calls stop with the reason for each signal that ends a program, until the returned function is called.
func CatchSignals(stop func(session.Reason)) (restore func()) {
	ch := make(chan os.Signal, 2)
	platform.NotifyEnd(ch)
	end := Forward(ch, func(s os.Signal) { stop(ReasonOf(s)) })
	return func() {
		signal.Stop(ch)
		end()
	}
}

// ReasonOf returns why a run stops that got a signal.
func ReasonOf(s os.Signal) session.Reason {
	if s == os.Interrupt {
		return session.Interrupt
	}
	return session.Terminated
}

// Forward hands what comes to a function until the returned function is called.
func Forward[T any](from <-chan T, to func(T)) (end func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case x := <-from:
				to(x)
			case <-quit:
				return
			}
		}
	}()
	return func() {
		close(quit)
		<-done
	}
}

// StartError means that the program could not be started.
type StartError struct{ Err error }

func (e *StartError) Error() string { return fmt.Sprintf("cannot be started: %v", e.Err) }
func (e *StartError) Unwrap() error { return e.Err }

// Run keeps the run of a host alone until it has ended. The end of ctx asks it to stop.
func (h *Host) Run(ctx context.Context) session.Outcome {
	serving, end := context.WithCancel(context.Background())
	defer end()
	stop := context.AfterFunc(ctx, func() { h.Stop(session.Cancelled) })
	defer stop()
	var ended *session.Outcome
	h.c.Done = func(_ uint64, o session.Outcome) {
		ended = &o
		end()
	}
	err := h.Serve(serving)
	if ended != nil {
		return *ended
	}
	// The run did not begin.
	if h.c.View != nil {
		h.c.View.Close()
	}
	if h.c.Telemetry != nil {
		_ = h.c.Telemetry.Close() // it has heard nothing
	}
	if h.c.RunDir != nil {
		_ = h.c.RunDir.Close() // err says more
	}
	return session.Outcome{Err: err}
}

// Serve keeps this host's part of the run until ctx ends; its workers end with it. An
// error means that it could not begin, or could not continue.
func (h *Host) Serve(ctx context.Context) error {
	control.Warm()
	c := &h.c
	var secure *tls.Config
	if !c.alone() {
		defer c.Link.Close()
		var err error
		if secure, err = transport.TLSFromSecret(c.Secret); err != nil {
			return err
		}
	}
	if c.Enters != nil {
		if err := h.enter(ctx, secure); err != nil {
			return err
		}
	}
	log, err := c.openLog()
	if err != nil {
		return err
	}
	c.agreed = log.State
	defer log.Close() // what is agreed is synced, or its session knows why not
	r := newRelay(c, secure, log)
	defer r.killAll()
	if err := r.begin(h.stopped); err != nil {
		return err
	}
	if r.gossip, r.noRing = openRing(c); r.gossip != nil {
		defer r.gossip.Close()
	}
	ctx, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel()
	if c.Apart {
		if r.commands, err = listenForCommands(); err != nil {
			return err
		}
		defer r.commands.close() //nolint:errcheck // a socket that is left behind is removed by the next process
		unless := rundir.Others{Notes: []string{"the logs of other machines are not here: this one took no part any more when the run ended"}}
		if err := errors.Join(c.RunDir.WriteWorkers(r.alive(nil)), rundir.WriteOthers(c.RunDir.Path(), unless)); err != nil {
			return &session.FileError{Err: err}
		}
		tasks.Go(func() { r.commands.serve(ctx, r.ask) })
	}
	tasks.Go(func() { r.run(ctx) })
	s := &seat{h: h, log: log, relay: r, again: make(chan *lead, 1), ends: make(chan session.Outcome, 1)}
	if !c.alone() {
		tasks.Go(func() { s.accept(ctx, secure) })
	}
	defer s.leave()
	var late, overdue <-chan time.Time // to leave, and for another host to say how the run has ended
	var ended *session.Outcome         // unless another host says otherwise
	for {
		select {
		case <-h.leave:
			if late == nil {
				late = time.After(timing.Drain)
				r.leave()
			}
		case <-late:
			return ErrLeft
		case <-r.left:
			return ErrLeft
		case l, ok := <-log.Changes():
			if !ok {
				return agree.ErrClosed
			}
			if !l.Ready || s.lead == nil || s.lead.term != l.Term {
				s.leave()
				if l.Ready {
					s.take(ctx, l.Term, 0, 0)
				}
			}
			r.follow(l)
		case old := <-s.again:
			if s.lead == old {
				s.leave()
				s.take(ctx, old.term, old.attempt, old.fills)
			}
		case out := <-s.ends:
			ended, overdue = &out, time.After(timing.Drain)
		case <-overdue:
			c.Done(log.Term(), *ended)
		case err := <-r.stranded:
			switch {
			case ended != nil:
				c.Done(log.Term(), *ended)
			case r.hasLeft():
				return ErrLeft
			default:
				return err
			}
		case <-h.asked.signal:
			if e, ok := h.asked.next(); ok {
				if w, ok := e.(session.WatchAsked); ok && c.Apart {
					r.watch(w.On)
					continue
				}
				s.ask(e)
				if stop, ok := e.(session.StopAsked); ok && c.Apart && s.lead == nil {
					r.passStop(stop)
				}
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// stopped returns the error of a lone host that was asked to stop before all its workers were started. Several hosts need a
// leader to end a run.
func (h *Host) stopped() error {
	if !h.c.alone() {
		return nil
	}
	e, ok := h.asked.next()
	if !ok {
		return nil
	}
	if stop, ok := e.(session.StopAsked); ok {
		return &session.StoppedError{Reason: stop.Reason}
	}
	h.asked.put(e)
	return nil
}

// openRing opens the ring of a run, nil without failure detection or for a single worker. Several hosts find each other by
// the Start that the leader sends to their workers.
func openRing(c *Config) (*ring.Member, error) {
	if c.Detect == 0 || c.Fixed && c.Workers == 1 {
		return nil, nil
	}
	job := rand.Text()
	if !c.alone() {
		sum := sha256.Sum256(append([]byte("soliton ring "), c.Secret...))
		job = hex.EncodeToString(sum[:8])
	}
	self, size := c.self(), c.Workers+len(c.Hosts)
	here := size // members on this machine
	if c.Apart {
		here = (size + len(c.Hosts) - 1) / len(c.Hosts)
	}
	detect := c.times().RingOf(here, runtime.NumCPU())
	return ring.Open(job, self.Name, self.Link, c.Ports, c.Secret, c.Rejected, detect, size)
}

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
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

	// Command and Dir are what the launcher needs to start the program again: PROGRAM as it was
	// given and the directory it was given in. Without a Command there are no checkpoints. Args,
	// where it is not nil, are its flags then.
	Command, Dir string
	Args         []string

	// Resume says that a run goes on that has ended before; nil for one that begins.
	Resume *Resume

	// Executable is the file whose SHA-256 goes into job.json where the worker is in
	// this process; "" leaves it out.
	Executable string

	// Threads is the number of compute threads of each worker. 0 means the cores this process
	// may use divided by the workers, at least 1.
	Threads int

	// Stages is the number of pipeline stages of the first plan. 0 means 1.
	Stages int

	// Mirrors is the number of replicas of each shard beside its owner's, so that a run bears as
	// many deaths at a time without going back. 0 means 1, below 0 none.
	Mirrors int

	// MinWorkers is the fewest workers that training goes on with. 0 means 1.
	MinWorkers int

	// Detect is the budget in which a worker that gives no sign of life is to be found and
	// left behind, from its Hello on, before which HelloTimeout counts. It may be silent for three
	// quarters of it. 0 means for ever.
	Detect time.Duration

	// Reduction is how gradients are summed: exact, in an order that depends on
	// the job only, or fast, in the order in which they come. "" means exact.
	Reduction string

	// Zero is the stage of ZeRO. In both, the optimizer's state is split over the workers of a
	// stage; the complete gradient is at the owner of a shard only in stage 2, at all of
	// them in stage 1. 0 means 2.
	Zero int

	// Reshape says what may be balanced anew between steps: "full" means micro-batches, layers
	// and workers, "dataflow" micro-batches only, "off" nothing. "" means full.
	Reshape string

	// NoDigests lets the workers trust their memory. Otherwise they keep digests of the state of
	// the job, and repair what has altered before it counts.
	NoDigests bool

	// Chaos, if it is not nil, returns the harms that the workers are to do to themselves, for a
	// job of so many steps. The agent hands them on unread. Its error is one of usage.
	Chaos func(steps int) (harms []string, err error)

	// Start starts a worker while the run goes on; nil where that cannot be. It is called by
	// other goroutines than Serve's.
	Start func(id, incarnation int) (Worker, error)

	// Respawn has a worker that is lost replaced by the next incarnation. It needs Start.
	Respawn bool

	// Clocks are the clocks of the devices that workers compute on, which are to be set; nil leaves
	// all as it is. Serve closes them. Only the agent of a single host sets clocks.
	Clocks Clocks

	// Telemetry gets spans and measures of the run; nil has nothing measured. Serve closes
	// it.
	Telemetry Telemetry

	// HelloTimeout is how long a worker may take until it calls
	// trainer.Main. 0 means 30 s, which is long for a process to start and short
	// for a person to wait.
	HelloTimeout time.Duration
}

// silence is how long a worker may be silent, so that with the time between two looks and the
// recovery it is out of the plan within the budget.
func (c Config) silence() time.Duration { return c.Detect * 3 / 4 }

// watches is how often in the budget the agent looks who is silent.
const watches = 16

// MinDetect is the least Config.Detect: three heartbeats.
const MinDetect = 3 * control.BeatEvery

// MaxThreads is the most Config.Threads.
const MaxThreads = 4096

// Validate reports every fault of the configuration, each on a line that names the
// field and what would be right.
func (c Config) Validate() error {
	var errs []error
	if c.Threads < 0 || c.Threads > MaxThreads {
		errs = append(errs, fmt.Errorf("Threads is %d: give 1 to %d, or 0 for all cores", c.Threads, MaxThreads))
	}
	if c.Reduction != "" && c.Reduction != "exact" && c.Reduction != "fast" {
		errs = append(errs, fmt.Errorf("Reduction is %q: give exact or fast, or \"\" for exact", c.Reduction))
	}
	if _, ok := reshapes[c.Reshape]; !ok && c.Reshape != "" {
		errs = append(errs, fmt.Errorf("Reshape is %q: give full, dataflow or off, or \"\" for full", c.Reshape))
	}
	if c.Zero < 0 || c.Zero > 2 {
		errs = append(errs, fmt.Errorf("Zero is %d: give 1 or 2, or 0 for 2", c.Zero))
	}
	if c.HelloTimeout < 0 {
		errs = append(errs, fmt.Errorf("HelloTimeout is %v: give a positive time, or 0 for 30s", c.HelloTimeout))
	}
	if c.Respawn && c.Start == nil {
		errs = append(errs, errors.New("Respawn is set without Start: say how a worker is started"))
	}
	if c.MinWorkers < 0 {
		errs = append(errs, fmt.Errorf("MinWorkers is %d: give at least 1, or 0 for 1", c.MinWorkers))
	}
	if c.Stages < 0 {
		errs = append(errs, fmt.Errorf("Stages is %d: give at least 1, or 0 for 1", c.Stages))
	}
	if c.Detect < 0 || c.Detect > 0 && c.Detect < MinDetect {
		errs = append(errs, fmt.Errorf("Detect is %v: give at least %v, or 0 for no detection", c.Detect, MinDetect))
	}
	return errors.Join(errs...)
}

// reshapes are the values of Config.Reshape.
var reshapes = map[string]controller.Reshape{"full": controller.Full, "dataflow": controller.Dataflow, "off": controller.Off}

func (c Config) withDefaults(workers int) Config {
	if c.Program == "" {
		c.Program = "the program"
	}
	if c.Threads == 0 {
		c.Threads = max(1, runtime.GOMAXPROCS(0)/workers)
	}
	if c.Stages == 0 {
		c.Stages = 1
	}
	switch {
	case c.Mirrors == 0:
		c.Mirrors = 1
	case c.Mirrors < 0:
		c.Mirrors = 0
	}
	if c.MinWorkers == 0 {
		c.MinWorkers = 1
	}
	if c.Reduction == "" {
		c.Reduction = "exact"
	}
	if c.Reshape == "" {
		c.Reshape = "full"
	}
	if c.Zero == 0 {
		c.Zero = 2
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
	Stopped    Reason = "stopped"    // a command of another process: exit 1
)

// Agent keeps one run. Its methods may be called from any goroutine; Serve once.
type Agent struct {
	cfg   Config
	stops chan Reason
	watch *watching
}

// New returns the agent for a valid configuration.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Agent{cfg: cfg, stops: make(chan Reason, 2), watch: newWatching()}, nil
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

// Serve keeps the run of the workers until all have ended, and closes the view and
// the run directory. Their WorkerIDs are their positions, in incarnation 0. There is at least one.
func (a *Agent) Serve(ctx context.Context, workers ...Worker) Outcome {
	controller.Warm()
	control.Warm()
	cfg := a.cfg.withDefaults(len(workers))
	return newRun(cfg, workers, newSession(cfg, len(workers)), a.watch).loop(ctx, a.stops)
}

func newRun(cfg Config, workers []Worker, s *session, watch *watching) *run {
	r := &run{
		cfg:     cfg,
		workers: workers,
		watch:   watch,
		lone:    len(workers) == 1,
		events:  make(chan event),
		started: make(chan begun),
		quit:    make(chan struct{}),
		s:       s,
		reapAt:  make([]time.Time, len(workers)),
	}
	for range workers {
		r.send = append(r.send, newSender())
	}
	r.start = func(who plan.Worker) (Worker, plan.Worker, error) {
		w, err := cfg.Start(int(who.ID), who.Incarnation)
		return w, who, err
	}
	return r
}

// run is the loop around one session and its goroutines.
type run struct {
	cfg     Config
	workers []Worker
	s       *session
	watch   *watching

	events  chan event             // from the goroutines to the loop
	started chan begun             // the same, of workers
	send    []chan control.Message // from the loop to each sender; holds more than a session ever sends
	quit    chan struct{}          // closed when the loop has ended

	others  sync.WaitGroup  // goroutines beside the loop
	talking context.Context // theirs

	commands   *commands   // nil for a run without files
	governing  *governing  // nil where no clocks are to be set
	gossip     *ringMember // nil where there is no ring
	agreement  *agreement
	opened     chan opened     // while it is being opened; nil afterwards
	deposed    <-chan struct{} // closed when another agent leads; nil for a lone one
	lone       bool            // there was one worker at the start
	start      func(plan.Worker) (Worker, plan.Worker, error)
	viewClosed bool
	early      []byte      // output that came before the view was closed
	reapAt     []time.Time // when patience with each worker ends; zero: it does not
	reap       *time.Timer // for the first of them
	cause      <-chan time.Time
}

// opened is the agreement, or why there is none.
type opened struct {
	agreement *agreement
	err       error
}

func (r *run) loop(ctx context.Context, stops <-chan Reason) Outcome {
	talk, hangUp := context.WithCancel(context.Background())
	r.talking = talk
	others := &r.others
	for id := range r.workers {
		r.attend(id)
	}
	defer r.enterRing()()
	if r.agreement != nil {
		others.Go(func() { r.agreement.run(talk, r.post) })
	}
	if r.cfg.Clocks != nil {
		g, err := newGoverning(r.cfg.Clocks, governorConfig, r.post)
		if err != nil {
			panic(err) // it has the defaults
		}
		r.governing = g
		others.Go(func() { g.run(talk) })
	}
	if r.cfg.RunDir != nil && r.agreement == nil {
		ch := make(chan opened, 1)
		r.opened = ch
		others.Go(func() {
			a, err := openAgreement(r.cfg.RunDir, r.cfg.Resume.newest().Generation)
			ch <- opened{a, err}
			if err == nil {
				a.run(talk, r.post)
				_ = a.node.Close() // no entry is needed any more that a full disk would not take
			}
		})
		if again := r.cfg.Resume; again != nil {
			// The first plan is greater than any that somebody has seen.
			o := <-ch
			if r.opened = nil; o.err != nil {
				r.apply(r.s.step(time.Now(), fileFailed{o.err}))
			} else {
				r.agreement = o.agreement
				was := o.agreement.node.State()
				r.s.version = plan.Version{Generation: was.Generation, N: max(was.Newest.N, again.newest().N) + 1}
			}
		}
	}
	if r.cfg.RunDir != nil {
		if c, err := listenForCommands(); err != nil {
			r.apply(r.s.step(time.Now(), fileFailed{err}))
		} else {
			r.commands = c
			others.Go(func() { c.serve(talk, r.post) })
		}
	}

	hello := time.NewTimer(r.cfg.HelloTimeout)
	defer hello.Stop()
	r.reap = time.NewTimer(0)
	r.reap.Stop()
	defer r.reap.Stop()
	ring := time.NewTimer(0)
	ring.Stop()
	defer ring.Stop()
	watch, due := time.NewTimer(0), time.Time{}
	watch.Stop()
	defer watch.Stop()
	rewatch := func() {
		if period := r.cfg.Detect / watches; period > 0 {
			due = time.Now().Add(period)
			watch.Reset(period)
		}
	}
	rewatch()
	on, watched := r.watch.now()
	if on {
		r.apply(r.s.step(time.Now(), watchAsked{on}))
	}
	cancelled := ctx.Done()

	r.apply(r.s.began(time.Now()))
loop:
	for !r.s.over() {
		var e event
		if at := r.s.alarm(); at.IsZero() {
			ring.Stop()
		} else {
			ring.Reset(time.Until(at))
		}
		select {
		case <-ring.C:
			e = alarm{}
		case e = <-r.events:
		case reason := <-stops:
			e = stopAsked{reason}
		case <-watched:
			var on bool
			on, watched = r.watch.now()
			e = watchAsked{on}
		case <-cancelled:
			cancelled = nil
			e = stopAsked{Cancelled}
		case <-hello.C:
			e = helloLate{}
		case <-r.deposed:
			break loop
		case <-r.cause:
			e = causeLate{}
		case <-watch.C:
			e = watchTick{due}
		case begun := <-r.started:
			if begun.err == nil {
				r.workers = append(r.workers, begun.w)
				r.send = append(r.send, newSender())
				r.reapAt = append(r.reapAt, time.Time{})
			}
			r.apply(r.s.step(time.Now(), workerStarted{begun.who, begun.err}))
			if begun.err == nil {
				r.attend(len(r.workers) - 1)
			}
			continue
		case <-r.reap.C:
			for id, late := range r.late() {
				if late {
					r.apply(r.s.step(time.Now(), reapLate{id}))
				}
			}
			r.rearm()
			continue
		}
		heard, told := e.(heardOf)
		if told {
			e = heard.event
		}
		r.apply(r.s.step(time.Now(), e))
		if told {
			close(heard.done)
		}
		if _, ok := e.(watchTick); ok {
			rewatch()
		}
	}

	hangUp()
	close(r.quit)
	if r.commands != nil {
		_ = r.commands.close() // a socket that is left behind harms nobody
	}
	others.Wait()
	if r.s.over() { // else another agent goes on with it
		r.closeView()
	}

	out := r.s.outcome()
	if g := r.governing; g != nil {
		if g.last.reason != "" && r.cfg.RunDir != nil && r.s.plan.Version.N > 0 {
			_ = r.cfg.RunDir.AddEvent(r.s.clockEvent(time.Now(), g.last).e) // the clocks are what matters
		}
		if g.err != nil && out.Warning == "" {
			out.Warning = "clocks may not be as they were found: " + oneLine(g.err.Error())
		}
	}
	if r.cfg.Telemetry != nil {
		if err := r.cfg.Telemetry.Close(); err != nil && out.Warning == "" {
			out.Warning = oneLine(err.Error())
		}
	}
	if r.s.lost >= 0 {
		out.Detail = r.workers[r.s.lost].LastOutput()
	}
	if r.cfg.RunDir != nil {
		if err := r.cfg.RunDir.Close(); err != nil && out.Err == nil {
			out.Err = &FileError{Err: err}
		}
	}
	return out
}

// late returns whose time is over, and takes note that it was told.
func (r *run) late() []bool {
	late := make([]bool, len(r.reapAt))
	now := time.Now()
	for id, at := range r.reapAt {
		if !at.IsZero() && !now.Before(at) {
			late[id], r.reapAt[id] = true, time.Time{}
		}
	}
	return late
}

// patience gives a worker until reapTime from now.
func (r *run) patience(id int) {
	r.reapAt[id] = time.Now().Add(reapTime)
	r.rearm()
}

// rearm sets the timer for the first end of patience.
func (r *run) rearm() {
	var first time.Time
	for _, at := range r.reapAt {
		if !at.IsZero() && (first.IsZero() || at.Before(first)) {
			first = at
		}
	}
	r.reap.Stop()
	if !first.IsZero() {
		r.reap.Reset(time.Until(first))
	}
}

// newSender makes the way to a worker: room for what is said to it while it is frozen, until
// that is found out.
func newSender() chan control.Message { return make(chan control.Message, 256) }

// heardOf is an event that somebody waits for to be heard of.
type heardOf struct {
	event
	done chan struct{}
}

// post hands an event to the loop, and reports whether there still is one.
func (r *run) post(e event) bool {
	select {
	case r.events <- e:
		return true
	case <-r.quit:
		return false
	}
}

// begun is a worker that was started while the run goes on.
type begun struct {
	who plan.Worker
	w   Worker
	err error
}

// begin starts a worker, which may take longer than the loop can wait.
func (r *run) begin(who plan.Worker) {
	r.others.Go(func() {
		w, who, err := r.start(who)
		select {
		case r.started <- begun{who, w, err}:
		case <-r.quit:
			if err == nil {
				end(w)
			}
		}
	})
}

// attend begins to listen to a worker.
func (r *run) attend(id int) {
	w, send := r.workers[id], r.send[id]
	r.others.Go(func() { r.talk(r.talking, id, w, send) })
	r.others.Go(func() { r.awaitExit(id, w) })
}

func (r *run) awaitExit(id int, w Worker) {
	select {
	case <-w.Exited():
		r.post(workerExited{id, w.Status()})
		waitReaped(w)
	case <-r.quit:
	}
}

// talk connects and receives until the connection ends. It owns the sender.
func (r *run) talk(ctx context.Context, id int, w Worker, send <-chan control.Message) {
	conn, far := w.(conversation)
	if !far {
		nc, err := w.Connect(ctx)
		if err != nil {
			r.post(connClosed{id, err})
			return
		}
		conn = control.New(nc)
	}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for {
			select {
			case m := <-send:
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
			r.post(connClosed{id, err})
			return
		}
		var e event = received{id, m}
		switch m := m.(type) {
		case control.Ready:
			if !far {
				m.Job.ProgramSHA256 = r.programSum(w)
			}
			e = received{id, m}
		case control.Harm:
			if m.Text != "" && !r.post(struck{m.Text}) {
				return
			}
			if m.At == 0 && m.Kind != control.Thaw {
				continue // nobody dies of it
			}
			e = harmOf(harmed{worker: id}, m)
		}
		if !r.post(e) {
			return
		}
	}
}

// stamped returns the time of a stamp in nanoseconds of CLOCK_MONOTONIC; now, if it cannot be one.
func stamped(at int64) time.Time {
	now := time.Now()
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return now
	}
	if ago := ts.Nano() - at; ago > 0 {
		return now.Add(-time.Duration(ago))
	}
	return now
}

// programSum returns the SHA-256 of the program a worker runs, "" where nobody
// wants it. Only a record: what cannot be read still runs.
func (r *run) programSum(w Worker) string {
	path := w.Program()
	if path == "" {
		path = r.cfg.Executable
	}
	if path == "" || r.cfg.RunDir == nil && r.cfg.Start == nil && r.lone {
		return ""
	}
	sum, _ := rundir.FileSHA256(path)
	return sum
}

// apply carries out effects: first what others wait for, in its order, then the rest in its own. A file
// that cannot be written is one more event for the session.
func (r *run) apply(effects []effect) {
	slices.SortStableFunc(effects, func(a, b effect) int { return r.urgency(a) - r.urgency(b) })
	for _, e := range effects {
		if err := r.do(e); err != nil {
			r.apply(r.s.step(time.Now(), fileFailed{err}))
			return
		}
	}
}

// urgency is 0 for an effect that a recovery waits for, and for those that it may rely on.
func (r *run) urgency(e effect) int {
	switch e.(type) {
	case sendMessage, kill, fence, writeJob:
		return 0
	case propose:
		if r.agreement != nil || r.opened != nil {
			return 0
		} // else it is agreed at once, with effects of its own
	}
	return 1
}

func (r *run) do(e effect) error {
	dir := r.cfg.RunDir
	switch e := e.(type) {
	case writeJob:
		if dir == nil {
			return nil
		}
		if r.opened != nil {
			o := <-r.opened
			if r.opened = nil; o.err != nil {
				return o.err
			}
			r.agreement = o.agreement
		}
		entry, err := r.agreement.job(e.job)
		if err != nil {
			return err
		}
		r.agreement.propose(entry)
		return dir.WriteJob(e.job, e.data)
	case verify:
		job := r.s.job.ID()
		r.others.Go(func() { r.post(verifyFiles(r.talking, dir.Path(), job, e.p)) })
	case balance:
		r.others.Go(func() { r.post(balanced{e.Make()}) })
	case commitCheckpoint:
		r.others.Go(func() { commitFiles(r.talking, dir.Path(), e.manifest, r.post) })
	case writePlan:
		if dir == nil {
			return nil
		}
		return dir.AddPlan(e.p)
	case writeMetrics:
		if dir == nil {
			return nil
		}
		return dir.AddMetrics(e.m)
	case writeEvent:
		if r.cfg.View != nil {
			r.cfg.View.Show(view.Change(e.e))
		}
		if dir == nil {
			return nil
		}
		return dir.AddEvent(e.e)
	case writeWorkers:
		if dir == nil || r.commands == nil {
			return nil
		}
		return dir.WriteWorkers(rundir.Workers{Agent: r.commands.socket(), Workers: e.alive})
	case beginTrace:
		var file func([]byte) error
		if dir != nil {
			file = dir.AddTrace
		}
		r.cfg.Telemetry.Begin(e.run, e.program, file)
	case writeSpans:
		r.cfg.Telemetry.Spans(e.spans)
	case observe, release, drawn:
		r.governing.take(e)
	case measure:
		r.cfg.Telemetry.Measure(e.m)
	case writeSummary:
		if dir == nil {
			return nil
		}
		return dir.WriteSummary(e.s)
	case sendMessage:
		r.send[e.worker] <- e.m
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
	case beginWorker:
		r.begin(e.who)
	case kill:
		r.workers[e.worker].Kill()
		r.patience(e.worker)
	case propose:
		if r.agreement == nil {
			// Nothing outlives this agent: what it proposes is agreed.
			began := time.Now()
			r.apply(r.s.step(time.Now(), agreedOn{e.order.Plan.Version, began}))
			return nil
		}
		entry, err := r.agreement.plan(e.order, e.reason)
		if err != nil {
			return err
		}
		r.agreement.propose(entry)
	case awaitExit:
		r.patience(e.worker)
	case fence:
		if w, ok := r.workers[e.worker].(*remote); ok {
			w.fence()
		}
	case awaitCause:
		// What a frozen worker does to others shows before it counts as silent.
		r.cause = time.After(reapTime + r.cfg.Detect)
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

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Config says how a run is kept. Its zero value is a run without files, view and output.
type Config struct {
	session.Settings

	// RunDir is where the run's files go; nil means a run without files.
	// Serve closes it.
	RunDir *rundir.Dir

	// View shows the run; nil shows nothing. Serve closes it.
	View view.View

	// Output gets what the program wants on its standard output, after the
	// view has closed; nil drops it.
	Output io.Writer

	// Executable is the file whose SHA-256 goes into job.json where the worker is in
	// this process; "" leaves it out.
	Executable string

	// Start starts a worker while the run goes on; nil where that cannot be. It is called by
	// other goroutines than Serve's.
	Start func(id, incarnation int) (Worker, error)

	// Clocks are the clocks of the devices that workers compute on, which are to be set; nil leaves
	// all as it is. Serve closes them. Only the agent of a single host sets clocks.
	Clocks Clocks

	// Telemetry gets spans and measures of the run; nil has nothing measured. Serve closes
	// it.
	Telemetry Telemetry
}

// Validate reports every fault of the configuration, each on a line that names the field and what would be right.
func (c Config) Validate() error {
	err := c.Settings.Validate()
	if c.Respawn && c.Start == nil {
		err = errors.Join(err, errors.New("Respawn is set without Start: say how a worker is started"))
	}
	return err
}

func (c Config) withDefaults(workers int) Config {
	c.Settings = c.Settings.WithDefaults(workers)
	if c.Output == nil {
		c.Output = io.Discard
	}
	return c
}

// session returns what a session has to know of the configuration.
func (c Config) session(workers int) session.Config {
	sc := session.Config{Settings: c.Settings, Workers: workers, Telemetry: c.Telemetry != nil, CanStart: c.Start != nil}
	if c.RunDir != nil {
		sc.RunDir, sc.Shown = c.RunDir.Path(), c.RunDir.String()
	}
	switch {
	case c.Clocks == nil:
	case c.Clocks.Emulated():
		sc.Clocks = session.EmulatedClocks
	default:
		sc.Clocks = session.RealClocks
	}
	return sc
}

// Agent keeps one run. Its methods may be called from any goroutine; Serve once.
type Agent struct {
	cfg   Config
	stops chan session.Reason
	watch *watching
}

// New returns the agent for a valid configuration.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Agent{cfg: cfg, stops: make(chan session.Reason, 2), watch: newWatching()}, nil
}

// Stop asks the run to stop: at the next commit the first time, at once the second
// time. It never waits.
func (a *Agent) Stop(r session.Reason) {
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
					a.Stop(session.Interrupt)
				} else {
					a.Stop(session.Terminated)
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
func (a *Agent) Serve(ctx context.Context, workers ...Worker) session.Outcome {
	control.Warm()
	cfg := a.cfg.withDefaults(len(workers))
	var all []plan.Worker
	for w := range workers {
		all = append(all, plan.Worker{ID: id.WorkerID(w)})
	}
	return newRun(cfg, workers, session.New(cfg.session(len(workers)), all), a.watch).loop(ctx, a.stops)
}

func newRun(cfg Config, workers []Worker, s *session.Session, watch *watching) *run {
	r := &run{
		cfg:     cfg,
		workers: workers,
		watch:   watch,
		lone:    len(workers) == 1,
		events:  make(chan session.Event),
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
	s       *session.Session
	watch   *watching

	events  chan session.Event     // from the goroutines to the loop
	started chan begun             // the same, of workers
	send    []chan control.Message // from the loop to each sender; holds more than a session ever sends
	quit    chan struct{}          // closed when the loop has ended

	others  sync.WaitGroup  // goroutines beside the loop
	talking context.Context // theirs

	commands   *commands   // nil for a run without files
	governing  *governing  // nil where no clocks are to be set
	gossip     *ringMember // nil where there is no ring
	noRing     error       // why there is none, where there should be
	agreement  *agreement
	opened     chan opened     // while it is being opened; nil afterwards
	deposed    <-chan struct{} // closed when another agent leads; nil for a lone one
	lone       bool            // there was one worker at the start
	start      func(plan.Worker) (Worker, plan.Worker, error)
	answer     *session.AnswerAdd // of the newest heardOf
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

func (r *run) loop(ctx context.Context, stops <-chan session.Reason) session.Outcome {
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
			a, err := openAgreement(r.cfg.RunDir, r.cfg.Resume.Newest().Generation)
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
				r.apply(r.s.Step(time.Now(), session.FileFailed{Err: o.err}))
			} else {
				r.agreement = o.agreement
				was := o.agreement.node.State()
				r.apply(r.s.Step(time.Now(), session.LogOpened{First: id.Version{Generation: was.Generation, N: max(was.Newest.N, again.Newest().N) + 1}}))
			}
		}
	}
	if r.cfg.RunDir != nil {
		if c, err := listenForCommands(); err != nil {
			r.apply(r.s.Step(time.Now(), session.FileFailed{Err: err}))
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
		if period := r.cfg.Detect / session.Watches; period > 0 {
			due = time.Now().Add(period)
			watch.Reset(period)
		}
	}
	rewatch()
	on, watched := r.watch.now()
	if on {
		r.apply(r.s.Step(time.Now(), session.WatchAsked{On: on}))
	}
	cancelled := ctx.Done()

	r.apply(r.s.Begin(time.Now()))
loop:
	for !r.s.Over() {
		var e session.Event
		if at := r.s.Alarm(); at.IsZero() {
			ring.Stop()
		} else {
			ring.Reset(time.Until(at))
		}
		select {
		case <-ring.C:
			e = session.AlarmDue{}
		case e = <-r.events:
		case reason := <-stops:
			e = session.StopAsked{Reason: reason}
		case <-watched:
			var on bool
			on, watched = r.watch.now()
			e = session.WatchAsked{On: on}
		case <-cancelled:
			cancelled = nil
			e = session.StopAsked{Reason: session.Cancelled}
		case <-hello.C:
			e = session.HelloTimeout{}
		case <-r.deposed:
			break loop
		case <-r.cause:
			e = session.CauseTimeout{}
		case <-watch.C:
			e = session.WatchTick{Due: due}
		case begun := <-r.started:
			if begun.err == nil {
				r.workers = append(r.workers, begun.w)
				r.send = append(r.send, newSender())
				r.reapAt = append(r.reapAt, time.Time{})
			}
			r.apply(r.s.Step(time.Now(), session.WorkerStarted{Worker: begun.who, Err: begun.err}))
			if begun.err == nil {
				r.attend(len(r.workers) - 1)
			}
			continue
		case <-r.reap.C:
			for id, late := range r.late() {
				if late {
					r.apply(r.s.Step(time.Now(), session.ReapTimeout{Worker: id}))
				}
			}
			r.rearm()
			continue
		}
		heard, told := e.(heardOf)
		if told {
			e, r.answer = heard.Event, heard.answer
		}
		r.apply(r.s.Step(time.Now(), e))
		if told {
			close(heard.done)
		}
		if _, ok := e.(session.WatchTick); ok {
			rewatch()
		}
	}

	hangUp()
	close(r.quit)
	if r.commands != nil {
		_ = r.commands.close() // a socket that is left behind harms nobody
	}
	others.Wait()
	if r.s.Over() { // else another agent goes on with it
		r.closeView()
	}

	out := r.s.Outcome()
	if g := r.governing; g != nil {
		if e, ok := r.s.ClocksRestored(time.Now(), g.last); ok && r.cfg.RunDir != nil {
			_ = r.cfg.RunDir.AddEvent(e) // the clocks are what matters
		}
		if g.err != nil && out.Warning == "" {
			out.Warning = "clocks may not be as they were found: " + session.OneLine(g.err.Error())
		}
	}
	if r.cfg.Telemetry != nil {
		if err := r.cfg.Telemetry.Close(); err != nil && out.Warning == "" {
			out.Warning = session.OneLine(err.Error())
		}
	}
	if out.Lost >= 0 {
		out.Detail = r.workers[out.Lost].LastOutput()
	}
	if r.cfg.RunDir != nil {
		if err := r.cfg.RunDir.Close(); err != nil && out.Err == nil {
			out.Err = &session.FileError{Err: err}
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

// heardOf is an event whose sender waits until the session has taken it in. The answer, if there is one, is there then.
type heardOf struct {
	session.Event
	answer *session.AnswerAdd
	done   chan struct{}
}

// post hands an event to the loop, and reports whether there still is one.
func (r *run) post(e session.Event) bool {
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
		r.post(session.WorkerExited{Worker: id, Status: w.Status()})
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
			r.post(session.ConnClosed{Worker: id, Err: err})
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
			r.post(session.ConnClosed{Worker: id, Err: err})
			return
		}
		var e session.Event = session.Received{Worker: id, Message: m}
		switch m := m.(type) {
		case control.Ready:
			if !far {
				m.Job.ProgramSHA256 = r.programSum(w)
			}
			e = session.Received{Worker: id, Message: m}
		case control.Harm:
			if m.Text != "" && !r.post(session.FaultInjected{Fault: m.Text}) {
				return
			}
			if m.At == 0 && m.Kind != control.Thaw {
				continue // nobody dies of it
			}
			e = harmOf(session.FaultStamped{Worker: id}, m)
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

// apply carries out effects in their order. A file that cannot be written is one more event for the session.
func (r *run) apply(effects []session.Effect) {
	var agreed []session.Agreed
	for _, e := range effects {
		if p, ok := e.(session.Propose); ok && r.agreement == nil && r.opened == nil {
			// Nothing outlives this agent: what it proposes is agreed.
			agreed = append(agreed, session.Agreed{Version: p.Order.Plan.Version, Proposed: time.Now()})
			continue
		}
		if err := r.do(e); err != nil {
			r.apply(r.s.Step(time.Now(), session.FileFailed{Err: err}))
			return
		}
	}
	for _, e := range agreed {
		r.apply(r.s.Step(time.Now(), e))
	}
}

func (r *run) do(e session.Effect) error {
	dir := r.cfg.RunDir
	switch e := e.(type) {
	case session.WriteJob:
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
		entry, err := r.agreement.job(e.Job)
		if err != nil {
			return err
		}
		r.agreement.propose(entry)
		return dir.WriteJob(e.Job, e.Data)
	case session.VerifyCheckpoint:
		r.others.Go(func() { r.post(verifyFiles(r.talking, dir.Path(), e.Job, e.Propose)) })
	case session.Balance:
		r.others.Go(func() { r.post(session.Balanced{Balanced: e.Make()}) })
	case session.CommitCheckpoint:
		r.others.Go(func() { commitFiles(r.talking, dir.Path(), e.Manifest, r.post) })
	case session.WritePlan:
		if dir == nil {
			return nil
		}
		return dir.AddPlan(e.Plan)
	case session.WriteMetrics:
		if dir == nil {
			return nil
		}
		return dir.AddMetrics(e.Metrics)
	case session.WriteEvent:
		if r.cfg.View != nil {
			r.cfg.View.Show(view.Change(e.Event))
		}
		if dir == nil {
			return nil
		}
		return dir.AddEvent(e.Event)
	case session.WriteWorkers:
		if dir == nil || r.commands == nil {
			return nil
		}
		return dir.WriteWorkers(rundir.Workers{Agent: r.commands.socket(), Workers: e.Alive})
	case session.BeginTrace:
		var file func([]byte) error
		if dir != nil {
			file = dir.AddTrace
		}
		r.cfg.Telemetry.Begin(e.Run, e.Program, file)
	case session.WriteSpans:
		r.cfg.Telemetry.Spans(e.Spans)
	case session.ObserveStep, session.ReleaseClocks, session.DeviceUsed:
		r.governing.take(e)
	case session.Measure:
		r.cfg.Telemetry.Measure(e.Measure)
	case session.WriteSummary:
		if dir == nil {
			return nil
		}
		return dir.WriteSummary(e.Summary)
	case session.Send:
		r.send[e.Worker] <- e.Message
	case session.Show:
		if r.cfg.View != nil {
			r.cfg.View.Show(e.Event)
		}
	case session.CloseView:
		r.closeView()
	case session.Output:
		if r.viewClosed {
			_, _ = io.WriteString(r.cfg.Output, e.Text)
		} else if len(r.early)+len(e.Text) <= maxEarlyOutput {
			r.early = append(r.early, e.Text...)
		}
	case session.StartWorker:
		r.begin(e.Worker)
	case session.Kill:
		r.workers[e.Worker].Kill()
		r.patience(e.Worker)
	case session.Propose:
		entry, err := r.agreement.plan(e.Order, e.Reason)
		if err != nil {
			return err
		}
		r.agreement.propose(entry)
	case session.AwaitExit:
		r.patience(e.Worker)
	case session.AnswerAdd:
		*r.answer = e
	case session.Fence:
		if w, ok := r.workers[e.Worker].(*remote); ok {
			w.fence()
		}
	case session.AwaitCause:
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

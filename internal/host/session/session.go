// Package session decides what a host does about a run: it makes the first plan, follows what workers report, carries the wishes of
// the controller to them, and accounts for all of it. A [Session] has no goroutine, socket, file, clock or callback: an
// [Event] goes in, with the time at which it happened, and the [Effect]s to carry out come out, in the order in which they are to be
// done: first what other processes wait for, then files and views.
//
//	s := session.New(cfg, workers)
//	do(s.Begin(now))
//	for !s.Over() {
//		do(s.Step(time.Now(), <-events)) // or AlarmDue at s.Alarm()
//	}
//	out := s.Outcome()
//
// A run is over when every worker has exited and its connection is closed. So whatever a worker has sent is taken in before its
// exit is judged.
//
// Each part of what a session knows has a file: messages.go (what workers say, committed steps), lifecycle.go (stop,
// exit, verdict), losses.go (what the controller decides about exits), evidence.go (missed heartbeats and gossip), joins.go,
// checkpoints.go, takeover.go, records.go (metrics, events, plans, summary, a full disk) and speed.go. Package spans makes the traces.
//
// The tables list all legal transitions. A test holds that lifecycle.go has the same, and that random runs take each.
//
// # Run
//
// A session begins assembling where another host has led the run before, and starting otherwise.
//
//	state       next       when
//	assembling  training   the state of every worker is known: the run is taken over
//	assembling  finished   the leader before has written the summary
//	assembling  ending     a worker or a file is at fault
//	starting    training   all workers are ready, and there is a plan
//	starting    ending     the user stops the run, or something is at fault
//	training    finished   every worker that is left has told its result
//	training    ending     the user stops the run at once, or it cannot continue
//	finished    ending     a worker fails, or the user is impatient, after all was written
//
// # Worker
//
// A host that takes a run over hears of a worker as it is at that moment.
//
//	state       next       when
//	connecting  greeted    Hello
//	connecting  prepared   Ready, told to a host that takes over
//	connecting  gone       it has exited and is replaced, or has no part in the run that is taken over
//	greeted     prepared   Ready
//	greeted     gone       a joining worker exits, or it exits before training and is replaced
//	prepared    working    it is sent Start
//	prepared    done       the run that is taken over has ended
//	prepared    gone       it is not of this job, is refused and exits
//	working     done       Done
//	working     gone       it exits, and the run continues without it
//	done        gone       it exits before the others are done
//
// # Process
//
//	state       next       when
//	running     hung-up    its connection is closed
//	running     exited     it exits before all is received
//	running     reaped     it has no part in the run that is taken over
//	running     abandoned  it was killed, and has not exited in time
//	running     fenced     it has missed heartbeats, and the run continues without it
//	hung-up     reaped     it exits
//	hung-up     abandoned  it was killed, and has not exited in time
//	exited      reaped     all it has sent is received, or does not come in time
package session

import (
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/delivery"
	"github.com/soliton-train/soliton/internal/host/session/skips"
	"github.com/soliton-train/soliton/internal/host/session/spans"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// Session decides what a host does about a run.
type Session struct {
	cfg Config
	now time.Time // of the event under way
	out outbox

	phase   phase
	workers []*worker // by place; the first ones are in the order of their WorkerIDs
	starved bool      // steps wait for data
	job     rundir.Job
	model   control.Ready // what all workers have said of the job
	began   time.Time     // training
	course
	ctl    *controller.Controller // from the start of training
	timers timers

	records     records
	reports     reports
	ring        ring
	late        lateness
	end         verdict
	checkpoints checkpoints
	deliveries  delivery.Queue
	disk        disk
	roster      roster
	rejections  map[string]*rejections // by who has rejected
	paces       pacing
	calls       calls
	clocks      clocking
	timelines   timelines
	skips       skips.Register
	tr          *spans.Tracer // nil if spans and measures are not wanted

	faults []string  // to be injected by workers
	starts []Effect  // when the first plan is agreed
	later  []Event   // for the time after the takeover
	silent []*worker // to be fenced after the event under way
}

// course is what workers compute under.
type course struct {
	plan    plan.Plan
	known   map[uint64]plan.Plan // plans that a step may have run under, by Version.N
	restart restart              // the newest
	thin    bool                 // a shard has fewer mirrors than it should
}

// restart is what a run goes back to.
type restart struct {
	version id.Version // of the plan that it resumes with
	step    int        // committed
}

// worker is what a session knows of a worker's process.
type worker struct {
	place int // in Session.workers
	who   plan.Worker
	state workerState
	exit  exitState

	joins     bool      // it is in no plan yet, and was not in the first one
	fresh     bool      // it was not in the first plan, and has committed no step yet
	inherited bool      // from another leader: the first step that it reports may be any
	hello     time.Time // until when it is to say Hello, zero for no limit
	fences    bool      // its process is that of a session that was fenced
	reap      time.Time // until when it is to exit, zero for no limit
	ready     control.Ready
	pid       int

	last    control.Step // newest it reported
	reading reading
	own     rundir.Worker
	rolled  id.Version // of the newest restart that it has applied
	repairs repairs

	signs // of life
	userCode
	pace   pace
	fault  error     // why it was killed, or said that it ends
	failed bool      // it has said Failed, and its exit says nothing new
	again  int       // step that was committed before, of which it cannot read a sample
	well   bool      // though the run continues without it
	killed bool      // by the session, so that it may be abandoned
	status Status    // how it has exited
	ended  time.Time // when that was known
	hit    time.Time // when a fault was injected

	every int       // the steps whose timelines it is to send, as it was told last
	told  time.Time // when
}

// over reports whether nothing more can come from a worker.
func (w *worker) over() bool { return w.exit >= reaped }

// closed reports whether nothing more is received from a worker.
func (w *worker) closed() bool { return w.exit == hungUp || w.exit == reaped || w.exit == fenced }

// hasLeft reports whether a worker has exited by itself and without an error. An evicted one has not, even if its exit was
// never seen.
func (w *worker) hasLeft() bool { return w.exit == reaped && w.status.OK() && w.fault == nil }

// hasExited reports whether the process is known to have exited.
func (w *worker) hasExited() bool { return w.exit == exited || w.exit == reaped }

const (
	// maxLead bounds the steps by which a worker may be ahead of another. They commit together, so only what lies in
	// sockets counts.
	maxLead = 1 << 16

	// maxMicros bounds the micro-batches of a step, whose places a plan lists.
	maxMicros = 1 << 20

	// maxParameters bounds what layers may claim to have.
	maxParameters = 1 << 44
)

// New returns the session of a run. workers are those that the run began with, followed by the others that an inherited plan
// counts on.
func New(cfg Config, workers []plan.Worker) *Session {
	s := &Session{
		cfg: cfg, phase: starting, course: course{known: make(map[uint64]plan.Plan)}, timers: make(timers), rejections: make(map[string]*rejections),
		reports: reports{told: make(map[int]said)}, roster: newRoster(), skips: skips.New(cfg.Skipped),
	}
	if cfg.Inherited != nil {
		s.phase = assembling
	}
	for i, w := range workers {
		s.workers = append(s.workers, &worker{place: i, who: w, fresh: i >= cfg.Workers})
		if i < cfg.Workers {
			s.roster.lives[w.ID] = 1
		}
	}
	return s
}

// Begin is called once, before Step.
func (s *Session) Begin(now time.Time) []Effect {
	s.now = now
	for _, w := range s.workers {
		w.hello = now.Add(s.cfg.HelloTimeout)
	}
	if s.phase == assembling {
		s.assemble()
	} else {
		s.then(s.processes()) // commands can come from now on
	}
	return s.out.take()
}

// Over reports whether no event can come any more. A run that is done waits until what must be written is; one that was asked to stop does
// not: the run directory puts it elsewhere.
func (s *Session) Over() bool {
	return s.deserted() && (s.disk.full.IsZero() || s.phase == ending || s.end.stop != "")
}

// Recovering reports whether workers wait for a plan.
func (s *Session) Recovering() bool { return s.ctl != nil && s.ctl.Busy() && !s.ctl.Holding() }

// deserted reports whether there is no worker, none is being started, and no host is waited for that was lost with its workers.
func (s *Session) deserted() bool {
	return s.roster.pending == 0 && !(s.phase == training && s.ctl.Holding() && s.awaits()) && !slices.ContainsFunc(s.workers, func(w *worker) bool { return !w.over() })
}

// LastHost returns the host of all workers that can continue the run, "" where several hosts have some. A leader that takes over does not
// know yet which can: any that has not been lost.
func (s *Session) LastHost() (last string) {
	for _, w := range s.workers {
		can := s.phase == training && s.goesOn(w) ||
			s.phase == assembling && w.state != gone && !w.over()
		switch {
		case !can:
		case last == "":
			last = w.who.Host
		case last != w.who.Host:
			return ""
		}
	}
	return last
}

// Outcome returns how the run has ended.
func (s *Session) Outcome() Outcome {
	e := &s.end
	o := Outcome{Summary: s.records.summary, Err: e.err, Detail: e.detail, Help: e.help, Resume: s.resumable(), Warning: e.warning, Lost: -1}
	if e.lost != nil {
		o.Lost = e.lost.place
	}
	if e.complete {
		o.ModelHost = o.Summary.ModelHost
	}
	return o
}

// Last returns the newest numbers of ballots and fills in the session's term, from which a later session of that term counts on.
func (s *Session) Last() (attempt uint64, fills int) {
	if s.ctl == nil {
		return s.cfg.Attempt, s.cfg.Fills
	}
	return s.ctl.Last()
}

// Step takes in an event and returns what is to be done, in that order.
func (s *Session) Step(now time.Time, e Event) []Effect {
	s.now = now
	if s.phase == assembling {
		s.gather(e)
	} else {
		s.take(e)
	}
	for ; len(s.silent) > 0; s.silent = s.silent[1:] {
		s.fence(s.silent[0])
	}
	s.then(s.deliver()...)
	s.bringEarly()
	s.weighSamples()
	if s.phase == training && s.deserted() {
		s.loseAll()
	}
	return s.out.take()
}

func (s *Session) take(e Event) {
	switch e := e.(type) {
	case Received:
		w := s.workers[e.Worker]
		if s.phase == ending || w.state == gone || w.state < working && w.fault != nil {
			return // an evicted worker gets no part any more
		}
		if !w.heard.Heard.IsZero() {
			w.heard.Hear(s.now, timing.Heartbeat)
		}
		s.message(w, e.Message)
	case ConnClosed:
		s.hungUp(s.workers[e.Worker], e.Err)
	case WorkerExited:
		s.exited(s.workers[e.Worker], e.Status)
	case WorkerHalted:
		s.halted(s.workers[e.Worker], e)
	case WorkerRuns:
		s.workers[e.Worker].runs = s.now
	case WorkerStarted:
		s.started(e)
	case Fenced:
		s.fenced(e)
	case Gossip:
		s.gossip(e)
	case FaultStamped:
		s.stamp(e)
	case FaultInjected:
		s.faults = slices.DeleteFunc(slices.Clone(s.faults), func(f string) bool { return f == e.Fault })

	case StopAsked:
		s.stop(e.Reason)
	case AddWorkers:
		s.add(e.N)
	case WatchAsked:
		s.timelines.watched = e.On
		s.askForTimelines()
	case Noted:
		if s.phase == training {
			s.then(s.event(eventNote, e.Text))
		}
	case Rejected:
		s.rejected(e.Host, -1, e.Counts)
	case HostBack:
		s.hostBack(e.Host, e.Workers)

	case AlarmDue:
		s.alarm()
	case WatchTick:
		s.watch(e)

	case Agreed:
		if starts := s.starts; starts != nil {
			s.starts = nil
			s.first(s.deliver()...) // a worker is appointed before it can commit a step
			s.first(starts...)
			return
		}
		s.tell(controller.Agreed{Version: e.Version, Proposed: e.Proposed})
	case Balanced:
		s.tell(e.Balanced)
	case FileFailed:
		s.judge(&FileError{Err: e.Err})
	case DiskFull:
		s.diskFull(e.Err)
	case DiskRoom:
		s.diskRoom()
	case SkipAgreed:
		s.skipped(e.Question)
	case DirRemoved:
		s.dirRemoved(e)
	case CheckpointCommitted:
		s.checkpointCommitted(e)
	case Archived:
		s.archived(e)
	case CheckpointsPruned:
		s.checkpointsPruned(e)
	case CheckpointVerified:
		s.checkpointVerified(e)
	case ClocksSet:
		s.clocksSet(e)
	case Metered:
		if s.tr != nil {
			for _, d := range e.Devices {
				s.then(Measure{d})
			}
		}
	}
}

// id is what people call a worker.
func (w *worker) id() int { return int(w.who.ID) }

// find returns a worker, nil if it has no place.
func (s *Session) find(w plan.Worker) *worker {
	for _, x := range s.workers {
		if x.who.ID == w.ID && x.who.Incarnation == w.Incarnation {
			return x
		}
	}
	return nil
}

// newest returns the newest incarnation of a worker, nil if it has no place.
func (s *Session) newest(w id.WorkerID) *worker {
	return s.find(plan.Worker{ID: w, Incarnation: s.roster.lives[w] - 1})
}

package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// session decides what the agent does about a run. It has no goroutine, socket,
// file or clock: step takes an event and returns the effects to carry out in
// their order.
//
// Each worker goes its way,
//
//	connecting --Hello--> greeted --Ready--> prepared --Start--> training --Done--> finished
//
// where Start goes to all of them as soon as all are prepared. Who dies in training is gone,
// and the controller decides how the others go on, see recovery.go. At the first failure that
// ends the run, or with a stop at once, the verdict is set, all workers are ended, and nothing
// they say counts any more. The session is over when every worker has
// ended and its connection too; so whatever a dying worker has sent is
// read before its death is judged.
type Session struct {
	cfg     Config
	workers []worker            // every session that was ever begun, in that order; of the first, it is the WorkerID
	lives   map[id.WorkerID]int // how many workers each ID has had
	tries   map[id.WorkerID]int // of them, those in a row that died before they had a part in the plan
	joined  int
	// joinedBy is by which plan a worker got a part, as leaders before have written down.
	joinedBy map[int]uint64

	state state // of the run: starting is connecting, then training and finished
	job   rundir.Job
	first control.Ready // what all workers have said of the job
	plan  plan.Plan
	start time.Time // of training

	heir       *Inherited // until the run is taken over
	tookOver   bool
	restarting id.Version             // of the newest plan that was to be agreed
	away       map[id.WorkerID]string // who was lost with a host, and comes back with it
	begun      int                    // workers that others before this session have had started
	ahead      []Received             // steps that others have to tell of first
	later      []Event                // for the time after the take-over

	// The gossip ring: what workers are told of it, whether it has formed, and when it is told who is missing.
	gossip     control.Ring
	ringFormed bool
	ringDue    time.Time
	noRing     string // why there is none, where there should be

	noted     id.Version // of the newest line of plans.jsonl
	starting  []Effect   // when the first plan is agreed
	tr        *tracer    // nil if nobody wants it
	paces     pacing
	clocks    clocking
	ctl       *controller.Controller // from the start of training
	known     map[uint64]plan.Plan   // that a step may have run under, by Version.N
	restart   restart                // the newest
	timers    map[controller.Timer]timer
	recovered []rundir.Recovery
	fates     []string // of who has died since the newest
	saves     saving
	version   id.Version // of the first plan; zero for that of a job that begins
	thin      bool       // a shard has fewer mirrors than it should
	rollbacks int
	losses    int
	chaos     []string  // harms that workers have still to do to themselves
	times     []float64 // of the newest steps
	watched   bool      // somebody wants timelines
	every     int       // of which steps; 0: of none

	last  rundir.Metrics // the newest committed step, of whichever worker told first
	told  map[int]said   // steps that some worker has still to report
	total struct {
		tokens int64
		ms     float64
	}
	val     *float64
	done    *control.Done // the first one, if it can be of one who knows the last loss
	ends    uint64        // Version.N of the plan that the run ends under, as far as known
	doneBy  int
	summary *rundir.Summary

	stop    Reason // the first reason to stop, "" while there is none
	err     error  // the verdict: the first error
	judged  bool   // a verdict is there, or help: what workers say no longer counts
	hearsay *hearsay
	lost    int // the worker whose end is the verdict, so that its last words matter; -1 if none
	detail  string
	help    string
	// cutShort says that a worker was killed when the run was over; "" if none was.
	cutShort string
}

// worker is what a session knows of one worker.
type worker struct {
	who   plan.Worker
	state state
	joins bool      // it is no worker of the first plan, and has no part in another one yet
	fresh bool      // it was no worker of the first plan, and has committed no step yet
	hello time.Time // until when it is to say so, where that is watched
	ready control.Ready
	last  control.Step // newest it reported
	own   rundir.Worker
	pid   int
	heard time.Time // when it last said something; zero before its Hello
	ring  standing

	failed         bool // it has said Failed, and its exit says nothing new
	closed, exited bool
	status         Status
	gaveUp         bool // it was killed and did not end

	inherited bool // from another leader: the first step that it tells of may be any

	killed   bool       // in training, to go on without it
	gone     bool       // dead, or out of the plan: the run goes on without it
	begun    id.Version // of the newest restart that it has applied
	doom     error      // why it was ended, or said that it ends
	silent   time.Time  // since when it was, where that is the reason
	ended    time.Time  // when its exit was known
	harmed   time.Time  // when somebody harmed it on purpose
	offences offences
	every    int       // the steps that it is to tell of, as it was told last
	paced    time.Time // when
}

func (w *worker) over() bool { return w.gaveUp || w.exited && w.closed }

// said is a step as one worker told of it.
type said struct {
	by   int
	step control.Step
}

// hearsay is a failure that may be the consequence of another worker's end.
type hearsay struct {
	err    *FailedError
	detail string
}

type state uint8

const (
	connecting state = iota
	greeted
	prepared
	training
	finished
)

// What happens.
type (
	Event any

	Received struct {
		Worker  int
		Message control.Message
	}
	ConnClosed struct { // or never made
		Worker int
		Err    error
	}
	WorkerExited struct {
		Worker int
		Status Status
	}
	AddWorkers    struct{ N int } // answerAdd comes
	WorkerStarted struct {        // as the session asked for by beginWorker
		Worker plan.Worker
		Err    error // it was not, and has no place in session.workers
	}
	HostBack     struct{ Host string } // of which no worker is in the run
	StopAsked    struct{ Reason Reason }
	HelloTimeout struct{}
	ReapTimeout  struct{ Worker int } // a second after kill or awaitExit
	CauseTimeout struct{}             // some time after awaitCause
	WatchTick    struct{ Due time.Time }
	FileFailed   struct{ Err error }
	AlarmDue     struct{}                   // the time that session.alarm told of
	LogOpened    struct{ First id.Version } // before began: the version of the first plan of a run that is resumed
	RingOpened   struct {                   // before began
		Ring   control.Ring
		Reason string // why there is none, where there should be
	}
	Agreed struct {
		Version  id.Version
		Proposed time.Time
	}
	Balanced      struct{ controller.Balanced }
	FaultInjected struct{ Fault string } // it must not strike again
	FaultStamped  struct {               // for measuring only
		Worker int // -1: the newest one of id
		ID     int
		At     time.Time
	}
)

// What is to be done.
type (
	Effect any

	WriteJob struct {
		Job  rundir.Job
		Data []rundir.DataFile
	}
	WritePlan    struct{ Plan rundir.Plan }
	WriteMetrics struct{ Metrics rundir.Metrics }
	WriteEvent   struct{ Event rundir.Event }
	WriteSummary struct{ Summary rundir.Summary }
	WriteWorkers struct{ Alive []rundir.Process }
	Send         struct {
		Worker  int
		Message control.Message
	}
	Show        struct{ Event view.Event }
	CloseView   struct{}
	Output      struct{ Text string }
	Kill        struct{ Worker int }
	StartWorker struct{ Worker plan.Worker } // workerStarted comes
	AwaitExit   struct{ Worker int }         // reapLate comes if the worker has not ended in a second
	Fence       struct{ Worker int }         // it has to end, if it lives
	AnswerAdd   struct {                     // to addAsked
		IDs     []int
		Refusal string
	}
	AwaitCause struct{} // causeLate comes unless the session is over before
	Propose    struct { // agreedOn comes
		Order  controller.Order
		Reason string
	}
	Balance struct{ controller.Balance } // balanced comes
)

const (
	// maxLead bounds the steps by which a worker may be ahead of another, which
	// is how many are kept. They commit together, so only what lies in sockets counts.
	maxLead = 1 << 16

	// maxMicros bounds the micro-batches of a step, whose places a plan lists.
	maxMicros = 1 << 20

	// maxParameters bounds what layers may claim to have.
	maxParameters = 1 << 44
)

// newSession returns the session of a run. workers are those that the run began with, and after them
// all that an inherited plan counts on.
func New(cfg Config, workers []plan.Worker) *Session {
	s := &Session{
		cfg: cfg, heir: cfg.Inherited, told: make(map[int]said), lost: -1,
		known: make(map[uint64]plan.Plan), timers: make(map[controller.Timer]timer),
		lives: make(map[id.WorkerID]int), tries: make(map[id.WorkerID]int), away: make(map[id.WorkerID]string),
	}
	for i, w := range workers {
		s.workers = append(s.workers, worker{who: w, fresh: i >= cfg.Workers})
		if i < cfg.Workers {
			s.lives[w.ID] = 1
		}
	}
	return s
}

// over reports whether nothing can come any more.
func (s *Session) Over() bool {
	return !slices.ContainsFunc(s.workers, func(w worker) bool { return !w.over() })
}

func (s *Session) Outcome() Outcome {
	return Outcome{Summary: s.summary, Err: s.err, Detail: s.detail, Help: s.help, Resume: s.resumable(), Warning: s.cutShort, Lost: s.lost}
}

func (s *Session) Step(now time.Time, e Event) []Effect {
	if s.heir != nil && !s.judged {
		return s.assemble(now, e)
	}
	switch e := e.(type) {
	case Received:
		if s.judged {
			return nil
		}
		w := &s.workers[e.Worker]
		if w.gone && s.cfg.Term > 0 {
			return nil // of a session that is fenced
		}
		if !w.heard.IsZero() {
			w.heard = now
		}
		return s.message(now, e.Worker, e.Message)
	case StopAsked:
		return s.stopAsked(now, e.Reason)
	case HelloTimeout:
		late := slices.IndexFunc(s.workers, func(w worker) bool { return w.state == connecting && !w.exited })
		if s.judged || late < 0 {
			return nil
		}
		return s.judge(now, &NoMainError{Program: s.cfg.Program, Waited: s.cfg.HelloTimeout.String()})
	case WatchTick:
		return s.watch(now, e.Due)
	case Gossip:
		return s.gossiped(now, e)
	case ClocksSet:
		return s.clocked(now, e)
	case Metered:
		return s.metered(e)
	case CauseTimeout:
		return s.believe(now)
	case AlarmDue:
		return s.ring(now)
	case CheckpointCommitted:
		return s.committedSave(now, e)
	case CheckpointsPruned:
		return s.prunedSaves(now, e)
	case CheckpointVerified:
		return s.verifiedSave(now, e)
	case Agreed:
		if first := s.starting; first != nil {
			s.starting = nil
			return first
		}
		return s.tell(now, controller.Agreed{Version: e.Version, Proposed: e.Proposed})
	case Balanced:
		return s.tell(now, e.Balanced)
	case FaultInjected:
		s.chaos = slices.DeleteFunc(slices.Clone(s.chaos), func(h string) bool { return h == e.Fault })
	case WatchAsked:
		return s.watchAsked(now, e.On)
	case AddWorkers:
		return s.add(now, e)
	case WorkerStarted:
		return s.started(now, e)
	case HostBack:
		return s.comeBack(now, e.Host)
	case FaultStamped:
		if e.Worker < 0 {
			e.Worker = s.newest(id.WorkerID(e.ID))
		}
		if e.Worker < 0 {
			return nil
		}
		w := &s.workers[e.Worker]
		if w.harmed = e.At; w.gone && !e.At.IsZero() { // news from somebody who was slower than the death
			return s.tell(now, controller.Harmed{Worker: s.session(e.Worker), At: e.At})
		}
	case LogOpened:
		s.version = e.First
	case RingOpened:
		s.gossip, s.noRing = e.Ring, e.Reason
	case FileFailed:
		return s.judge(now, &FileError{Err: e.Err})
	case ConnClosed:
		w := &s.workers[e.Worker]
		w.closed = true
		if w.exited {
			return s.ended(now, e.Worker)
		}
		if !s.judged && (errors.Is(e.Err, control.ErrFormat) || errors.Is(e.Err, control.ErrFrameSize)) {
			if w.joins {
				return s.refuse(now, e.Worker, errors.New("sent bytes that are no message"))
			}
			return s.judge(now, &ProtocolError{s.id(e.Worker), "sent bytes that are no message" + s.place()})
		}
		if !s.judged && w.state != finished {
			// A process that dies closes its connection first; its exit
			// says more.
			return []Effect{AwaitExit{e.Worker}}
		}
	case WorkerExited:
		w := &s.workers[e.Worker]
		w.exited, w.status, w.ended = true, e.Status, now
		if w.closed {
			return s.ended(now, e.Worker)
		}
		return []Effect{AwaitExit{e.Worker}}
	case ReapTimeout:
		switch w := &s.workers[e.Worker]; {
		case w.exited:
			// Ended, but something holds its connection open.
			w.closed = true
			return s.ended(now, e.Worker)
		case s.judged:
			w.gaveUp = true
		case w.killed:
			w.gaveUp = true // the others do not wait for it
			return s.ended(now, e.Worker)
		default:
			if w.doom == nil {
				w.doom = &ProtocolError{s.id(e.Worker), "closed its connection and went on" + s.place()}
			}
			if s.state != training {
				return s.judge(now, w.doom)
			}
			w.killed = true
			return []Effect{Kill(e)}
		}
	}
	return nil
}

// ended judges a worker that has ended and has nothing more to say.
func (s *Session) ended(now time.Time, id int) []Effect {
	w := &s.workers[id]
	switch {
	case s.judged, w.gone:
		return nil
	case w.joins && s.state == training:
		return s.fall(now, id)
	case w.joins:
		return nil
	case w.state == finished && w.status.OK():
		return append(s.tell(now, controller.Ended{Worker: s.session(id)}), s.conclude(now)...)
	case s.state == training:
		if w.failed && s.hearsay != nil {
			if !slices.ContainsFunc(s.workers, func(w worker) bool { return !w.gone && !w.failed && !w.over() }) {
				return s.believe(now) // nobody is left to say more
			}
			return nil
		}
		return s.die(now, id)
	case s.state == finished && w.who != s.plan.Workers[0]:
		return nil // its part is done
	case w.failed:
		if s.state < training && slices.ContainsFunc(s.workers, func(w worker) bool { return !w.failed && !w.over() }) {
			return nil
		}
		return s.believe(now) // nobody is left to say more
	case s.state == finished && w.doom == nil && w.status.Killed(), s.state == finished && !w.silent.IsZero():
		// From outside, after the run: nothing of it is missing.
		_, how := culprit(s.death(id))
		s.cutShort = fmt.Sprintf("worker %d %s after all was written; what the program does at the end of a run may be missing", s.id(id), how)
		return []Effect{s.about(now, id, "note", s.cutShort)}
	case w.state == connecting:
		s.lost = id
		return s.judge(now, &NoMainError{Program: s.cfg.Program, Status: w.status})
	}
	s.lost = id
	return s.judge(now, s.death(id))
}

// startPatience multiplies the silence that is borne before training.
const startPatience = 10

// watch looks for workers that are silent. due is when it was to look: who comes late was
// itself kept from listening, and begins anew.
func (s *Session) watch(now, due time.Time) []Effect {
	late := now.Sub(due) > s.cfg.Detect/4
	effects := s.missing(now)
	if late {
		effects = append(effects, s.deaf(now)...)
	}
	for id := range s.workers {
		w := &s.workers[id]
		limit := s.bears(w, now)
		switch {
		case w.heard.IsZero():
		case late:
			w.heard = now
		case !s.judged && !w.closed && !w.exited && w.doom == nil && now.Sub(w.heard) > limit:
			w.silent = w.heard
			w.doom = &SilentError{Worker: s.id(id), Workers: len(s.workers), For: limit, By: w.ring.by, Step: s.last.Step, Steps: s.job.Steps}
			if s.state < training {
				return s.judge(now, w.doom)
			}
			w.killed = true
			effects = append(effects, Kill{id}) // its end is the event
		}
	}
	return effects
}

func (s *Session) message(now time.Time, id int, m control.Message) []Effect {
	w := &s.workers[id]
	bad := func(format string, args ...any) []Effect {
		err := fmt.Errorf(format, args...)
		if w.joins {
			return s.refuse(now, id, err)
		}
		return s.judge(now, &ProtocolError{s.id(id), err.Error() + s.place()})
	}
	if _, first := m.(control.Hello); w.state == connecting && !first {
		if _, failed := m.(control.Failed); !failed {
			return bad("sent %T before its hello", m)
		}
	}
	if s.state == finished && w.inherited {
		switch m.(type) {
		case control.Step, control.Done, control.Answer, control.Applied:
			return nil // the leader before has written all down
		}
	}
	switch m := m.(type) {
	case control.Hello:
		switch {
		case w.state != connecting:
			return bad("said hello twice")
		case m.Protocol != control.Protocol:
			return bad("speaks version %d of the protocol, not %d", m.Protocol, control.Protocol)
		case m.WorkerID != s.id(id) || m.Incarnation != w.who.Incarnation:
			return bad("says it is worker %d in incarnation %d", m.WorkerID, m.Incarnation)
		}
		w.state, w.heard, w.pid, w.hello = greeted, now, m.PID, time.Time{}
		if w.joins {
			return []Effect{s.processes()}
		}
		return nil

	case control.Beat:
		return s.paced(now, id, m)

	case control.Failed:
		return s.failed(now, id, m)

	case control.Note:
		note := OneLine(m.Text)
		effects := []Effect{Show{view.Worker{ID: s.id(id), State: note}}}
		if id == 0 { // the others do the same
			effects = append(effects, Show{view.Note(note)})
		}
		return effects

	case control.Ready:
		if w.state != greeted {
			return bad("sent a job twice")
		}
		if fault := s.fault(m); fault != "" {
			return bad("%s", fault)
		}
		w.state, w.ready = prepared, m
		if w.joins {
			return s.enter(now, id)
		}
		if slices.ContainsFunc(s.workers, func(w worker) bool { return w.state < prepared }) {
			return []Effect{Show{view.Worker{ID: s.id(id), State: "ready"}}}
		}
		return s.begin(now)

	case control.Step:
		if w.state != training {
			return bad("sent a step outside of training")
		}
		return s.committed(now, id, m)

	case control.Output:
		switch {
		case w.state < training:
			return bad("sent output before training")
		case !s.isFirst(id):
			return bad("sent output, which is for worker %d to do", s.plan.Workers[0].ID)
		}
		return []Effect{Output{m.Text}}

	case control.Done:
		if w.state != training {
			return bad("ended a training that had not begun")
		}
		if s.state == finished {
			return nil // it joined as the run ended, which did not need it
		}
		return s.finish(now, id, m)

	case control.Timeline:
		if w.state != training || w.gone {
			return nil
		}
		return s.timeline(id, m)

	case control.Spans:
		if w.state != training || w.gone || s.state != training {
			return nil
		}
		effects, fault := s.spans(now, id, m)
		if fault != "" {
			return bad("%s", fault)
		}
		return effects

	case control.Repaired:
		if w.state != training || w.gone {
			return nil
		}
		return s.repaired(now, id, m)

	case control.Saved:
		if w.state != training || s.cfg.RunDir == "" {
			return bad("saved a part of a checkpoint outside of training")
		}
		if s.state != training || w.gone {
			return nil
		}
		return s.saved(now, id, m)

	case control.Answer, control.Applied, control.LinkLost, control.Leave, control.Level:
		if s.state != training || w.gone {
			return nil // it does not know yet
		}
		return s.hear(now, id, m)
	}
	return bad("sent a message that only an agent sends (%T)", m)
}

// fault returns what no worker may say when it is ready, "" if it is fine.
func (s *Session) fault(m control.Ready) string {
	job := m.Job
	switch {
	case job.Steps < 1:
		return fmt.Sprintf("sent a job of %d steps", job.Steps)
	case job.GlobalBatch < 1 || job.MicroBatch < 1 || job.GlobalBatch%job.MicroBatch != 0:
		return fmt.Sprintf("sent a global batch of %d in micro-batches of %d", job.GlobalBatch, job.MicroBatch)
	case len(s.workers) > 1 && (m.Addr == "" || len(m.Addr) > 255):
		return "sent no address where others could reach it,"
	case len(s.workers) > 1 && len(m.Layers) == 0:
		return "sent no layers"
	case len(m.Layers) > 0 && len(m.Layers) != job.Layers:
		return fmt.Sprintf("sent %d layers of a model of %d", len(m.Layers), job.Layers)
	}
	room := maxParameters
	for _, l := range m.Layers {
		for _, n := range l.Tensors {
			if n < 1 || n > room {
				return fmt.Sprintf("sent a tensor of %d elements", n)
			}
			room -= n
		}
	}
	return ""
}

// begin makes the first plan when all workers are ready.
func (s *Session) begin(now time.Time) []Effect {
	first := s.workers[0].ready
	for id := 1; id < len(s.workers); id++ {
		if field, values := difference(first, s.workers[id].ready); field != "" {
			return s.judge(now, &DifferError{Worker: id, Than: 0, Field: field, Values: values})
		}
	}
	from := 0
	if again := s.cfg.Resume; again != nil {
		if err := again.changed(first); err != nil {
			return s.judge(now, err)
		}
		from = again.Step
	}
	micros := first.Job.GlobalBatch / first.Job.MicroBatch
	if micros > maxMicros {
		return s.judge(now, &PlanError{fmt.Errorf("--micro-batch %d: a step of %d micro-batches is more than %d; use larger ones: %w",
			first.Job.MicroBatch, micros, maxMicros, ErrTooLarge)})
	}
	p, reason, err := planner.Next(plan.Plan{}, s.view(), profile(first), planner.Event{
		Kind: planner.Start, Micros: micros, Stages: s.cfg.Stages, Mirrors: s.cfg.Mirrors, FromStep: from + 1,
	})
	if err != nil {
		return s.judge(now, &PlanError{err})
	}
	if s.version != (id.Version{}) {
		p.Version = s.version
	}
	text, err := json.Marshal(p)
	if err == nil && len(text) > control.MaxFrame/2 {
		err = fmt.Errorf("a plan of %d bytes: use fewer layers, or larger micro-batches: %w", len(text), ErrTooLarge)
	}
	if err != nil {
		return s.judge(now, &PlanError{err})
	}
	if s.cfg.Chaos != nil {
		if s.chaos, err = s.cfg.Chaos(first.Job.Steps); err != nil {
			return s.judge(now, &ChaosError{err})
		}
	}
	s.plan, s.known[uint64(p.Version.N)], s.noted = p, p, p.Version

	s.state, s.start, s.first = training, now, first
	s.job = first.Job
	s.job.Program = path.Base(s.job.Program)
	s.job.Threads, s.job.Reduction, s.job.Zero, s.job.Started = s.cfg.Threads, s.cfg.Reduction, s.cfg.Zero, now.UTC()
	s.job.Workers, s.job.Stages = len(s.workers), len(p.Stages)
	s.job.Command, s.job.Dir, s.job.Mirrors = s.cfg.Command, s.cfg.Dir, s.cfg.Mirrors
	s.job.MinWorkers, s.job.Detect, s.job.Respawn, s.job.NoDigests, s.job.Reshape = s.cfg.MinWorkers, s.cfg.Detect.String(), s.cfg.Respawn, s.cfg.NoDigests, s.cfg.Reshape
	if s.cfg.Args != nil {
		s.job.Args = s.cfg.Args
	}

	if s.cfg.Telemetry {
		s.tr = newTracer(&s.job)
	}
	begin := view.Begin{Job: s.job, Reason: string(reason), Stages: stages(&p)}
	start := s.startMessage()
	start.Plan = text
	s.ringDue = s.formBy(now)
	if s.cfg.RunDir != "" {
		if start.Checkpoints {
			s.saves.every = first.CheckpointEvery
			s.nextSave(now)
		}
		begin.RunDir = s.cfg.Shown
	}
	for id := range s.workers {
		w := &s.workers[id]
		start.Peers = append(start.Peers, control.Peer{ID: id, Addr: w.ready.Addr})
		w.own = share(&p, w.who)
		begin.Workers = append(begin.Workers, w.own)
	}
	s.ctl = controller.New(controller.Config{
		Plan: p, Peers: s.peers(), Profile: profile(first), Term: max(s.cfg.Term, 1), Attempt: s.cfg.Attempt, Fills: s.cfg.Fills, Stages: s.cfg.Stages, Mirrors: s.cfg.Mirrors,
		MinWorkers: s.cfg.MinWorkers, Detect: s.cfg.Detect, Reshape: reshapes[s.cfg.Reshape],
	})
	kind, what := "start", fmt.Sprintf("%s begin with %s", plural(s.job.Steps, "step"), plural(len(s.workers), "worker"))
	if from > 0 {
		kind, what = "resume", fmt.Sprintf("step %d of %d is the next, with %s", from+1, s.job.Steps, plural(len(s.workers), "worker"))
		start.From = start.RunDir
		s.restart, s.last, s.saves.newest = restart{p.Version, from}, rundir.Metrics{Step: from}, from
		s.ctl.Step(now, controller.Saved{Step: from, Dir: start.From})
	}
	effects := []Effect{
		WriteJob{s.job, first.Data},
		Propose{controller.Order{Plan: p, Peers: s.peers(), Passed: id.Point{Step: p.FromStep - 1}, From: start.From}, string(reason)},
		WritePlan{rundir.Plan{Time: rundir.Time{Time: now}, Event: kind, Reason: string(reason), Plan: text}},
		s.processes(),
		s.event(now, kind, what),
		s.event(now, "plan", string(reason)),
	}
	if s.cfg.Resume != nil {
		for _, text := range s.cfg.Resume.Note {
			effects = append(effects, s.event(now, "note", text))
		}
	}
	if len(s.chaos) > 0 {
		text := strings.Join(s.chaos, ",")
		effects = append(effects, s.event(now, "chaos", text), Show{view.Note("chaos: " + text)})
	}
	if s.noRing != "" {
		effects = append(effects, s.event(now, "note", s.noRing))
	}
	if s.tr != nil {
		effects = append(effects, BeginTrace{s.tr.run, s.job.Program})
	}
	for id := range s.workers {
		s.workers[id].state = training
		start.Ring = s.ringOf(&s.workers[id])
		s.starting = append(s.starting, Send{id, start})
	}
	return append(effects, Show{begin})
}

// Last returns the newest numbers of ballots and fills in the session's term, which a later session of that term goes on from.
func (s *Session) Last() (attempt uint64, fills int) {
	if s.ctl == nil {
		return s.cfg.Attempt, s.cfg.Fills
	}
	return s.ctl.Last()
}

// view is who lives, as plans see it.
func (s *Session) view() plan.View {
	var v plan.View
	for id := range s.workers {
		v.Workers = append(v.Workers, s.workers[id].who)
	}
	return v
}

// profile is what is known of the model. Of one that a lone worker keeps for
// itself, that is the number of layers.
func profile(r control.Ready) plan.Profile {
	layers := make([]plan.Layer, max(len(r.Layers), r.Job.Layers, 1))
	for i, l := range r.Layers {
		layers[i].Tensors = l.Tensors
	}
	return plan.Profile{Layers: layers}
}

// startMessage is what lets a worker train, without a plan.
func (s *Session) startMessage() control.Start {
	start := control.Start{Threads: s.cfg.Threads, Reduction: s.cfg.Reduction, Zero: s.cfg.Zero, NoDigests: s.cfg.NoDigests, Chaos: s.chaos}
	if s.cfg.Term > 0 {
		start.Detect = s.cfg.Detect
	}
	if s.tr != nil {
		start.TraceEvery = s.tr.every
	}
	if s.cfg.RunDir != "" {
		start.RunDir = s.cfg.RunDir
		start.Checkpoints = s.cfg.Command != ""
	}
	return start
}

// share is a worker's part of a plan.
func share(p *plan.Plan, who plan.Worker) rundir.Worker {
	w := rundir.Worker{ID: int(who.ID), Incarnation: who.Incarnation, Stages: p.StagesOf(who.ID)}
	for _, st := range w.Stages {
		for l := p.Stages[st].Lo; l < p.Stages[st].Hi; l++ {
			w.Layers = append(w.Layers, l)
		}
	}
	return w
}

func (s *Session) committed(now time.Time, id int, m control.Step) []Effect {
	bad := func(format string, args ...any) []Effect {
		return s.judge(now, &ProtocolError{s.id(id), fmt.Sprintf(format, args...)})
	}
	w := &s.workers[id]
	if m.Plan == 0 {
		m.Plan = uint64(s.plan.Version.N)
	}
	under, ok := s.known[m.Plan]
	if w.fresh && w.inherited && ok && m.Step > s.last.Step+1 && len(s.ahead) < maxLead {
		s.ahead = append(s.ahead, Received{id, m})
		return nil
	}
	if ok && w.inherited && under.Version.Compare(s.restart.version) >= 0 {
		// What it told before, the leader before has in the books.
		w.inherited = false
		w.begun, w.last.Step = s.restart.version, m.Step-1
	}
	switch {
	case !ok || m.Plan < w.last.Plan:
		return bad("committed step %d under plan %d, and plan %d is live", m.Step, m.Plan, s.plan.Version.N)
	case under.Version.Compare(s.restart.version) < 0:
		w.own.Forwards, w.own.Backwards = m.Forwards, m.Backwards
		return nil // the run has gone back since
	case w.fresh:
		// Its first step is any that the others may be in.
		w.fresh, w.begun, w.last.Step = false, s.restart.version, m.Step-1
		if m.Step > s.last.Step+1 || m.Step < 1 {
			return bad("committed step %d, and the others %d", m.Step, s.last.Step)
		}
	case w.begun != s.restart.version:
		w.begun, w.last.Step = s.restart.version, s.restart.step
	}
	if m.Step != w.last.Step+1 || m.Step > s.job.Steps {
		return bad("committed step %d after step %d of %d", m.Step, w.last.Step, s.job.Steps)
	}
	if m.Tokens < 0 || m.MS < 0 || !finite(m.Loss, m.LR, m.GradNorm, m.MS) || m.ValLoss != nil && !finite(*m.ValLoss) {
		return bad("committed step %d with numbers that are not finite", m.Step)
	}
	w.last = m
	w.own.Forwards, w.own.Backwards = m.Forwards, m.Backwards
	row := Show{view.Worker{ID: s.id(id), Step: m.Step, Forwards: m.Forwards, Backwards: m.Backwards}}
	if m.Left {
		return []Effect{row} // the others tell of the step, and of the evaluation after it
	}

	effects := s.clockDraw(id, m)
	if m.Step <= s.last.Step {
		if was, ok := s.told[m.Step]; ok {
			if what := otherStep(was.step, m); what != "" {
				return s.judge(now, &MismatchError{Worker: s.id(id), Than: s.id(was.by), What: what, Step: m.Step})
			}
		}
		s.forget()
		return append(append(effects, row), s.traceWorkerStep(id, m)...)
	}
	s.told[m.Step] = said{id, m}
	s.forget()
	if len(s.told) > maxLead {
		return bad("is %d steps ahead of others", maxLead)
	}
	s.last = rundir.Metrics{
		Step: m.Step, Loss: m.Loss, LR: m.LR, GradNorm: m.GradNorm, Tokens: m.Tokens, MS: m.MS,
		Time: rundir.Time{Time: m.Time}, Workers: len(under.Workers), Plan: m.Plan, ValLoss: m.ValLoss,
	}
	s.stall(m)
	s.total.tokens += m.Tokens
	s.total.ms += m.MS
	if m.ValLoss != nil {
		s.val = m.ValLoss
	}
	effects = append(effects, WriteMetrics{s.last}, row, Show{view.Step(s.last)})
	effects = append(effects, s.pace(now)...)
	effects = append(effects, s.traceStep(m)...)
	effects = append(effects, s.traceWorkerStep(id, m)...)
	effects = append(effects, s.gather(now)...)
	effects = append(effects, s.clockStep(m)...)
	for ahead := s.ahead; len(ahead) > 0; ahead = ahead[1:] {
		if s.ahead = nil; !s.judged {
			e := ahead[0]
			effects = append(effects, s.message(now, e.Worker, e.Message)...)
		}
	}
	return effects
}

// forget drops the steps that all have reported who are to.
func (s *Session) forget() {
	least := math.MaxInt
	for id := range s.workers {
		switch w := &s.workers[id]; {
		case w.gone, w.joins, w.fresh:
		case w.begun != s.restart.version:
			least = min(least, s.restart.step)
		default:
			least = min(least, w.last.Step)
		}
	}
	for step := range s.told {
		if step <= least {
			delete(s.told, step)
		}
	}
}

// finish takes in that a worker has come to its end.
func (s *Session) finish(now time.Time, id int, m control.Done) []Effect {
	w := &s.workers[id]
	stopped := m.StoppedBy != ""
	if s.stop == "" && s.tookOver {
		s.stop = Reason(m.StoppedBy) // the leader before was asked
	}
	if m.Steps != w.last.Step && !w.fresh && !w.inherited || !stopped && m.Steps != s.job.Steps || stopped && Reason(m.StoppedBy) != s.stop {
		return s.judge(now, &ProtocolError{s.id(id), fmt.Sprintf("ended with %d steps, stopped by %q,%s", m.Steps, m.StoppedBy, s.place())})
	}
	if !finite(m.Loss) || m.ValLoss != nil && !finite(*m.ValLoss) {
		return s.judge(now, &ProtocolError{s.id(id), "ended with a loss that is not finite"})
	}
	if s.done != nil {
		if what := otherEnd(*s.done, m, w.fresh || s.workers[s.doneBy].fresh); what != "" {
			return s.judge(now, &MismatchError{Worker: s.id(id), Than: s.id(s.doneBy), What: what})
		}
	}
	if s.done == nil || s.workers[s.doneBy].fresh {
		s.done, s.doneBy = &m, id
	}
	s.ends = max(s.ends, m.Plan)
	if m.ValLoss != nil { // a worker that joined after the newest evaluation has none
		s.val = m.ValLoss
	}
	w.state = finished
	w.own = m.Worker
	w.own.ID, w.own.Incarnation = s.id(id), w.who.Incarnation
	row := Show{view.Worker{ID: s.id(id), Step: m.Steps, Forwards: w.own.Forwards, Backwards: w.own.Backwards, State: "done"}}
	effects := append([]Effect{row}, s.tell(now, controller.Finished{Worker: s.session(id), Step: m.Steps, Result: m.Result})...)
	return append(effects, s.conclude(now)...)
}

// conclude ends training when all that are left have come to its end.
func (s *Session) conclude(now time.Time) []Effect {
	if s.judged || s.state != training || s.done == nil ||
		slices.ContainsFunc(s.workers, func(w worker) bool { return !w.gone && w.state != finished && !s.idle(&w) }) {
		return nil
	}
	if s.ctl.Busy() && slices.ContainsFunc(s.workers, func(w worker) bool { return !w.gone && !w.over() }) {
		return nil // who is the first now has to know
	}
	if s.savesLeft() {
		return nil // it is concluded when that is on disk
	}
	m := s.done
	s.state = finished
	sum := s.summarise(now, m.StoppedBy)
	if !s.workers[s.doneBy].fresh {
		sum.Loss = m.Loss
	}
	sum.ParamsSHA256, sum.StateSHA256 = m.ParamsSHA256, m.StateSHA256
	s.summary = &sum

	reason := "all steps are done"
	if m.StoppedBy != "" {
		reason = fmt.Sprintf("stopped after step %d of %d: %s", m.Steps, s.job.Steps, m.StoppedBy)
		s.err = &StoppedError{Reason: s.stop, Step: m.Steps, Steps: s.job.Steps}
	}
	effects := []Effect{s.event(now, "end", reason), WriteSummary{sum}, Show{view.End{Summary: sum}}, CloseView{}}
	for id := range s.workers {
		switch w := &s.workers[id]; {
		case w.gone || w.closed:
		case w.joins && w.state < training:
			effects = append(effects, Kill{id}) // it reads data for a run that is over
		default:
			effects = append(effects, Send{id, control.Release{}})
		}
	}
	return effects
}

// idle reports whether a worker has no part in the end of the run: it is in no plan yet, and
// not in the one that the run ends under.
func (s *Session) idle(w *worker) bool {
	p, ok := s.known[s.ends]
	if !w.joins || !ok {
		return w.joins
	}
	in, ok := p.Worker(w.who.ID)
	return !ok || in != w.who
}

func (s *Session) failed(now time.Time, id int, m control.Failed) []Effect {
	if w := &s.workers[id]; w.joins {
		return s.refuse(now, id, errors.New(OneLine(m.Text)))
	}
	if m.Kind == control.Help {
		s.help, s.judged = m.Text, true
		return append([]Effect{CloseView{}}, s.killAll()...)
	}
	s.workers[id].failed = true
	err := &FailedError{Kind: m.Kind, Worker: s.id(id), Workers: len(s.workers), Text: OneLine(m.Text), Step: m.Step}
	if len(s.workers) == 1 || m.Kind != control.Faulty && m.Kind != control.PeerLost && m.Kind != control.Corrupt {
		s.detail = m.Stack
		return s.judge(now, err)
	}
	if s.state == training && (m.Kind != control.Faulty || s.ctl.Busy()) {
		s.workers[id].doom = err // its end is the event
		return nil
	}
	// Another worker's end may be behind this, and that one says more, but it may be
	// heard of later.
	if s.hearsay == nil {
		s.hearsay = &hearsay{err, m.Stack}
		return []Effect{AwaitCause{}}
	}
	if s.hearsay.err.Kind == control.PeerLost && m.Kind != control.PeerLost {
		s.hearsay = &hearsay{err, m.Stack}
	}
	return nil
}

// believe judges by what workers said of a failure, as nothing better came.
func (s *Session) believe(now time.Time) []Effect {
	if s.judged || s.hearsay == nil {
		return nil
	}
	s.detail = s.hearsay.detail
	return s.judge(now, s.hearsay.err)
}

func (s *Session) stopAsked(now time.Time, reason Reason) []Effect {
	if s.judged {
		return nil
	}
	first := s.stop == ""
	if first {
		s.stop = reason
	}
	if s.state == training && first {
		who := "the worker is"
		if len(s.workers) > 1 {
			who = "the workers are"
		}
		var effects []Effect
		for id := range s.workers {
			if !s.workers[id].gone {
				effects = append(effects, Send{id, control.Stop{Reason: string(reason)}})
			}
		}
		return append(effects,
			s.event(now, "stop", fmt.Sprintf("%s: %s asked to end at the next commit", reason, who)),
			Show{view.Stopping{Reason: string(reason)}})
	}
	return s.judge(now, &StoppedError{Reason: s.stop, Step: s.last.Step, Steps: s.job.Steps, AtOnce: true})
}

// judge sets the verdict, ends the workers and accounts for what was done.
func (s *Session) judge(now time.Time, err error) []Effect {
	var effects []Effect
	if !s.judged {
		s.judged = true
		if s.err == nil {
			s.err = err
		}
		if s.state == finished {
			// The files are written, and say now how the end of the program came out.
			sum := *s.summary
			sum.StoppedBy = stoppedBy(s.err)
			kind := "failed"
			if errors.As(err, new(*StoppedError)) {
				kind = "stop"
			}
			e := s.event(now, kind, err.Error())
			if id, _ := culprit(err); id >= 0 {
				e.Event.Worker, sum.WorkersLost = id, s.losses+1
			}
			s.summary = &sum
			effects = append(effects, e, WriteSummary{sum})
		}
		if s.state == training {
			sum := s.summarise(now, stoppedBy(err))
			s.summary = &sum
			e := s.event(now, "failed", err.Error())
			if w, cause := culprit(err); w >= 0 {
				e.Event.Worker = w
				if place := s.newest(id.WorkerID(w)); place >= 0 {
					effects = append(effects, s.row(place, cause))
				}
			}
			effects = append(effects, e, WriteSummary{sum}, Show{view.End{Summary: sum}})
		}
	}
	return append(append(effects, s.killAll()...), CloseView{})
}

func (s *Session) killAll() []Effect {
	var effects []Effect
	for id := range s.workers {
		if !s.workers[id].exited {
			effects = append(effects, Kill{id})
		}
	}
	return effects
}

// summarise accounts for the committed steps.
func (s *Session) summarise(now time.Time, stoppedBy string) rundir.Summary {
	sum := rundir.Summary{
		Steps: s.last.Step, Loss: s.last.Loss, ValLoss: s.val, DataSHA256: s.job.DataSHA256,
		Seconds:        float64(now.Sub(s.start).Milliseconds()) / 1000,
		WorkersStarted: len(s.workers) + s.begun, WorkersLost: s.losses, WorkersJoined: s.joined, Reduction: s.cfg.Reduction, StoppedBy: stoppedBy,
		Recoveries: append([]rundir.Recovery{}, s.recovered...), Rollbacks: s.rollbacks,
	}
	for id := range s.workers {
		if !s.workers[id].joins {
			w := s.workers[id].own
			w.Times = s.paces.times(s.workers[id].who.ID)
			sum.Workers = append(sum.Workers, w)
		}
	}
	if s.total.ms > 0 {
		sum.TokensPerSecond = math.Round(float64(s.total.tokens) / s.total.ms * 1000)
	}
	return sum
}

// event is one of the whole run.
func (s *Session) event(now time.Time, kind, reason string) WriteEvent {
	return WriteEvent{rundir.Event{Time: rundir.Time{Time: now}, Kind: kind, Worker: -1, Plan: uint64(s.plan.Version.N), Reason: reason}}
}

func (s *Session) place() string {
	if s.job.Steps == 0 {
		return " before training"
	}
	return fmt.Sprintf(" at step %d of %d", s.last.Step, s.job.Steps)
}

package session

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/delivery"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A takeover: a session continues a run that another leader has begun. While assembling, it gathers what the hosts tell of their
// workers, until it knows of each what became of it. Then it makes the controller of what is agreed, takes in what was told
// meanwhile, and has the controller ask the workers what they have, which seals them.

// Inherited is what a leader finds that follows another one.
type Inherited struct {
	Orders  []control.Order // agreed, in their order
	Reasons []string        // of their plans
	Issued  id.Version      // newest that was agreed
	History rundir.History
	Saved   int // step of the newest checkpoint, 0 for none

	plan   plan.Plan      // live, as far as known
	live   *control.Order // of the newest recovery
	coming *control.Order // a boundary plan that may be live
}

// Add takes in an order that was agreed after those before.
func (in *Inherited) Add(o control.Order, reason string) {
	in.Orders, in.Reasons, in.Issued = append(in.Orders, o), append(in.Reasons, reason), o.Plan.Version
	in.settle()
}

// settle finds out which plan is live, and which one may be: the live plan is that of the newest recovery, or a boundary plan that
// another one followed. The last boundary plan may be live.
func (in *Inherited) settle() {
	in.plan, in.live, in.coming = in.Orders[0].Plan, nil, nil
	for i := range in.Orders {
		switch o := &in.Orders[i]; {
		case i == 0 && o.Ballot == id.Ballot{}:
		case o.Ballot == id.Ballot{}:
			if in.coming != nil {
				in.plan = in.coming.Plan
			}
			in.coming = o
		default:
			in.plan, in.live, in.coming = o.Plan, o, nil
		}
	}
}

// Members are the workers that have a part in the run, or may have.
func (in *Inherited) Members() []plan.Worker {
	all := slices.Clone(in.plan.Workers)
	if in.coming != nil {
		all = append(all, in.coming.Plan.Workers...)
	}
	return all
}

// HasPart reports whether a worker is among those of a plan.
func HasPart(all []plan.Worker, w plan.Worker) bool {
	return slices.ContainsFunc(all, func(x plan.Worker) bool { return x.ID == w.ID && x.Incarnation == w.Incarnation })
}

// tookOver reports whether another leader has begun the run.
func (s *Session) tookOver() bool { return s.cfg.Inherited != nil }

// assemble begins to gather.
func (s *Session) assemble() {
	s.inheritPlans()
	members := s.cfg.Inherited.Members()
	for _, w := range s.workers {
		if HasPart(members, w.who) {
			w.inherited, w.joins = true, !HasPart(s.plan.Workers, w.who)
		} else {
			w.set(gone)
			w.exitTo(reaped)
			s.first(Fence{w.place})
		}
	}
	s.complete()
}

// inheritPlans reads off the agreed orders which plans there are.
func (s *Session) inheritPlans() {
	in := s.cfg.Inherited
	in.settle()
	s.plan = in.plan
	for _, o := range in.Orders {
		s.known[uint64(o.Plan.Version.N)] = o.Plan
		if o.Rollback {
			s.restart = restart{o.Plan.Version, o.Passed.Step}
		}
	}
}

// gather takes in what happens before the run is taken over.
func (s *Session) gather(e Event) {
	switch e := e.(type) {
	case WatchTick, Agreed, Rejected: // the last comes again
		return
	case AlarmDue, FileFailed, DiskFull, DiskRoom, DirRemoved:
		if s.take(e); s.phase == ending {
			return
		}
	case Received:
		w := s.workers[e.Worker]
		if w.state == gone {
			return
		}
		switch m := e.Message.(type) {
		case control.Hello:
			w.pid = m.PID
		case control.Ready:
			if fault := s.fault(m); fault != "" {
				s.judge(&ProtocolError{w.id(), fault})
				return
			}
			if w.ready = m; w.state != prepared {
				w.set(prepared)
			}
		case control.Beat:
		default:
			s.later = append(s.later, e)
		}
	case ConnClosed, WorkerExited, WorkerHalted:
		s.take(e)
	default:
		s.later = append(s.later, e)
	}
	s.complete()
}

// complete takes the run over as soon as the state of every worker is known.
func (s *Session) complete() {
	if !slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state < prepared && !w.over() }) {
		s.takeOver()
	}
}

func (s *Session) takeOver() {
	in := s.cfg.Inherited
	h := &in.History
	s.job, s.began = h.Job, h.Job.Started
	s.records.inherit(h)
	s.roster.joinedBy = h.JoinedBy
	begun := 0
	for _, w := range in.Orders[0].Plan.Workers {
		s.roster.lives[w.ID] = w.Incarnation + 1 // it may have been replaced before training
	}
	for w, n := range h.Started {
		s.roster.lives[id.WorkerID(w)] += n
		begun += n
	}
	s.records.earlier = len(in.Orders[0].Plan.Workers) + begun - len(s.workers)
	for w, host := range h.Away {
		s.roster.away[id.WorkerID(w)] = host
	}
	s.records.last = rundir.Metrics{Step: s.restart.step}
	if h.Last != nil && (h.Last.Plan >= uint64(s.restart.version.N) || h.Last.Step == s.restart.step) { // of the step that it goes on after, the numbers are the same
		s.records.last = *h.Last
	}
	s.thin = thin(&s.plan)
	s.then(s.event(eventLead, fmt.Sprintf("%s leads in term %d", s.cfg.Leader, s.cfg.Term)), s.processes())
	s.beginTrace()
	if h.Summary != nil {
		s.release(*h.Summary)
		return
	}
	// The leader before may have come no further than to agree on the plan.
	i := slices.IndexFunc(in.Orders, func(o control.Order) bool { return o.Plan.Version == s.plan.Version })
	s.notePlan("agreed", in.Reasons[i])
	some := slices.IndexFunc(s.workers, func(w *worker) bool { return w.state == prepared })
	s.enter(training)
	if some < 0 {
		if i := slices.IndexFunc(s.workers, func(w *worker) bool { return w.state != gone }); i >= 0 {
			s.end.lost = s.workers[i]
		}
		s.loseAll()
		return
	}
	s.model = s.workers[some].ready
	s.inheritDeliveries(&h.Calls)
	config := s.controllerConfig(s.plan, s.inheritedPeers())
	config.Term, config.Live, config.Coming, config.Issued = s.cfg.Term, in.live, in.coming, in.Issued
	config.Epoch = in.Orders[len(in.Orders)-1].Epoch
	config.Causes, config.Failed = s.unrecovered(h.Unrecovered)
	s.ctl = controller.New(config)
	s.checkpoints.from = in.Orders[0].Passed.Step
	if s.checkpoints.newest = in.Saved; in.Saved > 0 {
		s.ctl.Step(s.now, controller.Saved{Step: in.Saved, Dir: s.cfg.RunDir})
	}
	s.startInherited(&in.Orders[0])

	for _, e := range s.later {
		s.take(e)
	}
	s.later = nil
	lives := maps.Clone(s.roster.lives)
	for _, w := range s.workers {
		if w.state != gone && w.over() {
			s.ended(w)
		}
	}
	if s.phase == training && !s.ctl.Busy() {
		s.tell(controller.Led{Term: s.cfg.Term})
	}
	for _, joiner := range h.Joining {
		// It was to join, and the leader that knew how far it was is gone. Where it has exited, it may have been replaced just now.
		if s.phase == training && s.end.stop == "" && s.roster.lives[id.WorkerID(joiner)] == lives[id.WorkerID(joiner)] && !slices.ContainsFunc(s.workers, func(w *worker) bool { return w.state != gone && int(w.who.ID) == joiner }) {
			s.launch(id.WorkerID(joiner), "", fmt.Sprintf("worker %d is restarted, as another agent leads", joiner))
		}
	}
}

// unrecovered returns the causes of losses that the plan accounts for, but of which no leader has told the recovery, and when the
// first was known. Other losses are found again.
func (s *Session) unrecovered(lost []rundir.Event) (causes []string, since time.Time) {
	for _, e := range lost {
		worker := id.WorkerID(e.Worker)
		before := s.known[e.Plan]
		_, had := before.Worker(worker)
		if _, has := s.plan.Worker(worker); had && !has {
			causes = append(causes, e.Reason)
			if since.IsZero() {
				since = e.Time.Time
			}
		}
	}
	return causes, since
}

// inheritDeliveries continues the calls of OnStep where the leader before was.
func (s *Session) inheritDeliveries(c *rundir.Calls) {
	switch {
	case !s.model.OnStep:
	case c.Newest == nil: // no worker has begun
		s.deliveries = delivery.New(rundir.Delivery{Step: s.cfg.Inherited.Orders[0].Passed.Step}, nil)
	default:
		s.deliveries = delivery.Inherit(*c.Newest, due(*c))
	}
}

// due returns the steps for which OnStep has yet to be called, as a worker has reported them.
func due(c rundir.Calls) (steps []control.Step) {
	for _, m := range c.Due {
		steps = append(steps, control.Step{
			Step: m.Step, Loss: m.Loss, LR: m.LR, GradNorm: m.GradNorm, Tokens: m.Tokens, MS: m.MS, Time: m.Time.Time, Plan: m.Plan, ValLoss: m.ValLoss,
			Metrics: m.Metrics, TrainMetrics: m.TrainMetrics,
		})
	}
	return steps
}

// startInherited lets the workers train that have not been told yet, with the first order of the run. The leader before may have been lost
// as it told that samples are skipped: all hear of them before they are asked what they have.
func (s *Session) startInherited(first *control.Order) {
	start := s.beginTraining()
	for _, w := range s.workers {
		if w.state == gone {
			continue
		}
		w.own = share(&s.plan, w.who)
		if w.state == prepared {
			w.set(working)
			w.heard.Restart(s.now)
			start.Ring, start.Joins = s.ringOf(w), !HasPart(first.Plan.Workers, w.who)
			s.send(w, start)
			if !start.Joins {
				s.send(w, *first) // a worker that has begun drops it
			}
			s.judgeSamples(s.skips.Verdicts(w.who))
		}
	}
	s.hold() // the leader before may have had a full disk
}

// inheritedPeers are the workers that the plan counts on, alive or not.
func (s *Session) inheritedPeers() []control.Peer {
	addr := make(map[plan.Worker]string)
	for _, o := range s.cfg.Inherited.Orders {
		for _, p := range o.Peers {
			addr[p.Worker] = p.Addr
		}
	}
	var all []control.Peer
	for _, w := range s.workers {
		if w.state != gone {
			p := control.Peer{Worker: w.who, Addr: w.ready.Addr}
			p.Addr = cmp.Or(p.Addr, addr[p.Worker])
			all = append(all, p)
		}
	}
	return all
}

// release does what is left to do for a run whose summary is written.
func (s *Session) release(sum rundir.Summary) {
	s.enter(finished)
	s.records.summary, s.end.complete = &sum, true
	s.then(CloseView{})
	switch r := Reason(sum.StoppedBy); r {
	case "":
	case Interrupt, Terminated, Cancelled, Stopped:
		s.end.err = &StoppedError{Reason: r, Step: sum.Steps, Steps: s.job.Steps}
	default:
		s.end.err = &RecoveryError{errors.New(sum.StoppedBy), sum.Steps, s.job.Steps}
		s.enter(ending)
		s.killAll()
		return
	}
	for _, w := range s.workers {
		if w.state == prepared && !w.over() {
			w.set(done)
			s.send(w, control.Release{})
		}
	}
	for _, e := range s.later {
		if r, ok := e.(Received); ok {
			if _, done := r.Message.(control.Output); !done {
				continue
			}
		}
		s.take(e)
	}
}

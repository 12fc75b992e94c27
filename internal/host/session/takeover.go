package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// This is how a session goes on with a run that another leader has begun. It first gathers what
// the agents tell of their workers, until it knows of each what became of it. Then it takes the
// run over: it makes the controller of what is agreed, takes in what was told meanwhile, and has
// the controller ask the workers what they have, which seals them.

// inherited is what a leader finds that comes after another one.
type Inherited struct {
	Orders  []controller.Order // agreed, in their order
	plan    plan.Plan          // live, as far as known
	Reasons []string
	Issued  id.Version        // newest that was agreed
	live    *controller.Order // of the newest recovery
	coming  *controller.Order // a boundary plan that may be live
	History rundir.History
	Saved   int // step of the newest checkpoint, 0 for none
}

// began is called before the first event.
func (s *Session) Begin(now time.Time) []Effect {
	if s.heir == nil {
		return nil
	}
	var effects []Effect
	s.inheritPlans()
	for id := range s.workers {
		w := &s.workers[id]
		if !HasPart(s.heir.Members(), w.who) {
			w.gone, w.exited, w.closed = true, true, true
			effects = append(effects, Fence{id})
		} else {
			w.inherited, w.joins = true, !HasPart(s.plan.Workers, w.who)
		}
	}
	return append(effects, s.complete(now)...)
}

// inheritPlans reads off the agreed orders which plan is live: that of the newest recovery, or of
// a boundary plan that another one followed. The last boundary plan may be live.
func (s *Session) inheritPlans() {
	in := s.heir
	in.settle()
	s.plan = in.plan
	for _, o := range in.Orders {
		s.known[uint64(o.Plan.Version.N)] = o.Plan
		if o.Restart {
			s.restart = restart{o.Plan.Version, o.Passed.Step}
		}
	}
}

// add takes in an order that was agreed after those before.
func (in *Inherited) Add(o controller.Order, reason string) {
	in.Orders, in.Reasons, in.Issued = append(in.Orders, o), append(in.Reasons, reason), o.Plan.Version
	in.settle()
}

// settle finds out which plan is live, and which one may be.
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

// members are the workers that have a part in the run, or may have.
func (in *Inherited) Members() []plan.Worker {
	all := slices.Clone(in.plan.Workers)
	if in.coming != nil {
		all = append(all, in.coming.Plan.Workers...)
	}
	return all
}

// hasPart reports whether a session is in a plan.
func HasPart(all []plan.Worker, w plan.Worker) bool {
	return slices.ContainsFunc(all, func(x plan.Worker) bool { return x.ID == w.ID && x.Incarnation == w.Incarnation })
}

// assemble takes in what happens before the run is taken over.
func (s *Session) assemble(now time.Time, e Event) []Effect {
	var effects []Effect
	switch e := e.(type) {
	case Received:
		w := &s.workers[e.Worker]
		if w.gone {
			return nil
		}
		switch m := e.Message.(type) {
		case control.Hello:
			w.pid = m.PID
		case control.Ready:
			if fault := s.fault(m); fault != "" {
				s.heir = nil
				return s.judge(now, &ProtocolError{e.Worker, fault})
			}
			w.state, w.ready = prepared, m
		case control.Beat:
		default:
			s.later = append(s.later, e)
		}
	case ConnClosed:
		s.workers[e.Worker].closed = true
		if !s.workers[e.Worker].exited {
			effects = []Effect{AwaitExit{e.Worker}}
		}
	case WorkerExited:
		w := &s.workers[e.Worker]
		if w.gone {
			return nil
		}
		w.exited, w.status, w.ended = true, e.Status, now
		if !w.closed {
			effects = []Effect{AwaitExit{e.Worker}}
		}
	case ReapTimeout:
		switch w := &s.workers[e.Worker]; {
		case w.exited:
			w.closed = true
		case w.killed:
			w.gaveUp = true
		default:
			w.killed = true
			effects = []Effect{Kill(e)}
		}
	case RingOpened:
		s.gossip, s.noRing = e.Ring, e.Reason
		return nil
	case WatchTick, AlarmDue, Agreed, CauseTimeout:
		return nil
	case HelloTimeout, FileFailed:
		s.heir = nil
		return s.Step(now, e)
	default:
		s.later = append(s.later, e)
	}
	return append(effects, s.complete(now)...)
}

// complete takes the run over as soon as all is known.
func (s *Session) complete(now time.Time) []Effect {
	if slices.ContainsFunc(s.workers, func(w worker) bool { return !w.gone && w.state < prepared && !w.over() }) {
		return nil
	}
	return s.takeOver(now)
}

func (s *Session) takeOver(now time.Time) []Effect {
	in := s.heir
	s.heir, s.tookOver = nil, true
	h := &in.History
	s.job, s.start = h.Job, h.Job.Started
	s.recovered, s.losses, s.rollbacks, s.val, s.joined = h.Recoveries, h.Lost, h.Rollbacks, h.ValLoss, h.Joined
	s.joinedBy = h.JoinedBy
	begun := 0
	for number, n := range h.Started {
		s.lives[id.WorkerID(number)] += n
		begun += n
	}
	s.begun = len(in.Orders[0].Plan.Workers) + begun - len(s.workers)
	for number, host := range h.Away {
		s.away[id.WorkerID(number)] = host
	}
	s.total.tokens, s.total.ms = h.Tokens, h.MS
	s.last = rundir.Metrics{Step: s.restart.step}
	if h.Last != nil && h.Last.Plan >= uint64(s.restart.version.N) {
		s.last = *h.Last
	}
	s.thin = thin(&s.plan)
	if s.cfg.Telemetry {
		s.tr = newTracer(&s.job)
	}
	effects := []Effect{s.event(now, "lead", fmt.Sprintf("%s leads in term %d", s.cfg.Leader, s.cfg.Term)), s.processes()}
	if s.tr != nil {
		effects = append(effects, BeginTrace{s.tr.run, s.job.Program})
	}
	if h.Summary != nil {
		return append(effects, s.conclusion(now, *h.Summary)...)
	}
	if h.Plan != nil {
		s.noted = written(h.Plan)
	}
	if s.noted.Compare(s.plan.Version) < 0 {
		// It was agreed, and the leader before came no further.
		text, err := json.Marshal(s.plan)
		if err != nil {
			return s.judge(now, &PlanError{err})
		}
		i := slices.IndexFunc(in.Orders, func(o controller.Order) bool { return o.Plan.Version == s.plan.Version })
		s.noted = s.plan.Version
		effects = append(effects, WritePlan{rundir.Plan{Time: rundir.Time{Time: now}, Event: "agreed", Reason: in.Reasons[i], Plan: text}})
	}

	some := slices.IndexFunc(s.workers, func(w worker) bool { return w.state == prepared })
	if some < 0 {
		s.state = training
		for id := range s.workers {
			if !s.workers[id].gone {
				s.lost = id
				return append(effects, s.judge(now, s.death(id))...)
			}
		}
		return append(effects, s.judge(now, &RecoveryError{errors.New("no worker is left"), s.last.Step, s.job.Steps})...)
	}
	s.first = s.workers[some].ready
	s.ctl = controller.New(controller.Config{
		Plan: s.plan, Peers: s.inheritedPeers(in), Profile: profile(s.first), Term: s.cfg.Term, Attempt: s.cfg.Attempt, Fills: s.cfg.Fills, Stages: s.cfg.Stages, Mirrors: s.cfg.Mirrors,
		MinWorkers: s.cfg.MinWorkers, Detect: s.cfg.Detect, Reshape: reshapes[s.cfg.Reshape], Live: in.live, Epoch: in.Orders[len(in.Orders)-1].Epoch, Coming: in.coming, Issued: in.Issued,
	})
	s.state = training
	if s.cfg.RunDir != "" && s.startMessage().Checkpoints {
		s.saves.every = s.first.CheckpointEvery
		s.nextSave(now)
	}
	if s.saves.newest = in.Saved; in.Saved > 0 {
		s.ctl.Step(now, controller.Saved{Step: in.Saved, Dir: s.cfg.RunDir})
	}
	text, err := json.Marshal(in.Orders[0].Plan)
	if err != nil {
		return s.judge(now, &PlanError{err})
	}
	start := s.startMessage()
	start.Plan = text
	s.ringDue = s.formBy(now)
	for _, p := range in.Orders[0].Peers {
		start.Peers = append(start.Peers, control.Peer{ID: int(p.ID), Incarnation: p.Incarnation, Addr: p.Addr})
	}
	for id := range s.workers {
		w := &s.workers[id]
		if w.gone {
			continue
		}
		w.own = share(&s.plan, w.who)
		if w.state == prepared {
			w.state, w.heard = training, now
			begin := s.startMessage()
			if HasPart(in.Orders[0].Plan.Workers, w.who) {
				begin = start // who has begun does not hear it
			}
			begin.Ring = s.ringOf(w)
			effects = append(effects, Send{id, begin})
		}
	}
	for _, e := range s.later {
		effects = append(effects, s.Step(now, e)...)
	}
	s.later = nil
	for id := range s.workers {
		if w := &s.workers[id]; !w.gone && w.over() {
			effects = append(effects, s.ended(now, id)...)
		}
	}
	if !s.judged && !s.ctl.Busy() {
		effects = append(effects, s.tell(now, controller.Led{Term: s.cfg.Term})...)
	}
	for _, number := range h.Joining {
		// It was to join, and the leader that knew how far it was is gone.
		if !s.judged && s.stop == "" && !slices.ContainsFunc(s.workers, func(w worker) bool { return !w.gone && int(w.who.ID) == number }) {
			effects = append(effects, s.launch(now, id.WorkerID(number), "", fmt.Sprintf("worker %d is started anew, as another agent leads", number))...)
		}
	}
	return effects
}

// written is the version of a line of plans.jsonl.
func written(p *rundir.Plan) id.Version {
	was, err := plan.Parse(p.Plan)
	if err != nil {
		return id.Version{}
	}
	return was.Version
}

// inheritedPeers are the sessions that the plan counts on, alive or not.
func (s *Session) inheritedPeers(in *Inherited) []controller.Peer {
	addr := make(map[plan.Worker]string)
	for _, o := range in.Orders {
		for _, p := range o.Peers {
			addr[p.Worker] = p.Addr
		}
	}
	var all []controller.Peer
	for id := range s.workers {
		if w := &s.workers[id]; !w.gone {
			p := controller.Peer{Worker: s.session(id), Addr: w.ready.Addr}
			if p.Addr == "" {
				p.Addr = addr[p.Worker]
			}
			all = append(all, p)
		}
	}
	return all
}

// conclusion is what is left to do for a run whose summary is written.
func (s *Session) conclusion(now time.Time, sum rundir.Summary) []Effect {
	s.state, s.summary = finished, &sum
	switch r := Reason(sum.StoppedBy); r {
	case "":
	case Interrupt, Terminated, Cancelled, Stopped:
		s.err = &StoppedError{Reason: r, Step: sum.Steps, Steps: s.job.Steps}
	default:
		s.err = &RecoveryError{errors.New(sum.StoppedBy), sum.Steps, s.job.Steps}
		return append([]Effect{CloseView{}}, s.killAll()...)
	}
	effects := []Effect{CloseView{}}
	for id := range s.workers {
		if w := &s.workers[id]; !w.gone {
			w.state = finished
			effects = append(effects, Send{id, control.Release{}})
		}
	}
	for _, e := range s.later {
		if r, ok := e.(Received); ok {
			if _, done := r.Message.(control.Output); !done {
				continue
			}
		}
		effects = append(effects, s.Step(now, e)...)
	}
	return effects
}

func thin(p *plan.Plan) bool {
	return slices.ContainsFunc(p.Shards, func(sh plan.Shard) bool { return len(sh.Mirrors) < p.Mirrors })
}

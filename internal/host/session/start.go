package session

import (
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/change"
	"github.com/soliton-train/soliton/internal/host/session/delivery"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// start makes the first plan when all workers are ready.
func (s *Session) start() {
	beginners := s.beginners()
	first := beginners[0].ready
	for _, w := range beginners[1:] {
		if field, values := change.First(first, w.ready); field != "" {
			s.judge(&DifferError{Worker: w.id(), Than: beginners[0].id(), Field: field, Values: values})
			return
		}
	}
	from := 0
	var lineage []rundir.Ancestor
	if again := s.cfg.Resume; again != nil {
		if err := again.allows(first); err != nil {
			s.judge(err)
			return
		}
		if from = again.Step; again.Gather {
			if from = s.checkpoints.found; from == 0 && !s.checkpoints.none {
				s.seek() // the last thing before training
				return
			}
		}
		var err error
		if lineage, err = again.lineage(first, from); err != nil {
			s.judge(err)
			return
		}
	}
	p, reason, err := s.firstPlan(first, from)
	if err != nil {
		s.judge(err)
		return
	}
	order := control.Order{Plan: p, Peers: s.peers(), Passed: id.Point{Step: from}}
	if from > 0 {
		order.From = s.cfg.RunDir
	}
	if order, err = order.Share(); !s.fits(err) {
		return
	}
	if s.cfg.Chaos != nil {
		if s.faults, err = s.cfg.Chaos(first.Job.Steps); err != nil {
			s.judge(&ChaosError{err})
			return
		}
	}
	s.plan, s.known[uint64(p.Version.N)] = p, p
	s.enter(training)
	s.began, s.model = s.now, first
	s.describeJob(len(p.Stages), lineage)
	s.beginTrace()

	begin := view.Begin{Job: s.job, Reason: reason, Stages: stages(&p)}
	message := s.beginTraining()
	if s.cfg.RunDir != "" {
		begin.RunDir = s.cfg.Shown
	}
	if first.OnStep {
		s.deliveries = delivery.New(rundir.Delivery{Step: from}, nil)
		if again := s.cfg.Resume; again != nil && again.Calls.Newest != nil {
			s.deliveries = delivery.New(*again.Calls.Newest, due(again.Calls))
		}
	}
	s.ctl = controller.New(s.controllerConfig(p, s.peers()))
	kind, what := eventStart, fmt.Sprintf("%s begin with %s", plan.Count(s.job.Steps, "step"), plan.Count(len(beginners), "worker"))
	if from > 0 {
		kind, what = eventResume, fmt.Sprintf("step %d of %d is the next, with %s", from+1, s.job.Steps, plan.Count(len(beginners), "worker"))
		s.restart, s.records.last, s.checkpoints.newest = restart{p.Version, from}, rundir.Metrics{Step: from, Loss: s.cfg.Resume.Loss}, from
		s.records.val = s.cfg.Resume.ValLoss
		s.ctl.Step(s.now, controller.Saved{Step: from, Dir: order.From})
	}
	for _, w := range beginners {
		w.set(working)
		w.own = share(&p, w.who)
		begin.Workers = append(begin.Workers, w.own)
		message.Ring = s.ringOf(w)
		s.starts = append(s.starts, Send{w.place, message}, Send{w.place, order})
	}
	s.first(
		WriteJob{s.job, first.Data},
		Propose{order, reason},
	)
	s.notePlan(string(kind), reason)
	s.then(s.processes(), s.event(kind, what), s.event(eventPlan, reason))
	for _, w := range s.workers {
		if w.state == gone {
			s.then(s.about(w.who.ID, eventLost, OneLine(stoppedBy(s.death(w)))+", before training began"))
		}
	}
	if again := s.cfg.Resume; again != nil {
		for _, text := range slices.Concat(again.Note, s.checkpoints.refused) {
			s.then(s.event(eventNote, text))
		}
		changes := change.Between(again.Job.Plain(), s.job.Plain())
		if s.records.most = from; len(changes) == 0 {
			s.records.most = max(from, again.Committed)
		}
		for _, c := range changes {
			s.then(s.event(eventChanged, c.String()), Show{view.Note("changed: " + c.String())})
		}
	}
	if len(s.faults) > 0 {
		text := strings.Join(s.faults, ",")
		s.then(s.event(eventChaos, text), Show{view.Note("chaos: " + text)})
	}
	if s.cfg.NoRing != "" {
		s.then(s.event(eventNote, s.cfg.NoRing))
	}
	s.then(Show{begin})
	s.checkpoints.from = from
	s.archive(0)
}

// beginners returns the workers that the run begins with, in the order of their WorkerIDs. Some may have been replaced.
func (s *Session) beginners() []*worker {
	all := slices.DeleteFunc(slices.Clone(s.workers), func(w *worker) bool { return w.state == gone })
	slices.SortFunc(all, func(a, b *worker) int { return a.id() - b.id() })
	return all
}

// firstPlan makes the plan of a run after step from, with its reason.
func (s *Session) firstPlan(r control.Ready, from int) (p plan.Plan, reason string, err error) {
	micros := r.Job.GlobalBatch / r.Job.MicroBatch
	if micros > maxMicros {
		return p, "", &PlanError{fmt.Errorf("--micro-batch %d: a step of %d micro-batches is more than %d; use larger ones: %w",
			r.Job.MicroBatch, micros, maxMicros, ErrTooLarge)}
	}
	all := plan.View{ModelHosts: []string{s.cfg.Home, s.cfg.Leader}}
	for _, w := range s.beginners() {
		all.Workers = append(all.Workers, w.who)
	}
	p, why, err := planner.Next(plan.Plan{}, all, profile(r), planner.Event{
		Kind: planner.Start, Micros: micros, Stages: s.cfg.Stages, Mirrors: s.cfg.Mirrors, FromStep: from + 1,
	})
	if err != nil {
		return p, "", &PlanError{err}
	}
	if s.cfg.First != (id.Version{}) {
		p.Version = s.cfg.First
	}
	return p, string(why), nil
}

// describeJob completes what the workers have said of the job, for job.json.
func (s *Session) describeJob(stages int, lineage []rundir.Ancestor) {
	j, c := &s.job, &s.cfg
	*j = s.model.Job
	j.Lineage = lineage
	j.Program = path.Base(j.Program)
	j.Threads, j.Reduction, j.Zero, j.Started = c.Threads, c.Reduction.String(), c.Zero, s.now.UTC()
	j.Workers, j.Stages = s.cfg.Workers, stages
	j.Command, j.Dir, j.Python, j.Mirrors = c.Command, c.Dir, c.Python, c.Mirrors
	j.MinWorkers, j.Detect, j.Respawn, j.NoDigests, j.Reshape = c.MinWorkers, c.Detect.String(), c.Respawn, c.NoDigests, c.Reshape.String()
	j.Verify, j.SkipBad = c.verify(), c.SkipBad
	j.Checkpoints = c.Checkpoints
	j.Keep, j.KeepEvery, j.KeepBest = c.Keep.Newest, c.Keep.Every.String(), c.Keep.Best
	j.CallTimeout = max(c.CallTimeout, 0).String()
	if c.Args != nil {
		j.Args = c.Args
	}
}

// beginTraining sets when the ring and checkpoints are due, and returns the message that lets a worker train.
func (s *Session) beginTraining() control.Start {
	message := s.startMessage()
	s.awaitRing()
	if message.Checkpoints {
		s.checkpoints.every, s.checkpoints.steps = s.model.CheckpointEvery, max(s.model.CheckpointSteps, 0)
		s.checkpoints.made = s.now
		s.checkpoints.next(s.now)
	}
	return message
}

// startMessage says how a worker trains.
func (s *Session) startMessage() control.Start {
	m := control.Start{Threads: s.cfg.Threads, Reduction: s.cfg.Reduction.String(), Zero: s.cfg.Zero, NoDigests: s.cfg.NoDigests, Verify: s.cfg.verify(), Chaos: s.faults, Detect: s.cfg.Lease, TraceEvery: s.tr.Every()}
	m.Eras, m.Shift = s.job.Eras(), s.job.Shift()
	m.SkipBad, m.Skipped = s.cfg.SkipBad, s.skips.Ledger()
	if s.cfg.RunDir != "" {
		m.RunDir = s.cfg.RunDir
		m.Checkpoints = s.cfg.Command != ""
	}
	return m
}

// controllerConfig is what the controller has to know of a run.
func (s *Session) controllerConfig(p plan.Plan, peers []control.Peer) controller.Config {
	return controller.Config{
		Plan: p, Peers: peers, Profile: profile(s.model), Term: max(s.cfg.Term, 1), Attempt: s.cfg.Attempt, Fills: s.cfg.Fills, Stages: s.cfg.Stages,
		Mirrors: s.cfg.Mirrors, Large: s.cfg.Large, MinWorkers: s.cfg.MinWorkers, Detect: s.cfg.Detect, Reshape: s.cfg.Reshape,
		Respawn: s.cfg.Respawn && s.cfg.CanStart, Home: s.cfg.Home, Leader: s.cfg.Leader,
	}
}

// peers are the workers and where they listen.
func (s *Session) peers() []control.Peer {
	var all []control.Peer
	for _, w := range s.beginners() {
		all = append(all, control.Peer{Worker: w.who, Addr: w.ready.Addr})
	}
	return all
}

// profile is what is known of the model. Of a model that a lone worker keeps for itself, that is the number of layers.
func profile(r control.Ready) plan.Profile {
	layers := make([]plan.Layer, max(len(r.Layers), r.Job.Layers, 1))
	for i, l := range r.Layers {
		layers[i].Tensors = l.Tensors
	}
	return plan.Profile{Layers: layers}
}

// share is a worker's part of a plan.
func share(p *plan.Plan, who plan.Worker) rundir.Worker {
	return rundir.Worker{ID: int(who.ID), Incarnation: who.Incarnation, Stages: p.StagesOf(who.ID), Layers: p.LayersOf(who.ID)}
}

// stages are what the view is told of a plan's stages.
func stages(p *plan.Plan) []view.Stage {
	var to []view.Stage
	for _, st := range p.Stages {
		s := view.Stage{Lo: st.Lo, Hi: st.Hi}
		for _, w := range st.Workers {
			s.Workers = append(s.Workers, int(w))
		}
		to = append(to, s)
	}
	return to
}

// thin reports whether a shard has fewer mirrors than the plan wants.
func thin(p *plan.Plan) bool {
	return slices.ContainsFunc(p.Shards, func(sh plan.Shard) bool { return len(sh.Mirrors) < p.Mirrors })
}

func sameFloat(a, b float64) bool { return math.Float64bits(a) == math.Float64bits(b) }

func sameOptional(a, b *float64) bool {
	return (a == nil) == (b == nil) && (a == nil || sameFloat(*a, *b))
}

// otherStep names the number of a step in which the reports of two workers differ, "" for none. Their plans may differ: a recovery
// comes before the end of a step for some workers, and after it for others.
func otherStep(a, b control.Step) string {
	switch {
	case !sameFloat(a.Loss, b.Loss):
		return "loss"
	case !sameFloat(a.GradNorm, b.GradNorm):
		return "grad_norm"
	case !sameFloat(a.LR, b.LR):
		return "lr"
	case a.Tokens != b.Tokens:
		return "tokens"
	case !sameOptional(a.ValLoss, b.ValLoss):
		return "val_loss"
	case !maps.EqualFunc(a.Metrics, b.Metrics, sameFloat):
		return "metrics"
	case !maps.EqualFunc(a.TrainMetrics, b.TrainMetrics, sameFloat):
		return "train_metrics"
	}
	return ""
}

// otherEnd is otherStep for the end of training. A worker that joined after the newest evaluation does not have its loss, and one
// that joined after the last step, which is fresh, does not have the loss of the step.
func otherEnd(a, b control.Done, fresh bool) string {
	switch {
	case a.Steps != b.Steps:
		return "number of steps"
	case a.StoppedBy != b.StoppedBy:
		return "reason to stop"
	case !fresh && !sameFloat(a.Loss, b.Loss):
		return "loss"
	case a.ValLoss != nil && b.ValLoss != nil && !sameFloat(*a.ValLoss, *b.ValLoss):
		return "val_loss"
	case a.ParamsSHA256 != b.ParamsSHA256:
		return "params_sha256"
	case a.StateSHA256 != b.StateSHA256:
		return "state_sha256"
	}
	return ""
}

func finite(xs ...float64) bool {
	for _, x := range xs {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return false
		}
	}
	return true
}

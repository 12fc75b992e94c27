package agent

import (
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/elastic"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/progress"
	"github.com/soliton-train/soliton/internal/rundir"
	"github.com/soliton-train/soliton/internal/trace"
)

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

// More effects.
type (
	beginTrace struct {
		run     trace.Run
		program string
	}
	writeSpans struct{ spans []trace.Span }
	measure    struct{ m trace.Measure }
)

const (
	// tracedSteps is about how many steps of a run are traced in full, spread over all of it.
	tracedSteps = 100

	// leastEvery is the least distance between two of them. To write a span down takes the launcher some
	// microseconds, and a step of four workers has hundreds.
	leastEvery = 4

	// maxSpans bounds what a worker may tell of one step.
	maxSpans = control.MaxSpans

	// maxContexts bounds the places in traces that workers may add to: the newest ones count.
	maxContexts = 64
)

// tracer makes spans and measures out of what a session sees. Nobody wants them of a nil
// tracer.
type tracer struct {
	run   trace.Run
	every int // each so many steps, one is traced in full

	attempts []attempt                  // of the recovery under way
	changes  map[plan.Version]time.Time // boundary plans, and when they were proposed
	fills    map[fillID]time.Time       // copies under way, and since when
	issued   []trace.Context            // to workers, the newest last
	thin     int                        // step since which a shard lacks a mirror, 0 if none does
	struck   map[int]trace.Context      // steps that were struck, and their roots
}

type fillID struct {
	worker plan.Worker
	id     int
}

// attempt is what one ballot of a recovery is about: each fault has a trace of its own.
type attempt struct {
	trace.Context
	cause       string
	died, known time.Time
	dead        int // place of the session, -1 if nobody died
	last        lastTask
	step        trace.Context // that was struck
	before      plan.Version
}

// lastTask is what a worker was doing as it died.
type lastTask struct {
	step    int
	since   time.Time // zero: not known
	running *progress.Pair
}

// newTracer makes the tracer of a run. One that takes the run over knows the same traces.
func newTracer(job *rundir.Job) *tracer {
	return &tracer{
		run: trace.RunOf(job.ID(), job.Started), every: max(leastEvery, (job.Steps+tracedSteps-1)/tracedSteps),
		changes: make(map[plan.Version]time.Time), fills: make(map[fillID]time.Time), struck: make(map[int]trace.Context),
	}
}

// ballot is the root of the trace of a recovery's ballot, as workers are told of it.
func (t *tracer) ballot(b elastic.Ballot) trace.Context {
	if t == nil {
		return trace.Context{}
	}
	return t.issue(t.run.Root(trace.Recovery, b.Term, b.Attempt))
}

// change is the root of the trace of a boundary plan.
func (t *tracer) change(v plan.Version) trace.Context {
	if t == nil {
		return trace.Context{}
	}
	return t.issue(t.run.Root("plan", uint64(v.Generation), uint64(v.N)))
}

// order is the place in a trace that an order belongs to.
func (t *tracer) order(o elastic.Order) trace.Context {
	if (o.Ballot != elastic.Ballot{}) {
		return t.ballot(o.Ballot)
	}
	return t.change(o.Plan.Version)
}

func (t *tracer) issue(c trace.Context) trace.Context {
	if !slices.Contains(t.issued, c) {
		t.issued = append(t.issued, c)
		t.issued = t.issued[max(0, len(t.issued)-maxContexts):]
	}
	return c
}

// stepRoot is the root of a step's trace. After a rollback, a step has another one.
func (s *session) stepRoot(step int) trace.Context {
	return s.tr.run.Root(trace.Step, uint64(s.restart.version.N), uint64(step))
}

// traceEffect takes note of what the controller wants after an event.
func (s *session) traceEffect(now time.Time, cause elastic.Event, e elastic.Effect) []effect {
	t := s.tr
	if t == nil {
		return nil
	}
	switch e := e.(type) {
	case elastic.Ask:
		root := t.ballot(e.Ballot)
		if n := len(t.attempts); n > 0 && t.attempts[n-1].Context == root {
			return nil
		}
		a := attempt{Context: root, died: now, known: now, dead: -1, step: s.stepRoot(s.last.Step + 1), before: s.plan.Version}
		if dead, ok := cause.(elastic.Dead); ok {
			a.dead, a.cause = s.find(dead.Worker), dead.Cause
			if !dead.Died.IsZero() && dead.Died.Before(now) {
				a.died = dead.Died
			}
			a.last = s.lastTask(now, a.dead)
		}
		t.attempts = append(t.attempts, a)
	case elastic.Propose:
		if (e.Order.Ballot == elastic.Ballot{}) {
			t.changes[e.Order.Plan.Version] = now
		}
	case elastic.Copy:
		t.fills[fillID{e.Worker, e.Fill.ID}] = now
	case elastic.Adopt:
		return t.adopted(now, e)
	case elastic.Recovered:
		return s.traceRecovery(now, e.Recovery, "")
	case elastic.End:
		text := "the run has ended"
		if e.Err != nil {
			text = e.Err.Error()
		}
		return s.traceRecovery(now, elastic.Recovery{Cause: text, Version: s.plan.Version, Step: s.last.Step + 1}, text)
	}
	return nil
}

// adopted tells of a boundary plan that is live.
func (t *tracer) adopted(now time.Time, e elastic.Adopt) []effect {
	v := e.Order.Plan.Version
	began, ok := t.changes[v]
	if !ok {
		return nil
	}
	clear(t.changes) // older ones are withdrawn
	return []effect{writeSpans{[]trace.Span{{
		Context: t.change(v), Name: "plan change", Worker: trace.Agent, Start: began, End: now,
		Attrs: []trace.Attr{
			{Key: trace.KeyPlan, Value: v.String()}, {Key: trace.KeyCause, Value: e.Cause}, {Key: "soliton.plan.reason", Value: string(e.Reason)},
			{Key: trace.KeyStep, Value: e.Order.Passed.Step},
		},
	}}}}
}

// traceLevel tells of state that has been copied in the background.
func (s *session) traceLevel(now time.Time, e elastic.Level) []effect {
	if s.tr == nil {
		return nil
	}
	id := fillID{e.Worker, e.ID}
	began, ok := s.tr.fills[id]
	if !ok {
		return nil
	}
	delete(s.tr.fills, id)
	return []effect{writeSpans{[]trace.Span{{
		Context: s.tr.run.Root(trace.Migration, uint64(e.Worker.ID), uint64(e.Worker.Incarnation), uint64(e.ID)),
		Name:    trace.Migration, Worker: int(e.Worker.ID), Incarnation: e.Worker.Incarnation, Start: began, End: now,
		Attrs: []trace.Attr{{Key: trace.KeyStep, Value: e.Step}},
	}}}}
}

// lastTask is what a dead worker was doing.
func (s *session) lastTask(now time.Time, id int) (l lastTask) {
	if id < 0 {
		return l
	}
	p := s.workers[id].status.Progress
	l.step, l.running = p.Step, p.Running
	// The worker wrote that, in memory that may hold anything.
	if at := time.Unix(0, p.Since); at.After(s.start) && at.Before(now) {
		l.since = at
	}
	return l
}

// traceRecovery tells of a recovery that has ended, well if failure is "".
func (s *session) traceRecovery(now time.Time, r elastic.Recovery, failure string) []effect {
	t := s.tr
	attempts := t.attempts
	if t.attempts = nil; len(attempts) == 0 {
		return nil
	}
	var spans []trace.Span
	phases := [...]time.Duration{r.Detect, r.Query, r.Plan, r.Agree, r.Edit, r.Resume}
	for i, a := range attempts {
		if a.dead >= 0 {
			if at := s.workers[a.dead].harmed; !at.IsZero() && at.Before(a.died) {
				a.died = at
			}
		}
		start, own := a.died, phases
		switch {
		case failure != "":
			clear(own[:])
			own[0] = a.known.Sub(start)
		case i == 0:
			start = now.Add(-r.Total) // as events.jsonl has it
		default:
			answered := now.Add(-r.Resume - r.Edit - r.Agree - r.Plan)
			own[0], own[1] = a.known.Sub(start), answered.Sub(a.known)
		}
		cause := a.cause
		if cause == "" {
			cause = r.Cause
		}
		root := trace.Span{
			Context: a.Context, Name: trace.Recovery, Worker: trace.Agent, Start: start, End: now, Error: failure,
			Attrs: []trace.Attr{
				{Key: trace.KeyCause, Value: cause}, {Key: trace.KeyStep, Value: min(r.Step, s.job.Steps)},
				{Key: trace.KeyBefore, Value: a.before.String()}, {Key: trace.KeyPlan, Value: r.Version.String()},
				{Key: trace.KeyBallots, Value: len(attempts) - i}, {Key: trace.KeyLost, Value: r.Lost}, {Key: trace.KeyAgain, Value: r.Again},
				{Key: trace.KeyOpened, Value: r.Opened}, {Key: trace.KeyRollback, Value: r.Rollback}, {Key: trace.KeyDiedAt, Value: string(r.How)},
			},
			Links: []trace.Link{{Context: a.step, Why: "interrupted step"}},
		}
		if i > 0 {
			root.Links = append(root.Links, trace.Link{Context: attempts[i-1].Context, Why: "interrupted recovery"})
		}
		spans = append(spans, root)
		for p, at := 0, start; p < len(own); p++ {
			if failure != "" && p > 0 {
				break
			}
			end := at.Add(max(own[p], 0))
			if p == len(own)-1 {
				end = now
			}
			spans = append(spans, trace.Span{
				Context: trace.Context{Trace: a.Trace}, Parent: a.Span, Name: trace.Phases[p], Worker: trace.Agent, Start: at, End: end,
			})
			at = end
		}
		if a.dead >= 0 {
			spans = append(spans, s.lastWords(a))
		}
	}
	t.struck[min(r.Step, s.job.Steps)] = attempts[0].step
	effects := []effect{writeSpans{spans}}
	if failure == "" {
		m := trace.RecoveryDone{Seconds: r.Total.Seconds(), Rollback: r.Rollback, Recomputed: r.Again}
		for i, d := range phases {
			m.Phases[i] = d.Seconds()
		}
		effects = append(effects, measure{m})
	}
	return effects
}

// lastWords is the span of what a dead worker did last.
func (s *session) lastWords(a attempt) trace.Span {
	w := &s.workers[a.dead]
	since, doing := a.last.since, "waiting"
	if since.IsZero() || since.After(a.died) {
		since = a.died
	}
	span := trace.Span{
		Context: trace.Context{Trace: a.Trace}, Parent: a.Span, Name: trace.Last, Worker: int(w.who.ID), Incarnation: w.who.Incarnation,
		Start: since, End: a.died, Error: a.cause, Links: []trace.Link{{Context: a.step, Why: "interrupted step"}},
	}
	if p := a.last.running; p != nil {
		doing = fmt.Sprintf("stage %d, micro-batch %d", p.Stage, p.Micro)
		span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyStage, Value: p.Stage}, trace.Attr{Key: trace.KeyMicro, Value: p.Micro})
	}
	span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyRunning, Value: doing}, trace.Attr{Key: trace.KeyStep, Value: a.last.step})
	return span
}

// traceStep tells of a committed step, when the first worker does. Of steps that are neither sampled nor
// struck, there are measures only.
func (s *session) traceStep(m control.Step) []effect {
	t := s.tr
	if t == nil {
		return nil
	}
	lag := 0
	switch {
	case !s.thin:
		t.thin = 0
	case t.thin == 0:
		t.thin = m.Step
		fallthrough
	default:
		lag = m.Step - t.thin + 1
	}
	effects := []effect{
		measure{trace.StepDone{Step: m.Step, Seconds: m.MS / 1000, Tokens: m.Tokens, Loss: m.Loss, Workers: s.last.Workers, Plan: m.Plan}},
		measure{trace.MirrorLag{Steps: lag}},
	}
	root, struck := t.struck[m.Step]
	delete(t.struck, m.Step)
	if !struck {
		root = s.stepRoot(m.Step)
	}
	if !struck && m.Step%t.every != 0 && m.Step != 1 {
		return effects
	}
	span := trace.Span{
		Context: root, Name: trace.Step, Worker: trace.Agent,
		Start: m.Time.Add(-time.Duration(m.MS * float64(time.Millisecond))), End: m.Time,
		Attrs: []trace.Attr{
			{Key: trace.KeyStep, Value: m.Step}, {Key: trace.KeyPlan, Value: s.known[m.Plan].Version.String()}, {Key: trace.KeyLoss, Value: m.Loss},
			{Key: trace.KeyTokens, Value: m.Tokens}, {Key: trace.KeyWorkers, Value: s.last.Workers},
		},
	}
	return append(effects, writeSpans{[]trace.Span{span}})
}

// spanNames are those that workers may use.
var spanNames = []string{
	trace.Forward, trace.Backward, trace.Reduce, trace.Check, trace.Commit, trace.Exchange, trace.Update, trace.Gather,
	trace.Transfer, trace.Arrive, trace.Evaluate, trace.Step, trace.Answer, "edit", "resume",
}

// spans takes in what a worker tells. It may be late, or of a run that has gone back, and then it is dropped.
func (s *session) spans(now time.Time, id int, m control.Spans) (effects []effect, fault string) {
	t, w := s.tr, &s.workers[id]
	if t == nil {
		return nil, ""
	}
	if len(m.Spans) > maxSpans || len(m.Links) > maxSpans {
		return nil, fmt.Sprintf("told of %d spans and %d links at a time", len(m.Spans), len(m.Links))
	}
	at, err := trace.ParseContext(m.Trace)
	switch {
	case err != nil:
		return nil, "sent a trace context that is none"
	case m.Trace == "" && (m.Step < 1 || m.Step > s.job.Steps):
		return nil, fmt.Sprintf("told of step %d of %d", m.Step, s.job.Steps)
	case m.Trace == "" && m.Plan < uint64(s.restart.version.N), m.Trace != "" && !slices.Contains(t.issued, at):
		return nil, ""
	}
	parent := at
	if m.Trace == "" {
		// All that it did in a step is below its own part of it.
		at = s.stepRoot(m.Step)
		own := t.run.Root("part", uint64(s.restart.version.N), uint64(m.Step), uint64(w.who.ID), uint64(w.who.Incarnation))
		parent = trace.Context{Trace: at.Trace, Span: own.Span}
	}
	var spans []trace.Span
	for _, x := range m.Spans {
		start := time.Unix(0, x.Start)
		end := start.Add(time.Duration(x.Took))
		if !slices.Contains(spanNames, x.Name) || x.Took < 0 || start.Before(s.start.Add(-time.Minute)) || end.After(now.Add(time.Minute)) {
			continue
		}
		span := trace.Span{
			Context: trace.Context{Trace: parent.Trace}, Parent: parent.Span, Name: x.Name,
			Worker: int(w.who.ID), Incarnation: w.who.Incarnation, Start: start, End: end,
		}
		if x.Name == trace.Step {
			span.Context, span.Parent = parent, at.Span
			span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyStep, Value: m.Step})
			if m.Dropped > 0 {
				span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyDropped, Value: m.Dropped})
			}
		}
		for _, a := range [...]struct {
			key   string
			value int
		}{{trace.KeyStage, x.Stage}, {trace.KeyMicro, x.Micro}, {trace.KeyLayer, x.Layer}, {trace.KeyPeer, x.Peer}} {
			if a.value >= 0 {
				span.Attrs = append(span.Attrs, trace.Attr{Key: a.key, Value: a.value})
			}
		}
		if x.Bytes > 0 {
			span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyBytes, Value: x.Bytes})
		}
		if x.Back {
			span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyDirection, Value: trace.Backward})
		}
		spans = append(spans, span)
		switch x.Name {
		case trace.Reduce, trace.Commit, trace.Exchange:
			effects = append(effects, measure{trace.Collective{
				Worker: int(w.who.ID), Name: x.Name, Seconds: time.Duration(x.Took).Seconds(), Bytes: max(x.Bytes, 0),
			}})
		}
	}
	for _, l := range m.Links {
		if l.Worker >= 0 && l.Sent >= 0 && s.lives[plan.WorkerID(l.Worker)] > 0 {
			effects = append(effects, measure{trace.Traffic{From: int(w.who.ID), To: l.Worker, Bytes: l.Sent}})
		}
	}
	return append([]effect{writeSpans{spans}}, effects...), ""
}

// traceWorkerStep tells what a worker's step was made of.
func (s *session) traceWorkerStep(id int, m control.Step) []effect {
	if s.tr == nil || m.Compute <= 0 || m.MS <= 0 {
		return nil
	}
	return []effect{measure{trace.WorkerStep{Worker: s.id(id), Seconds: m.MS / 1000, Compute: time.Duration(m.Compute).Seconds()}}}
}

// traceCheckpoint tells of a checkpoint that is whole.
func (s *session) traceCheckpoint(now time.Time, step int, since time.Time) []effect {
	if s.tr == nil {
		return nil
	}
	if since.IsZero() {
		since = now
	}
	return []effect{writeSpans{[]trace.Span{{
		Context: s.tr.run.Root(trace.Checkpoint, uint64(s.restart.version.N), uint64(step)), Name: trace.Checkpoint, Worker: trace.Agent,
		Start: since, End: now, Attrs: []trace.Attr{{Key: trace.KeyStep, Value: step}},
		Links: []trace.Link{{Context: s.stepRoot(step), Why: "step"}},
	}}}}
}

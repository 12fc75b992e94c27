// Package spans makes the spans and measures of a run out of what its session sees: a trace for each recovery, each boundary plan,
// each checkpoint, and some of the steps. It decides nothing.
package spans

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/store/rundir"
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

// Tracer makes spans and measures out of what a session sees. A nil Tracer makes none.
type Tracer struct {
	run   trace.Run
	every int // one of so many steps is traced in full
	steps int // of the job
	began time.Time

	attempts    []attempt                // of the recovery under way
	changes     map[id.Version]time.Time // boundary plans, and when they were proposed
	fills       map[fillID]copying       // copies under way
	issued      []trace.Context          // to workers, the newest last
	thin        int                      // step since which a shard lacks a mirror, 0 if none does
	interrupted map[int]trace.Context    // steps that a fault interrupted, and their roots
}

// Moment is the state of a run as an event happens.
type Moment struct {
	Now     time.Time
	Step    int        // newest that was committed
	Plan    id.Version // live
	Restart id.Version // newest plan with which the run went back
}

// Victim is a worker whose failure the controller is told of.
type Victim struct {
	Worker plan.Worker
	Hit    time.Time      // when a fault was injected, zero for none
	Doing  progress.State // as it died, as far as that is known
}

// Out is what a Tracer has made.
type Out struct {
	Spans    []trace.Span
	Measures []trace.Measure
}

// copying is state on its way.
type copying struct {
	since  time.Time
	values int // parameters, without their moments
	from   []id.WorkerID
}

type fillID struct {
	worker plan.Worker
	id     id.Fill
}

// attempt is what one ballot of a recovery is about: each fault has a trace of its own.
type attempt struct {
	trace.Context
	cause       string
	died, known time.Time
	planned     time.Time     // all had answered, and there was a plan; zero: never
	agreed      time.Time     // upon it
	plan        id.Version    // that was agreed; zero: none was
	dead        *Victim       // nil if no worker died
	step        trace.Context // that was interrupted
	before      id.Version
}

// New returns the tracer of a run that began training at began. A leader that takes the run over makes the same traces.
func New(job *rundir.Job, began time.Time) *Tracer {
	return &Tracer{
		run: trace.RunOf(job.ID(), job.Started), every: max(leastEvery, (job.Steps+tracedSteps-1)/tracedSteps), steps: job.Steps, began: began,
		changes: make(map[id.Version]time.Time), fills: make(map[fillID]copying), interrupted: make(map[int]trace.Context),
	}
}

// Run names the run to telemetry.
func (t *Tracer) Run() trace.Run { return t.run }

// Every returns how far apart the steps are that workers trace in full; 0 for none.
func (t *Tracer) Every() int {
	if t == nil {
		return 0
	}
	return t.every
}

// Ballot is the root of the trace of a recovery's ballot, as workers are told of it.
func (t *Tracer) Ballot(b id.Ballot) trace.Context {
	if t == nil {
		return trace.Context{}
	}
	return t.issue(t.run.Root(trace.Recovery, b.Term, b.Attempt))
}

// change is the root of the trace of a boundary plan.
func (t *Tracer) change(v id.Version) trace.Context {
	if t == nil {
		return trace.Context{}
	}
	return t.issue(t.run.Root("plan", uint64(v.Generation), uint64(v.N)))
}

// Order is the place in a trace that an order belongs to.
func (t *Tracer) Order(o control.Order) trace.Context {
	if (o.Ballot != id.Ballot{}) {
		return t.Ballot(o.Ballot)
	}
	return t.change(o.Plan.Version)
}

func (t *Tracer) issue(c trace.Context) trace.Context {
	if !slices.Contains(t.issued, c) {
		t.issued = append(t.issued, c)
		t.issued = t.issued[max(0, len(t.issued)-maxContexts):]
	}
	return c
}

// stepRoot is the root of a step's trace. After a rollback, a step has another one.
func (t *Tracer) stepRoot(m Moment, step int) trace.Context {
	return t.run.Root(trace.Step, uint64(m.Restart.N), uint64(step))
}

// Effect takes note of what the controller wants after an event. dead is the worker whose failure the event is, nil for another.
func (t *Tracer) Effect(m Moment, cause controller.Event, dead *Victim, e controller.Effect) (o Out) {
	if t == nil {
		return o
	}
	now := m.Now
	switch e := e.(type) {
	case controller.Ask:
		root := t.Ballot(e.Ballot)
		if n := len(t.attempts); n > 0 && t.attempts[n-1].Context == root {
			return o
		}
		a := attempt{Context: root, died: now, known: now, dead: dead, step: t.stepRoot(m, m.Step+1), before: m.Plan}
		if c, ok := cause.(controller.Dead); ok {
			if a.cause = c.Cause; !c.Died.IsZero() && c.Died.Before(now) {
				a.died = c.Died
			}
		}
		t.attempts = append(t.attempts, a)
	case controller.Propose:
		if (e.Order.Ballot == id.Ballot{}) {
			t.changes[e.Order.Plan.Version] = now
		} else if a := t.attempt(e.Order.Ballot); a != nil {
			a.planned = now
		}
	case controller.Command:
		if a := t.attempt(e.Order.Ballot); a != nil && a.agreed.IsZero() {
			a.agreed = now
		}
	case controller.Copy:
		c := copying{since: now}
		for _, x := range e.Fill.Transfers {
			if c.values += x.Hi - x.Lo; !slices.Contains(c.from, x.From) {
				c.from = append(c.from, x.From)
			}
		}
		t.fills[fillID{e.Worker, e.Fill.ID}] = c
	case controller.Adopt:
		if a := t.attempt(e.Order.Ballot); a != nil {
			a.plan = e.Order.Plan.Version
		}
		o.Spans = t.adopted(now, e)
	case controller.Recovered:
		return t.recovered(m, trace.Recovery, e.Recovery, "")
	case controller.Relieved:
		o = t.recovered(m, trace.Relief, e.Relief.Recovery, "")
		o.Measures = nil
	case controller.End:
		text := "the run has ended"
		if e.Err != nil {
			text = e.Err.Error()
		}
		return t.recovered(m, trace.Recovery, controller.Recovery{Cause: text, Version: m.Plan, Step: m.Step + 1}, text)
	}
	return o
}

// Stamped takes note of when a fault was injected into a worker, which may be known only after the worker's exit.
func (t *Tracer) Stamped(w plan.Worker, at time.Time) {
	if t == nil {
		return
	}
	for _, a := range t.attempts {
		if a.dead != nil && a.dead.Worker == w {
			a.dead.Hit = at
		}
	}
}

// attempt returns the attempt with a ballot, nil for none.
func (t *Tracer) attempt(b id.Ballot) *attempt {
	root := t.run.Root(trace.Recovery, b.Term, b.Attempt)
	for i := range t.attempts {
		if t.attempts[i].Context == root {
			return &t.attempts[i]
		}
	}
	return nil
}

// adopted tells of a boundary plan that is live.
func (t *Tracer) adopted(now time.Time, e controller.Adopt) []trace.Span {
	v := e.Order.Plan.Version
	began, ok := t.changes[v]
	if !ok {
		return nil
	}
	clear(t.changes) // older ones are withdrawn
	return []trace.Span{{
		Context: t.change(v), Name: trace.Change, Worker: trace.Agent, Start: began, End: now,
		Attrs: []trace.Attr{
			{Key: trace.KeyPlan, Value: v.String()}, {Key: trace.KeyCause, Value: e.Cause.String()}, {Key: "soliton.plan.reason", Value: string(e.Reason)},
			{Key: trace.KeyStep, Value: e.Order.Passed.Step},
		},
	}}
}

// Level tells of state that has been copied in the background.
func (t *Tracer) Level(now time.Time, e controller.Level) (o Out) {
	if t == nil {
		return o
	}
	id := fillID{e.Worker, e.ID}
	c, ok := t.fills[id]
	if !ok {
		return o
	}
	delete(t.fills, id)
	return Out{Spans: []trace.Span{{
		Context: t.run.Root(trace.Migration, uint64(e.Worker.ID), uint64(e.Worker.Incarnation), e.ID.Term, uint64(e.ID.N)),
		Name:    trace.Migration, Worker: int(e.Worker.ID), Incarnation: e.Worker.Incarnation, Start: c.since, End: now,
		Attrs: []trace.Attr{{Key: trace.KeyStep, Value: e.Step}, {Key: trace.KeyParameters, Value: c.values}, {Key: trace.KeySources, Value: len(c.from)}},
	}}}
}

// tracePhase is one of a recovery: from the end of the one before.
type tracePhase struct {
	name string
	end  time.Time
}

// superseded are the phases of an attempt as far as it came until another fault began the next
// one. That there is a plan is known with the last answer.
func (a *attempt) superseded(end time.Time) (phases []tracePhase) {
	for i, at := range [...]time.Time{a.known, a.planned, a.agreed, {}} {
		name := [...]string{"detect", "query", "agree", "edit"}[i]
		if at.IsZero() || !at.Before(end) {
			return append(phases, tracePhase{name, end})
		}
		phases = append(phases, tracePhase{name, at})
	}
	return phases
}

// ended are the phases of the attempt with which a recovery has ended, as events.jsonl has them; it
// began with a death that may be later than the first one.
func (a *attempt) ended(now time.Time, r controller.Recovery) []tracePhase {
	edited := now.Add(-r.Resume)
	agreed := edited.Add(-r.Edit)
	proposed := agreed.Add(-r.Agree)
	answered := proposed.Add(-r.Plan)
	return []tracePhase{{"detect", a.known}, {"query", answered}, {"plan", proposed}, {"agree", agreed}, {"edit", edited}, {"resume", now}}
}

// recovered tells of a recovery or a relief that has ended; failure is "" for a success. A fault on the way has a trace of its own, and the
// one before ends where it begins.
func (t *Tracer) recovered(m Moment, name string, r controller.Recovery, failure string) (o Out) {
	now, attempts := m.Now, t.attempts
	if t.attempts = nil; len(attempts) == 0 {
		return o
	}
	for i := range attempts {
		a := &attempts[i]
		if a.dead != nil && !a.dead.Hit.IsZero() && a.dead.Hit.Before(a.died) {
			a.died = a.dead.Hit
		}
		if i == 0 && failure == "" {
			a.died = now.Add(-r.Total) // as events.jsonl has it
		}
		root := trace.Span{
			Context: a.Context, Name: name, Worker: trace.Agent, Start: a.died, End: now, Error: failure,
			Attrs: []trace.Attr{
				{Key: trace.KeyCause, Value: cmp.Or(a.cause, r.Cause)}, {Key: trace.KeyStep, Value: min(r.Step, t.steps)}, {Key: trace.KeyBefore, Value: a.before.String()},
			},
			Links: []trace.Link{{Context: a.step, Why: "interrupted step"}},
		}
		if i > 0 {
			root.Links = append(root.Links, trace.Link{Context: attempts[i-1].Context, Why: trace.Interrupted})
		}
		var phases []tracePhase
		switch last := i == len(attempts)-1; {
		case !last:
			next := &attempts[i+1]
			root.End, root.Error = next.known, ""
			root.Attrs = append(root.Attrs, trace.Attr{Key: trace.KeySuperseded, Value: true})
			if a.plan != (id.Version{}) {
				root.Attrs = append(root.Attrs, trace.Attr{Key: trace.KeyPlan, Value: a.plan.String()})
			}
			root.Links = append(root.Links, trace.Link{Context: next.Context, Why: "superseded by"})
			phases = a.superseded(next.known)
		case failure != "":
			phases = a.superseded(now)
		default:
			phases = a.ended(now, r)
		}
		if name == trace.Relief {
			phases = phases[1:] // there is nothing to detect
		}
		if i == len(attempts)-1 {
			root.Attrs = append(root.Attrs,
				trace.Attr{Key: trace.KeyPlan, Value: r.Version.String()}, trace.Attr{Key: trace.KeyBallots, Value: len(attempts)},
				trace.Attr{Key: trace.KeyLost, Value: r.Lost}, trace.Attr{Key: trace.KeyAgain, Value: r.Again}, trace.Attr{Key: trace.KeyOpened, Value: r.Opened},
				trace.Attr{Key: trace.KeyRollback, Value: r.Rollback}, trace.Attr{Key: trace.KeyDiedAt, Value: r.How.String()},
			)
		}
		o.Spans = append(o.Spans, root)
		at := a.died
		for _, p := range phases {
			if p.end.Before(at) {
				p.end = at
			}
			o.Spans = append(o.Spans, trace.Span{
				Context: trace.Context{Trace: a.Trace}, Parent: a.Span, Name: p.name, Worker: trace.Agent, Start: at, End: p.end,
			})
			at = p.end
		}
		if a.dead != nil {
			o.Spans = append(o.Spans, t.lastTask(a))
		}
	}
	if name == trace.Recovery { // steps in which workers are relieved may be many
		t.interrupted[min(r.Step, t.steps)] = attempts[0].step
	}
	if failure == "" {
		m := trace.RecoveryDone{Seconds: r.Total.Seconds(), Rollback: r.Rollback, Recomputed: r.Again}
		for i, d := range [...]time.Duration{r.Detect, r.Query, r.Plan, r.Agree, r.Edit, r.Resume} {
			m.Phases[i] = d.Seconds()
		}
		o.Measures = append(o.Measures, m)
	}
	return o
}

// lastTask is the span of what a dead worker did last.
func (t *Tracer) lastTask(a *attempt) trace.Span {
	w, last := a.dead.Worker, &a.dead.Doing
	// The worker wrote the time, in memory that may hold anything.
	since, doing := time.Unix(0, last.Since), "waiting"
	if !since.After(t.began) || since.After(a.died) {
		since = a.died
	}
	span := trace.Span{
		Context: trace.Context{Trace: a.Trace}, Parent: a.Span, Name: trace.Last, Worker: int(w.ID), Incarnation: w.Incarnation,
		Start: since, End: a.died, Error: a.cause, Links: []trace.Link{{Context: a.step, Why: "interrupted step"}},
	}
	for i, p := range last.All() {
		if text := fmt.Sprintf("stage %d, micro-batch %d", p.Stage, p.Micro); i > 0 {
			doing += "; " + text
		} else {
			doing = text
			span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyStage, Value: p.Stage}, trace.Attr{Key: trace.KeyMicro, Value: p.Micro})
		}
	}
	span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyRunning, Value: doing}, trace.Attr{Key: trace.KeyStep, Value: last.Step})
	return span
}

// Step tells of a step that was committed under a plan of so many workers, when the first worker does. thin says that a shard has
// fewer mirrors than it should. Steps that are neither sampled nor interrupted have measures only.
func (t *Tracer) Step(at Moment, m control.Step, under id.Version, workers int, thin bool) (o Out) {
	if t == nil {
		return o
	}
	lag := 0
	switch {
	case !thin:
		t.thin = 0
	case t.thin == 0:
		t.thin = m.Step
		fallthrough
	default:
		lag = m.Step - t.thin + 1
	}
	o.Measures = []trace.Measure{
		trace.StepDone{Step: m.Step, Seconds: m.MS / 1000, Tokens: m.Tokens, Loss: m.Loss, Workers: workers, Plan: m.Plan}, trace.MirrorLag{Steps: lag},
	}
	root, interrupted := t.interrupted[m.Step]
	delete(t.interrupted, m.Step)
	if !interrupted {
		root = t.stepRoot(at, m.Step)
	}
	if !interrupted && m.Step%t.every != 0 && m.Step != 1 {
		return o
	}
	o.Spans = []trace.Span{{
		Context: root, Name: trace.Step, Worker: trace.Agent,
		Start: m.Time.Add(-time.Duration(m.MS * float64(time.Millisecond))), End: m.Time,
		Attrs: []trace.Attr{
			{Key: trace.KeyStep, Value: m.Step}, {Key: trace.KeyPlan, Value: under.String()}, {Key: trace.KeyLoss, Value: m.Loss},
			{Key: trace.KeyTokens, Value: m.Tokens}, {Key: trace.KeyWorkers, Value: workers},
		},
	}}
	return o
}

// spanNames are those that workers may use.
var spanNames = []string{
	trace.Forward, trace.Backward, trace.Reduce, trace.Check, trace.Commit, trace.Exchange, trace.Update, trace.Gather, trace.Load,
	trace.Transfer, trace.Arrive, trace.Evaluate, trace.Step, trace.Answer, "edit", "resume",
}

// Worker takes in the spans of a worker, and returns what is wrong with them, "" for nothing. Late spans are dropped, and those of
// steps from which the run has gone back. lives counts the incarnations of each worker of the run.
func (t *Tracer) Worker(now Moment, w plan.Worker, m control.Spans, lives map[id.WorkerID]int) (o Out, fault string) {
	if t == nil {
		return o, ""
	}
	if len(m.Spans) > maxSpans || len(m.Links) > maxSpans {
		return o, fmt.Sprintf("told of %d spans and %d links at a time", len(m.Spans), len(m.Links))
	}
	at, err := trace.ParseContext(m.Trace)
	switch {
	case err != nil:
		return o, "sent a trace context that is none"
	case m.Trace == "" && (m.Step < 1 || m.Step > t.steps):
		return o, fmt.Sprintf("told of step %d of %d", m.Step, t.steps)
	case m.Trace == "" && m.Plan < uint64(now.Restart.N), m.Trace != "" && !slices.Contains(t.issued, at):
		return o, ""
	}
	parent := at
	if m.Trace == "" {
		// All that it did in a step is below its own part of it.
		at = t.stepRoot(now, m.Step)
		own := t.run.Root("part", uint64(now.Restart.N), uint64(m.Step), uint64(w.ID), uint64(w.Incarnation))
		parent = trace.Context{Trace: at.Trace, Span: own.Span}
	}
	stages := make(map[int]*trace.Span)
	for _, x := range m.Spans {
		start := time.Unix(0, x.Start)
		end := start.Add(time.Duration(x.Took))
		if !slices.Contains(spanNames, x.Name) || x.Took < 0 || start.Before(t.began.Add(-time.Minute)) || end.After(now.Now.Add(time.Minute)) {
			continue
		}
		span := trace.Span{
			Context: trace.Context{Trace: parent.Trace}, Parent: parent.Span, Name: x.Name,
			Worker: int(w.ID), Incarnation: w.Incarnation, Start: start, End: end,
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
		if x.Lane > 0 && x.Lane < progress.Lanes {
			span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyLane, Value: x.Lane})
		}
		if x.Back {
			span.Attrs = append(span.Attrs, trace.Attr{Key: trace.KeyDirection, Value: trace.Backward})
		}
		if m.Trace == "" && x.Stage >= 0 && (x.Name == trace.Forward || x.Name == trace.Backward) {
			// Passes are below what this worker did of the stage.
			st := stages[x.Stage]
			if st == nil {
				own := t.run.Root(trace.Stage, uint64(now.Restart.N), uint64(m.Step), uint64(w.ID), uint64(w.Incarnation), uint64(x.Stage))
				st = &trace.Span{
					Context: trace.Context{Trace: parent.Trace, Span: own.Span}, Parent: parent.Span, Name: trace.Stage, Worker: span.Worker, Incarnation: span.Incarnation,
					Start: start, End: end, Attrs: []trace.Attr{{Key: trace.KeyStage, Value: x.Stage}},
				}
				stages[x.Stage] = st
			}
			if start.Before(st.Start) {
				st.Start = start
			}
			if end.After(st.End) {
				st.End = end
			}
			span.Parent = st.Span
		}
		o.Spans = append(o.Spans, span)
		switch x.Name {
		case trace.Reduce, trace.Commit, trace.Exchange:
			o.Measures = append(o.Measures, trace.Collective{Name: x.Name, Seconds: time.Duration(x.Took).Seconds()})
		}
	}
	for _, st := range slices.Sorted(maps.Keys(stages)) {
		o.Spans = append(o.Spans, *stages[st])
	}
	for _, l := range m.Links {
		if l.Worker >= 0 && l.Sent >= 0 && lives[id.WorkerID(l.Worker)] > 0 {
			o.Measures = append(o.Measures, trace.Traffic{From: int(w.ID), To: l.Worker, Bytes: l.Sent})
		}
	}
	return o, ""
}

// WorkerStep tells what a worker's step was made of.
func (t *Tracer) WorkerStep(w id.WorkerID, m control.Step) (o Out) {
	if t != nil && m.Compute > 0 && m.MS > 0 {
		o.Measures = []trace.Measure{trace.WorkerStep{
			Worker: int(w), Seconds: m.MS / 1000, Compute: time.Duration(m.Compute).Seconds(), Reduced: max(m.Reduced, 0), Exchanged: max(m.Exchanged, 0),
		}}
	}
	return o
}

// Checkpoint tells of a checkpoint that is whole, whose state the workers began to capture at since. Their clocks may be ahead.
func (t *Tracer) Checkpoint(m Moment, step int, since time.Time) (o Out) {
	if t == nil {
		return o
	}
	if since.IsZero() || since.After(m.Now) {
		since = m.Now
	}
	return Out{Spans: []trace.Span{{
		Context: t.run.Root(trace.Checkpoint, uint64(m.Restart.N), uint64(step)), Name: trace.Checkpoint, Worker: trace.Agent,
		Start: since, End: m.Now, Attrs: []trace.Attr{{Key: trace.KeyStep, Value: step}},
		Links: []trace.Link{{Context: t.stepRoot(m, step), Why: "step"}},
	}}}
}

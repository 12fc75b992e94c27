package session

import (
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

// beginTrace begins the trace of the run, where spans and measures are wanted.
func (s *Session) beginTrace() {
	if s.cfg.Telemetry {
		s.tr = newTracer(&s.job)
		s.then(BeginTrace{s.tr.run, s.job.Program})
	}
}

// tracer makes spans and measures out of what a session sees. A nil tracer
// makes none.
type tracer struct {
	run   trace.Run
	every int // each so many steps, one is traced in full

	attempts    []attempt                // of the recovery under way
	changes     map[id.Version]time.Time // boundary plans, and when they were proposed
	fills       map[fillID]copying       // copies under way
	issued      []trace.Context          // to workers, the newest last
	thin        int                      // step since which a shard lacks a mirror, 0 if none does
	interrupted map[int]trace.Context    // steps that a fault interrupted, and their roots
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
	planned     time.Time // all had answered, and there was a plan; zero: never
	agreed      time.Time // upon it
	dead        int       // place of the session, -1 if none died
	last        lastTask
	step        trace.Context // that was interrupted
	before      id.Version
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
		changes: make(map[id.Version]time.Time), fills: make(map[fillID]copying), interrupted: make(map[int]trace.Context),
	}
}

// ballot is the root of the trace of a recovery's ballot, as workers are told of it.
func (t *tracer) ballot(b id.Ballot) trace.Context {
	if t == nil {
		return trace.Context{}
	}
	return t.issue(t.run.Root(trace.Recovery, b.Term, b.Attempt))
}

// change is the root of the trace of a boundary plan.
func (t *tracer) change(v id.Version) trace.Context {
	if t == nil {
		return trace.Context{}
	}
	return t.issue(t.run.Root("plan", uint64(v.Generation), uint64(v.N)))
}

// order is the place in a trace that an order belongs to.
func (t *tracer) order(o control.Order) trace.Context {
	if (o.Ballot != id.Ballot{}) {
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
func (s *Session) stepRoot(step int) trace.Context {
	return s.tr.run.Root(trace.Step, uint64(s.restart.version.N), uint64(step))
}

// traceEffect takes note of what the controller wants after an event.
func (s *Session) traceEffect(cause controller.Event, e controller.Effect) {
	t, now := s.tr, s.now
	if t == nil {
		return
	}
	switch e := e.(type) {
	case controller.Ask:
		root := t.ballot(e.Ballot)
		if n := len(t.attempts); n > 0 && t.attempts[n-1].Context == root {
			return
		}
		a := attempt{Context: root, died: now, known: now, dead: -1, step: s.stepRoot(s.records.last.Step + 1), before: s.plan.Version}
		if dead, ok := cause.(controller.Dead); ok {
			a.dead, a.cause = s.find(dead.Worker), dead.Cause
			if !dead.Died.IsZero() && dead.Died.Before(now) {
				a.died = dead.Died
			}
			a.last = s.lastTask(a.dead)
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
		s.then(t.adopted(now, e)...)
	case controller.Recovered:
		s.traceRecovery(e.Recovery, "")
	case controller.End:
		text := "the run has ended"
		if e.Err != nil {
			text = e.Err.Error()
		}
		s.traceRecovery(controller.Recovery{Cause: text, Version: s.plan.Version, Step: s.records.last.Step + 1}, text)
	}
}

// attempt returns the attempt with a ballot, nil for none.
func (t *tracer) attempt(b id.Ballot) *attempt {
	root := t.run.Root(trace.Recovery, b.Term, b.Attempt)
	for i := range t.attempts {
		if t.attempts[i].Context == root {
			return &t.attempts[i]
		}
	}
	return nil
}

// adopted tells of a boundary plan that is live.
func (t *tracer) adopted(now time.Time, e controller.Adopt) []Effect {
	v := e.Order.Plan.Version
	began, ok := t.changes[v]
	if !ok {
		return nil
	}
	clear(t.changes) // older ones are withdrawn
	return []Effect{WriteSpans{[]trace.Span{{
		Context: t.change(v), Name: trace.Change, Worker: trace.Agent, Start: began, End: now,
		Attrs: []trace.Attr{
			{Key: trace.KeyPlan, Value: v.String()}, {Key: trace.KeyCause, Value: e.Cause.String()}, {Key: "soliton.plan.reason", Value: string(e.Reason)},
			{Key: trace.KeyStep, Value: e.Order.Passed.Step},
		},
	}}}}
}

// traceLevel tells of state that has been copied in the background.
func (s *Session) traceLevel(e controller.Level) {
	if s.tr == nil {
		return
	}
	id := fillID{e.Worker, e.ID}
	c, ok := s.tr.fills[id]
	if !ok {
		return
	}
	delete(s.tr.fills, id)
	s.then(WriteSpans{[]trace.Span{{
		Context: s.tr.run.Root(trace.Migration, uint64(e.Worker.ID), uint64(e.Worker.Incarnation), e.ID.Term, uint64(e.ID.N)),
		Name:    trace.Migration, Worker: int(e.Worker.ID), Incarnation: e.Worker.Incarnation, Start: c.since, End: s.now,
		Attrs: []trace.Attr{{Key: trace.KeyStep, Value: e.Step}, {Key: trace.KeyParameters, Value: c.values}, {Key: trace.KeySources, Value: len(c.from)}},
	}}})
}

// lastTask is what a dead worker was doing.
func (s *Session) lastTask(id int) (l lastTask) {
	if id < 0 {
		return l
	}
	p := s.workers[id].status.Progress
	l.step, l.running = p.Step, p.Running
	// The worker wrote that, in memory that may hold anything.
	if at := time.Unix(0, p.Since); at.After(s.began) && at.Before(s.now) {
		l.since = at
	}
	return l
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

// traceRecovery tells of a recovery that has ended, well if failure is "". A fault on the way
// has a trace of its own, and the one before ends where it begins.
func (s *Session) traceRecovery(r controller.Recovery, failure string) {
	t, now := s.tr, s.now
	attempts := t.attempts
	if t.attempts = nil; len(attempts) == 0 {
		return
	}
	var spans []trace.Span
	for i := range attempts {
		a := &attempts[i]
		if a.dead >= 0 {
			if at := s.workers[a.dead].hit; !at.IsZero() && at.Before(a.died) {
				a.died = at
			}
		}
		if i == 0 && failure == "" {
			a.died = now.Add(-r.Total) // as events.jsonl has it
		}
		cause := a.cause
		if cause == "" {
			cause = r.Cause
		}
		root := trace.Span{
			Context: a.Context, Name: trace.Recovery, Worker: trace.Agent, Start: a.died, End: now, Error: failure,
			Attrs: []trace.Attr{
				{Key: trace.KeyCause, Value: cause}, {Key: trace.KeyStep, Value: min(r.Step, s.job.Steps)}, {Key: trace.KeyBefore, Value: a.before.String()},
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
			root.Links = append(root.Links, trace.Link{Context: next.Context, Why: "superseded by"})
			phases = a.superseded(next.known)
		case failure != "":
			phases = a.superseded(now)
		default:
			phases = a.ended(now, r)
		}
		if i == len(attempts)-1 {
			root.Attrs = append(root.Attrs,
				trace.Attr{Key: trace.KeyPlan, Value: r.Version.String()}, trace.Attr{Key: trace.KeyBallots, Value: len(attempts)},
				trace.Attr{Key: trace.KeyLost, Value: r.Lost}, trace.Attr{Key: trace.KeyAgain, Value: r.Again}, trace.Attr{Key: trace.KeyOpened, Value: r.Opened},
				trace.Attr{Key: trace.KeyRollback, Value: r.Rollback}, trace.Attr{Key: trace.KeyDiedAt, Value: r.How.String()},
			)
		}
		spans = append(spans, root)
		at := a.died
		for _, p := range phases {
			if p.end.Before(at) {
				p.end = at
			}
			spans = append(spans, trace.Span{
				Context: trace.Context{Trace: a.Trace}, Parent: a.Span, Name: p.name, Worker: trace.Agent, Start: at, End: p.end,
			})
			at = p.end
		}
		if a.dead >= 0 {
			spans = append(spans, s.lastWords(*a))
		}
	}
	t.interrupted[min(r.Step, s.job.Steps)] = attempts[0].step
	s.then(WriteSpans{spans})
	if failure == "" {
		m := trace.RecoveryDone{Seconds: r.Total.Seconds(), Rollback: r.Rollback, Recomputed: r.Again}
		for i, d := range [...]time.Duration{r.Detect, r.Query, r.Plan, r.Agree, r.Edit, r.Resume} {
			m.Phases[i] = d.Seconds()
		}
		s.then(Measure{m})
	}
}

// lastWords is the span of what a dead worker did last.
func (s *Session) lastWords(a attempt) trace.Span {
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
// interrupted, there are measures only.
func (s *Session) traceStep(m control.Step) {
	t := s.tr
	if t == nil {
		return
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
	s.then(
		Measure{trace.StepDone{Step: m.Step, Seconds: m.MS / 1000, Tokens: m.Tokens, Loss: m.Loss, Workers: s.records.last.Workers, Plan: m.Plan}},
		Measure{trace.MirrorLag{Steps: lag}},
	)
	root, interrupted := t.interrupted[m.Step]
	delete(t.interrupted, m.Step)
	if !interrupted {
		root = s.stepRoot(m.Step)
	}
	if !interrupted && m.Step%t.every != 0 && m.Step != 1 {
		return
	}
	span := trace.Span{
		Context: root, Name: trace.Step, Worker: trace.Agent,
		Start: m.Time.Add(-time.Duration(m.MS * float64(time.Millisecond))), End: m.Time,
		Attrs: []trace.Attr{
			{Key: trace.KeyStep, Value: m.Step}, {Key: trace.KeyPlan, Value: s.known[m.Plan].Version.String()}, {Key: trace.KeyLoss, Value: m.Loss},
			{Key: trace.KeyTokens, Value: m.Tokens}, {Key: trace.KeyWorkers, Value: s.records.last.Workers},
		},
	}
	s.then(WriteSpans{[]trace.Span{span}})
}

// spanNames are those that workers may use.
var spanNames = []string{
	trace.Forward, trace.Backward, trace.Reduce, trace.Check, trace.Commit, trace.Exchange, trace.Update, trace.Gather,
	trace.Transfer, trace.Arrive, trace.Evaluate, trace.Step, trace.Answer, "edit", "resume",
}

// spans takes in what a worker tells. It may be late, or of a run that has gone back, and then it is dropped.
func (s *Session) spans(place int, m control.Spans) (fault string) {
	t, w := s.tr, &s.workers[place]
	if t == nil {
		return ""
	}
	if len(m.Spans) > maxSpans || len(m.Links) > maxSpans {
		return fmt.Sprintf("told of %d spans and %d links at a time", len(m.Spans), len(m.Links))
	}
	at, err := trace.ParseContext(m.Trace)
	switch {
	case err != nil:
		return "sent a trace context that is none"
	case m.Trace == "" && (m.Step < 1 || m.Step > s.job.Steps):
		return fmt.Sprintf("told of step %d of %d", m.Step, s.job.Steps)
	case m.Trace == "" && m.Plan < uint64(s.restart.version.N), m.Trace != "" && !slices.Contains(t.issued, at):
		return ""
	}
	parent := at
	if m.Trace == "" {
		// All that it did in a step is below its own part of it.
		at = s.stepRoot(m.Step)
		own := t.run.Root("part", uint64(s.restart.version.N), uint64(m.Step), uint64(w.who.ID), uint64(w.who.Incarnation))
		parent = trace.Context{Trace: at.Trace, Span: own.Span}
	}
	var spans []trace.Span
	var measures []Effect
	stages := make(map[int]*trace.Span)
	for _, x := range m.Spans {
		start := time.Unix(0, x.Start)
		end := start.Add(time.Duration(x.Took))
		if !slices.Contains(spanNames, x.Name) || x.Took < 0 || start.Before(s.began.Add(-time.Minute)) || end.After(s.now.Add(time.Minute)) {
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
		if m.Trace == "" && x.Stage >= 0 && (x.Name == trace.Forward || x.Name == trace.Backward) {
			// Passes are below what this worker did of the stage.
			st := stages[x.Stage]
			if st == nil {
				own := t.run.Root(trace.Stage, uint64(s.restart.version.N), uint64(m.Step), uint64(w.who.ID), uint64(w.who.Incarnation), uint64(x.Stage))
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
		spans = append(spans, span)
		switch x.Name {
		case trace.Reduce, trace.Commit, trace.Exchange:
			measures = append(measures, Measure{trace.Collective{Name: x.Name, Seconds: time.Duration(x.Took).Seconds()}})
		}
	}
	for _, st := range slices.Sorted(maps.Keys(stages)) {
		spans = append(spans, *stages[st])
	}
	for _, l := range m.Links {
		if l.Worker >= 0 && l.Sent >= 0 && s.roster.lives[id.WorkerID(l.Worker)] > 0 {
			measures = append(measures, Measure{trace.Traffic{From: int(w.who.ID), To: l.Worker, Bytes: l.Sent}})
		}
	}
	s.then(WriteSpans{spans})
	s.then(measures...)
	return ""
}

// traceWorkerStep tells what a worker's step was made of.
func (s *Session) traceWorkerStep(id int, m control.Step) {
	if s.tr == nil || m.Compute <= 0 || m.MS <= 0 {
		return
	}
	s.then(Measure{trace.WorkerStep{
		Worker: s.id(id), Seconds: m.MS / 1000, Compute: time.Duration(m.Compute).Seconds(), Reduced: max(m.Reduced, 0), Exchanged: max(m.Exchanged, 0),
	}})
}

// traceCheckpoint tells of a checkpoint that is whole.
func (s *Session) traceCheckpoint(step int, since time.Time) {
	if s.tr == nil {
		return
	}
	if since.IsZero() {
		since = s.now
	}
	s.then(WriteSpans{[]trace.Span{{
		Context: s.tr.run.Root(trace.Checkpoint, uint64(s.restart.version.N), uint64(step)), Name: trace.Checkpoint, Worker: trace.Agent,
		Start: since, End: s.now, Attrs: []trace.Attr{{Key: trace.KeyStep, Value: step}},
		Links: []trace.Link{{Context: s.stepRoot(step), Why: "step"}},
	}}})
}

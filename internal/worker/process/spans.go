package process

import (
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// spans records what this worker does in a step until the step ends, and reports the steps that
// the agent traces. A nil spans records nothing.
type spans struct {
	w     *Worker
	every int

	mu          sync.Mutex
	anchor      time.Time // see wall
	list        []control.Span
	dropped     int
	compute     time.Duration
	reduced     int64                // bytes of the operands of reductions
	told        int64                // bytes of exchanges
	interrupted int                  // the step that the newest recovery interrupted
	orders      map[id.Ballot]string // trace context of each order that may still be applied
	plan        string               // trace context of the newest boundary plan
}

func newSpans(w *Worker, every int) *spans {
	if every <= 0 {
		return nil
	}
	return &spans{w: w, every: every, anchor: instant(), orders: make(map[id.Ballot]string)}
}

// instant returns the time with the least delay between its two clocks, of a few readings: the wall clock is read first.
func instant() time.Time {
	best := time.Now()
	for range 8 {
		if t := time.Now(); t.Round(0).Sub(best.Round(0)) > t.Sub(best) {
			best = t
		}
	}
	return best
}

// wall returns the wall clock's nanoseconds of a time, by those of one instant: a thread may be held up for milliseconds between the readings of its
// two clocks that make a time, and by a wall clock read for each, a span would seem to end before what lies within. s.mu is held.
func (s *spans) wall(t time.Time) int64 { return s.anchor.Add(t.Sub(s.anchor)).UnixNano() }

// add records what the engine has done.
func (s *spans) add(x engine.Span) {
	if s == nil {
		return
	}
	took := x.End.Sub(x.Start)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch x.Name {
	case trace.Forward, trace.Backward, trace.Check, trace.Update:
		s.compute += (took - x.Waited) / time.Duration(max(x.Beside, 1))
	case trace.Reduce:
		s.reduced += x.Bytes
	case trace.Commit, trace.Exchange:
		s.told += x.Bytes
	}
	s.put(control.Span{
		Name: x.Name, Start: s.wall(x.Start), Took: int64(took), Stage: x.Stage, Micro: x.Micro, Layer: x.Layer, Peer: int(x.Peer),
		Back: x.Back, Bytes: x.Bytes, Lane: x.Lane,
	})
}

// put records a span, or counts it as dropped when there are too many; s.mu is held.
func (s *spans) put(x control.Span) {
	if len(s.list) >= control.MaxSpans-2 { // leaves room for the step and an evaluation
		s.dropped++
		return
	}
	s.list = append(s.list, x)
}

// spanAt is a span about nothing but its time; s.mu is held.
func (s *spans) spanAt(name string, began time.Time, took time.Duration) control.Span {
	return control.Span{Name: name, Start: s.wall(began), Took: int64(took), Stage: -1, Micro: -1, Layer: -1, Peer: -1}
}

// now returns the time, or zero where no spans are recorded.
func (s *spans) now() (t time.Time) {
	if s != nil {
		t = time.Now()
	}
	return t
}

// evaluated records an evaluation.
func (s *spans) evaluated(began time.Time) {
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.list = append(s.list, s.spanAt(trace.Evaluate, began, time.Since(began)))
	}
}

// sums adds the totals since the last step to the message of a step.
func (s *spans) sums(m *control.Step) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m.Compute, m.Reduced, m.Exchanged = int64(max(s.compute, 0)), s.reduced, s.told
	s.compute, s.reduced, s.told = 0, 0, 0
}

// tell reports a committed step if the agent traces it, and clears the record.
func (s *spans) tell(step int, plan uint64, began time.Time, took time.Duration) error {
	if s == nil {
		return nil
	}
	if err := s.w.sendLate(); err != nil {
		return err
	}
	s.mu.Lock()
	wanted := step == s.interrupted || step%s.every == 0 || step == 1
	m := control.Spans{Step: step, Plan: plan, Dropped: s.dropped}
	if wanted {
		m.Spans = append(s.list, s.spanAt(trace.Step, began, took))
		s.list = nil
	} else {
		s.list = s.list[:0]
	}
	s.dropped = 0
	if now := time.Now(); time.Duration(now.UnixNano()-s.wall(now)).Abs() > time.Second { // the clock was set, or the machine slept
		s.anchor = instant()
	}
	s.mu.Unlock()
	if !wanted {
		return nil
	}
	for _, l := range s.w.net.Stats() {
		if len(m.Links) < control.MaxSpans {
			m.Links = append(m.Links, control.Traffic{Worker: int(l.Peer.Worker), Sent: l.BytesSent})
		}
	}
	return s.w.send(m)
}

// answered records the answer to a query.
func (s *spans) answered(context string, came time.Time) {
	if s == nil || context == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.w.late.put(control.Spans{Trace: context, Spans: []control.Span{s.spanAt(trace.Answer, came, time.Since(came))}})
}

// ordered records the trace context of an order.
func (s *spans) ordered(o control.Order, context string) {
	if s == nil || context == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if (o.Ballot == id.Ballot{}) {
		s.plan = context
		return
	}
	s.interrupted = o.Passed.Step + 1
	clear(s.orders) // earlier orders are withdrawn
	s.orders[o.Ballot] = context
}

// applied records the edit and the resumption of work under a new plan.
func (s *spans) applied(a control.Applied, resumed time.Time) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	context := s.orders[a.Ballot]
	if (a.Ballot == id.Ballot{}) {
		context, s.plan = s.plan, ""
	}
	if context == "" {
		return
	}
	edited := resumed.Add(-a.Resume)
	s.w.late.put(control.Spans{Trace: context, Spans: []control.Span{
		s.spanAt("edit", edited.Add(-a.Edit), a.Edit), s.spanAt("resume", edited, a.Resume),
	}})
}

// lateSpans are those of recoveries. They go with the next heartbeat, or with the end of the step: while a recovery lasts, others need the processors.
type lateSpans struct {
	mu   sync.Mutex
	list []control.Spans
}

func (l *lateSpans) put(m control.Spans) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, m)
}

// take returns what waits, in order.
func (l *lateSpans) take() []control.Spans {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.list
	l.list = nil
	return list
}

// sendLate sends the spans that wait.
func (w *Worker) sendLate() error {
	for _, m := range w.late.take() {
		if err := w.send(m); err != nil {
			return err
		}
	}
	return nil
}

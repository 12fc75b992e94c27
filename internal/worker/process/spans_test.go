package process

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

func TestSpansAreBounded(t *testing.T) {
	s := newSpans(&Worker{}, 10)
	now := time.Now()
	for range control.MaxSpans + 5 {
		s.add(engine.Span{Name: trace.Forward, Start: now, End: now.Add(time.Microsecond)})
	}
	s.evaluated(now)
	if len(s.list) >= control.MaxSpans || s.dropped == 0 {
		t.Errorf("%d spans, %d dropped", len(s.list), s.dropped)
	}
	s.add(engine.Span{Name: trace.Reduce, Start: now, End: now, Bytes: 7})
	s.add(engine.Span{Name: trace.Commit, Start: now, End: now, Bytes: 5})
	var said control.Step
	if s.sums(&said); said.Compute != ((control.MaxSpans+5)*time.Microsecond).Nanoseconds() || said.Reduced != 7 || said.Exchanged != 5 {
		t.Errorf("%+v", said)
	}
	if s.sums(&said); said.Compute+said.Reduced+said.Exchanged != 0 {
		t.Errorf("counted twice: %+v", said)
	}
	if err := s.tell(3, 1, now, 0); err != nil || len(s.list) != 0 || s.dropped != 0 { // the agent does not trace it
		t.Errorf("%v, %d spans are left", err, len(s.list))
	}
	var none *spans
	none.evaluated(now)
	none.sums(&said)
	if newSpans(nil, 0) != nil || said.Compute != 0 || !none.now().IsZero() || none.tell(1, 1, now, 0) != nil {
		t.Error("spans are recorded, and the agent traces no step")
	}
}

// BenchmarkSpan is what a span costs a worker.
func BenchmarkSpan(b *testing.B) {
	s := newSpans(&Worker{}, 1<<30)
	for i := 0; b.Loop(); i++ {
		began := time.Now()
		s.add(engine.Span{Name: trace.Forward, Start: began, End: time.Now()})
		if i%64 == 63 {
			_ = s.tell(2, 1, began, 0)
		}
	}
}

package simulate_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// TestPredict: a pipeline of two equal stages takes the micro-batches and one more, and
// shows it.
func TestPredict(t *testing.T) {
	prof := plantest.Uniform(2)
	p := plannertest.First(t, plantest.Workers(2, 1), prof, 2, 4, 1)
	r, err := simulate.Predict(&p, prof)
	if err != nil {
		t.Fatal(err)
	}
	if r.Step != 15*time.Millisecond {
		t.Errorf("the step takes %v", r.Step)
	}
	for _, w := range r.Workers {
		if w.Busy != 12*time.Millisecond || w.Bubble != 3*time.Millisecond {
			t.Errorf("%+v", w)
		}
	}
	end := time.Duration(0)
	for _, s := range r.Critical {
		if s.Begin != end {
			t.Errorf("%v begins at %v, after %v", s.Task, s.Begin, end)
		}
		end = s.End
	}
	if end != r.Step || len(r.Legs()) == 0 {
		t.Errorf("the critical path ends at %v: %v", end, r.Legs())
	}
	want := []string{"   0 ffffbb.bb.bb.bb", "   1 .fbbfbbfbbfbb.."}
	if got := r.Chart(15); !slices.Equal(got, want) {
		t.Errorf("%s", strings.Join(got, "\n"))
	}
}

// TestSharedCards: two workers of a host that send at the same time take turns, on two hosts
// they do not.
func TestSharedCards(t *testing.T) {
	prof := plantest.Uniform(2)
	prof.Bandwidth = 1e9
	prof.Layers[0].Output = 2_000_000 // 2 ms
	step := func(hosts ...string) time.Duration {
		ws := plantest.Workers(4, 4)
		for i, h := range hosts {
			ws[i].Host = h
		}
		p := plannertest.First(t, ws, prof, 2, 4, 0)
		p.Stages[0].Workers, p.Stages[1].Workers = []id.WorkerID{0, 1}, []id.WorkerID{2, 3}
		for m := range 4 {
			p.Route[0][m], p.Route[1][m] = id.WorkerID(m%2), id.WorkerID(2+m%2)
		}
		p.Limits = nil
		for w := range id.WorkerID(4) {
			p.Limits = append(p.Limits, plan.Limit{Stage: int(w) / 2, Worker: w, Forwards: 2, Lead: 0})
		}
		r, err := simulate.Predict(&p, prof)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.Spans {
			if s.Kind == graph.SendActivation && s.End-s.Begin != 2*time.Millisecond {
				t.Errorf("%+v", s)
			}
		}
		return r.Step
	}
	apart, shared := step("a", "b", "c", "d"), step("a", "a", "c", "c")
	if shared <= apart {
		t.Errorf("%v with shared cards, %v without", shared, apart)
	}
}

package plan_test

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"pgregory.net/rapid"
)

// told returns what workers of given speeds measure in the layers of their stages.
func told(p *plan.Plan, truth plan.Profile) map[id.WorkerID]plan.Times {
	all := make(map[id.WorkerID]plan.Times)
	for _, st := range p.Stages {
		for _, w := range st.Workers {
			t := all[w]
			for l := st.Lo; l < st.Hi; l++ {
				at := func(d time.Duration) time.Duration { return time.Duration(float64(d) / truth.SpeedOf(w)) }
				t.Layers = append(t.Layers, plan.LayerTime{Layer: l, Forward: at(truth.Layers[l].Forward), Backward: at(truth.Layers[l].Backward)})
			}
			all[w] = t
		}
	}
	return all
}

func TestProfileWith(t *testing.T) {
	truth := plan.Profile{Layers: plantest.Model(8), Speed: map[id.WorkerID]float64{2: 0.5, 5: 0.75}}
	p := plannertest.First(t, plantest.Workers(8, 8), truth, 2, 16, 1)
	plain := plan.Profile{Layers: plantest.Model(8)}
	for i := range plain.Layers {
		plain.Layers[i].Forward, plain.Layers[i].Backward = 0, 0
	}
	times := told(&p, truth)
	// One worker is an outlier in one layer, the others in nothing that counts.
	times[0].Layers[0].Forward *= 20
	for i := range times[1].Layers {
		times[1].Layers[i].Backward += 20 * time.Microsecond
	}
	got := plain.With(times)
	for w := range id.WorkerID(8) {
		if got.SpeedOf(w) != truth.SpeedOf(w) {
			t.Errorf("worker %d has speed %v, not %v", w, got.SpeedOf(w), truth.SpeedOf(w))
		}
	}
	for i, l := range got.Layers {
		if d := l.Forward + l.Backward - 3*time.Millisecond; d.Abs() > 50*time.Microsecond || l.Forward.Round(time.Millisecond) != time.Millisecond {
			t.Errorf("layer %d takes %v and %v", i, l.Forward, l.Backward)
		}
	}
	if !got.Differs(&plain) || got.Differs(&got) {
		t.Error("Differs")
	}
	if same := plain.With(map[id.WorkerID]plan.Times{3: {}}); same.Differs(&plain) || same.IsMeasured() {
		t.Error("nothing measured is something")
	}
	// Layers that no worker has run are as those like them, or in proportion.
	few := plain.With(map[id.WorkerID]plan.Times{0: {Layers: []plan.LayerTime{{Layer: 0, Forward: 5, Backward: 10}}}})
	if few.Layers[7].Forward != 5 {
		t.Errorf("a layer like the measured one: %v", few.Layers[7])
	}
}

// TestProfileWithAnything: whatever workers say, the profile is one to plan with.
func TestProfileWithAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prof := plantest.AnyProfile(t, 4, 5)
		times := make(map[id.WorkerID]plan.Times)
		for w := range id.WorkerID(5) {
			var m plan.Times
			for range rapid.IntRange(0, 3).Draw(t, "layers") {
				m.Layers = append(m.Layers, plan.LayerTime{Layer: rapid.IntRange(-1, 5).Draw(t, "layer"),
					Forward: time.Duration(rapid.Int64Range(-5, 1<<40).Draw(t, "forward")), Backward: time.Duration(rapid.Int64Range(-5, 1<<40).Draw(t, "backward"))})
			}
			m.Links = []plan.LinkTime{{To: id.WorkerID(rapid.IntRange(0, 6).Draw(t, "to")), Latency: time.Duration(rapid.Int64Range(-5, 1<<40).Draw(t, "latency")), Bandwidth: rapid.Float64().Draw(t, "bandwidth")}}
			times[w] = m
		}
		plannertest.First(t, plantest.Workers(5, 2), prof.With(times), 2, 8, 1)
	})
}

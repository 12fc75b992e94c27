package plan

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"pgregory.net/rapid"
)

// told returns what workers of given speeds measure in the layers of their stages.
func told(p *Plan, truth Profile) map[id.WorkerID]Times {
	all := make(map[id.WorkerID]Times)
	for _, st := range p.Stages {
		for _, w := range st.Workers {
			t := all[w]
			for l := st.Lo; l < st.Hi; l++ {
				at := func(d time.Duration) time.Duration { return time.Duration(float64(d) / truth.speed(w)) }
				t.Layers = append(t.Layers, LayerTime{l, at(truth.Layers[l].Forward), at(truth.Layers[l].Backward)})
			}
			all[w] = t
		}
	}
	return all
}

func TestProfileWith(t *testing.T) {
	truth := Profile{Layers: model(8), Speed: map[id.WorkerID]float64{2: 0.5, 5: 0.75}}
	p := first(t, workers(8, 8), truth, 2, 16, 1)
	plain := Profile{Layers: model(8)}
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
		if got.speed(w) != truth.speed(w) {
			t.Errorf("worker %d has speed %v, not %v", w, got.speed(w), truth.speed(w))
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
	if same := plain.With(map[id.WorkerID]Times{3: {}}); same.Differs(&plain) || same.isMeasured() {
		t.Error("nothing measured is something")
	}
	// Layers that nobody has run are as those like them, or in proportion.
	few := plain.With(map[id.WorkerID]Times{0: {Layers: []LayerTime{{Layer: 0, Forward: 5, Backward: 10}}}})
	if few.Layers[7].Forward != 5 {
		t.Errorf("a layer like the measured one: %v", few.Layers[7])
	}
}

// TestProfileWithAnything: whatever workers say, the profile is one to plan with.
func TestProfileWithAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prof := anyProfile(t, 4, 5)
		times := make(map[id.WorkerID]Times)
		for w := range id.WorkerID(5) {
			var m Times
			for range rapid.IntRange(0, 3).Draw(t, "layers") {
				m.Layers = append(m.Layers, LayerTime{rapid.IntRange(-1, 5).Draw(t, "layer"),
					time.Duration(rapid.Int64Range(-5, 1<<40).Draw(t, "forward")), time.Duration(rapid.Int64Range(-5, 1<<40).Draw(t, "backward"))})
			}
			m.Links = []LinkTime{{id.WorkerID(rapid.IntRange(0, 6).Draw(t, "to")), time.Duration(rapid.Int64Range(-5, 1<<40).Draw(t, "latency")), rapid.Float64().Draw(t, "bandwidth")}}
			times[w] = m
		}
		first(t, workers(5, 2), prof.With(times), 2, 8, 1)
	})
}

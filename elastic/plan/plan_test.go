package plan

import (
	"testing"
	"time"
)

// model returns layers of equal cost, with a matrix and a vector each.
func model(layers int) []Layer {
	l := make([]Layer, layers)
	for i := range l {
		l[i] = Layer{Tensors: []int{100_000, 300}, Forward: time.Millisecond, Backward: 2 * time.Millisecond, Output: 1 << 16}
	}
	return l
}

func workers(n, perHost int) []Worker {
	w := make([]Worker, n)
	for i := range w {
		w[i] = Worker{ID: WorkerID(i), Host: string(rune('A' + i/perHost))}
	}
	return w
}

func first(t interface {
	Helper()
	Fatalf(string, ...any)
}, w []Worker, prof Profile, stages, micros, mirrors int) Plan {
	t.Helper()
	p, reason, err := Next(Plan{}, View{Workers: w}, prof, Event{Micros: micros, Stages: stages, Mirrors: mirrors})
	if err != nil {
		t.Fatalf("Next: %v", err)
	}
	if reason == "" {
		t.Fatalf("a plan without a reason")
	}
	if err := p.Validate(prof.Layers); err != nil {
		t.Fatalf("%v\n%v", err, &p)
	}
	return p
}

func TestShow(t *testing.T) {
	for _, c := range []struct{ w, l, s, m int }{{4, 6, 2, 8}, {3, 6, 2, 12}, {5, 6, 3, 12}, {5, 10, 2, 12}, {8, 16, 3, 24}} {
		p := first(t, workers(c.w, 2), Profile{Layers: model(c.l)}, c.s, c.m, 1)
		s, err := p.Simulate(Profile{Layers: model(c.l)})
		t.Logf("%v%v %v, estimate %v", &p, err, s.Makespan, p.Estimate(Profile{Layers: model(c.l)}))
	}
}

func BenchmarkFirstPlan(b *testing.B) {
	prof := Profile{Layers: model(100)}
	for i := range prof.Layers {
		prof.Layers[i].Forward += time.Duration(i*7919%1000) * time.Microsecond
	}
	for b.Loop() {
		if _, _, err := Next(Plan{}, View{Workers: workers(1024, 8)}, prof, Event{Micros: 1024, Stages: 16, Mirrors: 1}); err != nil {
			b.Fatal(err)
		}
	}
}

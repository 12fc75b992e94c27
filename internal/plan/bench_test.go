package plan

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
)

// BenchmarkBoundary makes boundary plans for 1,024 workers and 100 layers.
func BenchmarkBoundary(b *testing.B) {
	prof := Profile{Layers: model(100)}
	ws := workers(1024, 8)
	const stages, micros = 16, 1024
	whole := first(b, ws, prof, stages, micros, 1)
	without := func(lo, hi int) View { return View{Step: 5, Workers: slices.Delete(slices.Clone(ws), lo, hi)} }
	lost := func(v View) Plan {
		p, _, err := Next(whole, v, prof, Event{Kind: Lost})
		if err != nil {
			b.Fatal(err)
		}
		return p
	}
	missing, host := without(100, 101), without(96, 104)
	afterHost := lost(host)
	for _, c := range []struct {
		name    string
		current Plan
		view    View
		kind    EventKind
	}{
		{"leave", whole, View{Step: 5, Workers: ws, Leaving: []id.WorkerID{100}}, Leave},
		{"leave host", whole, View{Step: 5, Workers: ws, Leaving: []id.WorkerID{96, 97, 98, 99, 100, 101, 102, 103}}, Leave},
		{"protect", lost(missing), missing, Protect},
		{"protect host", afterHost, host, Protect},
		{"join", lost(missing), View{Step: 6, Workers: append(slices.Clone(missing.Workers), Worker{1024, 0, "new"})}, Join},
		{"join host", afterHost, View{Step: 6, Workers: ws}, Join},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				if _, _, err := Next(c.current, c.view, prof, Event{Kind: c.kind}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("join host, half filled", func(b *testing.B) {
		v := View{Step: 6, Workers: ws}
		p, _, err := Next(afterHost, v, prof, Event{Kind: Join})
		if err != nil {
			b.Fatal(err)
		}
		state, _ := Needs(&afterHost, &p, v)
		for _, t := range state[:len(state)/2] {
			v.Held = append(v.Held, Holding{t.Range, t.To})
		}
		for b.Loop() {
			if _, _, err := Next(afterHost, v, prof, Event{Kind: Join}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("protect a third", func(b *testing.B) {
		old := first(b, workers(1024, 342), prof, stages, micros, 1)
		v := View{Step: 5, Workers: workers(684, 342)}
		p, _, err := Next(old, v, prof, Event{Kind: Lost})
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, _, err := Next(p, v, prof, Event{Kind: Protect}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("needs", func(b *testing.B) {
		p, _, err := Next(afterHost, View{Step: 6, Workers: ws}, prof, Event{Kind: Join})
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			Needs(&afterHost, &p, View{Workers: ws})
		}
	})
}

// BenchmarkLoss makes the plans after one loss for 1,024 workers, 100 layers, 16 stages and
// 2,048 micro-batches: the one in the step, and the one that moves layers and workers.
func BenchmarkLoss(b *testing.B) {
	prof := Profile{Layers: model(100)}
	ws := workers(1024, 8)
	whole := first(b, ws, prof, 16, 2048, 1)
	v := View{Step: 5, Workers: slices.Delete(slices.Clone(ws), 100, 101)}
	after := losing(b, whole, prof, 100)
	for _, c := range []struct {
		name    string
		current Plan
		kind    EventKind
	}{{"in step", whole, Lost}, {"rebalance", after, Rebalance}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				if _, _, err := Next(c.current, v, prof, Event{Kind: c.kind}); err != nil && !errors.Is(err, ErrNoGain) {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRebalance makes the plans that move layers and workers after a loss and with a slow
// worker, where the step is simulated.
func BenchmarkRebalance(b *testing.B) {
	for _, c := range []struct{ workers, stages, layers, micros int }{{8, 2, 16, 32}, {32, 4, 32, 128}} {
		prof := uniform(c.layers)
		whole := first(b, workers(c.workers, 4), prof, c.stages, c.micros, 1)
		slow := prof
		slow.Speed = map[id.WorkerID]float64{3: 0.5}
		mixed := prof
		mixed.Speed = map[id.WorkerID]float64{}
		for w := range c.workers {
			mixed.Speed[id.WorkerID(w)] = []float64{1, 0.9, 0.8, 0.5}[w*7/3%4]
		}
		lost := losing(b, whole, prof, 3)
		for _, k := range []struct {
			name    string
			current Plan
			prof    Profile
		}{{"lost", lost, prof}, {"slow", whole, slow}, {"lost and mixed", lost, mixed}} {
			b.Run(fmt.Sprintf("%d workers, %s", c.workers, k.name), func(b *testing.B) {
				v := View{Workers: k.current.Workers, Step: k.current.FromStep}
				for b.Loop() {
					if _, _, err := Next(k.current, v, k.prof, Event{Kind: Rebalance}); err != nil && !errors.Is(err, ErrNoGain) {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

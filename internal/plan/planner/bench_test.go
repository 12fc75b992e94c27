package planner_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
)

// BenchmarkBoundary makes boundary plans for 1,024 workers and 100 layers.
func BenchmarkBoundary(b *testing.B) {
	prof := plan.Profile{Layers: plantest.Model(100)}
	ws := plantest.Workers(1024, 8)
	const stages, micros = 16, 1024
	whole := plannertest.First(b, ws, prof, stages, micros, 1)
	without := func(lo, hi int) plan.View {
		return plan.View{Step: 5, Workers: slices.Delete(slices.Clone(ws), lo, hi)}
	}
	lost := func(v plan.View) plan.Plan {
		p, _, err := planner.Next(whole, v, prof, planner.Event{Kind: planner.Lost})
		if err != nil {
			b.Fatal(err)
		}
		return p
	}
	missing, host := without(100, 101), without(96, 104)
	afterHost := lost(host)
	for _, c := range []struct {
		name    string
		current plan.Plan
		view    plan.View
		kind    planner.EventKind
	}{
		{"leave", whole, plan.View{Step: 5, Workers: ws, Leaving: []id.WorkerID{100}}, planner.Leave},
		{"leave host", whole, plan.View{Step: 5, Workers: ws, Leaving: []id.WorkerID{96, 97, 98, 99, 100, 101, 102, 103}}, planner.Leave},
		{"protect", lost(missing), missing, planner.Protect},
		{"protect host", afterHost, host, planner.Protect},
		{"join", lost(missing), plan.View{Step: 6, Workers: append(slices.Clone(missing.Workers), plan.Worker{ID: 1024, Incarnation: 0, Host: "new"})}, planner.Join},
		{"join host", afterHost, plan.View{Step: 6, Workers: ws}, planner.Join},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				if _, _, err := planner.Next(c.current, c.view, prof, planner.Event{Kind: c.kind}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("protect a third", func(b *testing.B) {
		old := plannertest.First(b, plantest.Workers(1024, 342), prof, stages, micros, 1)
		v := plan.View{Step: 5, Workers: plantest.Workers(684, 342)}
		p, _, err := planner.Next(old, v, prof, planner.Event{Kind: planner.Lost})
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, _, err := planner.Next(p, v, prof, planner.Event{Kind: planner.Protect}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("needs", func(b *testing.B) {
		p, _, err := planner.Next(afterHost, plan.View{Step: 6, Workers: ws}, prof, planner.Event{Kind: planner.Join})
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			plan.Needs(&afterHost, &p, plan.View{Workers: ws})
		}
	})
}

// BenchmarkLoss makes the plans after one loss for 1,024 workers, 100 layers, 16 stages and
// 2,048 micro-batches: the one in the step, and the one that moves layers and workers.
func BenchmarkLoss(b *testing.B) {
	prof := plan.Profile{Layers: plantest.Model(100)}
	ws := plantest.Workers(1024, 8)
	whole := plannertest.First(b, ws, prof, 16, 2048, 1)
	v := plan.View{Step: 5, Workers: slices.Delete(slices.Clone(ws), 100, 101)}
	after := plannertest.Losing(b, whole, prof, 100)
	for _, c := range []struct {
		name    string
		current plan.Plan
		kind    planner.EventKind
	}{{"in step", whole, planner.Lost}, {"rebalance", after, planner.Rebalance}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				if _, _, err := planner.Next(c.current, v, prof, planner.Event{Kind: c.kind}); err != nil && !errors.Is(err, planner.ErrNoGain) {
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
		prof := plantest.Uniform(c.layers)
		whole := plannertest.First(b, plantest.Workers(c.workers, 4), prof, c.stages, c.micros, 1)
		slow := prof
		slow.Speed = map[id.WorkerID]float64{3: 0.5}
		mixed := prof
		mixed.Speed = map[id.WorkerID]float64{}
		for w := range c.workers {
			mixed.Speed[id.WorkerID(w)] = []float64{1, 0.9, 0.8, 0.5}[w*7/3%4]
		}
		lost := plannertest.Losing(b, whole, prof, 3)
		for _, k := range []struct {
			name    string
			current plan.Plan
			prof    plan.Profile
		}{{"lost", lost, prof}, {"slow", whole, slow}, {"lost and mixed", lost, mixed}} {
			b.Run(fmt.Sprintf("%d workers, %s", c.workers, k.name), func(b *testing.B) {
				v := plan.View{Workers: k.current.Workers, Step: k.current.FromStep}
				for b.Loop() {
					if _, _, err := planner.Next(k.current, v, k.prof, planner.Event{Kind: planner.Rebalance}); err != nil && !errors.Is(err, planner.ErrNoGain) {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

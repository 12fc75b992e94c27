package plan_test

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"pgregory.net/rapid"
)

// TestLossOfAWorker follows one loss: two stages of two workers on two hosts
// each, worker 1 dies after it has done two of its four micro-batches, one of
// which is settled.
func TestLossOfAWorker(t *testing.T) {
	layers := plantest.Model(4)
	old := plannertest.First(t, []plan.Worker{{ID: 0, Incarnation: 0, Host: "a"}, {ID: 1, Incarnation: 0, Host: "b"}, {ID: 2, Incarnation: 0, Host: "a"}, {ID: 3, Incarnation: 0, Host: "b"}}, plan.Profile{Layers: layers}, 2, 8, 1)
	// Workers are dealt by host: stage 0 is on a, stage 1 on b.
	if got := [][]id.WorkerID{old.Stages[0].Workers, old.Stages[1].Workers}; !reflect.DeepEqual(got, [][]id.WorkerID{{0, 2}, {1, 3}}) {
		t.Fatalf("stages %v", got)
	}
	v := plan.View{Step: 7, Workers: []plan.Worker{{ID: 0, Incarnation: 0, Host: "a"}, {ID: 2, Incarnation: 0, Host: "a"}, {ID: 3, Incarnation: 0, Host: "b"}}, Settled: []graph.Pair{{Stage: 1, Micro: 0}}}
	for m := range 8 {
		w, phase := old.Route[0][m], graph.Waiting
		if m < 2 {
			phase = graph.Finished
		}
		v.Works = append(v.Works, plan.Work{Worker: w, Status: graph.Status{Pair: graph.Pair{Stage: 0, Micro: m}, Phase: phase, Input: true, Gradient: m < 2}})
	}
	for m := 4; m < 8; m++ {
		v.Works = append(v.Works, plan.Work{Worker: 3, Status: graph.Status{Pair: graph.Pair{Stage: 1, Micro: m}, Phase: graph.Waiting}})
	}
	p, reason, err := planner.Next(old, v, plan.Profile{Layers: layers}, planner.Event{Kind: planner.Lost, Cause: "worker 1 exited: signal: killed"})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Validate(layers), plantest.ValidateAfter(&p, &old)); err != nil {
		t.Fatal(err)
	}
	if want := planner.Reason("worker 1 exited: signal: killed: 2 shards promoted, 3 passes rerouted"); reason != want {
		t.Errorf("reason %q, want %q", reason, want)
	}
	if !p.InStep || p.FromStep != 7 || p.Version != (id.Version{Generation: 1, N: 2}) {
		t.Errorf("not the plan for the rest of step 7:\n%v", &p)
	}
	if p.Runs(graph.Pair{Stage: 1, Micro: 0}, 7) || !p.Runs(graph.Pair{Stage: 1, Micro: 0}, 8) || !p.Runs(graph.Pair{Stage: 1, Micro: 1}, 7) {
		t.Errorf("settled %v", p.Settled)
	}
	d := plantest.Diff(&old, &p)
	if !slices.Equal(d.Left, []id.WorkerID{1}) || len(d.Joined) > 0 || len(d.Move) > 0 || len(d.Mirror) > 0 {
		t.Errorf("diff %+v", d)
	}
	for m, r := range d.Reroute {
		if r != (plantest.Reroute{Pair: graph.Pair{Stage: 1, Micro: m}, From: 1, To: 3}) {
			t.Errorf("reroute %+v", r)
		}
	}
	if len(d.Reroute) != 4 {
		t.Errorf("%d pairs go elsewhere, want the 4 of the lost worker", len(d.Reroute))
	}
	for _, s := range d.Promote {
		if s.From != 1 || s.To == 1 {
			t.Errorf("promoted %+v", s)
		}
	}
	if len(d.Promote) != 2 {
		t.Errorf("promoted %v", d.Promote)
	}
	// Worker 0 mirrored the shards of worker 1 and talks to worker 3 now.
	if !slices.Equal(d.Open, []plan.Link{{A: 0, B: 3}}) {
		t.Errorf("open %v", d.Open)
	}
}

func TestLossOfAStage(t *testing.T) {
	layers := plantest.Model(2)
	old := plannertest.First(t, plantest.Workers(2, 1), plan.Profile{Layers: layers}, 2, 4, 1)
	p, _, err := planner.Next(old, plan.View{Step: 1, Workers: plantest.Workers(1, 1)}, plan.Profile{Layers: layers}, planner.Event{Kind: planner.Lost})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Validate(layers), plantest.ValidateAfter(&p, &old)); err != nil {
		t.Fatal(err)
	}
	d := plantest.Diff(&old, &p)
	if !slices.Equal(p.StagesOf(0), []int{0, 1}) || !slices.Equal(d.Gather, []plantest.Gather{{Layer: 1, Worker: 0}}) || len(d.Open) > 0 {
		t.Errorf("worker 0 did not take the stage over: %+v\n%v", d, &p)
	}
	if s, err := simulate.Run(&p, plan.Profile{Layers: layers}); err != nil || s.Makespan == 0 {
		t.Errorf("the plan cannot run: %v", err)
	}
}

func TestLossOfAllHolders(t *testing.T) {
	layers := plantest.Model(2)
	old := plannertest.First(t, plantest.Workers(3, 1), plan.Profile{Layers: layers}, 1, 4, 1)
	_, _, err := planner.Next(old, plan.View{Step: 1, Workers: plantest.Workers(1, 1)}, plan.Profile{Layers: layers}, planner.Event{Kind: planner.Lost})
	lost := new(planner.LostError)
	if !errors.As(err, &lost) || lost.Count != 2 || !strings.Contains(err.Error(), "without a living owner or mirror") {
		t.Errorf("error %v", err)
	}
	if _, _, err := planner.Next(old, plan.View{Step: 1, Workers: plantest.Workers(3, 1)}, plan.Profile{Layers: layers}, planner.Event{Kind: planner.Lost}); err == nil {
		t.Error("a loss of no worker was accepted")
	}
	reborn := []plan.Worker{{ID: 0, Incarnation: 1, Host: "A"}, {ID: 1, Incarnation: 1, Host: "B"}, {ID: 2, Incarnation: 1, Host: "C"}}
	if _, _, err := planner.Next(old, plan.View{Step: 1, Workers: reborn}, plan.Profile{Layers: layers}, planner.Event{Kind: planner.Lost}); !errors.Is(err, planner.ErrNoWorkers) {
		t.Errorf("sessions of another life went on: %v", err)
	}
}

func TestDiffFromNothing(t *testing.T) {
	p := plannertest.First(t, plantest.Workers(4, 2), plan.Profile{Layers: plantest.Model(4)}, 2, 4, 1)
	d := plantest.Diff(&plan.Plan{}, &p)
	if len(d.Joined) != 4 || len(d.Move) != len(p.Shards) || len(d.Mirror) != len(p.Shards) || len(d.Promote) > 0 ||
		len(d.Reroute) != 8 || len(d.Gather) != 8 || len(d.Limits) != 4 || !slices.Equal(d.Open, plantest.Links(&p)) {
		t.Errorf("%+v", d)
	}
	for _, m := range d.Move {
		if m.From != -1 {
			t.Errorf("move %+v", m)
		}
	}
}

func TestDiffOfANewIncarnation(t *testing.T) {
	old := plannertest.First(t, plantest.Workers(3, 1), plan.Profile{Layers: plantest.Model(2)}, 1, 3, 1)
	p := plantest.Copied(t, old)
	p.Workers[2].Incarnation++
	d := plantest.Diff(&old, &p)
	if !slices.Equal(d.Joined, []id.WorkerID{2}) || !slices.Equal(d.Left, []id.WorkerID{2}) || !slices.Equal(d.Open, []plan.Link{{A: 0, B: 2}, {A: 1, B: 2}}) ||
		len(d.Reroute) != 1 || len(d.Gather) != 2 || len(d.Limits) != 1 || len(d.Promote) != 0 {
		t.Errorf("%+v", d)
	}
}

// TestDiffAgainstOracle compares holders block by block.
func TestDiffAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(2, 5).Draw(t, "layers")
		prof := plantest.AnyProfile(t, layers, 6)
		draw := func(what string) plan.Plan {
			n := rapid.IntRange(2, 6).Draw(t, what)
			return plannertest.First(t, plantest.Workers(n, 2), prof, rapid.IntRange(1, 2).Draw(t, "stages"), 6, rapid.IntRange(0, 2).Draw(t, "mirrors"))
		}
		old, p := draw("old"), draw("new")
		d := plantest.Diff(&old, &p)
		at := func(shards []plan.Shard, layer, x int) plan.Shard {
			for _, s := range shards {
				if s.Layer == layer && s.Lo <= x && x < s.Hi {
					return s
				}
			}
			return plan.Shard{Owner: -1}
		}
		listed := func(list []plan.Transfer, layer, x int, to id.WorkerID) (n int) {
			for _, tr := range list {
				if tr.Layer == layer && tr.Lo <= x && x < tr.Hi && tr.To == to {
					n++
				}
			}
			return n
		}
		for l := range prof.Layers {
			for x := 0; x < prof.Layers[l].Size(); x += kernel.Block / 4 {
				was, is := at(old.Shards, l, x), at(p.Shards, l, x)
				for w := range id.WorkerID(6) {
					held := was.Holds(w)
					owns, mirrors := is.Owner == w, slices.Contains(is.Mirrors, w)
					count := func(b bool) int {
						if b {
							return 1
						}
						return 0
					}
					if listed(d.Promote, l, x, w) != count(owns && held && was.Owner != w) ||
						listed(d.Move, l, x, w) != count(owns && !held) || listed(d.Mirror, l, x, w) != count(mirrors && !held) {
						t.Fatalf("worker %d, parameter %d of layer %d: %+v\n%v%v", w, x, l, d, &old, &p)
					}
				}
			}
		}
		had := plantest.Links(&old)
		for _, l := range plantest.Links(&p) {
			_, isNew := slices.BinarySearchFunc(d.Open, l, func(a, b plan.Link) int {
				return int((a.A-b.A)*1000 + a.B - b.B)
			})
			if isNew == slices.Contains(had, l) {
				t.Fatalf("link %v: new %v", l, isNew)
			}
		}
	})
}

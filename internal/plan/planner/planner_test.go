package planner_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

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

func TestFirstPlan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(1, 8).Draw(t, "layers")
		n := rapid.IntRange(1, 9).Draw(t, "workers")
		stages := rapid.IntRange(1, min(5, layers, n)).Draw(t, "stages")
		micros := rapid.IntRange(1, 20).Draw(t, "micro-batches")
		mirrors := rapid.IntRange(0, 3).Draw(t, "mirrors")
		prof := plantest.AnyProfile(t, layers, n)
		ws := plantest.Workers(n, rapid.IntRange(1, 4).Draw(t, "per host"))
		p := plannertest.First(t, ws, prof, stages, micros, mirrors)
		if len(p.Stages) != stages || p.Micros() != micros || len(p.Workers) != n {
			t.Fatalf("not the plan that was asked for:\n%v", &p)
		}
		holdersApart(t, &p)
		slices.Reverse(ws)
		if q := plannertest.First(t, ws, prof, stages, micros, mirrors); !reflect.DeepEqual(p, q) {
			t.Fatalf("two plans from the same view:\n%v%v", &p, &q)
		}
		b, err := json.Marshal(&p)
		if err != nil {
			t.Fatalf("%v", err)
		}
		q, err := plan.Parse(b)
		if err != nil || !reflect.DeepEqual(canonical(p), canonical(q)) {
			t.Fatalf("after JSON (%v):\n%v%v", err, &p, &q)
		}
		if d := plantest.Diff(&p, &q); !reflect.DeepEqual(d, plantest.Change{}) {
			t.Fatalf("a plan differs from itself: %+v", d)
		}
		if sched, err := simulate.Run(&p, prof); err != nil || sched.Makespan < 0 {
			t.Fatalf("Simulate: %v, %v", sched.Makespan, err)
		}
		// Every worker owns about the same of its stage.
		for _, st := range p.Stages {
			total, owned := 0, map[id.WorkerID]int{}
			for _, s := range p.Shards {
				if st.Lo <= s.Layer && s.Layer < st.Hi {
					total += s.Hi - s.Lo
					owned[s.Owner] += s.Hi - s.Lo
				}
			}
			for _, w := range st.Workers {
				if off := math.Abs(float64(owned[w]) - float64(total)/float64(len(st.Workers))); off > 2*kernel.Block {
					t.Fatalf("worker %d owns %d of %d:\n%v", w, owned[w], total, &p)
				}
			}
		}
	})
}

// canonical replaces empty lists by nil, as JSON may.
func canonical(p plan.Plan) plan.Plan {
	p.Shards = slices.Clone(p.Shards)
	for i := range p.Shards {
		if len(p.Shards[i].Mirrors) == 0 {
			p.Shards[i].Mirrors = nil
		}
	}
	if len(p.Shards) == 0 {
		p.Shards = nil
	}
	return p
}

func TestSlowWorkerHasLess(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4), Speed: map[id.WorkerID]float64{1: 0.5}}
	p := plannertest.First(t, plantest.Workers(3, 3), prof, 1, 20, 1)
	counts := map[id.WorkerID]int{}
	for _, w := range p.Route[0] {
		counts[w]++
	}
	if counts[0] != 8 || counts[1] != 4 || counts[2] != 8 {
		t.Errorf("micro-batches %v, want 8, 4, 8", counts)
	}
}

// holdersApart checks that the holders of every shard are on as many hosts as they can be: else two hosts that fail may have all of them.
func holdersApart(t plantest.Fataler, p *plan.Plan) {
	hosts := make(map[string]bool)
	for _, w := range p.Workers {
		hosts[w.Host] = true
	}
	for _, s := range p.Shards {
		on := make(map[string]bool)
		for _, x := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			w, _ := p.Worker(x)
			on[w.Host] = true
		}
		if len(on) < min(len(s.Mirrors)+1, len(hosts)) {
			t.Fatalf("%v has its owner and %d mirrors on %d of %d hosts\n%v", s, len(s.Mirrors), len(on), len(hosts), p)
		}
	}
}

// TestMirrorsAreSpread: no worker mirrors much more than others.
func TestMirrorsAreSpread(t *testing.T) {
	for _, c := range []struct{ workers, perHost, stages, mirrors int }{
		{4, 4, 1, 1}, {4, 4, 2, 1}, {8, 4, 1, 1}, {8, 4, 2, 1}, {8, 2, 2, 2}, {6, 2, 3, 1}, {9, 3, 1, 2}, {8, 1, 8, 1}, {10, 2, 1, 2}, {12, 3, 2, 3}, {6, 2, 1, 4},
	} {
		p := plannertest.First(t, plantest.Workers(c.workers, c.perHost), plan.Profile{Layers: plantest.Model(8 * 9)}, c.stages, 16, c.mirrors)
		mirrored := map[id.WorkerID]int{}
		total := 0
		for _, s := range p.Shards {
			for _, m := range s.Mirrors {
				mirrored[m] += s.Hi - s.Lo
				total += s.Hi - s.Lo
			}
		}
		for _, w := range p.Workers {
			if share := float64(total) / float64(c.workers); float64(mirrored[w.ID]) < 0.7*share || float64(mirrored[w.ID]) > 1.4*share {
				t.Errorf("%+v: worker %d mirrors %d of %d\n%v", c, w.ID, mirrored[w.ID], total, &p)
			}
		}
	}
}

func TestImpossibleJobs(t *testing.T) {
	_, _, err := planner.Next(plan.Plan{}, plan.View{}, plan.Profile{Layers: plantest.Model(1)}, planner.Event{Micros: 1})
	if !errors.Is(err, planner.ErrNoWorkers) {
		t.Errorf("no workers: %v", err)
	}
	for _, c := range []struct {
		workers, layers int
		e               planner.Event
		want            []string
	}{
		{4, 2, planner.Event{Stages: 3, Micros: 4}, []string{"--stages 3: every stage needs a layer and the model has 2 layers; use --stages 2 or fewer"}},
		{2, 9, planner.Event{Stages: 3, Micros: 4}, []string{"--workers 2: every one of 3 stages needs a worker; use --workers 3 or more, or --stages 2 or fewer"}},
		{1, 1, planner.Event{Stages: 2, Micros: 0, Mirrors: -1}, []string{"--stages 2", "--workers 1", "--mirrors -1", "--global-batch"}},
		{1, 0, planner.Event{Stages: -1, Micros: 1}, []string{"no layers", "--stages -1"}},
	} {
		_, _, err := planner.Next(plan.Plan{}, plan.View{Workers: plantest.Workers(c.workers, 1)}, plan.Profile{Layers: plantest.Model(c.layers)}, c.e)
		for _, w := range c.want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%+v: error %q does not say %q", c.e, err, w)
			}
		}
		if flag := new(planner.FlagError); !errors.As(err, &flag) {
			t.Errorf("%+v: no FlagError in %v", c.e, err)
		}
	}
	if _, _, err := planner.Next(plan.Plan{}, plan.View{Workers: []plan.Worker{{ID: 1}, {ID: 1}}}, plan.Profile{Layers: plantest.Model(1)}, planner.Event{Micros: 1}); err == nil {
		t.Error("a worker listed twice was accepted")
	}
	if _, _, err := planner.Next(plan.Plan{}, plan.View{Workers: plantest.Workers(1, 1)}, plan.Profile{Layers: plantest.Model(1)}, planner.Event{Kind: 99}); err == nil {
		t.Error("an unknown event was accepted")
	}
}

func TestNothingMeasuredYet(t *testing.T) {
	prof := plan.Profile{Layers: []plan.Layer{{Tensors: []int{8000}}, {Tensors: []int{4000}}, {Tensors: []int{4000}}}}
	p := plannertest.First(t, plantest.Workers(2, 2), prof, 2, 4, 1)
	if p.Stages[0].Hi != 1 {
		t.Errorf("stages are not cut by parameters:\n%v", &p)
	}
	// A guess is no reason for stages of different numbers of workers.
	big := plan.Profile{Layers: []plan.Layer{{Tensors: []int{90_000}}, {Tensors: []int{10_000}}}}
	if q := plannertest.First(t, plantest.Workers(4, 4), big, 2, 8, 1); len(q.Stages[0].Workers) != 2 {
		t.Errorf("uneven stages from a guess:\n%v", &q)
	}
	for i := range big.Layers {
		big.Layers[i].Forward = time.Duration(big.Layers[i].Size())
	}
	if q := plannertest.First(t, plantest.Workers(4, 4), big, 2, 8, 1); len(q.Stages[0].Workers) != 3 {
		t.Errorf("even stages although one has nine times the work:\n%v", &q)
	}
	if prof.Layers[0].Forward != 0 {
		t.Error("the caller's profile was changed")
	}
}

func ExamplePlan_String() {
	p, reason, err := planner.Next(plan.Plan{}, plan.View{Workers: []plan.Worker{{ID: 0, Incarnation: 0, Host: "a"}, {ID: 1, Incarnation: 0, Host: "a"}, {ID: 2, Incarnation: 0, Host: "b"}}},
		plan.Profile{Layers: []plan.Layer{{Tensors: []int{8192}}, {Tensors: []int{8192}}, {Tensors: []int{8192}}}},
		planner.Event{Micros: 8, Stages: 2, Mirrors: 1})
	fmt.Println(reason, err)
	fmt.Print(&p)
	// Output:
	// first plan: 3 workers in 2 stages, 8 micro-batches per step <nil>
	// plan 1.1 from step 1: 3 workers, 2 stages, 8 micro-batches, 1 mirror per shard
	// stage 0, layers 0-1
	//   worker 0 on a: micro-batches 0-3, 4 in flight, owns 8192 parameters, mirrors 8192
	//   worker 1 on a: micro-batches 4-7, 4 in flight, owns 8192 parameters, mirrors 0
	// stage 1, layers 2
	//   worker 2 on b: micro-batches 0-7, 1 in flight, owns 8192 parameters, mirrors 16384
}

func BenchmarkFirstPlan(b *testing.B) {
	prof := plan.Profile{Layers: plantest.Model(100)}
	for i := range prof.Layers {
		prof.Layers[i].Forward += time.Duration(i*7919%1000) * time.Microsecond
	}
	for _, stages := range []int{1, 8, 16, 100} {
		b.Run(fmt.Sprintf("1024 workers, 100 layers, %d stages", stages), func(b *testing.B) {
			for b.Loop() {
				if _, _, err := planner.Next(plan.Plan{}, plan.View{Workers: plantest.Workers(1024, 8)}, prof, planner.Event{Micros: 1024, Stages: stages, Mirrors: 1}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkLostWorker(b *testing.B) {
	prof := plan.Profile{Layers: plantest.Model(100)}
	ws := plantest.Workers(1024, 8)
	old := plannertest.First(b, ws, prof, 16, 1024, 1)
	v := plan.View{Step: 5, Workers: slices.Delete(slices.Clone(ws), 100, 101)}
	for s, route := range old.Route {
		for m, w := range route {
			v.Works = append(v.Works, plan.Work{Worker: w, Status: graph.Status{Pair: graph.Pair{Stage: s, Micro: m}, Phase: graph.Finished}})
		}
	}
	for b.Loop() {
		if _, _, err := planner.Next(old, v, prof, planner.Event{Kind: planner.Lost}); err != nil {
			b.Fatal(err)
		}
	}
}

// TestEvenStages: like stages have like ranks, and limits are those of 1F1B and three more.
func TestEvenStages(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(8)}
	p := plannertest.First(t, plantest.Workers(8, 8), prof, 4, 16, 1)
	for s := range p.Stages {
		for i, w := range p.Stages[s].Workers {
			want := 4 - s
			if s < 3 {
				want += 3
			}
			if l := p.Limit(s, w).Forwards; l != want {
				t.Errorf("limit of worker %d in stage %d is %d", w, s, l)
			}
			for m := range 16 {
				if (p.Route[s][m] == w) != (m/8 == i) {
					t.Errorf("stage %d routes micro-batch %d to worker %d", s, m, p.Route[s][m])
				}
			}
		}
	}
	sched, err := simulate.Run(&p, prof)
	if want := (8 + 3) * 6 * time.Millisecond; err != nil || sched.Makespan != want || simulate.Estimate(&p, prof) != want {
		t.Errorf("step takes %v (%v), closed form %v, want %v", sched.Makespan, err, simulate.Estimate(&p, prof), want)
	}
}

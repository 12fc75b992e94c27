package planner_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"github.com/soliton-train/soliton/internal/plan/search"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"pgregory.net/rapid"
)

// rebalanced returns the plan for [Rebalance], which is valid, and whether there is one.
func rebalanced(t plantest.Fataler, current plan.Plan, prof plan.Profile) (plan.Plan, bool) {
	t.Helper()
	v := plan.View{Workers: current.Workers, Step: current.FromStep}
	p, reason, err := planner.Next(current, v, prof, planner.Event{Kind: planner.Rebalance})
	if errors.Is(err, planner.ErrNoGain) {
		return current, false
	}
	if err != nil {
		t.Fatalf("%v", err)
	}
	for _, err := range []error{p.Validate(prof.Layers), plantest.ValidateAfter(&p, &current)} {
		if err != nil {
			t.Fatalf("%v\n%v\n%v", err, &current, &p)
		}
	}
	if reason == "" {
		t.Fatalf("a plan without a reason")
	}
	return p, true
}

// sane checks that every worker owns about its share of its stages, and that owners are
// of the stage.
func sane(t plantest.Fataler, p *plan.Plan, prof plan.Profile) {
	t.Helper()
	for s, st := range p.Stages {
		total, owned := 0, map[id.WorkerID]int{}
		for _, sh := range p.Shards {
			if st.Lo <= sh.Layer && sh.Layer < st.Hi {
				total += sh.Hi - sh.Lo
				owned[sh.Owner] += sh.Hi - sh.Lo
				if !slices.Contains(st.Workers, sh.Owner) {
					t.Fatalf("worker %d owns a part of stage %d:\n%v", sh.Owner, s, p)
				}
			}
		}
	}
}

// TestRebalanceAnything: whatever the times, the plan is valid, can be made again, needs
// only what some worker has, and there is nothing better after it.
func TestRebalanceAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(1, 8).Draw(t, "layers")
		n := rapid.IntRange(1, 8).Draw(t, "workers")
		stages := rapid.IntRange(1, min(4, layers, n)).Draw(t, "stages")
		micros := rapid.IntRange(1, 16).Draw(t, "micro-batches")
		mirrors := rapid.IntRange(1, 2).Draw(t, "mirrors")
		prof := plantest.AnyProfile(t, layers, n)
		p := plannertest.First(t, plantest.Workers(n, rapid.IntRange(1, 4).Draw(t, "per host")), prof, stages, micros, mirrors)
		for range rapid.IntRange(0, n-1).Draw(t, "lost") {
			lost := p.Workers[rapid.IntRange(0, len(p.Workers)-1).Draw(t, "worker")].ID
			p = plannertest.Losing(t, p, prof, lost)
		}
		prof.Speed = map[id.WorkerID]float64{}
		for w := range n {
			prof.Speed[id.WorkerID(w)] = rapid.SampledFrom([]float64{1, 1, 1, 0.5, 0.8}).Draw(t, "speed")
		}
		next, ok := rebalanced(t, p, prof)
		if !ok {
			return
		}
		v := plan.View{Workers: p.Workers, Step: p.FromStep}
		for _, tr := range plan.Needs(&p, &next, v) {
			if tr.From < 0 {
				t.Fatalf("no worker has %+v", tr)
			}
		}
		sane(t, &next, prof)
		a, b := search.StepTime(&p, &prof), search.StepTime(&next, &prof)
		if float64(b) > 0.99*float64(a)+1 {
			t.Fatalf("%v follows %v:\n%v%v", b, a, &p, &next)
		}
	})
}

// TestEightLosses loses eight of 32 workers one after the other, with and without layers that
// move. The ideal is the undisturbed step over the share of workers that is left. The best
// integer plan is a bound that no plan with one stage for each worker is better than, see
// integerBound: of those with at most twice the mean of layers in a stage, as the planner has
// to, and of all.
func TestEightLosses(t *testing.T) {
	const micros, layers = 128, 32
	prof := plantest.Uniform(layers)
	ws := plantest.Workers(32, 4)
	p := plannertest.First(t, ws, prof, 4, micros, 1)
	whole := simulate.PassTime(&p, &prof)
	flowOnly := p
	for k := 1; k <= 8; k++ {
		lost := id.WorkerID(k * 11 % 32)
		p, flowOnly = plannertest.Losing(t, p, prof, lost), plannertest.Losing(t, flowOnly, prof, lost)
		next, ok := rebalanced(t, p, prof)
		if ok {
			sane(t, &next, prof)
		}
		p = next
		ideal := float64(whole) * 32 / float64(32-k)
		took, flow := simulate.PassTime(&p, &prof), simulate.PassTime(&flowOnly, &prof)
		both := float64(took)
		bound := float64(plantest.IntegerBound(layers, 4, 32-k, micros, layers/2, took))
		free := float64(plantest.IntegerBound(layers, 4, 32-k, micros, layers, took))
		var shape []string
		for _, st := range p.Stages {
			shape = append(shape, fmt.Sprintf("%d/%d", st.Hi-st.Lo, len(st.Workers)))
		}
		t.Logf("%d lost: dataflow %.3f of ideal and %.3f of the best integer plan; with graph %.3f of ideal and %.3f of the best integer plan, %.3f with any number of layers in a stage: %v",
			k, ideal/float64(flow), bound/float64(flow), ideal/both, bound/both, free/both, shape)
		if ideal/both < 0.95 || bound/both < 0.93 {
			t.Errorf("that is too little")
		}
	}
}

// TestEightWorkers: after one loss, and with one worker at half speed, a step takes little
// more than the speed that is left has it.
func TestEightWorkers(t *testing.T) {
	prof := plantest.Uniform(16)
	whole := plannertest.First(t, plantest.Workers(8, 4), prof, 2, 32, 1)
	was := float64(simulate.PassTime(&whole, &prof))
	lost, _ := rebalanced(t, plannertest.Losing(t, whole, prof, 3), prof)
	slow := prof
	slow.Speed = map[id.WorkerID]float64{3: 0.5}
	slowed, _ := rebalanced(t, whole, slow)
	one, half := was*8/7/float64(simulate.PassTime(&lost, &prof)), was*8/7.5/float64(simulate.PassTime(&slowed, &slow))
	t.Logf("one lost: %.3f of 7/8; one at half speed: %.3f of 7.5/8", one, half)
	if one < 0.94 || half < 0.94 {
		t.Errorf("that is too little")
	}
}

// TestNearExhaustive: on small clusters whose transfers are free, the plan for Rebalance is
// at most 2 % over, and mostly equal to, the best that trying all borders and all stages of all workers finds, with
// routes by the same means.
func TestNearExhaustive(t *testing.T) {
	if testing.Short() {
		t.Skip("tries all plans of many clusters")
	}
	worst := 1.0
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(2, 4).Draw(t, "layers")
		n := rapid.IntRange(2, 4).Draw(t, "workers")
		stages := 2
		micros := rapid.IntRange(4, 8).Draw(t, "micro-batches")
		prof := plan.Profile{Speed: map[id.WorkerID]float64{}}
		for range layers {
			f := time.Duration(rapid.IntRange(2, 8).Draw(t, "forward")) * time.Millisecond
			prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{1000}, Forward: f, Backward: 2 * f})
		}
		prof.Memory = map[id.WorkerID]int64{}
		for w := range id.WorkerID(n) {
			prof.Memory[w] = 1 << 40
		}
		p := plannertest.First(t, plantest.Workers(n, n), prof, stages, micros, 1)
		for w := range id.WorkerID(n) {
			prof.Speed[w] = rapid.SampledFrom([]float64{1, 1, 0.5}).Draw(t, "speed")
		}
		got, _ := rebalanced(t, p, prof)
		best := exhaustive(p, prof)
		ratio := float64(search.StepTime(&got, &prof)) / float64(best)
		worst = max(worst, ratio)
		if ratio > 1.02 {
			t.Fatalf("%v is %.3f times the best, %v:\n%v", search.StepTime(&got, &prof), ratio, best, &got)
		}
	})
	t.Logf("at most %.3f of the best", worst)
}

// exhaustive returns the time of the best plan with one stage for every worker.
func exhaustive(p plan.Plan, prof plan.Profile) time.Duration {
	best := time.Duration(math.MaxInt64)
	stages := make([]plan.Stage, len(p.Stages))
	var staff func(w int)
	staff = func(w int) {
		if w == len(p.Workers) {
			if !slices.ContainsFunc(stages, func(s plan.Stage) bool { return len(s.Workers) == 0 }) {
				q := plan.Plan{Workers: p.Workers, Stages: slices.Clone(stages)}
				search.Route(&q, prof, p.Micros())
				best = min(best, search.StepTime(&q, &prof))
			}
			return
		}
		for s := range stages {
			was := stages[s].Workers
			stages[s].Workers = append(slices.Clone(was), p.Workers[w].ID)
			staff(w + 1)
			stages[s].Workers = was
		}
	}
	var cut func(s, lo int)
	cut = func(s, lo int) {
		if s == len(stages)-1 {
			stages[s] = plan.Stage{Lo: lo, Hi: len(prof.Layers)}
			staff(0)
			return
		}
		for hi := lo + 1; hi <= len(prof.Layers)-(len(stages)-1-s); hi++ {
			stages[s] = plan.Stage{Lo: lo, Hi: hi}
			cut(s+1, hi)
		}
	}
	cut(0, 0)
	return best
}

// TestRebalanceFixed: the dataflow dimension alone moves no layer and no worker, and takes
// micro-batches from slow workers.
func TestRebalanceFixed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(2, 8).Draw(t, "layers")
		workers := rapid.IntRange(2, 8).Draw(t, "workers")
		prof := plan.Profile{Speed: map[id.WorkerID]float64{}}
		for range layers {
			prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{100}, Forward: time.Millisecond, Backward: 2 * time.Millisecond})
		}
		v := plan.View{Step: 1}
		for i := range workers {
			v.Workers = append(v.Workers, plan.Worker{ID: id.WorkerID(i)})
		}
		current, _, err := planner.Next(plan.Plan{}, v, prof, planner.Event{
			Kind: planner.Start, Stages: rapid.IntRange(1, min(layers, workers)).Draw(t, "stages"),
			Micros: rapid.IntRange(1, 24).Draw(t, "micros"), Mirrors: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		for i := range workers {
			prof.Speed[id.WorkerID(i)] = rapid.SampledFrom([]float64{0.25, 0.5, 1}).Draw(t, "speed")
		}
		p, _, err := planner.Next(current, v, prof, planner.Event{Kind: planner.Rebalance, Fixed: true})
		if errors.Is(err, planner.ErrNoGain) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{p.Validate(prof.Layers), plantest.ValidateAfter(&p, &current)} {
			if err != nil {
				t.Fatalf("%v\n%v\n%v", err, &current, &p)
			}
		}
		if !slices.EqualFunc(p.Stages, current.Stages, func(a, b plan.Stage) bool {
			return a.Lo == b.Lo && a.Hi == b.Hi && slices.Equal(slices.Sorted(slices.Values(a.Workers)), slices.Sorted(slices.Values(b.Workers)))
		}) {
			t.Fatalf("stages went from %v to %v", current.Stages, p.Stages)
		}
		if was, is := search.StepTime(&current, &prof), search.StepTime(&p, &prof); float64(is) > 0.99*float64(was) {
			t.Fatalf("a step of %v takes %v", was, is)
		}
	})
}

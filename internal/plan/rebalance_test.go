package plan

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"pgregory.net/rapid"
)

// rebalanced returns the plan for [Rebalance], which is valid, and whether there is one.
func rebalanced(t fataler, current Plan, prof Profile) (Plan, bool) {
	t.Helper()
	v := View{Workers: current.Workers, Step: current.FromStep}
	p, reason, err := Next(current, v, prof, Event{Kind: Rebalance})
	if errors.Is(err, ErrNoGain) {
		return current, false
	}
	if err != nil {
		t.Fatalf("%v", err)
	}
	for _, err := range []error{p.Validate(prof.Layers), p.ValidateAfter(&current)} {
		if err != nil {
			t.Fatalf("%v\n%v\n%v", err, &current, &p)
		}
	}
	if reason == "" {
		t.Fatalf("a plan without a reason")
	}
	return p, true
}

// losing returns the plan after a loss, with its mirrors made again.
func losing(t fataler, p Plan, prof Profile, lost id.WorkerID) Plan {
	t.Helper()
	v := View{Step: p.FromStep}
	for _, w := range p.Workers {
		if w.ID != lost {
			v.Workers = append(v.Workers, w)
		}
	}
	for _, kind := range []EventKind{Lost, Protect} {
		next, _, err := Next(p, v, prof, Event{Kind: kind})
		if err != nil {
			t.Fatalf("%v", err)
		}
		if err := next.Validate(prof.Layers); err != nil {
			t.Fatalf("%v", err)
		}
		p = next
	}
	return p
}

// sane checks that every worker owns about its share of its stages, and that owners are
// of the stage.
func sane(t fataler, p *Plan, prof Profile) {
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
// only what is somewhere, and there is nothing better after it.
func TestRebalanceAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(1, 8).Draw(t, "layers")
		n := rapid.IntRange(1, 8).Draw(t, "workers")
		stages := rapid.IntRange(1, min(4, layers, n)).Draw(t, "stages")
		micros := rapid.IntRange(1, 16).Draw(t, "micro-batches")
		mirrors := rapid.IntRange(1, 2).Draw(t, "mirrors")
		prof := anyProfile(t, layers, n)
		p := first(t, workers(n, rapid.IntRange(1, 4).Draw(t, "per host")), prof, stages, micros, mirrors)
		for range rapid.IntRange(0, n-1).Draw(t, "lost") {
			lost := p.Workers[rapid.IntRange(0, len(p.Workers)-1).Draw(t, "worker")].ID
			p = losing(t, p, prof, lost)
		}
		prof.Speed = map[id.WorkerID]float64{}
		for w := range n {
			prof.Speed[id.WorkerID(w)] = rapid.SampledFrom([]float64{1, 1, 1, 0.5, 0.8}).Draw(t, "speed")
		}
		next, ok := rebalanced(t, p, prof)
		if !ok {
			return
		}
		v := View{Workers: p.Workers, Step: p.FromStep}
		state, parameters := Needs(&p, &next, v)
		for _, tr := range append(state, parameters...) {
			if tr.From < 0 {
				t.Fatalf("nobody has %+v", tr)
			}
		}
		sane(t, &next, prof)
		for _, tr := range state {
			v.Held = append(v.Held, Holding{tr.Range, tr.To})
		}
		again, _, err := Next(p, v, prof, Event{Kind: Rebalance})
		if err != nil {
			t.Fatalf("%v", err)
		}
		if more, _ := Needs(&p, &again, v); len(more) > 0 {
			t.Fatalf("with all that it needs it needs %v", more)
		}
		a, b := p.time(&prof), next.time(&prof)
		if float64(b) > (1-gain)*float64(a)+1 {
			t.Fatalf("%v follows %v:\n%v%v", b, a, &p, &next)
		}
	})
}

// uniform returns a profile of equal layers.
func uniform(layers int) Profile { return Profile{Layers: model(layers)} }

// TestEightLosses loses eight of 32 workers one after the other, with and without layers that
// move. The ideal is the undisturbed step over the share of workers that is left. The best
// integer plan is a bound that no plan with one stage for each worker is better than, see
// integerBound: of those with at most twice the mean of layers in a stage, as the planner has
// to, and of all.
func TestEightLosses(t *testing.T) {
	const micros, layers = 128, 32
	prof := uniform(layers)
	ws := workers(32, 4)
	p := first(t, ws, prof, 4, micros, 1)
	whole := p.passTime(&prof)
	flowOnly := p
	for k := 1; k <= 8; k++ {
		lost := id.WorkerID(k * 11 % 32)
		p, flowOnly = losing(t, p, prof, lost), losing(t, flowOnly, prof, lost)
		next, ok := rebalanced(t, p, prof)
		if ok {
			sane(t, &next, prof)
		}
		p = next
		ideal := float64(whole) * 32 / float64(32-k)
		took, flow := p.passTime(&prof), flowOnly.passTime(&prof)
		both := float64(took)
		bound := float64(integerBound(layers, 4, 32-k, micros, layers/2, took))
		free := float64(integerBound(layers, 4, 32-k, micros, layers, took))
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
	prof := uniform(16)
	whole := first(t, workers(8, 4), prof, 2, 32, 1)
	was := float64(whole.passTime(&prof))
	lost, _ := rebalanced(t, losing(t, whole, prof, 3), prof)
	slow := prof
	slow.Speed = map[id.WorkerID]float64{3: 0.5}
	slowed, _ := rebalanced(t, whole, slow)
	one, half := was*8/7/float64(lost.passTime(&prof)), was*8/7.5/float64(slowed.passTime(&slow))
	t.Logf("one lost: %.3f of 7/8; one at half speed: %.3f of 7.5/8", one, half)
	if one < 0.94 || half < 0.94 {
		t.Errorf("that is too little")
	}
}

// integerBound returns a time that no plan is faster than which has one stage for every one of
// equally fast workers and at most a number of the equal layers in a stage, whose forward passes
// take 1 ms and backward passes 2 ms: the least of stagesBound over all numbers of layers and
// workers of stages, but no more than upTo.
func integerBound(layers, stages, workers, micros, most int, upTo time.Duration) time.Duration {
	best := int(upTo / time.Millisecond)
	l, w := make([]int, stages), make([]int, stages)
	var deal func(i, layersLeft, workersLeft, before int)
	deal = func(i, layersLeft, workersLeft, before int) {
		if i == stages {
			best = min(best, stagesBound(l, w, micros))
			return
		}
		later := stages - 1 - i
		for l[i] = 1; l[i] <= min(most, layersLeft-later); l[i]++ {
			for w[i] = 1; w[i] <= workersLeft-later; w[i]++ {
				if later == 0 && (l[i] < layersLeft || w[i] < workersLeft) {
					continue
				}
				if 3*(before+l[i]*ceil(micros, w[i])) < best { // see stagesBound; else it is no better
					deal(i+1, layersLeft-l[i], workersLeft-w[i], before+l[i])
				}
			}
		}
	}
	deal(0, layers, workers, 0)
	return time.Duration(best) * time.Millisecond
}

// stagesBound returns, in milliseconds, the least time in which every stage by itself could be
// done, whatever the routes and limits. Its k-th micro-batch comes no earlier than the
// stages before can have run k forward passes, and after its k-th last backward pass there
// are k more to be run in each of those. In between its workers run whole micro-batches:
// the number of workers that can run n or more is at most that of the pairs of a begin and
// an end that leave the time for n.
func stagesBound(layers, workers []int, micros int) (t int) {
	most := slices.Max(workers)
	begin, end := make([]int, most), make([]int, most)
	for i, l := range layers {
		room := func() bool {
			total := 0
			for n := 1; total < micros; n++ {
				pairs, k := 0, workers[i]-1
				for _, b := range begin[:workers[i]] {
					for k >= 0 && b+end[k]+3*l*n > t {
						k--
					}
					if k < 0 {
						break
					}
					k--
					pairs++
				}
				if pairs == 0 {
					return false
				}
				total += pairs
			}
			return true
		}
		t = max(t, begin[0]+end[0]+3*l*ceil(micros, workers[i])) // somebody runs as many
		for !room() {
			t++
		}
		nextBegin, nextEnd := make([]int, most), make([]int, most)
		for k := range most {
			b, e := begin[k], end[k]
			if k >= workers[i] {
				b, e = max(b, nextBegin[k-workers[i]]), max(e, nextEnd[k-workers[i]])
			}
			nextBegin[k], nextEnd[k] = b+l, e+2*l
		}
		begin, end = nextBegin, nextEnd
	}
	return t
}

// TestStagesBound: no routes and limits are faster than the bound, and the floor of the planner
// is the same.
func TestStagesBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages, micros := rapid.IntRange(1, 4).Draw(t, "stages"), rapid.IntRange(1, 40).Draw(t, "micro-batches")
		var layers, ranks []int
		p := Plan{}
		lo := 0
		var parts []part
		for range stages {
			l, w := rapid.IntRange(1, 6).Draw(t, "layers"), rapid.IntRange(1, 6).Draw(t, "workers")
			layers, ranks = append(layers, l), append(ranks, w)
			parts = append(parts, part{lo, lo + l, w})
			st := Stage{Lo: lo, Hi: lo + l}
			for range w {
				id := id.WorkerID(len(p.Workers))
				p.Workers = append(p.Workers, Worker{ID: id})
				st.Workers = append(st.Workers, id)
			}
			p.Stages = append(p.Stages, st)
			lo += l
		}
		prof := uniform(lo)
		bound := time.Duration(stagesBound(layers, ranks, micros)) * time.Millisecond
		for _, st := range p.Stages {
			var route []id.WorkerID
			for m := range micros {
				route = append(route, rapid.SampledFrom([]id.WorkerID{
					st.Workers[m%len(st.Workers)], st.Workers[m*len(st.Workers)/micros],
				}).Draw(t, "route"))
			}
			p.Route = append(p.Route, route)
			more := rapid.IntRange(0, 10).Draw(t, "more in flight")
			for _, w := range st.Workers {
				p.Limits = append(p.Limits, Limit{len(p.Route) - 1, w, stages + more, rapid.IntRange(0, 3).Draw(t, "lead")})
			}
		}
		if got := p.passTime(&prof); got < bound {
			t.Fatalf("%v is less than %v:\n%v", got, bound, &p)
		}
		p.route(&prof, micros)
		if got := p.passTime(&prof); got < bound {
			t.Fatalf("the planner's %v is less than %v:\n%v", got, bound, &p)
		}
		d := newSpreader(newShaper(&p, &prof), len(p.Workers))
		if got := d.floor(parts).Round(100 * time.Microsecond); got != bound {
			t.Fatalf("a floor of %v, and the bound is %v:\n%v", got, bound, &p)
		}
	})
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
		prof := Profile{Speed: map[id.WorkerID]float64{}}
		for range layers {
			f := time.Duration(rapid.IntRange(2, 8).Draw(t, "forward")) * time.Millisecond
			prof.Layers = append(prof.Layers, Layer{Tensors: []int{1000}, Forward: f, Backward: 2 * f})
		}
		prof.Memory = map[id.WorkerID]int64{}
		for w := range id.WorkerID(n) {
			prof.Memory[w] = 1 << 40
		}
		p := first(t, workers(n, n), prof, stages, micros, 1)
		for w := range id.WorkerID(n) {
			prof.Speed[w] = rapid.SampledFrom([]float64{1, 1, 0.5}).Draw(t, "speed")
		}
		got, _ := rebalanced(t, p, prof)
		best := exhaustive(p, prof)
		ratio := float64(got.time(&prof)) / float64(best)
		worst = max(worst, ratio)
		if ratio > 1.02 {
			t.Fatalf("%v is %.3f times the best, %v:\n%v", got.time(&prof), ratio, best, &got)
		}
	})
	t.Logf("at most %.3f of the best", worst)
}

// exhaustive returns the time of the best plan with one stage for every worker.
func exhaustive(p Plan, prof Profile) time.Duration {
	best := time.Duration(math.MaxInt64)
	stages := make([]Stage, len(p.Stages))
	var staff func(w int)
	staff = func(w int) {
		if w == len(p.Workers) {
			if !slices.ContainsFunc(stages, func(s Stage) bool { return len(s.Workers) == 0 }) {
				q := Plan{Workers: p.Workers, Stages: slices.Clone(stages)}
				q.route(&prof, p.Micros())
				best = min(best, q.time(&prof))
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
			stages[s] = Stage{Lo: lo, Hi: len(prof.Layers)}
			staff(0)
			return
		}
		for hi := lo + 1; hi <= len(prof.Layers)-(len(stages)-1-s); hi++ {
			stages[s] = Stage{Lo: lo, Hi: hi}
			cut(s+1, hi)
		}
	}
	cut(0, 0)
	return best
}

// TestRebalanceFixed: the dataflow dimension alone moves no layer and no worker, and takes
// micro-batches from who is slow.
func TestRebalanceFixed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(2, 8).Draw(t, "layers")
		workers := rapid.IntRange(2, 8).Draw(t, "workers")
		prof := Profile{Speed: map[id.WorkerID]float64{}}
		for range layers {
			prof.Layers = append(prof.Layers, Layer{Tensors: []int{100}, Forward: time.Millisecond, Backward: 2 * time.Millisecond})
		}
		v := View{Step: 1}
		for i := range workers {
			v.Workers = append(v.Workers, Worker{ID: id.WorkerID(i)})
		}
		current, _, err := Next(Plan{}, v, prof, Event{
			Kind: Start, Stages: rapid.IntRange(1, min(layers, workers)).Draw(t, "stages"),
			Micros: rapid.IntRange(1, 24).Draw(t, "micros"), Mirrors: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		for i := range workers {
			prof.Speed[id.WorkerID(i)] = rapid.SampledFrom([]float64{0.25, 0.5, 1}).Draw(t, "speed")
		}
		p, _, err := Next(current, v, prof, Event{Kind: Rebalance, Fixed: true})
		if errors.Is(err, ErrNoGain) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{p.Validate(prof.Layers), p.ValidateAfter(&current)} {
			if err != nil {
				t.Fatalf("%v\n%v\n%v", err, &current, &p)
			}
		}
		if !slices.EqualFunc(p.Stages, current.Stages, sameStage) {
			t.Fatalf("stages went from %v to %v", current.Stages, p.Stages)
		}
		if was, is := current.time(&prof), p.time(&prof); float64(is) > (1-gain)*float64(was) {
			t.Fatalf("a step of %v takes %v", was, is)
		}
	})
}

// TestContiguous: every worker has one range of its stage, before and after layers move, and as
// much as the others to a block.
func TestContiguous(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stages := rapid.IntRange(1, 3).Draw(t, "stages")
		n := stages * rapid.IntRange(1, 4).Draw(t, "workers in a stage")
		mirrors := rapid.IntRange(0, 2).Draw(t, "mirrors")
		prof := Profile{Speed: map[id.WorkerID]float64{}}
		for range rapid.IntRange(stages, 8).Draw(t, "layers") {
			f := time.Duration(rapid.IntRange(1, 9).Draw(t, "forward")) * time.Millisecond
			size := rapid.IntRange(1, 9).Draw(t, "blocks") * kernel.Block
			prof.Layers = append(prof.Layers, Layer{Tensors: []int{size, 100}, Forward: f, Backward: 2 * f})
		}
		v := View{Workers: workers(n, n)}
		p, _, err := Next(Plan{}, v, prof, Event{Kind: Start, Stages: stages, Micros: 2 * n, Mirrors: mirrors, Contiguous: true})
		if err != nil {
			t.Fatal(err)
		}
		check := func(p *Plan) {
			if err := p.Validate(prof.Layers); err != nil {
				t.Fatalf("%v\n%v", err, p)
			}
			for _, st := range p.Stages {
				rank, owned, total := 0, make([]int, len(st.Workers)), 0
				for _, sh := range p.Shards {
					if sh.Layer < st.Lo || st.Hi <= sh.Layer {
						continue
					}
					at := slices.Index(st.Workers, sh.Owner)
					if at < rank {
						t.Fatalf("the range of rank %d goes on after that of rank %d:\n%v", at, rank, p)
					}
					rank = at
					owned[rank] += sh.Hi - sh.Lo
					total += sh.Hi - sh.Lo
				}
				for r, n := range owned {
					if off := n - total/len(owned); off > kernel.Block || off < -kernel.Block {
						t.Fatalf("rank %d owns %d of %d:\n%v", r, n, total, p)
					}
				}
			}
		}
		check(&p)
		for i := range prof.Layers {
			prof.Layers[i].Forward = time.Duration(rapid.IntRange(1, 9).Draw(t, "measured")) * time.Millisecond
			prof.Layers[i].Backward = 2 * prof.Layers[i].Forward
		}
		q, _, err := Next(p, View{Workers: p.Workers, Step: 1}, prof, Event{Kind: Rebalance, Contiguous: true})
		if errors.Is(err, ErrNoGain) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := q.ValidateAfter(&p); err != nil {
			t.Fatal(err)
		}
		check(&q)
	})
}

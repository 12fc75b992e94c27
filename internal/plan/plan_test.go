package plan

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
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"pgregory.net/rapid"
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
		w[i] = Worker{ID: id.WorkerID(i), Host: string(rune('A' + i/perHost))}
	}
	return w
}

type fataler interface {
	Helper()
	Fatalf(string, ...any)
}

// first returns the first plan, which is valid.
func first(t fataler, w []Worker, prof Profile, stages, micros, mirrors int) Plan {
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

// anyProfile draws a model and speeds.
func anyProfile(t *rapid.T, layers, workers int) Profile {
	prof := Profile{Speed: map[id.WorkerID]float64{}}
	for range layers {
		prof.Layers = append(prof.Layers, Layer{
			Tensors:  rapid.SliceOfN(rapid.IntRange(0, 5*kernel.Block), 0, 4).Draw(t, "tensors"),
			Forward:  time.Duration(rapid.IntRange(0, 20).Draw(t, "forward")) * time.Millisecond,
			Backward: time.Duration(rapid.IntRange(0, 20).Draw(t, "backward")) * time.Millisecond,
			Output:   1 << 10,
		})
	}
	if rapid.Bool().Draw(t, "uneven speeds") {
		for w := range workers {
			prof.Speed[id.WorkerID(w)] = rapid.Float64Range(0.2, 1).Draw(t, "speed")
		}
	}
	if rapid.Bool().Draw(t, "slow links") {
		prof.Latency, prof.Bandwidth, prof.Updates = time.Millisecond, 1e8, 1e8
	}
	return prof
}

func TestFirstPlan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(1, 8).Draw(t, "layers")
		n := rapid.IntRange(1, 9).Draw(t, "workers")
		stages := rapid.IntRange(1, min(5, layers, n)).Draw(t, "stages")
		micros := rapid.IntRange(1, 20).Draw(t, "micro-batches")
		mirrors := rapid.IntRange(0, 3).Draw(t, "mirrors")
		prof := anyProfile(t, layers, n)
		ws := workers(n, rapid.IntRange(1, 4).Draw(t, "per host"))
		p := first(t, ws, prof, stages, micros, mirrors)
		if len(p.Stages) != stages || p.Micros() != micros || len(p.Workers) != n {
			t.Fatalf("not the plan that was asked for:\n%v", &p)
		}
		slices.Reverse(ws)
		if q := first(t, ws, prof, stages, micros, mirrors); !reflect.DeepEqual(p, q) {
			t.Fatalf("two plans from the same view:\n%v%v", &p, &q)
		}
		b, err := json.Marshal(&p)
		if err != nil {
			t.Fatalf("%v", err)
		}
		q, err := Parse(b)
		if err != nil || !reflect.DeepEqual(canonical(p), canonical(q)) {
			t.Fatalf("after JSON (%v):\n%v%v", err, &p, &q)
		}
		if d := Diff(&p, &q); !reflect.DeepEqual(d, Change{}) {
			t.Fatalf("a plan differs from itself: %+v", d)
		}
		if sched, err := p.Simulate(prof); err != nil || sched.Makespan < 0 {
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
func canonical(p Plan) Plan {
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

// TestDealAgainstOracle tries every way to deal layers and workers.
func TestDealAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "layers")
		ws := rapid.IntRange(1, 6).Draw(t, "workers")
		stages := rapid.IntRange(1, min(n, ws, 4)).Draw(t, "stages")
		micros := rapid.IntRange(1, 12).Draw(t, "micro-batches")
		layers := make([]Layer, n)
		for i := range layers {
			layers[i].Forward = time.Duration(rapid.IntRange(0, 30).Draw(t, "work"))
		}
		var oracle func(lo, ws, stages int) time.Duration
		oracle = func(lo, ws, stages int) time.Duration {
			if stages == 0 {
				if lo == n {
					return 0
				}
				return math.MaxInt64
			}
			best := time.Duration(math.MaxInt64)
			var work time.Duration
			for hi := lo + 1; hi <= n; hi++ {
				work += layers[hi-1].Forward
				for k := 1; k <= ws; k++ {
					each := (micros + k - 1) / k
					best = min(best, max(work*time.Duration(2*each-1), oracle(hi, ws-k, stages-1)))
				}
			}
			return best
		}
		want := oracle(0, ws, stages)
		parts := deal(layers, stages, ws, micros, math.MaxInt)
		d := newDealer(layers, stages, ws, micros, math.MaxInt)
		at, used := 0, 0
		for _, p := range parts {
			if p.lo != at || p.hi <= p.lo || p.workers < 1 {
				t.Fatalf("parts %v", parts)
			}
			at, used = p.hi, used+p.workers
		}
		if at != n || used != ws || len(parts) != stages {
			t.Fatalf("parts %v of %d layers, %d workers", parts, n, ws)
		}
		got := d.slowest(parts)
		if got != want {
			t.Fatalf("parts %v take %d, the best %d", parts, got, want)
		}
	})
}

// TestRecutAgainstOracle does so for given factors.
func TestRecutAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 7).Draw(t, "layers")
		factors := rapid.SliceOfN(rapid.Float64Range(0.5, 3), 1, min(n, 4)).Draw(t, "factors")
		layers := make([]Layer, n)
		for i := range layers {
			layers[i].Backward = time.Duration(rapid.IntRange(1, 30).Draw(t, "work"))
		}
		var oracle func(lo, s int) float64
		oracle = func(lo, s int) float64 {
			if s == len(factors) {
				if lo == n {
					return 0
				}
				return math.Inf(1)
			}
			best, work := math.Inf(1), 0.0
			for hi := lo + 1; hi <= n; hi++ {
				work += float64(layers[hi-1].Backward)
				best = min(best, max(work*factors[s], oracle(hi, s+1)))
			}
			return best
		}
		got := 0.0
		work := sums(layers)
		for s, p := range recut(layers, factors) {
			got = max(got, factors[s]*float64(work[p.hi]-work[p.lo]))
		}
		if want := oracle(0, 0); math.Abs(got-want) > 1e-9*want {
			t.Fatalf("the slowest takes %v, the best %v", got, want)
		}
	})
}

// TestContiguousAgainstOracle tries all borders: the slowest worker first, the
// nodes of the gradient tree second.
func TestContiguousAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		micros := rapid.IntRange(1, 16).Draw(t, "micro-batches")
		speeds := rapid.SliceOfN(rapid.SampledFrom([]float64{1, 1, 1, 0.5, 0.25, 2}), 1, 4).Draw(t, "speeds")
		type cost struct {
			slowest float64
			nodes   int
		}
		less := func(a, b cost) bool {
			return a.slowest < b.slowest-1e-9 || a.slowest < b.slowest+1e-9 && a.nodes < b.nodes
		}
		var oracle func(lo, rank int) cost
		oracle = func(lo, rank int) cost {
			if rank == len(speeds)-1 {
				return cost{float64(micros-lo) / speeds[rank], nodes(micros, lo, micros)}
			}
			best := cost{math.Inf(1), 0}
			for hi := lo; hi <= micros; hi++ {
				rest := oracle(hi, rank+1)
				c := cost{max(rest.slowest, float64(hi-lo)/speeds[rank]), rest.nodes + nodes(micros, lo, hi)}
				if less(c, best) {
					best = c
				}
			}
			return best
		}
		// The recursion takes the least nodes for the least slowest of the
		// rest, which may be less than the whole allows; so the bound first.
		want := oracle(0, 0)
		fewest := fewestNodes(micros, speeds, want.slowest)
		r := contiguous(micros, speeds)
		if !slices.IsSorted(r) {
			t.Fatalf("%v is not contiguous", r)
		}
		got := cost{}
		for rank, v := range speeds {
			n := 0
			for _, x := range r {
				if x == rank {
					n++
				}
			}
			got.slowest = max(got.slowest, float64(n)/v)
		}
		r.count(func(_, n int) { got.nodes += n })
		if got.slowest > want.slowest+1e-9 || got.nodes != fewest {
			t.Fatalf("%v has %+v, the best is %v with %d nodes", r, got, want.slowest, fewest)
		}
	})
}

// fewestNodes tries all contiguous runs in which nobody is slower than a bound.
func fewestNodes(micros int, speeds []float64, slowest float64) int {
	var try func(lo, rank int) int
	try = func(lo, rank int) int {
		if rank == len(speeds) {
			if lo == micros {
				return 0
			}
			return math.MaxInt / 2
		}
		best := math.MaxInt / 2
		for hi := lo; hi <= micros && float64(hi-lo)/speeds[rank] <= slowest+1e-9; hi++ {
			best = min(best, nodes(micros, lo, hi)+try(hi, rank+1))
		}
		return best
	}
	return try(0, 0)
}

func TestAlignedRuns(t *testing.T) {
	for _, c := range []struct {
		micros, ranks int
		most          int // nodes of one rank
	}{{8, 2, 1}, {16, 4, 1}, {12, 3, 1}, {48, 3, 1}, {24, 2, 2}, {64, 8, 1}} {
		speeds := slices.Repeat([]float64{1}, c.ranks)
		if got := (&candidate{rankings: []ranking{contiguous(c.micros, speeds)}}).buffers(); got > c.most {
			t.Errorf("%d micro-batches on %d ranks: %d nodes", c.micros, c.ranks, got)
		}
	}
}

func TestNodes(t *testing.T) {
	p := Plan{InStep: true, FromStep: 3, Route: [][]id.WorkerID{{1, 1, 1, 1, 0, 1, 1, 1}}, Settled: []graph.Pair{{Stage: 0, Micro: 1}}}
	for _, c := range []struct {
		w    id.WorkerID
		step int
		want []tree.Node
	}{
		{1, 4, []tree.Node{{Lo: 0, Hi: 4}, {Lo: 5, Hi: 6}, {Lo: 6, Hi: 8}}},
		{1, 3, []tree.Node{{Lo: 0, Hi: 1}, {Lo: 2, Hi: 4}, {Lo: 5, Hi: 6}, {Lo: 6, Hi: 8}}},
		{0, 3, []tree.Node{{Lo: 4, Hi: 5}}},
		{2, 3, nil},
	} {
		if got := p.Nodes(0, c.w, c.step); !slices.Equal(got, c.want) {
			t.Errorf("worker %d in step %d: %v, want %v", c.w, c.step, got, c.want)
		}
	}
	if p.mostSums(0) != 4 {
		t.Errorf("most sums %d", p.mostSums(0))
	}
}

func TestNodesAgainstCover(t *testing.T) {
	for m := 1; m <= 40; m++ {
		for lo := range m + 1 {
			for hi := lo; hi <= m; hi++ {
				want := 0
				if lo < hi {
					cover(m, lo, hi, func(tree.Node) { want++ })
				}
				if got := nodes(m, lo, hi); got != want {
					t.Fatalf("[%d,%d) of %d: %d nodes, want %d", lo, hi, m, got, want)
				}
			}
		}
	}
}

// TestEvenStages: like stages have like ranks, and limits are those of 1F1B.
func TestEvenStages(t *testing.T) {
	prof := Profile{Layers: model(8)}
	p := first(t, workers(8, 8), prof, 4, 16, 1)
	for s := range p.Stages {
		for i, w := range p.Stages[s].Workers {
			want := 4 - s
			if s < 3 {
				want += ahead
			}
			if l := p.Limit(s, w); l != want {
				t.Errorf("limit of worker %d in stage %d is %d", w, s, l)
			}
			for m := range 16 {
				if (p.Route[s][m] == w) != (m/8 == i) {
					t.Errorf("stage %d routes micro-batch %d to worker %d", s, m, p.Route[s][m])
				}
			}
		}
	}
	sched, err := p.Simulate(prof)
	if want := (8 + 3) * 6 * time.Millisecond; err != nil || sched.Makespan != want || p.Estimate(prof) != want {
		t.Errorf("step takes %v (%v), closed form %v, want %v", sched.Makespan, err, p.Estimate(prof), want)
	}
}

// TestEstimate holds the closed form against the simulator.
func TestEstimate(t *testing.T) {
	prof := Profile{Layers: model(12), Latency: 50 * time.Microsecond, Bandwidth: 1e9, Updates: 1e9}
	for n := 1; n <= 8; n++ {
		for stages := 1; stages <= min(n, 4); stages++ {
			for _, micros := range []int{8, 24} {
				p := first(t, workers(n, 4), prof, stages, micros, 1)
				s, err := p.Simulate(prof)
				if err != nil {
					t.Fatal(err)
				}
				est := p.Estimate(prof)
				if ratio := float64(s.Makespan) / float64(est); ratio < 0.85 || ratio > 1.2 {
					t.Errorf("%d workers, %d stages, %d micro-batches: %v, closed form %v\n%v", n, stages, micros, s.Makespan, est, &p)
				}
			}
		}
	}
}

func TestSlowWorkerHasLess(t *testing.T) {
	prof := Profile{Layers: model(4), Speed: map[id.WorkerID]float64{1: 0.5}}
	p := first(t, workers(3, 3), prof, 1, 20, 1)
	counts := map[id.WorkerID]int{}
	for _, w := range p.Route[0] {
		counts[w]++
	}
	if counts[0] != 8 || counts[1] != 4 || counts[2] != 8 {
		t.Errorf("micro-batches %v, want 8, 4, 8", counts)
	}
}

// TestMirrorsAreSpread: no worker mirrors much more than others.
func TestMirrorsAreSpread(t *testing.T) {
	for _, c := range []struct{ workers, perHost, stages, mirrors int }{
		{4, 4, 1, 1}, {4, 4, 2, 1}, {8, 4, 1, 1}, {8, 4, 2, 1}, {8, 2, 2, 2}, {6, 2, 3, 1}, {9, 3, 1, 2}, {8, 1, 8, 1},
	} {
		p := first(t, workers(c.workers, c.perHost), Profile{Layers: model(8 * 9)}, c.stages, 16, c.mirrors)
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
	_, _, err := Next(Plan{}, View{}, Profile{Layers: model(1)}, Event{Micros: 1})
	if !errors.Is(err, ErrNoWorkers) {
		t.Errorf("no workers: %v", err)
	}
	for _, c := range []struct {
		workers, layers int
		e               Event
		want            []string
	}{
		{4, 2, Event{Stages: 3, Micros: 4}, []string{"--stages 3: every stage needs a layer and the model has 2 layers; use --stages 2 or fewer"}},
		{2, 9, Event{Stages: 3, Micros: 4}, []string{"--workers 2: every one of 3 stages needs a worker; use --workers 3 or more, or --stages 2 or fewer"}},
		{1, 1, Event{Stages: 2, Micros: 0, Mirrors: -1}, []string{"--stages 2", "--workers 1", "--mirrors -1", "--global-batch"}},
		{1, 0, Event{Stages: -1, Micros: 1}, []string{"no layers", "--stages -1"}},
	} {
		_, _, err := Next(Plan{}, View{Workers: workers(c.workers, 1)}, Profile{Layers: model(c.layers)}, c.e)
		for _, w := range c.want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%+v: error %q does not say %q", c.e, err, w)
			}
		}
		if flag := new(FlagError); !errors.As(err, &flag) {
			t.Errorf("%+v: no FlagError in %v", c.e, err)
		}
	}
	if _, _, err := Next(Plan{}, View{Workers: []Worker{{ID: 1}, {ID: 1}}}, Profile{Layers: model(1)}, Event{Micros: 1}); err == nil {
		t.Error("a worker listed twice was accepted")
	}
	if _, _, err := Next(Plan{}, View{Workers: workers(1, 1)}, Profile{Layers: model(1)}, Event{Kind: 99}); err == nil {
		t.Error("an unknown event was accepted")
	}
}

func TestNothingMeasuredYet(t *testing.T) {
	prof := Profile{Layers: []Layer{{Tensors: []int{8000}}, {Tensors: []int{4000}}, {Tensors: []int{4000}}}}
	p := first(t, workers(2, 2), prof, 2, 4, 1)
	if p.Stages[0].Hi != 1 {
		t.Errorf("stages are not cut by parameters:\n%v", &p)
	}
	// A guess is no reason for stages of different numbers of workers.
	big := Profile{Layers: []Layer{{Tensors: []int{90_000}}, {Tensors: []int{10_000}}}}
	if q := first(t, workers(4, 4), big, 2, 8, 1); len(q.Stages[0].Workers) != 2 {
		t.Errorf("uneven stages from a guess:\n%v", &q)
	}
	for i := range big.Layers {
		big.Layers[i].Forward = time.Duration(big.Layers[i].Size())
	}
	if q := first(t, workers(4, 4), big, 2, 8, 1); len(q.Stages[0].Workers) != 3 {
		t.Errorf("even stages although one has nine times the work:\n%v", &q)
	}
	if prof.Layers[0].Forward != 0 {
		t.Error("the caller's profile was changed")
	}
}

func ExamplePlan_String() {
	p, reason, err := Next(Plan{}, View{Workers: []Worker{{0, 0, "a"}, {1, 0, "a"}, {2, 0, "b"}}},
		Profile{Layers: []Layer{{Tensors: []int{8192}}, {Tensors: []int{8192}}, {Tensors: []int{8192}}}},
		Event{Micros: 8, Stages: 2, Mirrors: 1})
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
	prof := Profile{Layers: model(100)}
	for i := range prof.Layers {
		prof.Layers[i].Forward += time.Duration(i*7919%1000) * time.Microsecond
	}
	for _, stages := range []int{1, 8, 16, 100} {
		b.Run(fmt.Sprintf("1024 workers, 100 layers, %d stages", stages), func(b *testing.B) {
			for b.Loop() {
				if _, _, err := Next(Plan{}, View{Workers: workers(1024, 8)}, prof, Event{Micros: 1024, Stages: stages, Mirrors: 1}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkLostWorker(b *testing.B) {
	prof := Profile{Layers: model(100)}
	ws := workers(1024, 8)
	old := first(b, ws, prof, 16, 1024, 1)
	v := View{Step: 5, Workers: slices.Delete(slices.Clone(ws), 100, 101)}
	for s, route := range old.Route {
		for m, w := range route {
			v.Works = append(v.Works, Work{w, graph.Status{Pair: graph.Pair{Stage: s, Micro: m}, Phase: graph.Finished}})
		}
	}
	for b.Loop() {
		if _, _, err := Next(old, v, prof, Event{Kind: Lost}); err != nil {
			b.Fatal(err)
		}
	}
}

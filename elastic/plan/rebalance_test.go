package plan

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

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
func losing(t fataler, p Plan, prof Profile, lost WorkerID) Plan {
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
		total, owned := 0, map[WorkerID]int{}
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
		prof.Speed = map[WorkerID]float64{}
		for w := range n {
			prof.Speed[WorkerID(w)] = rapid.SampledFrom([]float64{1, 1, 1, 0.5, 0.8}).Draw(t, "speed")
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

func TestEightLosses(t *testing.T) {
	const micros = 128
	prof := uniform(32)
	ws := workers(32, 4)
	p := first(t, ws, prof, 4, micros, 1)
	whole := p.passTime(&prof)
	flowOnly := p
	for k := 1; k <= 8; k++ {
		lost := WorkerID(k * 11 % 32)
		p, flowOnly = losing(t, p, prof, lost), losing(t, flowOnly, prof, lost)
		began := time.Now()
		next, ok := rebalanced(t, p, prof)
		took := time.Since(began)
		if ok {
			sane(t, &next, prof)
		}
		p = next
		bound := integerBound(prof, 4, 32-k, micros)
		ideal := float64(whole) * 32 / float64(32-k)
		both, one := float64(p.passTime(&prof)), float64(flowOnly.passTime(&prof))
		var shape []string
		for _, st := range p.Stages {
			shape = append(shape, fmt.Sprintf("%d/%d", st.Hi-st.Lo, len(st.Workers)))
		}
		t.Logf("%d lost: dataflow %.3f of ideal, dataflow and graph %.3f of ideal and %.3f of the best integer plan, %v, %v",
			k, ideal/one, ideal/both, float64(bound)/both, shape, took)
	}
}

// integerBound returns the least closed-form time over all numbers of layers and workers
// of stages, equal layers and workers given: no schedule of whole micro-batches is shorter
// in steady state.
func integerBound(prof Profile, stages, workers, micros int) time.Duration {
	layers := len(prof.Layers)
	each := prof.Layers[0].Forward + prof.Layers[0].Backward
	type key struct{ s, l, w int }
	known := map[key]int{}
	var best func(k key) int
	best = func(k key) int {
		if k.s == 0 {
			if k.l == 0 && k.w == 0 {
				return 0
			}
			return math.MaxInt
		}
		if v, ok := known[k]; ok {
			return v
		}
		least := math.MaxInt
		for l := 1; l <= k.l; l++ {
			for w := 1; w <= k.w; w++ {
				if v := best(key{k.s - 1, k.l - l, k.w - w}); v < math.MaxInt {
					least = min(least, max(v, l*(ceil(micros, w)-1)))
				}
			}
		}
		known[k] = least
		return least
	}
	return time.Duration(layers+best(key{stages, layers, workers})) * each
}

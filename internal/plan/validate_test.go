package plan_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// TestEveryPropertyIsChecked breaks one property after the other.
func TestEveryPropertyIsChecked(t *testing.T) {
	layers := plantest.Model(4)
	good := plannertest.First(t, plantest.Workers(4, 2), plan.Profile{Layers: layers}, 2, 8, 1)
	seen := map[int]bool{}
	for _, c := range []struct {
		number int
		what   string
		spoil  func(p *plan.Plan)
	}{
		{1, "no generation", func(p *plan.Plan) { p.Version.Generation = 0 }},
		{1, "no version", func(p *plan.Plan) { p.Version.N = 0 }},
		{1, "no step", func(p *plan.Plan) { p.FromStep = 0 }},
		{2, "worker twice", func(p *plan.Plan) { p.Workers[1] = p.Workers[0] }},
		{2, "negative worker", func(p *plan.Plan) { p.Workers[0].ID = -1 }},
		{2, "negative incarnation", func(p *plan.Plan) { p.Workers[0].Incarnation = -1 }},
		{2, "model on a host without workers", func(p *plan.Plan) { p.ModelHost = "elsewhere" }},
		{3, "gap", func(p *plan.Plan) { p.Stages[1].Lo++ }},
		{3, "overlap", func(p *plan.Plan) { p.Stages[0].Hi++ }},
		{3, "layer missing", func(p *plan.Plan) { p.Stages[1].Hi-- }},
		{3, "layer too many", func(p *plan.Plan) { p.Stages[1].Hi++ }},
		{3, "no stages", func(p *plan.Plan) { p.Stages, p.Route, p.Limits = nil, nil, nil }},
		{4, "no workers", func(p *plan.Plan) { p.Stages[0].Workers = nil }},
		{4, "foreign worker", func(p *plan.Plan) { p.Stages[0].Workers[0] = 9 }},
		{4, "worker twice", func(p *plan.Plan) { p.Stages[0].Workers[1] = p.Stages[0].Workers[0] }},
		{5, "other stage's worker", func(p *plan.Plan) { p.Route[0][3] = p.Stages[1].Workers[0] }},
		{5, "short route", func(p *plan.Plan) { p.Route[1] = p.Route[1][1:] }},
		{5, "no micro-batches", func(p *plan.Plan) { p.Route[0], p.Route[1] = nil, nil }},
		{5, "route missing", func(p *plan.Plan) { p.Route = p.Route[:1] }},
		{5, "route too many", func(p *plan.Plan) { p.Route = append(p.Route, p.Route[0]) }},
		{6, "limit too low", func(p *plan.Plan) { p.Limits[0].Forwards = 1 }},
		{6, "limit missing", func(p *plan.Plan) { p.Limits = p.Limits[1:] }},
		{6, "limit twice", func(p *plan.Plan) { p.Limits = append(p.Limits, p.Limits[0]) }},
		{6, "limit of no worker", func(p *plan.Plan) { p.Limits = append(p.Limits, plan.Limit{Stage: 7, Worker: 1, Forwards: 3}) }},
		{7, "shard missing", func(p *plan.Plan) { p.Shards = slices.Delete(p.Shards, 1, 2) }},
		{7, "last shard missing", func(p *plan.Plan) { p.Shards = p.Shards[:len(p.Shards)-1] }},
		{7, "shard twice", func(p *plan.Plan) { p.Shards = slices.Insert(p.Shards, 1, p.Shards[0]) }},
		{7, "empty shard", func(p *plan.Plan) { p.Shards[0].Hi = p.Shards[0].Lo }},
		{7, "foreign layer", func(p *plan.Plan) { p.Shards[0].Layer = 99 }},
		{7, "over the end", func(p *plan.Plan) { p.Shards[len(p.Shards)-1].Hi += kernel.Block }},
		{7, "negative", func(p *plan.Plan) { p.Shards[0].Lo = -kernel.Block }},
		{8, "inside a block", func(p *plan.Plan) { p.Shards[0].Hi--; p.Shards[1].Lo-- }},
		{9, "foreign owner", func(p *plan.Plan) { p.Shards[0].Owner = 9 }},
		{10, "own mirror", func(p *plan.Plan) { p.Shards[0].Mirrors[0] = p.Shards[0].Owner }},
		{10, "foreign mirror", func(p *plan.Plan) { p.Shards[0].Mirrors[0] = 9 }},
		{10, "mirror twice", func(p *plan.Plan) {
			p.Mirrors, p.Shards[0].Mirrors = 2, slices.Repeat(p.Shards[0].Mirrors, 2)
		}},
		{10, "too many mirrors", func(p *plan.Plan) { p.Mirrors = 0 }},
		{11, "mirror on the owner's host", func(p *plan.Plan) { p.Shards[0].Mirrors[0] = p.Shards[0].Owner ^ 1 }},
		{11, "no mirror", func(p *plan.Plan) { p.Shards[0].Mirrors = nil }},
		{12, "too few buffers", func(p *plan.Plan) { p.Buffers = 0 }},
		{12, "scattered", func(p *plan.Plan) {
			p.Route[0][0], p.Route[0][7] = p.Route[0][7], p.Route[0][0]
		}},
		{13, "settled at a border", func(p *plan.Plan) { p.Settled = []graph.Pair{{Stage: 0, Micro: 0}} }},
		{13, "settled out of range", func(p *plan.Plan) { p.InStep, p.Settled = true, []graph.Pair{{Stage: 2, Micro: 0}} }},
		{13, "settled twice", func(p *plan.Plan) {
			p.InStep, p.Settled = true, []graph.Pair{{Stage: 1, Micro: 0}, {Stage: 1, Micro: 0}}
		}},
		{13, "first at a border", func(p *plan.Plan) { p.First = []graph.Pair{{Stage: 0, Micro: 0}} }},
		{13, "first out of range", func(p *plan.Plan) { p.InStep, p.First = true, []graph.Pair{{Stage: 0, Micro: 99}} }},
		{13, "first and settled", func(p *plan.Plan) {
			p.InStep, p.Settled, p.First = true, []graph.Pair{{Stage: 1, Micro: 0}}, []graph.Pair{{Stage: 1, Micro: 0}}
		}},
		{15, "same version", func(p *plan.Plan) { p.Version.N-- }},
		{15, "older generation", func(p *plan.Plan) { p.Version = id.Version{Generation: 0, N: 9} }},
		{15, "earlier step", func(p *plan.Plan) { p.FromStep = 0 }},
		{16, "other micro-batches", func(p *plan.Plan) { p.Route[0], p.Route[1] = p.Route[0][:4], p.Route[1][:4] }},
		{17, "other layers", func(p *plan.Plan) { p.InStep, p.Stages[0].Hi, p.Stages[1].Lo = true, 1, 1 }},
		{17, "other borders", func(p *plan.Plan) { p.InStep = true; p.Shards[0].Hi -= kernel.Block; p.Shards[1].Lo -= kernel.Block }},
		{17, "new incarnation", func(p *plan.Plan) { p.InStep = true; p.Workers[0].Incarnation++ }},
		{18, "owner lives", func(p *plan.Plan) {
			p.InStep, p.Shards[0].Owner, p.Shards[0].Mirrors = true, p.Shards[0].Mirrors[0], nil
		}},
		{18, "no mirror before", func(p *plan.Plan) {
			p.InStep, p.Workers, p.Shards[0].Owner, p.Shards[0].Mirrors = true, p.Workers[1:], 1, nil
		}},
		{18, "new mirror", func(p *plan.Plan) { p.InStep = true; p.Shards[0].Mirrors[0] ^= 1 }},
		{14, "degraded with all mirrors", func(p *plan.Plan) { p.Degraded = true }},
		{14, "degraded in a step", func(p *plan.Plan) { p.InStep, p.Degraded, p.Shards[0].Mirrors = true, true, nil }},
		{19, "more mirrors", func(p *plan.Plan) { p.Mirrors++ }},
	} {
		p := plantest.Copied(t, good)
		p.Version.N++
		if err := errors.Join(p.Validate(layers), plantest.ValidateAfter(&p, &good)); err != nil {
			t.Fatalf("the plan is not good to begin with: %v", err)
		}
		c.spoil(&p)
		err := p.Validate(layers)
		if c.number >= 15 {
			err = plantest.ValidateAfter(&p, &good)
		}
		invalid := new(plan.InvalidError)
		if !errors.As(err, &invalid) || !invalid.Has(c.number) {
			t.Errorf("[%d] %s: %v", c.number, c.what, err)
		}
		seen[c.number] = true
	}
	for n := 1; n <= 19; n++ {
		if !seen[n] {
			t.Errorf("property %d is not tested", n)
		}
	}
}

func TestAllFaultsTogether(t *testing.T) {
	layers := plantest.Model(4)
	p := plannertest.First(t, plantest.Workers(4, 2), plan.Profile{Layers: layers}, 2, 8, 1)
	p.FromStep, p.Limits[0].Forwards, p.Shards[0].Owner = 0, 0, 77
	err := p.Validate(layers)
	for _, want := range []string{"plan 1.1 is invalid: [1] ", "; [6] ", "; [9] "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	for range 200 {
		p.Settled = append(p.Settled, graph.Pair{Stage: 99})
	}
	if err := p.Validate(layers); !strings.HasSuffix(err.Error(), " more") || len(err.Error()) > 10_000 {
		t.Errorf("an endless error of %d bytes", len(err.Error()))
	}
}

// FuzzPlan: whatever comes from outside, reading and checking it ends.
func FuzzPlan(f *testing.F) {
	layers := plantest.Model(4)
	for _, stages := range []int{1, 2, 3} {
		p := plannertest.First(f, plantest.Workers(4, 2), plan.Profile{Layers: layers}, stages, 4, 1)
		b, err := json.Marshal(&p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"stages":[{"lo":0,"hi":9223372036854775807,"workers":[1]}],"route":[[]],"shards":[{"layer":-1}],"in_step":true,"settled":[{"stage":-1,"micro":-5}]}`))
	f.Add([]byte(`{"stages":[{},{}],"route":[[1],[2],[3]],"workers":[{"id":-1},{"id":-1}],"shards":[{"lo":-9,"hi":-3}]}`))
	old := plannertest.First(f, plantest.Workers(4, 2), plan.Profile{Layers: layers}, 2, 4, 1)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := plan.Parse(b)
		if err != nil {
			return
		}
		valid := p.Validate(layers) == nil
		after := plantest.ValidateAfter(&p, &old)
		_ = p.String()
		if valid {
			if _, err := simulate.Run(&p, plan.Profile{Layers: layers}); err != nil {
				t.Errorf("a valid plan cannot be simulated: %v\n%v", err, &p)
			}
			plantest.Diff(&old, &p)
			if after == nil && p.InStep && len(p.Workers) > len(old.Workers) {
				t.Errorf("an in-step plan brought workers")
			}
		}
	})
}

// Workers of a host are counted in the order of their IDs.
func TestOnHost(t *testing.T) {
	p := plan.Plan{Workers: []plan.Worker{{ID: 0, Host: "a"}, {ID: 2, Host: "b"}, {ID: 3, Host: "a"}, {ID: 7, Host: "a"}}}
	for id, want := range map[id.WorkerID][2]int{0: {0, 3}, 2: {0, 1}, 3: {1, 3}, 7: {2, 3}} {
		if i, n := p.OnHost(id); [2]int{i, n} != want {
			t.Errorf("worker %d is number %d of %d, want %v", id, i, n, want)
		}
	}
}

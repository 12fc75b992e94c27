package planner_test

import (
	"errors"
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
)

func owned(p *plan.Plan) (owned, mirrored map[id.WorkerID]int) {
	owned, mirrored = map[id.WorkerID]int{}, map[id.WorkerID]int{}
	for _, s := range p.Shards {
		owned[s.Owner] += s.Hi - s.Lo
		for _, m := range s.Mirrors {
			mirrored[m] += s.Hi - s.Lo
		}
	}
	return owned, mirrored
}

// TestLeaveNeedsNothing: mirrors take over at once.
func TestLeaveNeedsNothing(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(8)}
	old := plannertest.First(t, plantest.Workers(8, 2), prof, 2, 16, 1)
	v := plan.View{Workers: plantest.Workers(8, 2), Leaving: []id.WorkerID{5}, Step: 9}
	p, reason := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Leave})
	if want := planner.Reason("worker 5 leaves: 4 shards promoted, 0 moved, mirrors are missing"); reason != want {
		t.Errorf("reason %q, want %q", reason, want)
	}
	if state := plan.Needs(&old, &p, v); len(state) > 0 {
		t.Errorf("it needs %v", state)
	}
	if !p.Degraded || p.InStep || p.FromStep != 10 || p.Protected() || len(p.Workers) != 7 {
		t.Errorf("not the plan without worker 5:\n%v", &p)
	}
	for s := range p.Stages {
		for w, n := range plan.NodeCounts(p.Route[s]) {
			if n > 4 {
				t.Errorf("worker %d has %d sums:\n%v", w, n, &p)
			}
		}
	}
	// Then the mirrors are restored; everything else stays.
	v.Workers, v.Leaving = p.Workers, nil
	q, reason := plannertest.After(t, &p, v, prof, planner.Event{Kind: planner.Protect})
	if want := planner.Reason("mirrors restored: 8 mirrors added, every shard has 1 mirror"); reason != want {
		t.Errorf("reason %q, want %q", reason, want)
	}
	if state := plan.Needs(&p, &q, v); len(state) != 8 || !q.Protected() || q.Degraded {
		t.Errorf("it needs %v\n%v", state, &q)
	}
	for i, s := range q.Shards {
		if was := p.Shards[i]; s.Owner != was.Owner || len(was.Mirrors) > 0 && !slices.Equal(s.Mirrors, was.Mirrors) {
			t.Errorf("shard %+v becomes %+v", was, s)
		}
	}
}

// TestLeaveWithoutMirrors: what only leaving workers have is moved first.
func TestLeaveWithoutMirrors(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4)}
	old := plannertest.First(t, plantest.Workers(4, 2), prof, 2, 8, 0)
	v := plan.View{Workers: plantest.Workers(4, 2), Leaving: []id.WorkerID{0, 1}, Step: 2} // all of stage 0
	p, reason := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Leave})
	if want := planner.Reason("workers 0, 1 leave: 0 shards promoted, 4 moved"); reason != want {
		t.Errorf("reason %q, want %q", reason, want)
	}
	state := plan.Needs(&old, &p, v)
	if len(state) != 4 {
		t.Errorf("it needs %v\n%v", state, &p)
	}
	for _, tr := range state {
		if tr.From > 1 || tr.To < 2 {
			t.Errorf("transfer %+v", tr)
		}
	}
	if got := ownedBy(&p); math.Abs(float64(got[2]-got[3])) > 2*kernel.Block {
		t.Errorf("owners %v", got)
	}
	if _, _, err := planner.Next(old, plan.View{Workers: plantest.Workers(4, 2), Leaving: []id.WorkerID{0, 1, 2, 3}}, prof, planner.Event{Kind: planner.Leave}); !errors.Is(err, planner.ErrNoWorkers) {
		t.Errorf("everybody left: %v", err)
	}
	if _, _, err := planner.Next(old, plan.View{Workers: plantest.Workers(4, 2), Leaving: []id.WorkerID{7}}, prof, planner.Event{Kind: planner.Leave}); err == nil {
		t.Error("no worker left, and a plan was made")
	}
	if _, _, err := planner.Next(old, plan.View{Workers: plantest.Workers(2, 2), Leaving: []id.WorkerID{0}}, prof, planner.Event{Kind: planner.Leave}); !errors.As(err, new(*planner.LostError)) {
		t.Errorf("shards without a holder: %v", err)
	}
}

func ownedBy(p *plan.Plan) map[id.WorkerID]int {
	o, _ := owned(p)
	return o
}

// TestTooFewForMirrors: the reason says that K mirrors cannot be.
func TestTooFewForMirrors(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4)}
	old := plannertest.First(t, plantest.Workers(3, 1), prof, 1, 8, 2)
	p, _ := plannertest.After(t, &old, plan.View{Workers: plantest.Workers(2, 1), Step: 3}, prof, planner.Event{Kind: planner.Lost})
	q, reason := plannertest.After(t, &p, plan.View{Workers: plantest.Workers(2, 1), Step: 4}, prof, planner.Event{Kind: planner.Protect})
	if q.Protected() || !strings.HasSuffix(string(reason), "only 1 of 2 mirrors per shard possible with 2 workers") {
		t.Errorf("%q\n%v", reason, &q)
	}
}

// TestJoinIsFair: new workers own and mirror their share, no worker owns more than
// before, and not much more is moved than that share.
func TestJoinIsFair(t *testing.T) {
	for _, later := range []bool{false, true} {
		joinIsFair(t, later)
	}
}

// joinIsFair has the new workers get their shares as they join, or later.
func joinIsFair(t *testing.T, later bool) {
	for _, c := range []struct{ workers, perHost, joins, stages, mirrors int }{
		{1, 1, 1, 1, 1}, {2, 1, 1, 1, 1}, {3, 2, 1, 1, 1}, {4, 6, 2, 2, 1}, {8, 2, 1, 2, 1}, {8, 4, 4, 2, 2}, {16, 4, 1, 1, 1}, {32, 8, 8, 4, 1},
	} {
		prof := plan.Profile{Layers: plantest.Model(12)}
		old := plannertest.First(t, plantest.Workers(c.workers, c.perHost), prof, c.stages, 64, c.mirrors)
		v := plan.View{Workers: plantest.Workers(c.workers+c.joins, c.perHost), Step: 4}
		p, reason := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Join, Later: later})
		if later {
			joined := p
			if lacks := plan.Needs(&old, &joined, v); len(lacks) > 0 {
				t.Errorf("%+v: %v is moved before workers join", c, lacks)
			}
			if p, _ = plannertest.After(t, &joined, v, prof, planner.Event{Kind: planner.Spread}); !reflect.DeepEqual(p.Stages, joined.Stages) {
				t.Errorf("%+v: stages %v become %v", c, joined.Stages, p.Stages)
			}
			if _, _, err := planner.Next(p, v, prof, planner.Event{Kind: planner.Spread}); !errors.Is(err, planner.ErrNoGain) {
				t.Errorf("%+v: once more: %v", c, err)
			}
		}
		if !strings.Contains(string(reason), " joins: into stage 0, ") && !strings.Contains(string(reason), " join: into stage ") {
			t.Errorf("reason %q", reason)
		}
		had, _ := owned(&old)
		owns, mirrors := owned(&p)
		params := 0
		for _, l := range prof.Layers {
			params += l.Size()
		}
		var most, moved int
		for _, w := range p.Workers {
			stages := p.StagesOf(w.ID)
			if len(stages) != 1 {
				t.Fatalf("worker %d serves %v", w.ID, stages)
			}
			if int(w.ID) < c.workers {
				if owns[w.ID] > had[w.ID] {
					t.Errorf("%+v: worker %d owned %d and owns %d", c, w.ID, had[w.ID], owns[w.ID])
				}
				continue
			}
			st := p.Stages[stages[0]]
			share := (st.Hi - st.Lo) * prof.Layers[0].Size() / len(st.Workers)
			if off := math.Abs(float64(owns[w.ID] - share)); off > kernel.Block {
				t.Errorf("%+v: worker %d owns %d, its share is %d", c, w.ID, owns[w.ID], share)
			}
			mirrored := min(c.mirrors, len(p.Workers)-1) * params / len(p.Workers)
			if off := math.Abs(float64(mirrors[w.ID]-mirrored)) / float64(mirrored); off > 0.35 {
				t.Errorf("%+v: worker %d mirrors %d, its share is %d\n%v", c, w.ID, mirrors[w.ID], mirrored, &p)
			}
			most += owns[w.ID] + mirrors[w.ID]
		}
		for _, tr := range plan.Needs(&old, &p, v) {
			moved += tr.Hi - tr.Lo
		}
		if moved > most+most/10 {
			t.Errorf("%+v: %d parameters are moved, and the new workers have %d", c, moved, most)
		}
		if len(p.Shards) > len(old.Shards)+2*8*c.joins+len(prof.Layers) {
			t.Errorf("%+v: %d shards become %d", c, len(old.Shards), len(p.Shards))
		}
	}
}

// TestRespawn: a worker dies, its stage falls to another one, a new life of it
// joins; then everything is as it was, but for names.
func TestRespawn(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4)}
	ws := plantest.Workers(2, 1)
	old := plannertest.First(t, ws, prof, 2, 8, 1)
	p, _ := plannertest.After(t, &old, plan.View{Workers: ws[:1], Step: 3}, prof, planner.Event{Kind: planner.Lost})
	v := plan.View{Workers: []plan.Worker{ws[0], {ID: 1, Incarnation: 1, Host: "B"}}, Step: 4}
	q, reason := plannertest.After(t, &p, v, prof, planner.Event{Kind: planner.Join})
	if want := planner.Reason("worker 1 joins: into stage 0, 200600 of 401200 parameters moved, every shard has 1 mirror"); reason != want {
		t.Errorf("reason %q, want %q", reason, want)
	}
	if got := [][]id.WorkerID{q.Stages[0].Workers, q.Stages[1].Workers}; !slices.Equal(got[0], []id.WorkerID{1}) || !slices.Equal(got[1], []id.WorkerID{0}) {
		t.Errorf("stages %v", got)
	}
	if !q.Protected() {
		t.Errorf("not protected:\n%v", &q)
	}
	if d := plantest.Diff(&p, &q); !slices.Equal(d.Joined, []id.WorkerID{1}) || len(d.Left) > 0 {
		t.Errorf("diff %+v", d)
	}
	if _, _, err := planner.Next(q, v, prof, planner.Event{Kind: planner.Join}); err == nil {
		t.Error("no worker joined, and a plan was made")
	}
}

// TestLossBeforeThePlanIsLive: what is said of an earlier step does not count.
func TestLossBeforeThePlanIsLive(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4)}
	old := plannertest.First(t, plantest.Workers(4, 1), prof, 2, 8, 1)
	old.FromStep = 9
	v := plan.View{Workers: plantest.Workers(3, 1), Step: 8, Settled: []graph.Pair{{Stage: 0, Micro: 0}, {Stage: 1, Micro: 7}}}
	for i := range old.Shards {
		v.Complete = append(v.Complete, plan.Complete{Shard: i, Worker: 0})
	}
	p, _ := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Lost, After: id.Version{Generation: 1, N: 6}})
	if p.FromStep != 9 || len(p.Settled) > 0 || p.Version != (id.Version{Generation: 1, N: 7}) {
		t.Errorf("settled %v:\n%v", p.Settled, &p)
	}
}

// TestHolderOfTheGradientIsPromoted, not the first mirror.
func TestHolderOfTheGradientIsPromoted(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(4)}
	old := plannertest.First(t, plantest.Workers(4, 1), prof, 1, 8, 3)
	v := plan.View{Workers: plantest.Workers(4, 1)[1:], Step: 2}
	for i := range old.Shards {
		v.Complete = append(v.Complete, plan.Complete{Shard: i, Worker: 3})
	}
	p, _ := plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Lost})
	for i, s := range old.Shards {
		if s.Owner == 0 && p.Shards[i].Owner != 3 {
			t.Errorf("shard %d goes to worker %d", i, p.Shards[i].Owner)
		}
	}
	// Without it the shards are spread, and no leaving worker is chosen.
	v.Complete, v.Leaving = nil, []id.WorkerID{2}
	p, _ = plannertest.After(t, &old, v, prof, planner.Event{Kind: planner.Lost})
	owns, had := ownedBy(&p), ownedBy(&old)
	if owns[2] != had[2] || owns[1] == had[1] || owns[3] == had[3] {
		t.Errorf("owners %v, before %v", owns, had)
	}
}

// TestTakenOverStage: the dataflow makes up for a worker in two stages.
func TestTakenOverStage(t *testing.T) {
	prof := plan.Profile{Layers: plantest.Model(3)}
	for i := range prof.Layers {
		prof.Layers[i].Forward = time.Duration(i+1) * time.Millisecond
	}
	ws := plantest.Workers(3, 1)
	old := plannertest.First(t, ws, prof, 2, 12, 1)
	if len(old.Stages[0].Workers) != 1 {
		t.Fatalf("stage 0 has more workers than one:\n%v", &old)
	}
	p, _ := plannertest.After(t, &old, plan.View{Workers: ws[1:], Step: 2}, prof, planner.Event{Kind: planner.Lost})
	q, _ := plannertest.After(t, &p, plan.View{Workers: ws[1:], Step: 3}, prof, planner.Event{Kind: planner.Protect})
	load := map[id.WorkerID]float64{}
	for s, c := range simulate.StageCosts(&prof, q.Stages) {
		for _, w := range q.Route[s] {
			load[w] += c.Work()
		}
	}
	if a, b := load[1], load[2]; a > 1.15*b || b > 1.15*a {
		t.Errorf("loads %v:\n%v", load, &q)
	}
}

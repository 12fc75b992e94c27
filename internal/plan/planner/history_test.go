package planner_test

import (
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/plannertest"
	"github.com/soliton-train/soliton/internal/plan/plantest"
	"github.com/soliton-train/soliton/internal/plan/simulate"
	"pgregory.net/rapid"
)

// history follows a job from plan to plan, and knows which worker has which
// state, block by block.
type history struct {
	prof  plan.Profile
	plan  plan.Plan
	step  int
	view  plan.View           // Workers are true at any time
	state map[piece]bool      // parameters and moments
	lives map[id.WorkerID]int // last incarnation
}

type piece struct {
	worker id.WorkerID
	layer  int
	at     int
}

func newHistory(t plantest.Fataler, w []plan.Worker, prof plan.Profile, stages, micros, mirrors int) *history {
	h := &history{prof: prof, plan: plannertest.First(t, w, prof, stages, micros, mirrors), step: 1, view: plan.View{Workers: w}, lives: map[id.WorkerID]int{}}
	h.settle()
	return h
}

// settle gives everyone what the plan says, and takes away what it does not.
func (h *history) settle() {
	h.state = map[piece]bool{}
	for _, s := range h.plan.Shards {
		for _, w := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			h.add(id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}, w)
		}
	}
}

// add calls the blocks of a range a worker's.
func (h *history) add(r id.Range, w id.WorkerID) {
	for _, at := range h.blocks(r) {
		h.state[piece{w, r.Layer, at}] = true
	}
}

func (h *history) has(r id.Range, w id.WorkerID) bool {
	return !slices.ContainsFunc(h.blocks(r), func(at int) bool { return !h.state[piece{w, r.Layer, at}] })
}

// blocks returns where the blocks of a range begin.
func (h *history) blocks(r id.Range) (at []int) {
	begin := 0
	for _, n := range h.prof.Layers[r.Layer].Tensors {
		for x := 0; x < n; x += kernel.Block {
			if r.Lo <= begin+x && begin+x < r.Hi {
				at = append(at, begin+x)
			}
		}
		begin += n
	}
	return at
}

// next makes a plan and checks all that holds for any.
func (h *history) next(t plantest.Fataler, e planner.Event) (plan.Plan, error) {
	t.Helper()
	h.view.Step = h.step
	p, reason, err := planner.Next(h.plan, h.view, h.prof, e)
	if err != nil {
		return p, err
	}
	if reason == "" || strings.Contains(string(reason), "\n") {
		t.Fatalf("reason %q", reason)
	}
	if err := errors.Join(p.Validate(h.prof.Layers), plantest.ValidateAfter(&p, &h.plan)); err != nil {
		t.Fatalf("%v\nbefore:\n%vafter:\n%v", err, &h.plan, &p)
	}
	v := h.view
	v.Workers = slices.Clone(v.Workers)
	slices.Reverse(v.Workers)
	if q, _, err := planner.Next(h.plan, v, h.prof, e); err != nil || !reflect.DeepEqual(p, q) {
		t.Fatalf("two plans from the same view (%v):\n%v%v", err, &p, &q)
	}
	if !slices.EqualFunc(p.Stages, h.plan.Stages, func(a, b plan.Stage) bool { return a.Lo == b.Lo && a.Hi == b.Hi }) {
		t.Fatalf("borders of layers moved:\n%v%v", &h.plan, &p)
	}
	if _, err := simulate.Run(&p, h.prof); err != nil {
		t.Fatalf("%v\n%v", err, &p)
	}
	return p, nil
}

// fill does what a plan needs, so that it can go live.
func (h *history) fill(t plantest.Fataler, p *plan.Plan) {
	t.Helper()
	lives := func(id id.WorkerID) bool {
		return slices.ContainsFunc(h.view.Workers, func(w plan.Worker) bool { return w.ID == id })
	}
	for _, tr := range plan.Needs(&h.plan, p, h.view) {
		if !lives(tr.From) || !h.has(tr.Range, tr.From) || !lives(tr.To) || tr.From == tr.To || tr.Lo >= tr.Hi {
			t.Fatalf("%+v is impossible\n%v%v", tr, &h.plan, p)
		}
		if h.has(tr.Range, tr.To) {
			t.Fatalf("%+v is not needed\n%v%v", tr, &h.plan, p)
		}
		h.add(tr.Range, tr.To)
	}
}

// live lets a plan go live: everyone has what it says.
func (h *history) live(t plantest.Fataler, p plan.Plan) {
	t.Helper()
	for _, s := range p.Shards {
		for _, w := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			if !h.has(id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}, w) {
				t.Fatalf("worker %d does not have %+v\n%v%v", w, s, &h.plan, &p)
			}
		}
	}
	h.plan = p
	h.settle()
}

// lose takes living workers away.
func (h *history) lose(ids ...id.WorkerID) {
	gone := func(id id.WorkerID) bool { return slices.Contains(ids, id) }
	h.view.Workers = slices.DeleteFunc(slices.Clone(h.view.Workers), func(w plan.Worker) bool { return gone(w.ID) })
	h.view.Leaving = slices.DeleteFunc(slices.Clone(h.view.Leaving), gone)
	maps.DeleteFunc(h.state, func(x piece, _ bool) bool { return gone(x.worker) })
}

// enter brings a worker.
func (h *history) enter(id id.WorkerID, host string) {
	if _, ok := h.plan.Worker(id); ok {
		h.lives[id]++
	}
	h.view.Workers = append(slices.Clone(h.view.Workers), plan.Worker{ID: id, Incarnation: h.lives[id], Host: host})
}

// TestHistories plays random histories of losses, leaves, joins and mirrors
// made again, with transfers that a loss interrupts.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := rapid.IntRange(1, 6).Draw(t, "layers")
		n := rapid.IntRange(1, 8).Draw(t, "workers")
		stages := rapid.IntRange(1, min(4, layers, n)).Draw(t, "stages")
		perHost := rapid.IntRange(1, 4).Draw(t, "per host")
		prof := plantest.AnyProfile(t, layers, 12)
		h := newHistory(t, plantest.Workers(n, perHost), prof, stages, rapid.IntRange(1, 16).Draw(t, "micro-batches"), rapid.IntRange(0, 3).Draw(t, "mirrors"))
		some := func(what string, least int) (ids []id.WorkerID) {
			for _, w := range h.view.Workers {
				if rapid.IntRange(0, 3).Draw(t, what) == 0 {
					ids = append(ids, w.ID)
				}
			}
			if len(ids) < least {
				ids = append(ids, rapid.SampledFrom(h.view.Workers).Draw(t, what).ID)
			}
			return ids
		}
		lost := func(ids []id.WorkerID) (goesOn bool) {
			h.lose(ids...)
			if !slices.ContainsFunc(h.plan.Workers, func(w plan.Worker) bool { return slices.Contains(ids, w.ID) }) {
				return len(h.view.Workers) > 0
			}
			p, err := h.next(t, planner.Event{Kind: planner.Lost})
			none := new(planner.LostError)
			if errors.Is(err, planner.ErrNoWorkers) || errors.As(err, &none) {
				return false
			}
			if err != nil {
				t.Fatalf("%v", err)
			}
			h.live(t, p)
			return true
		}
		for range rapid.IntRange(1, 6).Draw(t, "events") {
			h.step++
			kind := rapid.SampledFrom([]planner.EventKind{planner.Lost, planner.Leave, planner.Protect, planner.Join, planner.Spread}).Draw(t, "event")
			later := kind == planner.Join && rapid.Bool().Draw(t, "later")
			switch kind {
			case planner.Lost:
				if !lost(some("lost", 1)) {
					return
				}
				continue
			case planner.Leave:
				h.view.Leaving = some("leaves", 1)
			case planner.Join:
				for range rapid.IntRange(1, 3).Draw(t, "joins") {
					id := id.WorkerID(0)
					for slices.ContainsFunc(h.view.Workers, func(w plan.Worker) bool { return w.ID == id }) {
						id++
					}
					h.enter(id, rapid.SampledFrom([]string{"A", "B", "C"}).Draw(t, "host"))
				}
			}
			var p plan.Plan
			for round := range rapid.IntRange(1, 3).Draw(t, "rounds") {
				var err error
				before := p
				p, err = h.next(t, planner.Event{Kind: kind, After: p.Version, Later: later})
				if errors.Is(err, planner.ErrNoGain) && kind == planner.Spread {
					break // no worker lacks a share
				}
				if errors.Is(err, planner.ErrNoWorkers) {
					if kind != planner.Leave || len(h.view.Leaving) < len(h.plan.Workers) {
						t.Fatalf("%v", err)
					}
					return
				}
				if err != nil {
					t.Fatalf("%v", err)
				}
				if round > 0 && p.Version.Compare(before.Version) <= 0 {
					t.Fatalf("version %v after %v", p.Version, before.Version)
				}
				if n := len(p.Workers); kind != planner.Leave && !later && (p.Degraded || p.Protected() != (n > p.Mirrors)) {
					t.Fatalf("not protected:\n%v", &p)
				}
				if kind != planner.Leave && !later {
					holdersApart(t, &p)
				}
				if rapid.IntRange(0, 3).Draw(t, "a loss meanwhile") == 0 {
					if !lost(some("lost", 1)) {
						return
					}
					if kind == planner.Leave && len(h.view.Leaving) == 0 || kind == planner.Join && len(h.view.Workers) == len(h.plan.Workers) {
						kind, h.view.Leaving, later = planner.Protect, nil, false
					}
					if kind == planner.Spread {
						kind = planner.Protect
					}
					if p, err = h.next(t, planner.Event{Kind: kind, After: p.Version, Later: later}); err != nil {
						if errors.Is(err, planner.ErrNoWorkers) {
							return
						}
						t.Fatalf("%v", err)
					}
				}
			}
			if p.Workers == nil {
				continue
			}
			h.fill(t, &p)
			h.live(t, p)
			h.lose(h.view.Leaving...)
			// New workers wait for a plan of their own.
			h.view.Workers = h.plan.Workers
		}
	})
}

package engine

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/planner/layouttest"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// comb is a stage of layers with many parameters, y = x + mean of w, whose gradients depend on
// all that they should: dw[i] = dy·i/n.
type comb struct {
	KeepsNothing
	lo, hi int
	layers []Layer
}

func (c *comb) Forward(m Micro, in tensor.Tensor) (Pass, tensor.Tensor, error) {
	out := tensor.New(m.Samples, 1)
	copy(out.F, in.F)
	for l := c.lo; l < c.hi; l++ {
		if err := m.Ready(l); err != nil {
			return nil, tensor.Tensor{}, err
		}
		sum := float32(0)
		for _, w := range c.layers[l].Params {
			sum += w
		}
		for i := range out.F {
			out.F[i] += sum / combParams
		}
	}
	return out, out, nil
}

func (c *comb) Loss(p Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	out := p.(tensor.Tensor)
	dout = tensor.New(out.Shape...)
	for i, y := range out.F {
		d := y - target.F[i]
		dout.F[i] = d
		sum += float64(float64(d)*float64(d)) / 2
	}
	return sum, int64(len(out.F)), dout
}

func (c *comb) Backward(_ Pass, dout tensor.Tensor, grads Gradients) tensor.Tensor {
	for l := c.hi - 1; l >= c.lo; l-- {
		g := grads.Buffer(l)
		clear(g)
		for _, d := range dout.F {
			for i := range g {
				g[i] += float32(d * (float32(i+l) / float32(len(g))))
			}
		}
		grads.Done(l, g)
	}
	return dout
}

func (*comb) Drop(Pass)        {}
func (*comb) Suspect(Pass) int { return -1 }
func (c *comb) Shapes(p Pass) (all [][]int) {
	for range c.hi - c.lo - 1 {
		all = append(all, p.(tensor.Tensor).Shape)
	}
	return all
}

// combs is a run of several workers in stages.
type combs struct {
	t       *testing.T
	first   plan.Plan
	prof    plan.Profile
	peers   []control.Peer
	engines []*Engine
	level   chan id.WorkerID
	applied chan id.Version
	repairs atomic.Int32

	contiguous bool
	slow       int // the move in which the first half of the layers is slow
}

const (
	combLayers = 5
	combMicros = 12
	combParams = 3*kernel.Block + 100
)

func startCombs(t *testing.T, workers, stages, mirrors int, contiguous bool) *combs {
	t.Helper()
	c := &combs{t: t, contiguous: contiguous, level: make(chan id.WorkerID, workers), applied: make(chan id.Version, 8*workers)}
	for range combLayers {
		c.prof.Layers = append(c.prof.Layers, plan.Layer{Tensors: []int{combParams}})
	}
	mem := transport.NewMem()
	var v plan.View
	var networks []*comm.Endpoint
	for i := range workers {
		network, err := comm.Listen(comm.Config{Self: id.Session{Worker: id.WorkerID(i)}, Transport: mem})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { network.Close() })
		networks = append(networks, network)
		w := plan.Worker{ID: id.WorkerID(i)}
		v.Workers = append(v.Workers, w)
		c.peers = append(c.peers, control.Peer{Worker: w, Addr: network.Addr()})
	}
	var err error
	if c.first, _, err = planner.Next(plan.Plan{}, v, c.prof, planner.Event{Stages: stages, Micros: combMicros, Mirrors: mirrors}); err != nil {
		t.Fatal(err)
	}
	if contiguous {
		layouttest.Contiguous(&c.first, nil, c.prof.Layers)
	}
	if c.first.Stages[0].Hi <= combLayers/2 {
		c.slow = 1
	}
	for i := range workers {
		layers := make([]Layer, combLayers)
		for l := range layers {
			layers[l] = Layer{Name: fmt.Sprint(l), Tensors: []zero.Tensor{{Size: combParams}}}
		}
		pool := kernel.NewPool(1 + i%3)
		t.Cleanup(pool.Close)
		e, err := New(Config{
			Self: v.Workers[i], Network: networks[i], Groups: make(map[uint16]*group.Group), First: control.Order{Plan: c.first, Peers: c.peers},
			Stage: func(lo, hi int) Stage {
				for l := lo; l < hi; l++ {
					if layers[l].Params == nil {
						layers[l].Params = make([]float32, combParams)
					}
				}
				return &comb{lo: lo, hi: hi, layers: layers}
			},
			Layers: layers,
			Begin: func(r id.Range, params []float32, _ [][]float32) error {
				for i := range params {
					params[i] = float32((r.Layer*7+r.Lo+i)%13) / 13
				}
				return nil
			},
			Input: tensor.Spec{Shape: []int{1}}, Target: tensor.Spec{Shape: []int{1}},
			Job:  rundir.Job{GlobalBatch: 2 * combMicros, MicroBatch: 2, ClipNorm: 1},
			Rule: adam, LR: func(step int) float64 { return 0.01 / float64(step) },
			Load: func(_ int, i uint64, in, target tensor.Tensor) error {
				in.F[0], target.F[0] = float32(i%7)-3, float32(i%5)
				return nil
			},
			Pool: pool, Passes: 1 + i%3, Yield: i%2 == 0,
			Stop: func() string { return "" },
			Tell: func(m control.Message) {
				switch m := m.(type) {
				case control.Level:
					c.level <- id.WorkerID(i)
				case control.Applied:
					c.applied <- m.Version
				case control.Repaired:
					c.repairs.Add(1)
				}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		c.engines = append(c.engines, e)
	}
	return c
}

type hashCollector struct{ hash.Hash }

func (h hashCollector) Take(_ Part, data []float32) error {
	_, err := h.Write(comm.Bytes(data))
	return err
}
func (h hashCollector) Finish() ([]byte, error) { return h.Sum(nil), nil }
func (hashCollector) Discard()                  {}

// train trains up to a step, and returns the hash of the state after it. before, if
// it is not nil, is called before every step.
func (c *combs) train(steps int, before func(worker, step int)) string {
	hashes := make([]string, len(c.engines))
	all(c.engines, func(i int, e *Engine) {
		for step := 1; step <= steps; step++ {
			if before != nil {
				before(i, step)
			}
			if _, err := e.Step(c.t.Context(), step); err != nil {
				c.t.Errorf("worker %d: %v", i, err)
				return
			}
		}
		h, _, err := e.Keep(c.t.Context(), steps, sha256.Size, func(context.Context) (Collector, error) { return hashCollector{sha256.New()}, nil })
		if err != nil {
			c.t.Errorf("worker %d: %v", i, err)
		}
		hashes[i] = fmt.Sprintf("%x", h)
	})
	return hashes[0]
}

// coming is a plan for which state is being copied.
type coming struct {
	plan  plan.Plan
	waits map[id.WorkerID]bool
}

// copy asks for what a layer's move needs. Half of the layers seems to be slow.
func (c *combs) copy(current plan.Plan, half int) (coming, error) {
	prof := plan.Profile{Layers: slices.Clone(c.prof.Layers)}
	for l := range prof.Layers {
		prof.Layers[l].Forward, prof.Layers[l].Backward = time.Millisecond, time.Millisecond
		if (l < combLayers/2) == (half == c.slow) {
			prof.Layers[l].Forward *= 3
		}
	}
	v := plan.View{Workers: current.Workers, Step: current.FromStep}
	next, _, err := planner.Next(current, v, prof, planner.Event{Kind: planner.Rebalance})
	if err != nil {
		return coming{}, err
	}
	if c.contiguous {
		layouttest.Contiguous(&next, &current, prof.Layers)
	}
	// A border of stages moves, or a worker goes to the other stage: it gets layers in both cases.
	state := plan.Needs(&current, &next, v)
	if half == 0 && len(state) == 0 {
		return coming{}, errors.New("no layer moves")
	}
	x := coming{plan: next, waits: make(map[id.WorkerID]bool)}
	for _, t := range state {
		x.waits[t.To] = true
	}
	for _, e := range c.engines {
		e.Fill(control.Fill{ID: id.Fill{Term: uint64(1 + half), N: 2000 - 1999*half}, Peers: c.peers, Transfers: state})
	}
	return x, nil
}

// goOver waits until the state is there, orders the plan, opens a gate, and waits until the plan
// is live.
func (c *combs) goOver(x coming, gate chan struct{}) error {
	for len(x.waits) > 0 {
		select {
		case w := <-c.level:
			delete(x.waits, w)
		case <-c.t.Context().Done():
			return c.t.Context().Err()
		}
	}
	for _, e := range c.engines {
		e.Order(control.Order{Plan: x.plan, Peers: c.peers})
	}
	close(gate)
	for range c.engines {
		select {
		case v := <-c.applied:
			if v != x.plan.Version {
				return fmt.Errorf("plan %v is live, want %v", v, x.plan.Version)
			}
		case <-c.t.Context().Done():
			return c.t.Context().Err()
		}
	}
	return nil
}

// A layer moves to another stage and back under training, and the bits are those of one worker
// alone: whatever the layout of the shards, and whether blocks are repaired meanwhile, so that
// gradients which were sent already do not count.
func TestMigrateSameBits(t *testing.T) {
	const steps = 24
	want := startCombs(t, 1, 1, 0, false).train(steps, nil)
	for _, x := range []struct {
		workers, mirrors   int
		contiguous, repair bool
		flip               core.Target
	}{{4, 0, false, false, 0}, {4, 0, true, false, 0}, {4, 1, false, true, core.Own}, {6, 1, true, true, core.Moment}, {6, 0, false, true, core.CopiedParams}} {
		t.Run(fmt.Sprintf("%d workers, %d mirrors, contiguous %v, repair %v", x.workers, x.mirrors, x.contiguous, x.repair), func(t *testing.T) {
			c := startCombs(t, x.workers, 2, x.mirrors, x.contiguous)
			for range c.engines {
				<-c.applied
			}
			// No worker begins with these steps before a plan has come, a copy was asked for, and
			// another plan has come.
			gates := map[int]chan struct{}{6: make(chan struct{}), 8: make(chan struct{}), 14: make(chan struct{})}
			done := make(chan error, 1)
			there, err := c.copy(c.first, 0)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				done <- func() error {
					defer cancel() // opens all gates
					if err := c.goOver(there, gates[6]); err != nil {
						return err
					}
					back, err := c.copy(there.plan, 1)
					if err != nil {
						return err
					}
					close(gates[8])
					return c.goOver(back, gates[14])
				}()
			}()
			got := c.train(steps, func(worker, step int) {
				if x.repair && worker <= 1 && step > 1 {
					c.engines[worker].Flip(x.flip)
				}
				if g := gates[step]; g != nil {
					select {
					case <-g:
					case <-ctx.Done():
					}
				}
			})
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if x.repair && c.repairs.Load() == 0 {
				t.Error("nothing was repaired")
			}
			if got != want {
				t.Errorf("the state has the hash %s, want %s", got, want)
			}
		})
	}
}

// A worker that leaves a stage and has to take it over in the next step, because the only worker
// that stayed is lost, has what came to it of the stage's parameters before, which does not come again.
func TestBackInAStage(t *testing.T) {
	const steps, lone, struck = 12, id.WorkerID(7), 7
	want := startCombs(t, 1, 1, 0, false).train(steps, nil)
	c := startCombs(t, 8, 2, 1, false)
	for range c.engines {
		<-c.applied
	}
	next := c.first
	next.Version.N++
	next.Stages = slices.Clone(next.Stages)
	next.Stages[0].Workers, next.Stages[1].Workers = []id.WorkerID{0, 1, 2, 3, 4, 5, 6}, []id.WorkerID{lone}
	next.Route = [][]id.WorkerID{next.Route[0], slices.Repeat([]id.WorkerID{lone}, combMicros)}
	next.Limits = slices.DeleteFunc(slices.Clone(next.Limits), func(l plan.Limit) bool { return l.Stage == 1 })
	for w := range lone {
		if w >= 4 {
			next.Limits = append(next.Limits, plan.Limit{Stage: 0, Worker: w, Forwards: 2})
		}
	}
	next.Limits = append(next.Limits, plan.Limit{Stage: 1, Worker: lone, Forwards: 1})
	next.Shards = slices.Clone(next.Shards)
	for i := range next.Shards {
		s := &next.Shards[i]
		switch {
		case next.StageOf(s.Layer) == 0:
		case s.Owner == 5:
			// Its new mirror goes over to the plan when all of the layer has come.
			s.Owner, s.Mirrors = lone, []id.WorkerID{4}
		case s.Owner != lone:
			s.Owner, s.Mirrors = lone, []id.WorkerID{s.Owner}
		}
	}
	if err := next.Validate(c.prof.Layers); err != nil {
		t.Fatal(err)
	}
	x := coming{plan: next, waits: make(map[id.WorkerID]bool)}
	state := plan.Needs(&c.first, &next, plan.View{Workers: c.first.Workers, Step: 1})
	for _, s := range state {
		x.waits[s.To] = true
	}
	for _, e := range c.engines {
		e.Fill(control.Fill{ID: id.Fill{Term: 1, N: 1}, Peers: c.peers, Transfers: state})
	}

	// Everybody waits for the plan before the step at whose commit it goes live. The lone worker
	// dies before it begins the next one.
	var there sync.WaitGroup
	there.Add(len(c.engines))
	ordered, dead, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- func() error {
			there.Wait()
			if err := c.goOver(x, ordered); err != nil {
				return err
			}
			<-dead
			return c.lose(next, lone, struck)
		}()
	}()
	got := c.train(steps, func(worker, step int) {
		switch {
		case step == struck-1:
			there.Done()
			<-ordered
		case step == struck && id.WorkerID(worker) == lone:
			close(dead)
			runtime.Goexit()
		}
	})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("the state has the hash %s, want %s", got, want)
	}
}

// lose closes a worker in a step, and has the others go on without it.
func (c *combs) lose(current plan.Plan, lost id.WorkerID, step int) error {
	c.engines[lost].Close()
	order := control.Order{Ballot: id.Ballot{Term: 1, Attempt: 1}, Passed: id.Point{Step: step - 1, Gate: id.Committed}}
	v := plan.View{Step: step}
	answers := make(chan struct{})
	for _, w := range current.Workers {
		if w.ID == lost {
			continue
		}
		v.Workers = append(v.Workers, w)
		order.Peers = append(order.Peers, c.peers[w.ID])
		c.engines[w.ID].Query(order.Ballot, func(r control.Report) {
			for _, s := range r.Works {
				v.Works = append(v.Works, plan.Work{Worker: w.ID, Status: s})
			}
			if order.Result = r.Result; r.Passed != order.Passed {
				c.t.Errorf("worker %d is at %v", w.ID, r.Passed)
			}
			answers <- struct{}{}
		})
		<-answers
	}
	var err error
	if order.Plan, _, err = planner.Next(current, v, c.prof, planner.Event{Kind: planner.Lost}); err != nil {
		return err
	}
	for _, w := range v.Workers {
		c.engines[w.ID].Order(order)
	}
	return nil
}

// A copy of parameters that is as it came, but not what the owner has, is sent again, and the step
// is done again: its owner, or one that was lost since, had another one when it sent it.
func TestCopyDiffers(t *testing.T) {
	const steps, wrong, struck = 8, 3, 5
	want := startCombs(t, 1, 1, 0, false).train(steps, nil)
	for _, mirrors := range []int{0, 1} {
		c := startCombs(t, 4, 1, mirrors, false)
		got := c.train(steps, func(worker, step int) {
			e := c.engines[worker]
			for altered := false; worker == wrong && step == struck && !altered; { // each look takes a turn of its loop
				e.inspect(func() {
					if !e.core.Arrived() {
						return
					}
					for _, s := range e.spans() {
						if !s.state {
							s.arrays[0][0]++
							e.guard.take(s.r, s.arrays[0])
							altered = true
							return
						}
					}
				})
			}
		})
		if got != want {
			t.Errorf("%d mirrors: the state has the hash %s, want %s", mirrors, got, want)
		}
		if n := c.repairs.Load(); n != 1 {
			t.Errorf("%d mirrors: %d repairs, want 1", mirrors, n)
		}
	}
}

// A source that was altered since the last check is not copied: the copy would be wrong for good,
// with digests of its own. What is put together from what is here keeps its digests.
func TestAlteredIsNotCopied(t *testing.T) {
	c := startCombs(t, 2, 1, 1, false)
	all(c.engines, func(i int, e *Engine) {
		if _, err := e.Step(t.Context(), 1); err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
	})
	e := c.engines[0]
	e.inspect(func() {
		var sh *shard
		for _, x := range e.inOrder() {
			if x.owner && x.Hi-x.Lo > kernel.Block {
				sh = x
				break
			}
		}
		part := id.Range{Layer: sh.Layer, Lo: sh.Lo, Hi: sh.Lo + kernel.Block}
		half, whole := core.Transfer{Fill: id.Fill{Term: 1, N: 1}, Range: part}, core.Transfer{Fill: id.Fill{Term: 1, N: 1}, Range: sh.Range}
		copies, sources := []core.Copy{{Transfer: half, Source: sh.Range}, {Transfer: whole, Source: sh.Range}}, []*shard{sh, sh}
		for _, x := range [][]float32{sh.params, sh.state.Moments[1]} {
			was := x[kernel.Block]
			x[kernel.Block] *= 2 // in the block after the part
			if bases := e.copyBases(copies, sources, 1); len(bases[half]) == 0 || bases[whole] != nil {
				t.Errorf("%d and %d numbers are copied, want some of the part and none of the whole", len(bases[half]), len(bases[whole]))
			}
			x[kernel.Block] = was
		}
		if bases := e.copyBases(copies, sources, 1); len(bases[whole]) == 0 {
			t.Error("nothing is copied of what is good")
		}
		e.copyStop.Store(true)
		if bases := e.copyBases(copies, sources, 1); len(bases) > 0 {
			t.Errorf("%d are copied after the stop", len(bases))
		}
		e.copyStop.Store(false)

		sums := slices.Clone(e.guard.of(part)[0])
		sh.params[0] *= 2
		made, err := e.assemble(part, nil)
		if err != nil || made == nil {
			t.Fatal(made, err)
		}
		e.shards[part] = made
		e.watch(false)
		if !slices.Equal(sums, e.guard.of(part)[0]) {
			t.Error("the digests of what was altered are taken again")
		}
		delete(e.shards, part)
		sh.params[0] /= 2
	})
}

// Everybody learns the shapes between all layers: another plan may have another border of stages.
func TestShapesAreToldToAll(t *testing.T) {
	c := startCombs(t, 4, 2, 1, false)
	c.train(1, nil)
	for _, e := range c.engines {
		for known := 0; known < combLayers-1; { // each look takes a turn of its loop
			e.inspect(func() {
				known = 0
				for layer := range combLayers {
					if layer > 0 && e.core.Shape(layer) != nil {
						known++
					}
				}
			})
		}
	}
}

// A worker that has left with a plan says what it knows, when the others are asked before it is released, and is
// done with what they go on with.
func TestWhoHasLeftAnswers(t *testing.T) {
	c := startCombs(t, 4, 2, 1, false)
	for range c.engines {
		<-c.applied
	}
	e, ballot := c.engines[0], id.Ballot{Term: 1, Attempt: 1}
	without := c.first
	without.Version.N++
	without.Workers = without.Workers[1:]
	e.Order(control.Order{Ballot: id.Ballot{Term: 1}, Plan: without})
	<-c.applied
	answers := make(chan control.Report, 1)
	e.Query(ballot, func(r control.Report) { answers <- r })
	if r := <-answers; r.Plan != c.first.Version {
		t.Errorf("%+v", r)
	}
	next := c.first
	next.Version.N++
	e.Order(control.Order{Ballot: ballot, Plan: next})
	if v := <-c.applied; v != next.Version {
		t.Errorf("plan %v is applied, want %v", v, next.Version)
	}
	if _, err := e.Step(t.Context(), 1); !errors.Is(err, core.ErrLeft) {
		t.Errorf("%v", err)
	}
}

// An evaluation needs no training step before it: the workers that would tell the shapes between layers may be lost.
func TestEvaluateBeforeAnyStep(t *testing.T) {
	c := startCombs(t, 4, 2, 1, false)
	losses := make([]core.Loss, len(c.engines))
	all(c.engines, func(i int, e *Engine) {
		var err error
		if losses[i], _, err = e.Evaluate(t.Context(), 0, 7, func(i int, in, target tensor.Tensor) error {
			in.F[0], target.F[0] = float32(i), 1
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
	for _, l := range losses {
		if l != losses[0] || l.Count == 0 {
			t.Errorf("the losses are %v", losses)
		}
	}
}

// Package training measures steps and their parts against peers.
package training

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
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
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/nn"
)

// bandwidth compares, turn by turn, the fast reduction of a step of the engine
// with comm's ring reduce-scatter of the same layers and shards. Endpoints of
// this process talk over loopback TCP.
func bandwidth(workers, rounds int, rec *report.Recorder) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c, err := newCluster(ctx, workers)
	if err != nil {
		return err
	}
	defer c.close()
	moved := 4 * float64(c.size) * float64(workers-1) / float64(workers) // sent and received by each worker
	fmt.Printf("\nreduction of %d parameters in %d layers between %d workers, TCP, GB/s a worker\n", c.size, len(c.layers), workers)
	rate := func(d time.Duration) float64 { return moved / 1e9 / d.Seconds() }
	var fast, inTurn, together, byTurn, byTogether []float64
	row := report.Row{
		Comparison: "reduce", Case: fmt.Sprintf("%d parameters in %d layers, TCP", c.size, len(c.layers)), Workers: workers,
		Ours: "engine, fast", Theirs: "ring, layer after layer", Unit: "GB/s a worker", Kind: report.Rate,
	}
	side := row
	side.Theirs = "ring, layers side by side"
	for i := range rounds + 2 {
		step := i + 1
		f, err := c.step(ctx, step)
		if err != nil {
			return err
		}
		t, err := c.ring(ctx, 2*step, false)
		if err != nil {
			return err
		}
		s, err := c.ring(ctx, 2*step+1, true)
		if err != nil {
			return err
		}
		if i < 2 {
			continue // warms up
		}
		fast, inTurn, together = append(fast, rate(f)), append(inTurn, rate(t)), append(together, rate(s))
		row.Add(rate(f), rate(t))
		side.Add(rate(f), rate(s))
		byTurn, byTogether = append(byTurn, t.Seconds()/f.Seconds()), append(byTogether, s.Seconds()/f.Seconds())
	}
	rec.Add(row, side)
	for _, r := range []struct {
		name string
		rate []float64
	}{{"engine, fast reduction", fast}, {"ring, layer after layer", inTurn}, {"ring, layers side by side", together}} {
		fmt.Printf("  %-26s median %.2f of %s\n", r.name, lab.Median(r.rate), lab.Fractions(r.rate))
	}
	fmt.Printf("  engine's bandwidth by the ring's, median over turns: %.3f layer after layer, %.3f side by side\n", lab.Median(byTurn), lab.Median(byTogether))
	return nil
}

// cluster is some engines and their endpoints.
type cluster struct {
	networks []*comm.Endpoint
	groups   []*group.Group // of the rings
	version  id.Version
	engines  []*engine.Engine
	layers   []engine.Layer
	size     int     // parameters of all layers
	parts    [][]int // of each layer, the borders of its shards
	buffers  [][][]float32
	pools    []*kernel.Pool
	gate     *gate
	ends     []time.Time // of each worker's reductions in a step
}

func newCluster(ctx context.Context, n int) (c *cluster, err error) {
	c = &cluster{gate: newGate(n), ends: make([]time.Time, n), version: id.Version{Generation: 1, N: 1}}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	var prof plan.Profile
	for i, l := range nn.GPT(nn.GPTConfig{}).Layers {
		layer := engine.Layer{Name: fmt.Sprint(i)}
		var tensors []int
		for _, p := range l.Params() {
			size := tensor.Size(p.Shape)
			layer.Tensors = append(layer.Tensors, zero.Tensor{Size: size})
			tensors = append(tensors, size)
		}
		c.layers = append(c.layers, layer)
		c.size += layer.Size()
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: tensors})
	}
	var view plan.View
	var peers []comm.Peer
	for i := range n {
		self := id.Session{Worker: id.WorkerID(i)}
		network, err := comm.Listen(comm.Config{Self: self, Transport: transport.TCP{}})
		if err != nil {
			return c, err
		}
		c.networks = append(c.networks, network)
		peers = append(peers, comm.Peer{Session: self, Addr: network.Addr()})
		view.Workers = append(view.Workers, plan.Worker{ID: id.WorkerID(i)})
	}
	p, _, err := planner.Next(plan.Plan{}, view, prof, planner.Event{Kind: planner.Start, Micros: n, Stages: 1})
	if err != nil {
		return c, err
	}
	first := control.Order{Plan: p}
	for i, w := range p.Workers {
		first.Peers = append(first.Peers, control.Peer{Worker: w, Addr: peers[i].Addr})
	}
	c.parts = make([][]int, len(c.layers))
	for l := range c.parts {
		c.parts[l] = make([]int, n+1)
	}
	for _, s := range p.Shards {
		for rank := int(s.Owner); rank < n; rank++ {
			c.parts[s.Layer][rank+1] = s.Hi
		}
	}
	c.groups, c.engines, c.buffers = make([]*group.Group, n), make([]*engine.Engine, n), make([][][]float32, n)
	sessions := make([]id.Session, n)
	for i := range n {
		sessions[i] = peers[i].Session
		c.pools = append(c.pools, kernel.NewPool(1))
		if err := c.networks[i].SetMembers(peers); err != nil {
			return c, err
		}
	}
	return c, Each(n, func(i int) error {
		layers := slices.Clone(c.layers)
		for l := range layers {
			layers[l].Params = make([]float32, layers[l].Size())
			c.buffers[i] = append(c.buffers[i], make([]float32, layers[l].Size()))
		}
		one := tensor.Spec{Shape: []int{1}}
		var err error
		c.engines[i], err = engine.New(engine.Config{
			Self: p.Workers[i], First: first, Network: c.networks[i], Groups: make(map[uint16]*group.Group),
			Stage:  func(int, int) engine.Stage { return &noLayers{c: c, worker: i} },
			Begin:  func(id.Range, []float32, [][]float32) error { return nil },
			Tell:   func(control.Message) {},
			Layers: layers, Input: one, Target: one, Job: rundir.Job{GlobalBatch: n, MicroBatch: 1}, Rule: zero.SGD{}, Pool: c.pools[i], Fast: true,
			Load: func(int, uint64, tensor.Tensor, tensor.Tensor) error { return nil },
			Stop: func() string { return "" },
			LR: func(int) float64 { // the commit's first question, when all reductions have ended
				c.ends[i] = time.Now()
				return 0
			},
		})
		if err != nil {
			return err
		}
		if c.groups[i], err = group.New(c.networks[i], 1000); err != nil {
			return err
		}
		_, err = c.groups[i].Edit(ctx, c.version, sessions)
		return err
	})
}

func (c *cluster) close() {
	for _, e := range c.engines {
		if e != nil {
			e.Close()
		}
	}
	for _, n := range c.networks {
		_ = n.Close() // nothing of it is needed any more
	}
	for _, p := range c.pools {
		p.Close()
	}
}

// step runs a step of all engines and returns how long its reductions took.
func (c *cluster) step(ctx context.Context, step int) (time.Duration, error) {
	err := Each(len(c.engines), func(i int) error {
		_, err := c.engines[i].Step(ctx, step)
		return err
	})
	return slices.MaxFunc(c.ends, time.Time.Compare).Sub(c.gate.opened), err
}

// ring reduces all layers with comm's ring, last layer first, and returns how
// long that took.
func (c *cluster) ring(ctx context.Context, step int, together bool) (time.Duration, error) {
	err := Each(len(c.groups), func(i int) error {
		for _, b := range c.buffers[i] { // written last by us, as gradients are
			clear(b)
		}
		c.gate.pass()
		width := 1 // layers at the same time
		if together {
			width = len(c.layers)
		}
		next := make(chan int, len(c.layers))
		for l := len(c.layers) - 1; l >= 0; l-- {
			next <- l
		}
		close(next)
		err := Each(width, func(int) error {
			for l := range next {
				call := group.Call{Version: c.version, Step: uint64(step), Tag: uint16(l), Priority: comm.Bulk, Algorithm: group.Ring}
				if err := c.groups[i].ReduceScatter(ctx, call, c.buffers[i][l], c.parts[l]); err != nil {
					return err
				}
			}
			return nil
		})
		c.ends[i] = time.Now()
		return err
	})
	return slices.MaxFunc(c.ends, time.Time.Compare).Sub(c.gate.opened), err
}

// noLayers is a stage that computes nothing and hands all gradients over at
// once, when all workers are there.
type noLayers struct {
	engine.KeepsNothing
	c      *cluster
	worker int
	out    tensor.Tensor
}

func (s *noLayers) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	for l := range s.c.layers { // so that no parameters are under way any more
		if err := m.Ready(l); err != nil {
			return nil, tensor.Tensor{}, err
		}
	}
	s.out = tensor.New(1, 1)
	return s, s.out, nil
}

func (s *noLayers) Loss(engine.Pass, tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	return 0, 1, s.out
}

func (s *noLayers) Backward(_ engine.Pass, _ tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	buffers := make([][]float32, len(s.c.layers))
	for l := range buffers {
		buffers[l] = grads.Buffer(l)
		clear(buffers[l])
	}
	s.c.gate.pass()
	for l := len(buffers) - 1; l >= 0; l-- {
		grads.Done(l, buffers[l])
	}
	return tensor.Tensor{}
}

func (s *noLayers) Drop(engine.Pass)           {}
func (s *noLayers) Suspect(engine.Pass) int    { return -1 }
func (s *noLayers) Shapes(engine.Pass) [][]int { return nil }

// Each calls f for 0 to n-1 side by side and returns an error of theirs.
func Each(n int, f func(i int) error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// gate lets goroutines pass when n of them are there, again and again.
type gate struct {
	mu     sync.Mutex
	n      int
	left   int
	open   chan struct{}
	opened time.Time
}

func newGate(n int) *gate { return &gate{n: n, left: n, open: make(chan struct{})} }

func (g *gate) pass() {
	g.mu.Lock()
	open := g.open
	if g.left--; g.left == 0 {
		g.left, g.open, g.opened = g.n, make(chan struct{}), time.Now()
		close(open)
	}
	g.mu.Unlock()
	<-open
}

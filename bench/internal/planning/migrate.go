package planning

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"hash"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/bench/internal/training"
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
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// Migrate moves a layer to the next stage and back while a job trains, over links between the
// stages that carry so many bytes per second. Three ways take turns: in the background; with
// training held while the state is copied; and in the background where shards are contiguous.
// Engines of this process talk over loopback TCP; passes are emulated, they take the time they are
// given, so that what else a step takes is that of the runtime. Round 0 is told apart: as the heap of
// the process grows, the system clears memory that is used for the first time. What the agents do, some
// milliseconds for each plan, is left out: this command asks the engines itself.
func Migrate(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("migrate", flag.ExitOnError)
	m := migration{}
	f.IntVar(&m.ranks, "ranks", 2, "workers in each of the two stages")
	f.IntVar(&m.layers, "layers", 5, "layers, an odd number")
	f.IntVar(&m.params, "params", 2<<20, "parameters of a layer")
	f.IntVar(&m.micros, "micro-batches", 4, "micro-batches of a step")
	f.DurationVar(&m.forward, "forward", 6*time.Millisecond, "time of a layer and micro-batch; backward takes twice that")
	f.Float64Var(&m.rate, "rate", 100, "MB/s from one worker to another of the other stage; 0: no limit")
	f.IntVar(&m.quiet, "quiet", 8, "undisturbed steps before each migration")
	f.IntVar(&m.steps, "steps", 18, "steps for each migration, of which some are left when it is done")
	f.IntVar(&m.mirrors, "mirrors", 0, "mirrors of each shard")
	rounds := f.Int("rounds", 4, "rounds after round 0, in each of which all three ways move a layer there and back")
	_ = f.Parse(args)
	if m.ranks < 1 || m.layers < 3 || m.layers%2 == 0 || m.micros < m.ranks || m.quiet < 3 || m.params < 1 || *rounds < 1 {
		return errors.New("give --ranks and --rounds of at least 1, an odd number of --layers from 3 on, --micro-batches for all ranks and --quiet of at least 3")
	}
	state := float64(zero.AdamW{}.Moments()+1) * 4 * float64(m.params) / 1e6
	fmt.Printf("%s, kernel path %v, %d cores; passes are emulated\n", runtime.Version(), kernel.Active(), runtime.NumCPU())
	fmt.Printf("2 stages of %d workers, %d layers of %d parameters, %d micro-batches; a layer with its optimizer state: %.1f MB; between stages %.0f MB/s a link\n",
		m.ranks, m.layers, m.params, m.micros, state, m.rate)
	// Workers are processes of their own in truth, with two of Go's processors more than threads. Without them, what is sent waits for what is computed.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2 * m.ranks * (1 + 2)))
	// Collections of garbage would stop all of them.
	defer debug.SetGCPercent(debug.SetGCPercent(400))

	ways := []way{{name: "background"}, {name: "stop and copy", holds: true}, {name: "contiguous", contiguous: true}}
	all := make(map[string][]moved)
	var early map[string][]moved // of round 0
	digest := ""
	what := fmt.Sprintf("a layer of %.1f MB, %.0f MB/s a link, %d stages", state, m.rate, 2)
	// Steps of a plan that cuts the stages elsewhere take longer or shorter with no migration at all.
	pause := report.Row{
		Comparison: "migrate", Case: what + ": what a step takes longer at most", Workers: 2 * m.ranks, Ours: "background", Theirs: "stop and copy", Unit: "ms", Kind: report.Cost, Goal: 0.1,
	}
	live := report.Row{
		Comparison: "migrate", Case: what + ": until the plan is live", Workers: 2 * m.ranks, Ours: "interleaved shards", Theirs: "contiguous shards", Unit: "ms", Kind: report.Time,
	}
	first := pause
	first.Case, first.Goal = first.Case+", in the first round of a process", 0
	for round := range *rounds + 1 {
		for i := range ways {
			w := ways[(round+i)%len(ways)]
			got, d, err := m.run(w)
			if err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			if digest != "" && d != digest {
				return fmt.Errorf("%s ended with the state %s, others with %s", w.name, d, digest)
			}
			digest = d
			for _, x := range got {
				fmt.Printf("  round %d  %-13s %s  copied in %4.0f ms, live after %4.0f ms = %.1f steps, of which the change took %.0f ms; median step %.0f ms before, %.0f under the new plan; longest %.0f ms above them, %.0f undisturbed: %s\n",
					round, w.name, x.what, x.copied, x.took, x.took/x.median, x.edit, x.median, x.after, x.pause, x.usual, lab.List(x.during))
			}
			all[w.name] = append(all[w.name], got...)
		}
		if round == 0 {
			early, all = all, make(map[string][]moved)
		}
	}
	// The migrations of a kind have the same place in the list of each way.
	for i, x := range early["background"] {
		first.Add(x.pause, early["stop and copy"][i].pause)
	}
	for i, x := range all["background"] {
		pause.Add(x.pause, all["stop and copy"][i].pause)
		live.Add(x.took, all["contiguous"][i].took)
	}
	rec.Add(pause, first, live)
	fmt.Printf("all runs ended with the state %s\n", digest)
	summarize(all)
	return nil
}

// moved is what one migration took, in milliseconds.
type moved struct {
	what   string
	median float64   // step before it
	after  float64   // median step under the new plan, without the first
	during []float64 // steps from the copy on; the last is the first under the new plan
	pause  float64   // by how much one of these takes longer than the median step of its plan, at most
	usual  float64   // the same of as many undisturbed steps: what chance alone makes of it
	copied float64   // from when state begins to be copied until all of it has come
	edit   float64   // from the commit that makes the plan live until it is applied everywhere
	took   float64   // from when state begins to be copied until the plan is live everywhere
}

func (m moved) net() float64 { return max(0, m.pause-m.usual) }

func summarize(all map[string][]moved) {
	of := func(way string, f func(moved) float64) float64 {
		var x []float64
		for _, m := range all[way] {
			x = append(x, f(m))
		}
		return lab.Median(x)
	}
	pause := func(m moved) float64 { return m.pause }
	took := func(m moved) float64 { return m.took }
	copied := func(m moved) float64 { return m.copied }
	fmt.Printf("\nmedians over %d migrations of each way\n", len(all["background"]))
	for _, w := range []string{"background", "stop and copy", "contiguous"} {
		fmt.Printf("  %-13s pause %.0f ms, %.0f above the undisturbed; copied in %.0f ms, live after %.0f ms\n", w, of(w, pause), of(w, moved.net), of(w, copied), of(w, took))
	}
	fmt.Printf("pause by that of stop and copy: %.3f; above the longest of as many undisturbed steps: %.3f\n",
		of("background", pause)/of("stop and copy", pause), of("background", moved.net)/of("stop and copy", moved.net))
	fmt.Printf("time of contiguous shards by that of interleaved ones: %.2f until live, %.2f of the copies\n",
		of("contiguous", took)/of("background", took), of("contiguous", copied)/of("background", copied))
}

// way is how a layer moves.
type way struct {
	name       string
	holds      bool // training, while state is copied
	contiguous bool
}

// migration is a job whose layers move.
type migration struct {
	ranks, layers, params, micros, quiet, steps, mirrors int
	forward                                              time.Duration
	rate                                                 float64 // MB/s
}

// crew is the engines of a job.
type crew struct {
	m        migration
	way      way
	plan     plan.Plan
	fills    int
	peers    []control.Peer
	networks []*comm.Endpoint
	engines  []*engine.Engine
	pools    []*kernel.Pool
	level    chan id.WorkerID
	applied  chan control.Applied
}

func (m migration) profile(slow, fast time.Duration) (p plan.Profile) {
	for l := range m.layers {
		f := fast
		if l < m.layers/2 {
			f = slow
		}
		p.Layers = append(p.Layers, plan.Layer{Tensors: []int{m.params}, Forward: f, Backward: 2 * f})
	}
	return p
}

// run trains, moves a layer forth and back, and returns the digest of the state at the end.
func (m migration) run(w way) (all []moved, digest string, err error) {
	defer runtime.GC()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := &crew{m: m, way: w, level: make(chan id.WorkerID, 2*m.ranks), applied: make(chan control.Applied, 8*m.ranks)}
	defer c.close()
	if err := c.start(); err != nil {
		return nil, "", err
	}
	// The first half of the layers seems to be slow, then the second: the middle one goes to and fro.
	slow, fast := 2*m.forward, m.forward
	if c.plan.Stages[0].Hi <= m.layers/2 {
		slow, fast = fast, slow
	}
	step := 0
	for range 2 {
		x, err := c.move(ctx, &step, m.profile(slow, fast))
		if err != nil {
			return nil, "", err
		}
		all = append(all, x)
		slow, fast = fast, slow
	}
	if digest, err = c.finish(ctx, step); err != nil {
		return nil, "", err
	}
	return all, digest, nil
}

func (c *crew) start() error {
	n := 2 * c.m.ranks
	view := plan.View{}
	for i := range n {
		network, err := comm.Listen(comm.Config{Self: id.Session{Worker: id.WorkerID(i)}, Transport: transport.TCP{}})
		if err != nil {
			return err
		}
		c.networks, c.pools = append(c.networks, network), append(c.pools, kernel.NewPool(1))
		w := plan.Worker{ID: id.WorkerID(i)}
		view.Workers = append(view.Workers, w)
		c.peers = append(c.peers, control.Peer{Worker: w, Addr: network.Addr()})
	}
	var err error
	if c.plan, _, err = planner.Next(plan.Plan{}, view, c.m.profile(0, 0),
		planner.Event{Kind: planner.Start, Stages: 2, Micros: c.m.micros, Mirrors: c.m.mirrors}); err != nil {
		return err
	}
	if c.way.contiguous {
		layouttest.Contiguous(&c.plan, nil, c.m.profile(0, 0).Layers)
	}
	for _, a := range c.plan.Stages[0].Workers {
		for _, b := range c.plan.Stages[1].Workers {
			c.networks[a].Shape(b, c.m.rate*1e6)
			c.networks[b].Shape(a, c.m.rate*1e6)
		}
	}
	c.engines = make([]*engine.Engine, n)
	for i := range n {
		layers := make([]engine.Layer, c.m.layers)
		memory := make([][]float32, c.m.layers)
		for l := range layers {
			layers[l] = engine.Layer{Name: fmt.Sprint(l), Tensors: []zero.Tensor{{Size: c.m.params}}}
		}
		one := tensor.Spec{Shape: []int{1}}
		if c.engines[i], err = engine.New(engine.Config{
			Self: view.Workers[i], First: control.Order{Plan: c.plan, Peers: c.peers}, Network: c.networks[i], Groups: make(map[uint16]*group.Group),
			Stage: func(lo, hi int) engine.Stage {
				for l := lo; l < hi; l++ {
					if memory[l] == nil {
						memory[l] = make([]float32, c.m.params)
					}
					layers[l].Params = memory[l]
				}
				return &device{lo: lo, hi: hi, layers: layers, forward: c.m.forward}
			},
			Begin: func(r id.Range, params []float32, _ [][]float32) error {
				for i := range params {
					params[i] = float32((r.Lo+i)%97) / 97
				}
				return nil
			},
			Layers: layers, Input: one, Target: one, Job: rundir.Job{GlobalBatch: c.m.micros, MicroBatch: 1, ClipNorm: 1},
			Rule: zero.AdamW{Beta1: 0.9, Beta2: 0.999, Eps: 1e-8}, LR: func(int) float64 { return 0.001 }, Pool: c.pools[i],
			Load: func(_ int, i uint64, in, target tensor.Tensor) error {
				in.F[0], target.F[0] = float32(i%7)-3, float32(i%5)
				return nil
			},
			Stop: func() string { return "" }, Yield: true,
			Tell: func(m control.Message) {
				switch m := m.(type) {
				case control.Level:
					c.level <- id.WorkerID(i)
				case control.Applied:
					if m.Version != (id.Version{}) {
						c.applied <- m
					}
				}
			},
		}); err != nil {
			return err
		}
	}
	_, err = c.await(c.plan.Version)
	return err
}

func (c *crew) close() {
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

// grace is how long a wait may take before something is wrong.
const grace = time.Minute

// await waits until a plan is live on all workers, and returns the longest time from the commit
// on until it was.
func (c *crew) await(v id.Version) (edit time.Duration, err error) {
	for range c.engines {
		select {
		case a := <-c.applied:
			if a.Version != v {
				return 0, fmt.Errorf("plan %v is live and not %v", a.Version, v)
			}
			edit = max(edit, a.Edit)
		case <-time.After(grace):
			return 0, fmt.Errorf("plan %v does not go live", v)
		}
	}
	return edit, nil
}

// move trains on from a step, moving a layer after some undisturbed ones.
func (c *crew) move(ctx context.Context, step *int, prof plan.Profile) (moved, error) {
	view := plan.View{Workers: c.plan.Workers, Step: *step}
	next, _, err := planner.Next(c.plan, view, prof, planner.Event{Kind: planner.Rebalance})
	if err != nil {
		return moved{}, err
	}
	if c.way.contiguous {
		layouttest.Contiguous(&next, &c.plan, prof.Layers)
	}
	state := plan.Needs(&c.plan, &next, view)
	getters := make(map[id.WorkerID]bool)
	for _, t := range state {
		getters[t.To] = true
	}

	base, copies := *step, *step+1+c.m.quiet // before which state begins to be copied
	quiet, held := make(chan struct{}), make(chan struct{})
	var left atomic.Int32 // workers that are still in the steps before
	left.Store(int32(len(c.engines)))
	release := sync.OnceFunc(func() { close(held) })
	if !c.way.holds {
		release()
	}
	ended, lives := make([][]time.Time, len(c.engines)), 0
	trained := make(chan error, 1)
	go func() {
		trained <- training.Each(len(c.engines), func(i int) error {
			for s := base + 1; s <= base+c.m.steps; s++ {
				if s == copies {
					if left.Add(-1) == 0 {
						close(quiet)
					}
					<-held
				}
				r, err := c.engines[i].Step(ctx, s)
				if err != nil {
					return fmt.Errorf("worker %d: %w", i, err)
				}
				ended[i] = append(ended[i], time.Now())
				if i == 0 && r.Plan != next.Version {
					lives = s + 1
				}
			}
			return nil
		})
	}()
	var began, levelAt, liveAt time.Time
	var edit time.Duration
	err = func() error {
		defer release()
		select {
		case <-quiet:
		case err := <-trained:
			return errors.Join(err, errors.New("training ended before it was to"))
		}
		c.fills++
		began = time.Now()
		for _, e := range c.engines {
			e.Fill(control.Fill{ID: id.Fill{Term: 1, N: c.fills}, Peers: c.peers, Transfers: state})
		}
		for len(getters) > 0 {
			select {
			case w := <-c.level:
				delete(getters, w)
			case <-time.After(grace):
				return errors.New("state does not come")
			}
		}
		levelAt = time.Now()
		for _, e := range c.engines {
			e.Order(control.Order{Plan: next, Peers: c.peers})
		}
		release()
		edit, err = c.await(next.Version)
		liveAt = time.Now()
		return err
	}()
	if err = errors.Join(err, <-trained); err != nil {
		return moved{}, err
	}
	if lives+3 > base+c.m.steps {
		return moved{}, errors.New("fewer than 3 steps are left under the new plan; give more --steps")
	}
	from := c.plan
	c.plan = next
	*step = base + c.m.steps

	// A step has ended when it has on all workers.
	at := slices.Clone(ended[0])
	for _, w := range ended[1:] {
		for i := range at {
			at[i] = slices.MaxFunc([]time.Time{at[i], w[i]}, time.Time.Compare)
		}
	}
	took := func(s int) float64 { return ms(at[s-base-1].Sub(at[s-base-2])) }
	x := moved{what: fmt.Sprintf("layers [%d,%d) to [%d,%d)", from.Stages[0].Lo, from.Stages[0].Hi, next.Stages[0].Lo, next.Stages[0].Hi)}
	var before []float64
	for s := base + 3; s < copies; s++ { // the first two warm up
		before = append(before, took(s))
	}
	var after []float64
	for s := lives + 1; s <= base+c.m.steps; s++ {
		after = append(after, took(s))
	}
	x.median, x.after = lab.Median(before), lab.Median(after)
	for s := copies; s <= lives; s++ {
		x.during = append(x.during, took(s))
		usual := x.median
		if s == lives {
			usual = x.after
		}
		x.pause = max(x.pause, took(s)-usual)
	}
	x.usual = max(0, slices.Max(before[max(0, len(before)-len(x.during)):])-x.median)
	x.edit, x.copied, x.took = ms(edit), ms(levelAt.Sub(began)), ms(liveAt.Sub(began))
	return x, nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// finish ends the run and returns the digest of all parameters and moments.
func (c *crew) finish(ctx context.Context, step int) (string, error) {
	for _, n := range c.networks {
		for i := range c.networks {
			n.Shape(id.WorkerID(i), 0)
		}
	}
	words := make([][]byte, len(c.engines))
	err := training.Each(len(c.engines), func(i int) (err error) {
		words[i], _, err = c.engines[i].Keep(ctx, step, 4, func(context.Context) (engine.Collector, error) { return collector{sha256.New()}, nil })
		return err
	})
	return fmt.Sprintf("%x", words[0]), err
}

// collector hashes what it gets.
type collector struct{ hash.Hash }

func (c collector) Take(_ engine.Part, data []float32) error {
	_, err := c.Write(comm.Bytes(data))
	return err
}
func (c collector) Finish() ([]byte, error) { return c.Sum(nil)[:4], nil }
func (collector) Discard()                  {}

// device is a stage that takes its time. What it computes depends on all that it should depend
// on a little: the boundary tensor on a parameter of each layer, and all gradients on the tensor.
type device struct {
	engine.KeepsNothing
	lo, hi  int
	layers  []engine.Layer
	forward time.Duration
}

type devicePass struct{ in, out tensor.Tensor }

func (d *device) Forward(m engine.Micro, in tensor.Tensor) (engine.Pass, tensor.Tensor, error) {
	p := &devicePass{in, tensor.New(m.Samples, 1)}
	copy(p.out.F, in.F)
	for l := d.lo; l < d.hi; l++ {
		if err := m.Ready(l); err != nil {
			return nil, tensor.Tensor{}, err
		}
		end := time.Now().Add(d.forward)
		w := d.layers[l].Params
		for i := range p.out.F {
			p.out.F[i] += w[(m.Step*31+m.First+i)%len(w)]
		}
		time.Sleep(time.Until(end))
	}
	return p, p.out, nil
}

func (d *device) Loss(p engine.Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor) {
	out := p.(*devicePass).out
	dout = tensor.New(out.Shape...)
	for i, y := range out.F {
		e := y - target.F[i]
		dout.F[i] = e
		sum += float64(float64(e)*float64(e)) / 2
	}
	return sum, int64(len(out.F)), dout
}

func (d *device) Backward(_ engine.Pass, dout tensor.Tensor, grads engine.Gradients) tensor.Tensor {
	for l := d.hi - 1; l >= d.lo; l-- {
		end := time.Now().Add(2 * d.forward)
		g := grads.Buffer(l)
		sum := float32(0)
		for _, x := range dout.F {
			sum += x
		}
		for i := range g {
			g[i] = sum
		}
		time.Sleep(time.Until(end))
		grads.Done(l, g)
	}
	return dout
}

func (*device) Drop(engine.Pass)        {}
func (*device) Suspect(engine.Pass) int { return -1 }
func (d *device) Shapes(p engine.Pass) (all [][]int) {
	for range d.hi - d.lo - 1 {
		all = append(all, p.(*devicePass).out.Shape)
	}
	return all
}

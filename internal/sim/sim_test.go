package sim

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

var (
	schedules = flag.Int("schedules", 300, "random schedules of faults")
	seed      = flag.Uint64("seed", 1, "first seed")
)

const ms = time.Millisecond

// layers have blocks enough for a shard for each of several workers.
func layers() (all []plan.Layer) {
	for range 4 {
		all = append(all, plan.Layer{Tensors: []int{8 * unit}})
	}
	return all
}

// faults are what a schedule injects: into worker w, with another one and a time.
var faults = []struct {
	name string
	do   func(c *Cluster, w, x id.WorkerID, d time.Duration)
}{
	{"kill", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Kill(w) }},
	{"kill", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Kill(w) }},
	{"freeze", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Freeze(w, 4*d) }},
	{"stop", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Freeze(w, 40*d) }}, // it is fenced, and rejoins or is killed
	{"halt", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Halt(w, d/2) }},
	{"halt", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Halt(w, 40*d) }},
	{"late", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Late(w, d/4) }},
	{"late", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Late(w, d/4) }},
	{"cut", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Cut(w, x, 4*d) }},
	{"join", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Join() }},
	{"leave", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Leave(w) }},
	{"lead", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Lead() }},
	{"measure", func(c *Cluster, w, x id.WorkerID, d time.Duration) { c.Measure(w, d) }},
	{"flip", func(c *Cluster, w, x id.WorkerID, d time.Duration) {
		if c.cfg.Digests {
			c.Flip(w, int(d))
		} else {
			c.Hold(w, d)
		}
	}},
	{"stop", func(c *Cluster, w, x id.WorkerID, d time.Duration) {
		if d < 20*ms {
			c.Stop()
		}
	}},
}

// schedule draws a run: its shape, and the faults in it. seed is that of the delays.
func schedule(r *rand.Rand, seed uint64, trace bool) (*Cluster, string) {
	return scheduleOf(r, seed, trace, nil)
}

// scheduleOf is schedule for a run that change, if it is not nil, has altered.
func scheduleOf(r *rand.Rand, seed uint64, trace bool, change func(*Config)) (*Cluster, string) {
	n := 1 + r.IntN(6)
	cfg := Config{
		Seed: seed, Workers: n, Stages: 1 + r.IntN(min(n, 3)), Micros: maxMicros, Mirrors: r.IntN(3), Steps: 8, Zero: 1 + r.IntN(2), MinWorkers: 1,
		Layers: layers(), Detect: 300 * ms, Checkpoint: time.Duration(r.IntN(3)) * 10 * ms, Evaluate: r.IntN(4), Respawn: r.IntN(2) == 0, Digests: r.IntN(2) == 0, Derive: seed%3 != 0, Beside: seed%3 == 1,
		Trace: trace, Verify: int(seed % 3), Hosts: int(seed / 3 % 4), Large: int64(seed / 5 % 2), Keeping: seed/10%2 == 1, Passes: 1 + int(seed/20%3), Flying: int(seed / 60 % 2), // one base at a time, or all
	}
	if change != nil {
		change(&cfg)
	}
	c := New(cfg)
	text := fmt.Sprintf("%d workers, %d stages, %d mirrors, ZeRO %d, checkpoint %v, evaluation %d, respawn %v, digests %v", n, cfg.Stages, cfg.Mirrors, cfg.Zero,
		cfg.Checkpoint, cfg.Evaluate, cfg.Respawn, cfg.Digests)
	var last time.Duration
	at := func() time.Duration { // often shortly after the fault before, in the recovery from it
		if last == 0 || r.IntN(2) == 0 {
			last = time.Duration(r.Int64N(int64(60 * ms)))
		} else {
			last += time.Duration(r.Int64N(int64(4 * ms)))
		}
		return last
	}
	worker := func() id.WorkerID { return id.WorkerID(r.IntN(n + 2)) }
	for range r.IntN(9) {
		t, w, x, d := at(), worker(), worker(), time.Duration(r.Int64N(int64(100*ms)))
		f := faults[r.IntN(len(faults))]
		text += fmt.Sprintf("; %v: %s %d", t, f.name, w)
		c.inject(t, func() { f.do(c, w, x, d) })
	}
	if seed%3 == 1 {
		text += c.injectAll(r, at, worker)
	}
	return c, text
}

// injectAll injects faults into all workers at once, and into workers that have not begun. Without replacements the run may end.
func (c *Cluster) injectAll(r *rand.Rand, at func() time.Duration, worker func() id.WorkerID) (text string) {
	for range 1 + r.IntN(2) {
		t, w, d := at(), worker(), time.Duration(r.Int64N(int64(3*time.Second)))
		switch r.IntN(4) {
		case 0, 1:
			text += fmt.Sprintf("; %v: kill all", t)
			c.inject(t, c.KillAll)
		case 2:
			text += fmt.Sprintf("; %v: freeze all for %v", t, d)
			c.inject(t, func() { c.FreezeAll(d) })
		default:
			if c.cfg.Respawn {
				text += fmt.Sprintf("; %v: kill %d at the start", t/20, w)
				c.At(t/20, func() { c.Kill(w) })
			}
		}
	}
	return text
}

// inject has f called at a time after the start, in training: before, every failure ends the run.
func (c *Cluster) inject(at time.Duration, f func()) {
	c.At(at, func() {
		if len(c.agreed) == 0 {
			c.inject(at+2*ms, f)
			return
		}
		f()
	})
}

// try runs the schedule of a seed, and returns what is wrong with it.
func try(seed uint64, trace bool) (*Cluster, error) {
	c, text := schedule(rand.New(rand.NewPCG(seed, 2)), seed, trace)
	if err := run(c, nil); err != nil {
		return c, fmt.Errorf("seed %d (%s): %w", seed, text, err)
	}
	return c, nil
}

// run tells a story and runs a cluster to its end, and returns what is wrong with it.
func run(c *Cluster, tell func(*Cluster)) (err error) {
	defer func() {
		if v := recover(); v != nil {
			violation, ok := v.(*Violation)
			if !ok {
				buf := make([]byte, 1<<14)
				violation = &Violation{fmt.Sprintf("%v\n%s", v, buf[:runtime.Stack(buf, false)]), c.Log()}
			}
			err = violation
		}
	}()
	steps := c.cfg.Steps
	if tell != nil {
		tell(c)
	}
	ended, out := c.Run(5 * time.Minute)
	if !ended {
		return fmt.Errorf("no end\n%s", strings.Join(append(c.Log(), c.states()...), "\n"))
	}
	// The cluster holds that a run which fails has lost all its workers.
	if out.Err == nil && out.ModelHost != c.model {
		return fmt.Errorf("the model is on %q, and the run says on %q\n%s", c.model, out.ModelHost, strings.Join(c.Log(), "\n"))
	}
	if stopped := new(session.StoppedError); out.Err == nil && out.Summary.Steps != steps {
		return fmt.Errorf("ended after %d steps", out.Summary.Steps)
	} else if out.Err != nil && !errors.As(out.Err, &stopped) && !slices.ContainsFunc([]any{new(*session.LostError), new(*session.SilentError), new(*session.RecoveryError), new(*session.FailedError)}, func(as any) bool { return errors.As(out.Err, as) }) {
		return fmt.Errorf("ended by %w\n%s", out.Err, strings.Join(c.Log(), "\n"))
	}
	return nil
}

// states says where each worker is.
func (c *Cluster) states() (all []string) {
	for _, w := range c.order {
		if w.core == nil {
			all = append(all, fmt.Sprintf("worker %v: alive %v, has not begun", w.session, w.alive))
			continue
		}
		at, _ := w.core.Passed()
		all = append(all, fmt.Sprintf("worker %v: alive %v, %v, at %v, plan %v, asking %v, over %v, waiting %v, shut %v, ops %v, editing %v",
			w.session, w.alive, w.core.State(), at, w.core.Plan().Version, w.asking, w.over, len(w.waiting), w.shut, len(w.ops), w.editing != nil))
	}
	return all
}

// TestSchedules holds that random faults at random moments break no invariant, and that the run goes on once they end.
//
//	go test ./internal/sim -run Schedules -schedules 10000 -seed 1
func TestSchedules(t *testing.T) {
	var next atomic.Uint64
	var recoveries, failed atomic.Int64
	var tasks sync.WaitGroup
	began := time.Now()
	for range runtime.GOMAXPROCS(0) {
		tasks.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= uint64(*schedules) || failed.Load() > 3 {
					return
				}
				c, err := try(*seed+i, false)
				if err != nil {
					failed.Add(1)
					t.Error(err)
					continue
				}
				recoveries.Add(int64(c.Recoveries))
			}
		})
	}
	tasks.Wait()
	t.Logf("%d schedules with %d recoveries in %v", *schedules, recoveries.Load(), time.Since(began).Round(ms))
}

// TestSeed shows one schedule in full.
func TestSeed(t *testing.T) {
	if *schedules != 1 {
		t.Skip("go test ./internal/sim -run Seed -schedules 1 -seed N shows a schedule")
	}
	c, err := try(*seed, true)
	if err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(c.Log(), "\n"))
	}
	t.Log(strings.Join(c.Log(), "\n"))
}

package dvfs_test

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/plan/simulate"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// a100 are means of one pipeline stage of GPT-3 175B in bfloat16 on an NVIDIA A100 SXM at locked clocks: forward and
// backward pass of a micro-batch together, as published with Perseus (Chung et al., "Reducing Energy Bloat in Large Model
// Training", SOSP 2024; github.com/ml-energy/zeus, sosp24_data/emulation/stage_profile/gpt3-175b+a100_sxm_bf16.csv).
var a100 = []struct {
	mhz             int
	seconds, joules float64
}{
	{855, 0.2182990, 51.881280}, {900, 0.2069831, 51.133224}, {945, 0.1989906, 50.775496}, {990, 0.1901342, 50.608240},
	{1035, 0.1820945, 50.339184}, {1080, 0.1751283, 49.854872}, {1125, 0.1684400, 51.796000}, {1170, 0.1626808, 53.337872},
	{1215, 0.1572324, 55.839664}, {1260, 0.1523569, 59.009472}, {1305, 0.1479658, 63.384872}, {1350, 0.1445870, 65.896560},
	{1395, 0.1432815, 68.254112}, {1410, 0.1431154, 68.389720},
}

// idleA100 is taken for what such a card draws while it waits, in watts; the publication's profile has passes only.
const idleA100 = 80

// card is a device by its power, and how fast it works at its frequencies.
type card struct {
	name  string
	steps []int
	power dvfs.Power
	speed func(int) float64

	coarser int // every so many steps are few enough for all settings to be simulated
}

// measured is the power of an A100 at the frequencies that were measured.
type measured map[int]point

type point struct{ watts, speed float64 }

func (m measured) Busy(mhz int) float64 { return m[mhz].watts }
func (m measured) Idle() float64        { return idleA100 }

func cards() []card {
	table := measured{}
	var steps []int
	for _, p := range a100 {
		table[p.mhz] = point{p.joules / p.seconds, 1 / p.seconds}
		steps = append(steps, p.mhz)
	}
	return []card{
		{"cubic", dvfs.Grid(700, 1400, 50), dvfs.DefaultPower(1400), nil, 3},
		{"a100", steps, table, func(mhz int) float64 { return table[mhz].speed }, 4},
	}
}

// cluster is a plan and how long its steps take.
type cluster struct {
	p    plan.Plan
	prof plan.Profile
}

// afterLoss is the plan of 8 workers in 2 stages after one is lost: 16 layers, 32 micro-batches.
func afterLoss(t testing.TB) cluster {
	prof := plan.Profile{LinkSpeed: plan.LinkSpeed{Latency: 50 * time.Microsecond, Bandwidth: 10e9}, Updates: 1e9}
	for range 16 {
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{1 << 20}, Forward: 2 * time.Millisecond, Backward: 4 * time.Millisecond, Output: 1 << 18})
	}
	var workers []plan.Worker
	for i := range 8 {
		workers = append(workers, plan.Worker{ID: id.WorkerID(i), Host: fmt.Sprint(i)})
	}
	p, _, err := planner.Next(plan.Plan{}, plan.View{Workers: workers}, prof, planner.Event{Kind: planner.Start, Micros: 32, Stages: 2, Mirrors: 1})
	if err != nil {
		t.Fatal(err)
	}
	left := plan.View{Workers: slices.Delete(workers, 2, 3), Step: 5}
	for _, kind := range []planner.EventKind{planner.Lost, planner.Protect} {
		if p, _, err = planner.Next(p, left, prof, planner.Event{Kind: kind}); err != nil {
			t.Fatal(err)
		}
	}
	return cluster{p, prof}
}

func (c cluster) model(t testing.TB) dvfs.Model {
	m := dvfs.Model{Workers: len(c.p.Workers), Busy: make([]float64, len(c.p.Workers))}
	index := map[id.WorkerID]int{}
	for i, w := range c.p.Workers {
		index[w.ID] = i
	}
	for s, st := range c.p.Stages {
		for _, w := range c.p.Route[s] {
			for l := st.Lo; l < st.Hi; l++ {
				m.Busy[index[w]] += (c.prof.Layers[l].Forward + c.prof.Layers[l].Backward).Seconds()
			}
		}
	}
	m.Step = func(speeds []float64) float64 {
		s, err := simulate.Run(&c.p, c.slowed(speeds))
		if err != nil {
			t.Fatal(err)
		}
		return s.Makespan.Seconds()
	}
	return m
}

// slowed is the profile with workers at shares of their speed.
func (c cluster) slowed(speeds []float64) plan.Profile {
	prof := c.prof
	prof.Speed = map[id.WorkerID]float64{}
	for i, w := range c.p.Workers {
		prof.Speed[w.ID] = speeds[i]
		if own := c.prof.Speed[w.ID]; own > 0 {
			prof.Speed[w.ID] *= own
		}
	}
	return prof
}

func devices(n int, c card, now int) []dvfs.Device {
	var all []dvfs.Device
	for i := range n {
		all = append(all, dvfs.Device{Workers: []int{i}, Steps: c.steps, Now: now, Power: c.power, Speed: c.speed})
	}
	return all
}

// exhaustive finds the least energy of a step by trying all frequencies of all devices. It leaves out only what
// certainly is no better: devices that compute for longer than the step may take, settings that draw more than the best one
// so far, and, where a step never gets shorter as a device gets slower (which holds for the closed form, but not for a
// schedule, whose order changes), settings below impossible ones. Energy is reckoned for steps of the fastest length.
func exhaustive(devs []dvfs.Device, m dvfs.Model, tolerance float64, monotone bool) (best float64, tried int) {
	speeds := make([]float64, m.Workers)
	speed := func(d *dvfs.Device, mhz int) float64 {
		if d.Speed == nil {
			return float64(mhz) / float64(d.Now)
		}
		return d.Speed(mhz) / d.Speed(d.Now)
	}
	for i := range devs {
		speeds[i] = speed(&devs[i], slices.Max(devs[i].Steps))
	}
	fastest := m.Step(speeds)
	limit := fastest * (1 + tolerance)
	draws := func(i, mhz int) float64 { return energyOf(&devs[i], m.Busy[i]/speed(&devs[i], mhz), mhz, fastest) }
	steps := make([][]int, len(devs))     // those that are possible, the least energy first
	least := make([]float64, len(devs)+1) // of devices from i on
	for i := len(devs) - 1; i >= 0; i-- {
		for _, f := range devs[i].Steps {
			if m.Busy[i]/speed(&devs[i], f) <= limit {
				steps[i] = append(steps[i], f)
			}
		}
		slices.SortFunc(steps[i], func(a, b int) int { return cmp.Compare(draws(i, a), draws(i, b)) })
		least[i] = least[i+1] + draws(i, steps[i][0])
	}
	best = math.Inf(1)
	var walk func(i int, sum float64)
	walk = func(i int, sum float64) {
		for _, f := range steps[i] {
			next := sum + draws(i, f)
			if next+least[i+1] >= best*(1-1e-9) {
				break
			}
			speeds[i] = speed(&devs[i], f)
			last := i == len(devs)-1
			if last || monotone {
				tried++
				if m.Step(slices.Clone(speeds)) > limit {
					continue
				}
			}
			if last {
				best = next
			} else {
				walk(i+1, next)
			}
		}
		speeds[i] = speed(&devs[i], slices.Max(devs[i].Steps))
	}
	walk(0, 0)
	return best, tried
}

func energyOf(d *dvfs.Device, busy float64, mhz int, seconds float64) float64 {
	busy = min(busy, seconds)
	return d.Power.Busy(mhz)*busy + d.Power.Idle()*(seconds-busy)
}

// TestSavingAfterLoss holds the governor's clocks against the best ones, on the plan that is left after a loss: by the closed form,
// with all frequencies, and by the simulator, with fewer.
func TestSavingAfterLoss(t *testing.T) {
	c := afterLoss(t)
	simulated := c.model(t)
	closed := simulated
	closed.Step = func(speeds []float64) float64 { return simulate.Estimate(&c.p, c.slowed(speeds)).Seconds() }
	for _, kind := range cards() {
		coarse := kind
		coarse.steps = nil
		for i := len(kind.steps) - 1; i >= 0; i -= kind.coarser {
			coarse.steps = append(coarse.steps, kind.steps[i])
		}
		slices.Reverse(coarse.steps)
		all := 0.0
		for _, of := range []struct {
			name     string
			card     card
			m        dvfs.Model
			monotone bool
		}{{"closed form", kind, closed, true}, {"simulated", coarse, simulated, false}} {
			t.Run(kind.name+" "+of.name, func(t *testing.T) {
				if !of.monotone && testing.Short() {
					t.Skip("simulates some thousand steps")
				}
				devs := devices(of.m.Workers, of.card, slices.Max(of.card.steps))
				calls := 0
				counted := of.m
				counted.Step = func(s []float64) float64 { calls++; return of.m.Step(s) }
				const tolerance = 0.005
				a, err := dvfs.Allocate(devs, counted, tolerance)
				if err != nil {
					t.Fatal(err)
				}
				best, tried := exhaustive(devs, of.m, tolerance, of.monotone)
				saving, most := a.NowEnergy-a.Energy, a.NowEnergy-best
				t.Logf("step %.4f s -> %.4f s (%+.2f %%), energy -%.2f %%; the best of %d settings -%.2f %%; ratio %.3f, in %d predictions; %v MHz",
					a.Fastest, a.Seconds, 100*(a.Seconds/a.Fastest-1), 100*saving/a.NowEnergy, tried, 100*most/a.NowEnergy, saving/most, calls, a.MHz)
				if a.Seconds > 1.01*a.Fastest {
					t.Errorf("a step takes %.4f s, and %.4f s at full clock", a.Seconds, a.Fastest)
				}
				// With few frequencies there may be nothing to save.
				if saving < 0.9*most {
					t.Errorf("saves %.4f, the best clocks %.4f", saving, most)
				}
				all += most
			})
		}
		if all <= 0 {
			t.Errorf("%s: there is nothing to save", kind.name)
		}
	}
}

// TestBottleneck lets one worker be slow, at a clock that can be raised.
func TestBottleneck(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates some thousand steps: not with -short")
	}
	c := afterLoss(t)
	for _, kind := range cards() {
		for _, slow := range []int{0, 5} {
			t.Run(fmt.Sprint(kind.name, " ", slow), func(t *testing.T) {
				m := c.model(t)
				devs := devices(m.Workers, kind, slices.Max(kind.steps))
				low := kind.steps[len(kind.steps)/3]
				now := float64(low) / float64(slices.Max(kind.steps))
				if kind.speed != nil {
					now = kind.speed(low) / kind.speed(slices.Max(kind.steps))
				}
				// What is measured at the low clock: the model's speed 1 is what it is now.
				devs[slow].Now = low
				prof := c.prof
				prof.Speed = map[id.WorkerID]float64{c.p.Workers[slow].ID: now}
				m.Step = cluster{c.p, prof}.model(t).Step
				m.Busy[slow] /= now
				bound := c.model(t).Step(slices.Repeat([]float64{1}, m.Workers))

				g, err := dvfs.NewGovernor(dvfs.Config{})
				if err != nil {
					t.Fatal(err)
				}
				d, err := g.Step(dvfs.Observation{Plan: 1, Seconds: 1, Devices: devs, Model: func() dvfs.Model { return m }})
				if err != nil {
					t.Fatal(err)
				}
				speeds := slices.Repeat([]float64{1}, m.Workers)
				for _, s := range d.Settings {
					if s.MHz < devs[s.Clock].Now {
						t.Errorf("clock %d is lowered where all wait for another", s.Clock)
					}
					speeds[s.Clock] = float64(s.MHz) / float64(devs[s.Clock].Now)
					if kind.speed != nil {
						speeds[s.Clock] = kind.speed(s.MHz) / kind.speed(devs[s.Clock].Now)
					}
				}
				after := m.Step(speeds)
				t.Logf("step %.4f s -> %.4f s, bound %.4f s: %s", m.Step(slices.Repeat([]float64{1}, m.Workers)), after, bound, d.Reason)
				if after > 1.02*bound {
					t.Errorf("a step takes %.4f s, the bound is %.4f s", after, bound)
				}
			})
		}
	}
}

// pipeline is a model by hand: the slowest worker counts.
func pipeline(work ...float64) dvfs.Model {
	return dvfs.Model{Workers: len(work), Busy: work, Step: func(speeds []float64) float64 {
		slowest := 0.0
		for i, w := range work {
			slowest = max(slowest, w/speeds[i])
		}
		return slowest
	}}
}

// bench is a governor with devices that do what it says.
type bench struct {
	t    *testing.T
	g    *dvfs.Governor
	devs []dvfs.Device
	work []float64 // seconds of each at 1000 MHz
	plan uint64
	real func(m float64) float64 // makes a measured time of a true one
	log  []string
}

func newBench(t *testing.T, cfg dvfs.Config, work ...float64) *bench {
	g, err := dvfs.NewGovernor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, g: g, work: work, plan: 1, real: func(m float64) float64 { return m }}
	for i := range work {
		b.devs = append(b.devs, dvfs.Device{Workers: []int{i}, Steps: dvfs.Grid(500, 1000, 50), Now: 1000})
	}
	return b
}

// run lets n steps pass and returns what was decided: "4: +1 -2" for a clock raised and two lowered after the fourth.
func (b *bench) run(n int) string {
	b.log = nil
	for i := range n {
		now := slices.Clone(b.work)
		for w := range now {
			now[w] *= 1000 / float64(b.devs[w].Now)
		}
		m := pipeline(now...)
		d, err := b.g.Step(dvfs.Observation{
			Plan: b.plan, Seconds: b.real(m.Step(slices.Repeat([]float64{1}, len(now)))), Devices: slices.Clone(b.devs), Model: func() dvfs.Model { return m },
		})
		if err != nil {
			b.t.Fatal(err)
		}
		if (d.Settings == nil) != (d.Reason == "") {
			b.t.Fatalf("%+v", d)
		}
		up, down := 0, 0
		for _, s := range d.Settings {
			if s.MHz > b.devs[s.Clock].Now {
				up++
			} else {
				down++
			}
			b.devs[s.Clock].Now = s.MHz
		}
		if d.Settings != nil {
			b.log = append(b.log, fmt.Sprintf("%d: +%d -%d", i+1, up, down))
		}
	}
	return strings.Join(b.log, ", ")
}

func TestGovernor(t *testing.T) {
	cfg := dvfs.Config{Settle: 4, Hold: 12}
	t.Run("lowers those who wait, once", func(t *testing.T) {
		b := newBench(t, cfg, 1, 0.6, 0.8)
		if got := b.run(100); got != "5: +0 -2" || b.devs[1].Now != 600 || b.devs[2].Now != 800 || b.devs[0].Now != 1000 {
			t.Errorf("%s; %v", got, b.devs)
		}
	})
	t.Run("leaves a balanced plan alone", func(t *testing.T) {
		if got := newBench(t, cfg, 1, 1, 0.99).run(100); got != "" {
			t.Error(got)
		}
	})
	t.Run("raises at once when the plan makes a low one the bottleneck", func(t *testing.T) {
		b := newBench(t, cfg, 1, 0.6)
		b.run(20)
		b.plan, b.work = 2, []float64{0.8, 1}
		if got := b.run(40); got != "1: +1 -0, 13: +0 -1" || b.devs[1].Now != 1000 || b.devs[0].Now != 800 {
			t.Errorf("%s; %v", got, b.devs)
		}
	})
	t.Run("raises soon when work changes under a plan", func(t *testing.T) {
		b := newBench(t, cfg, 1, 0.6)
		b.run(9)
		b.work = []float64{1, 0.9}
		if got := b.run(8); got != "4: +1 -0" || b.devs[1].Now != 900 {
			t.Errorf("%s; %v", got, b.devs)
		}
	})
	t.Run("keeps what it raised though steps are longer than when there was less work", func(t *testing.T) {
		b := newBench(t, cfg, 1, 0.6)
		b.run(20)
		b.work = []float64{1.1, 1.05}
		if got := b.run(40); strings.Count(got, "+") > 2 || b.devs[1].Now < 950 {
			t.Errorf("%s; %v", got, b.devs)
		}
	})
	t.Run("does not follow work that changes to and fro", func(t *testing.T) {
		b := newBench(t, cfg, 1, 0.62)
		b.run(40)
		changes := 0
		for i := range 40 {
			b.work[1] = 0.62 - 0.02*float64(i%2)
			if b.run(4) != "" {
				changes++
			}
		}
		if changes > 0 {
			t.Errorf("%d changes", changes)
		}
	})
	t.Run("takes back what makes steps longer", func(t *testing.T) {
		b := newBench(t, cfg, 1, 0.6)
		// The second worker is the bottleneck as soon as it is slower, whatever is predicted.
		b.real = func(m float64) float64 { return m * (1 + 0.2*(1-float64(b.devs[1].Now)/1000)) }
		if got := b.run(9); got != "5: +0 -1, 9: +1 -0" || b.devs[1].Now != 1000 {
			t.Errorf("%s; %v", got, b.devs)
		}
		if got := b.run(23); got != "" {
			t.Errorf("tried again after 23 steps of 24: %s", got)
		}
		// Each time it waits twice as long.
		if got := b.run(8); got != "1: +0 -1, 5: +1 -0" {
			t.Error(got)
		}
		if got := b.run(43); got != "" {
			t.Errorf("tried again after 43 steps of 44: %s", got)
		}
	})
	t.Run("does nothing without a model", func(t *testing.T) {
		g, err := dvfs.NewGovernor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if d, err := g.Step(dvfs.Observation{Seconds: 1, Devices: newBench(t, cfg, 1).devs}); err != nil || d.Settings != nil {
				t.Fatalf("%+v, %v", d, err)
			}
		}
	})
}

// TestSharedClock has two workers under one clock: neither can be lowered for itself.
func TestSharedClock(t *testing.T) {
	devs := []dvfs.Device{{Workers: []int{0, 1}, Steps: []int{500, 1000}, Now: 1000}, {Steps: []int{300, 500, 1000}, Now: 1000}}
	a, err := dvfs.Allocate(devs, pipeline(1, 0.2), 0.01)
	if err != nil || !slices.Equal(a.MHz, []int{1000, 1000}) && !slices.Equal(a.MHz, []int{1000, 300}) {
		t.Errorf("%v, %v", a.MHz, err)
	}
}

func TestAllocateFaults(t *testing.T) {
	good := []dvfs.Device{{Workers: []int{0}, Steps: []int{1}, Now: 1}}
	for name, c := range map[string]struct {
		devs []dvfs.Device
		m    dvfs.Model
		tol  float64
		want []string
	}{
		"all":        {[]dvfs.Device{{Workers: []int{0, 1, 1}}}, dvfs.Model{Workers: 1, Busy: []float64{1, 2}}, math.NaN(), []string{"tolerance", "Step", "Busy", "Steps", "Now", "worker 1"}},
		"model NaN":  {good, dvfs.Model{Workers: 1, Step: func([]float64) float64 { return math.NaN() }}, 0, []string{"NaN"}},
		"model zero": {good, dvfs.Model{Workers: 1, Step: func([]float64) float64 { return 0 }}, 0, []string{"0 s"}},
	} {
		_, err := dvfs.Allocate(c.devs, c.m, c.tol)
		for _, w := range c.want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want %q", name, err, w)
			}
		}
	}
	if err := (dvfs.Config{Tolerance: 2, Gain: math.NaN(), Slow: -1, Worse: 2, Settle: -1, Hold: -1}).Validate(); err == nil || strings.Count(err.Error(), "\n") != 5 {
		t.Error(err)
	}
}

// BenchmarkAllocate finds clocks for the plan after a loss.
func BenchmarkAllocate(b *testing.B) {
	m := afterLoss(b).model(b)
	kind := cards()[0]
	devs := devices(m.Workers, kind, slices.Max(kind.steps))
	for b.Loop() {
		if _, err := dvfs.Allocate(devs, m, 0.005); err != nil {
			b.Fatal(err)
		}
	}
}

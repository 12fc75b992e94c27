package host

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/plan/simulate"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/host/devices"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// fakeClock is a clock that would stay as it is set.
type fakeClock struct {
	*dvfs.Emulated
	id      string
	refuses error
	log     *[]string
}

func (c *fakeClock) Set(mhz int) error {
	if c.refuses != nil {
		return c.refuses
	}
	*c.log = append(*c.log, fmt.Sprint(c.id, " ", mhz))
	return c.Emulated.Set(mhz)
}

func (c *fakeClock) Restore() error {
	*c.log = append(*c.log, c.id+" back")
	return c.Emulated.Restore()
}

func (c *fakeClock) Saved() (dvfs.Saved, bool) {
	return dvfs.Saved{Kind: dvfs.KindNVML, ID: c.id}, true
}

// fakeClocks has a device for each worker.
type fakeClocks struct {
	t        *testing.T
	emulated bool
	start    map[int]int // MHz as found, where that is not the highest
	refuses  error
	err      error
	log      []string
	all      map[int]devices.Device
}

func (c *fakeClocks) Devices(processes map[int]int) ([]devices.Device, error) {
	if c.err != nil {
		return nil, c.err
	}
	if c.all == nil {
		c.all = make(map[int]devices.Device)
	}
	var ids []int
	for id := range processes {
		ids = append(ids, id)
		if _, ok := c.all[id]; ok {
			continue
		}
		e, err := dvfs.NewEmulated(dvfs.EmulatedConfig{Steps: dvfs.Grid(700, 1400, 50), Start: c.start[id], Power: dvfs.DefaultPower(1400)})
		if err != nil {
			c.t.Fatal(err)
		}
		var clock dvfs.Clock = &fakeClock{e, fmt.Sprint("card-", id), c.refuses, &c.log}
		if c.emulated {
			clock = e
		}
		c.all[id] = devices.Device{Clock: clock, Kind: "gpu", Workers: []int{id}}
	}
	slices.Sort(ids)
	var all []devices.Device
	for _, id := range ids {
		all = append(all, c.all[id])
	}
	return all, nil
}

func (c *fakeClocks) Save(r dvfs.Record) error {
	c.log = append(c.log, fmt.Sprint("save ", len(r.Clocks)))
	return nil
}

func (c *fakeClocks) Close(restored bool) error {
	c.log = append(c.log, fmt.Sprint("close ", restored))
	return nil
}

func (c *fakeClocks) Emulated() bool { return c.emulated }

// uneven is a plan of which clocks can make something: one of four workers has a quarter of the others' work.
func uneven(t *testing.T) session.ObserveStep {
	prof := plan.Profile{}
	for range 2 {
		prof.Layers = append(prof.Layers, plan.Layer{Tensors: []int{4}, Forward: time.Millisecond, Backward: 2 * time.Millisecond})
	}
	var v plan.View
	for i := range 4 {
		v.Workers = append(v.Workers, plan.Worker{ID: id.WorkerID(i)})
	}
	p, _, err := planner.Next(plan.Plan{}, v, prof, planner.Event{Kind: planner.Start, Micros: 13, Stages: 1, Mirrors: 1})
	if err != nil {
		t.Fatal(err)
	}
	if w := p.Route[0][0]; w != 0 || p.Route[0][11] != 2 || p.Route[0][12] != 3 {
		t.Fatalf("routes %v", p.Route)
	}
	return session.ObserveStep{Plan: p, Profile: prof, Seconds: 0.1, Processes: map[int]int{0: 10, 1: 11, 2: 12, 3: 13}}
}

func governed(t *testing.T, c *fakeClocks) (g *governing, posted *[]session.Event) {
	posted = new([]session.Event)
	c.t = t
	g, err := newGoverning(devices.NewHolder(c, nil), "", nil, dvfs.Config{Settle: 2, Hold: 4}, func(e session.Event) bool { *posted = append(*posted, e); return true })
	if err != nil {
		t.Fatal(err)
	}
	return g, posted
}

// Clocks of those who wait are lowered after the record is saved, put back when another plan comes, and at the end.
func TestGoverning(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates some thousand steps in one goroutine: not with -short")
	}
	c := &fakeClocks{}
	g, posted := governed(t, c)
	e := uneven(t)
	for range 8 {
		g.observe(t.Context(), observed{ObserveStep: e})
	}
	if len(*posted) != 1 {
		t.Fatalf("%+v", *posted)
	}
	set := (*posted)[0].(session.ClocksSet)
	if len(set.Settings) != 1 || set.Lowered[3] != 2 || len(set.Raised) > 0 || set.Reason == "" {
		t.Errorf("%+v", set)
	}
	if c.log[0] != "save 4" || len(c.log) != 2 {
		t.Errorf("%v", c.log)
	}

	// What is asked under a plan that is out of date changes nothing.
	*posted, c.log = nil, nil
	g.newest.Store(2)
	for range 100 {
		g.observe(t.Context(), observed{ObserveStep: e})
	}
	if len(c.log) > 0 || len(*posted) > 0 {
		t.Errorf("under an old plan: %v, %+v", c.log, *posted)
	}
	g.release(session.ReleaseClocks{Version: id.Version{Generation: 1, N: 2}})
	if fmt.Sprint(c.log) != "[card-3 back]" || len(*posted) != 1 || (*posted)[0].(session.ClocksSet).Lowered[3] != 1 {
		t.Errorf("%v, %+v", c.log, *posted)
	}

	*posted, c.log = nil, nil
	e.Plan.Version.N = 2
	for range 8 {
		g.observe(t.Context(), observed{ObserveStep: e})
	}
	if len(*posted) != 1 {
		t.Fatalf("%+v", *posted)
	}
	c.log = nil
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	g.run(ctx)
	if fmt.Sprint(c.log) != "[card-3 back close true]" || g.err != nil || len(g.last.Settings) != 1 {
		t.Errorf("at the end: %v, %v, %+v", c.log, g.err, g.last)
	}
}

// A bottleneck whose clock was found low gets a higher one, and keeps it under another plan.
func TestGoverningRaises(t *testing.T) {
	c := &fakeClocks{start: map[int]int{0: 1000}}
	g, posted := governed(t, c)
	e := uneven(t)
	e.Profile.Speed = map[id.WorkerID]float64{0: 1000.0 / 1400}
	g.observe(t.Context(), observed{ObserveStep: e})
	if len(*posted) != 1 || (*posted)[0].(session.ClocksSet).Raised[0] != 0 || fmt.Sprint(c.log) != "[save 4 card-0 1400]" {
		t.Fatalf("%+v, %v", *posted, c.log)
	}
	g.release(session.ReleaseClocks{Version: id.Version{Generation: 1, N: 2}})
	if len(c.log) != 2 {
		t.Errorf("%v", c.log)
	}
	g.close()
	if fmt.Sprint(c.log[2:]) != "[card-0 back close true]" {
		t.Errorf("%v", c.log)
	}
}

// Without permission, hardware, or workers on it there is one line, and no more is tried.
func TestGoverningGivesUp(t *testing.T) {
	for _, c := range []*fakeClocks{
		{refuses: fmt.Errorf("card: %w; root may", dvfs.ErrPermission)},
		{err: fmt.Errorf("no cards: %w", dvfs.ErrUnsupported)},
	} {
		g, posted := governed(t, c)
		e := uneven(t)
		for range 8 {
			g.observe(t.Context(), observed{ObserveStep: e})
			if g.gaveUp {
				break
			}
		}
		if len(*posted) != 1 || len((*posted)[0].(session.ClocksSet).Settings) > 0 || (*posted)[0].(session.ClocksSet).Reason == "" {
			t.Errorf("%+v", *posted)
		}
	}
	g, posted := governed(t, &fakeClocks{})
	e := uneven(t)
	e.Processes = map[int]int{}
	g.observe(t.Context(), observed{ObserveStep: e})
	if len(*posted) != 1 {
		t.Errorf("nobody on a device: %+v", *posted)
	}
}

// heardBy is an outbox that keeps what is put into it.
type heardBy struct{ all []control.Message }

func (h *heardBy) put(m control.Message) { h.all = append(h.all, m) }
func (h *heardBy) empty() bool           { return true }

// farClock describes a device of another host.
func farClock(worker int) control.ClockDevice {
	return control.ClockDevice{Name: fmt.Sprint("card-", worker), Kind: "gpu", Steps: dvfs.Grid(700, 1400, 50), Found: 1400, Workers: []int{worker}, Joules: 5}
}

// The devices of other hosts are opened and set by messages. A host that does not answer, refuses or says what cannot be has none, and
// the others are governed without it.
func TestGoverningOtherHosts(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates some thousand steps in one goroutine: not with -short")
	}
	e := uneven(t)
	for i, host := range []string{"a", "a", "b", "c"} {
		e.Plan.Workers[i].Host = host
	}
	var b, c heardBy
	o := observed{ObserveStep: e, hosts: []linkedHost{{1, "b", &b}, {2, "c", &c}}}
	begin := func() (g *governing, posted *[]session.Event) {
		b, c = heardBy{}, heardBy{}
		g, posted = governed(t, &fakeClocks{})
		g.self, g.own = "a", func(host string) bool { return host == "a" }
		g.observe(t.Context(), o)
		if fmt.Sprintf("%+v", b.all) != "[{ID:1 Workers:[2]}]" || fmt.Sprintf("%+v", c.all) != "[{ID:1 Workers:[3]}]" || len(g.devices) != 2 {
			t.Fatalf("%+v, %+v, %d devices", b.all, c.all, len(g.devices))
		}
		b, c = heardBy{}, heardBy{}
		return g, posted
	}
	say := func(g *governing, host int, m control.Message) {
		g.heard(hostSaid{host: host, m: m})
		e, _ := g.queue.next()
		g.work(t.Context(), e)
	}
	lower := func(g *governing) {
		t.Helper()
		for range 8 {
			g.observe(t.Context(), o)
		}
		if len(c.all) != 1 || c.all[0].(control.SetClock).ID != 1 || c.all[0].(control.SetClock).MHz >= 1400 || len(b.all) > 0 {
			t.Fatalf("%+v, %+v", b.all, c.all)
		}
	}

	// b never answers.
	g, posted := begin()
	say(g, 2, control.Clocks{ID: 1, Devices: []control.ClockDevice{farClock(3)}})
	lower(g)
	if set := (*posted)[0].(session.ClocksSet); len(set.Settings) != 1 || set.Settings[0].Device != "c: card-3" || set.Lowered[3] != 2 || set.Shares[3] != 0.5 {
		t.Errorf("%+v", set)
	}
	*posted = nil
	say(g, 2, control.ClockState{ID: 1, Devices: []control.ClockNow{{MHz: 700, Joules: 8}}})
	g.meter()
	if m := (*posted)[0].(session.Metered).Devices; len(m) != 3 || m[2].Name != "c: card-3" || m[2].Hertz != 700e6 || m[2].Joules != 3 || g.joules() != 3 {
		t.Errorf("%+v", m)
	}
	// Another plan, and the same one with fewer links.
	g.release(session.ReleaseClocks{Version: id.Version{Generation: 1, N: 2}})
	if len(c.all) != 2 || c.all[1] != (control.SetClock{ID: 1}) {
		t.Errorf("%+v", c.all)
	}
	g.observe(t.Context(), observed{ObserveStep: e, hosts: o.hosts[:1]})
	if len(g.devices) != 2 || len(g.asked) != 1 || g.joules() != 3 {
		t.Errorf("%d devices, %v J", len(g.devices), g.joules())
	}

	// c cannot set what it has, and b has nothing.
	g, posted = begin()
	say(g, 2, control.Clocks{ID: 1, Devices: []control.ClockDevice{farClock(3)}})
	lower(g)
	*posted = nil
	say(g, 2, control.ClockState{ID: 1, Err: "no permission"})
	if set := (*posted)[0].(session.ClocksSet); set.Lowered[3] != 1 || set.Shares[3] != 1 || len(set.Settings) != 1 || set.Settings[0].MHz != 1400 || len(g.devices) != 2 {
		t.Errorf("%+v", set)
	}
	say(g, 1, control.Clocks{ID: 1, Err: "no\nhardware"})
	if len(*posted) != 2 || (*posted)[1] != (session.Noted{Text: "clocks of a host are left alone: b: no hardware"}) || g.gaveUp {
		t.Errorf("%+v", *posted)
	}

	// Answers of before, of hosts that were not asked, and what cannot be.
	g, posted = begin()
	say(g, 2, control.Clocks{ID: 2, Devices: []control.ClockDevice{farClock(3)}})
	say(g, 7, control.Clocks{ID: 1, Devices: []control.ClockDevice{farClock(3)}})
	say(g, 2, control.ClockState{ID: 1})
	if len(g.devices) != 2 || len(g.asked) != 2 || len(*posted) > 0 {
		t.Errorf("%d devices, %+v", len(g.devices), *posted)
	}
	say(g, 2, control.Clocks{ID: 1, Devices: []control.ClockDevice{farClock(2)}})
	say(g, 2, control.Clocks{ID: 1, Devices: []control.ClockDevice{farClock(3)}}) // too late
	say(g, 1, control.Clocks{ID: 1})
	if len(g.devices) != 2 || len(g.asked) != 0 || len(*posted) != 1 {
		t.Errorf("%d devices, %+v", len(g.devices), *posted)
	}
}

// The model is of the clocks of the moment: who takes longer for its clock computes for longer.
func TestClockModel(t *testing.T) {
	e := uneven(t)
	e.Under = map[id.WorkerID]float64{2: 2}
	m := devices.Model(e, func() bool { return false })
	if m.Workers != 4 || m.Busy[2] != 2*m.Busy[1] || m.Busy[0] != m.Busy[1] || math.Abs(m.Busy[0]/m.Busy[3]-4) > 1e-9 {
		t.Errorf("%+v", m.Busy)
	}
	same := []float64{1, 1, 1, 1}
	now := m.Step(same)
	if slower := m.Step([]float64{1, 1, 0.5, 1}); slower < 1.9*now {
		t.Errorf("%v s, and %v s with the bottleneck at half speed", now, slower)
	}
	large := e
	large.Plan.Route = nil
	for range e.Plan.Stages {
		large.Plan.Route = append(large.Plan.Route, slices.Repeat([]id.WorkerID{0, 1}, 300))
	}
	m = devices.Model(large, func() bool { return false })
	if got := m.Step(same); got != simulate.Estimate(&large.Plan, plan.Profile{Layers: e.Profile.Layers, Speed: map[id.WorkerID]float64{0: 1, 1: 1, 2: 0.5, 3: 1}}).Seconds() {
		t.Errorf("%v s by the closed form", got)
	}
}

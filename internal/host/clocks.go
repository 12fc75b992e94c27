package host

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/plan/simulate"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// The clocks of the devices that workers compute on. The session says which steps count: those of a plan that is
// live, with all mirrors and with measured times of all its workers. A goroutine beside the loop asks the governor of package dvfs,
// which may take a while, and sets what that says. It tells the session, which writes it down and has the detector of slow
// workers know. Plans know nothing of clocks: they are made with the times that were measured before a clock was lowered. What
// is lowered is put back when another plan comes, and at the end of the run.

// Clocks are those of the devices of this machine. Its methods are called by one goroutine.
type Clocks interface {
	// Devices returns the devices that workers compute on, given the process of each worker. It is called again where a plan
	// has other workers, after all clocks are put back.
	Devices(processes map[int]int) ([]Device, error)

	// Save is called before the first clock is set that stays so when this process dies. When it returns,
	// a process that outlives this one will put back what the record says.
	Save(dvfs.Record) error

	// Close is called last. restored says that all clocks are as they were found.
	Close(restored bool) error

	// Emulated says that the devices do not exist: workers are told how fast they are to be.
	Emulated() bool
}

// Device is one of them.
type Device struct {
	dvfs.Clock
	Kind    string                // cpu or gpu, for metrics
	Workers []int                 // WorkerIDs of those who compute on it
	Power   dvfs.Power            // nil: not known
	Speed   func(mhz int) float64 // of its work; nil: proportional to the frequency
}

// governorConfig lets less be gained by a change than is the governor's default: what the other dimensions leave to clocks
// is often one percent.
var governorConfig = dvfs.Config{Gain: 0.005}

// governing is the goroutine that sets clocks.
type governing struct {
	clocks   Clocks
	queue    *queue[session.Effect]
	post     func(session.Event) bool
	newest   atomic.Uint64                          // N of the newest plan; what is about another one is dropped
	changes  atomic.Uint64                          // of clocks; steps from before the newest tell nothing of it
	emulated atomic.Pointer[map[int]*dvfs.Emulated] // clocks of workers that are emulated; nil before devices are known
	governor *dvfs.Governor

	// Of the goroutine alone.
	opened    bool
	gaveUp    bool
	processes map[int]int // that devices are known for
	devices   []Device
	keeper    *dvfs.Keeper
	now, own  []int     // MHz at which each device is, and at which its workers' times are known to plans
	from      []float64 // joules as it was opened
	before    float64   // joules of devices that are no longer there

	last session.ClocksSet // after the end: what was put back
	err  error             // after the end: what could not be
}

func newGoverning(c Clocks, cfg dvfs.Config, post func(session.Event) bool) (*governing, error) {
	g, err := dvfs.NewGovernor(cfg)
	if err != nil {
		return nil, err
	}
	return &governing{clocks: c, queue: newQueue[session.Effect](), post: post, governor: g}, nil
}

// take hands work to the goroutine; it never waits.
func (g *governing) take(e session.Effect) {
	switch o := e.(type) {
	case session.ObserveStep:
		o.Changes = g.changes.Load()
		e = o
	case session.ReleaseClocks:
		g.newest.Store(uint64(o.Version.N))
	case session.DeviceUsed: // at once, as of a real device: the goroutine may be searching for steps on end
		if all := g.emulated.Load(); all != nil && (*all)[o.Worker] != nil {
			(*all)[o.Worker].Run(o.Busy, o.Idle)
		}
		return
	}
	g.queue.put(e)
}

// meterEvery is the time between two looks at what devices do.
const meterEvery = time.Second

// run works until ctx ends, and then puts all clocks back.
func (g *governing) run(ctx context.Context) {
	defer g.close()
	tick := time.NewTicker(meterEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-tick.C:
			g.meter()
		case <-g.queue.signal:
			if e, ok := g.queue.next(); ok {
				g.work(ctx, e)
			}
		case <-ctx.Done():
		}
	}
}

func (g *governing) work(ctx context.Context, e session.Effect) {
	switch e := e.(type) {
	case session.ObserveStep:
		if !g.gaveUp && uint64(e.Plan.Version.N) >= g.newest.Load() && e.Changes == g.changes.Load() {
			g.observe(ctx, e)
		}
	case session.ReleaseClocks:
		g.release(e)
	}
}

// close puts everything back.
func (g *governing) close() {
	touched := g.keeper != nil && g.keeper.Touched()
	if touched {
		g.err = g.keeper.Close()
	}
	g.last.Joules = g.joules()
	if g.err == nil && touched {
		g.last.Reason = "clocks are as they were found: the run is over"
		g.last.Settings = g.restored()
	}
	g.err = errors.Join(g.err, g.clocks.Close(g.err == nil))
}

// restored are the settings of all clocks that are as they were found again.
func (g *governing) restored() (all []rundir.Clock) {
	for i, d := range g.devices {
		if g.now[i] != d.Found() {
			g.now[i] = d.Found()
			all = append(all, rundir.Clock{Device: d.Name(), MHz: g.now[i], Workers: d.Workers})
		}
	}
	return all
}

// giveUp leaves the clocks alone from now on, and says why.
func (g *governing) giveUp(why error) {
	g.gaveUp = true
	if g.keeper != nil {
		g.err = g.keeper.Close()
		g.restored()
	}
	e := session.ClocksSet{Reason: "clocks are left alone: " + session.OneLine(why.Error()), Joules: g.joules(), Lowered: make(map[id.WorkerID]float64)}
	for _, d := range g.devices {
		for _, w := range d.Workers {
			e.Lowered[id.WorkerID(w)] = 1
		}
	}
	g.post(e)
}

// open finds the devices of the workers.
func (g *governing) open(processes map[int]int) error {
	if g.keeper != nil {
		if err := g.keeper.Close(); err != nil {
			return err
		}
		g.before = g.joules()
	}
	devices, err := g.clocks.Devices(processes)
	if err != nil {
		return err
	}
	g.opened, g.processes, g.devices = true, processes, devices
	g.now, g.own, g.from = nil, nil, nil
	var clocks []dvfs.Clock
	emulated := make(map[int]*dvfs.Emulated)
	for _, d := range devices {
		clocks = append(clocks, d.Clock)
		if em, ok := d.Clock.(*dvfs.Emulated); ok {
			for _, w := range d.Workers {
				emulated[w] = em
			}
		}
		g.now, g.own = append(g.now, d.Found()), append(g.own, d.Found())
		j, err := d.Energy()
		if err != nil {
			j = math.NaN() // it has no counter
		}
		g.from = append(g.from, j)
	}
	g.emulated.Store(&emulated)
	g.keeper = dvfs.NewKeeper(clocks, g.clocks.Save)
	return nil
}

// joules is what all devices have drawn since they were opened, as far as they tell.
func (g *governing) joules() float64 {
	sum := g.before
	for i, d := range g.devices {
		if j, err := d.Energy(); err == nil && !math.IsNaN(g.from[i]) {
			sum += j - g.from[i]
		}
	}
	return sum
}

func (g *governing) meter() {
	var m session.Metered
	for i, d := range g.devices {
		x := trace.Device{Name: d.Name(), Kind: d.Kind, Hertz: float64(g.now[i]) * 1e6, Emulated: g.clocks.Emulated()}
		if mhz, err := d.Current(); err == nil {
			x.Hertz = float64(mhz) * 1e6
		}
		if j, err := d.Energy(); err == nil && !math.IsNaN(g.from[i]) {
			x.Joules = j - g.from[i]
		}
		m.Devices = append(m.Devices, x)
	}
	if len(m.Devices) > 0 {
		g.post(m)
	}
}

// release puts lowered clocks back.
func (g *governing) release(e session.ReleaseClocks) {
	var back []dvfs.Setting
	for i := range g.devices {
		if g.now[i] < g.own[i] {
			back = append(back, dvfs.Setting{Clock: i, MHz: g.own[i]})
		}
	}
	if len(back) > 0 && !g.gaveUp {
		g.apply(back, fmt.Sprintf("clocks are put back: plan %v is live, and its times are to be measured", e.Version))
	}
}

// observe asks the governor, and does what it says.
func (g *governing) observe(ctx context.Context, e session.ObserveStep) {
	known := g.opened
	for id, pid := range e.Processes {
		known = known && g.processes[id] == pid
	}
	if !known {
		if err := g.open(e.Processes); err != nil {
			g.giveUp(err)
			return
		}
		if len(g.devices) == 0 {
			g.giveUp(errors.New("no worker computes on a device whose clock can be set"))
			return
		}
	}
	version := uint64(e.Plan.Version.N)
	o := dvfs.Observation{Plan: version, Seconds: e.Seconds}
	place := make(map[int]int) // of a worker in the plan
	for i, w := range e.Plan.Workers {
		place[int(w.ID)] = i
	}
	for i, d := range g.devices {
		x := dvfs.Device{Steps: d.Steps(), Now: g.now[i], Power: d.Power, Speed: d.Speed}
		for _, w := range d.Workers {
			if at, ok := place[w]; ok {
				x.Workers = append(x.Workers, at)
			}
		}
		o.Devices = append(o.Devices, x)
	}
	stale := func() bool { return ctx.Err() != nil || g.newest.Load() > version }
	o.Model = func() dvfs.Model { return clockModel(e, stale) }
	d, err := g.governor.Step(o)
	switch {
	case stale():
		// The governor begins anew with the plan that there is now.
	case err != nil:
		g.giveUp(err)
	case len(d.Settings) > 0:
		g.apply(d.Settings, d.Reason)
	}
}

// apply sets clocks and tells of it.
func (g *governing) apply(settings []dvfs.Setting, reason string) {
	e := session.ClocksSet{Reason: reason, Lowered: make(map[id.WorkerID]float64), Shares: make(map[id.WorkerID]float64)}
	if g.clocks.Emulated() {
		e.Reason += " (emulated)"
	}
	for i, s := range settings {
		if s.MHz == g.devices[s.Clock].Found() {
			settings[i].MHz = 0 // exactly as it was
		}
	}
	if err := g.keeper.Apply(settings); err != nil {
		g.giveUp(err)
		return
	}
	g.changes.Add(1)
	for _, s := range settings {
		d := g.devices[s.Clock]
		if s.MHz == 0 {
			s.MHz = d.Found()
		}
		g.now[s.Clock] = s.MHz
		speed := func(mhz int) float64 { return float64(mhz) }
		if d.Speed != nil {
			speed = d.Speed
		}
		up := s.MHz > g.own[s.Clock]
		if up {
			g.own[s.Clock] = s.MHz
		}
		for _, w := range d.Workers {
			id := id.WorkerID(w)
			e.Shares[id] = speed(s.MHz) / speed(d.Found())
			if up {
				e.Raised = append(e.Raised, id)
			} else {
				e.Lowered[id] = max(1, speed(g.own[s.Clock])/speed(s.MHz))
			}
		}
		e.Settings = append(e.Settings, rundir.Clock{Device: d.Name(), MHz: s.MHz, Workers: d.Workers})
	}
	e.Joules = g.joules()
	g.post(e)
}

// maxSimulated bounds the passes of a step times the devices, to which all simulations of an allocation are in proportion; beyond, the
// closed form predicts, which knows less of waiting.
const maxSimulated = 1 << 12

// clockModel predicts a step of the plan from the speeds of workers, beside those that were measured at the clocks of the moment. Nothing
// takes long any more where it is stale.
func clockModel(e session.ObserveStep, stale func() bool) dvfs.Model {
	p := e.Plan
	now := make([]float64, len(p.Workers)) // speed by the profile, at the clock of the moment
	m := dvfs.Model{Workers: len(p.Workers), Busy: make([]float64, len(p.Workers))}
	place := make(map[id.WorkerID]int)
	for i, w := range p.Workers {
		place[w.ID], now[i] = i, 1
		if v := e.Profile.Speed[w.ID]; v > 0 {
			now[i] = v
		}
		if u := e.Under[w.ID]; u > 1 {
			now[i] /= u
		}
	}
	passes := 0
	for s, st := range p.Stages {
		var pass time.Duration
		for _, l := range e.Profile.Layers[st.Lo:st.Hi] {
			pass += l.Forward + l.Backward
		}
		for _, w := range p.Route[s] {
			m.Busy[place[w]] += pass.Seconds() / now[place[w]]
			passes += 2
		}
	}
	simulated := passes*len(p.Workers) <= maxSimulated
	m.Step = func(speeds []float64) float64 {
		if stale() {
			return math.Inf(1)
		}
		prof := e.Profile
		prof.Speed = make(map[id.WorkerID]float64, len(now))
		for i, w := range p.Workers {
			prof.Speed[w.ID] = now[i] * speeds[i]
		}
		if !simulated {
			return simulate.Estimate(&p, prof).Seconds()
		}
		t, err := simulate.Typical(&p, prof)
		if err != nil {
			return math.Inf(1) // which is an error of the allocation
		}
		return t.Seconds()
	}
	return m
}

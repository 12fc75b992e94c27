package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/host/devices"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// The clocks of the devices that workers compute on. The session says which steps count: those of a plan that is
// live, with all mirrors and with measured times of all its workers. A goroutine beside the loop asks the governor of package dvfs,
// which may take a while, and sets what that says. It tells the session, which writes it down and has the detector of slow
// workers know. Plans know nothing of clocks: they are made with the times that were measured before a clock was lowered. What
// is lowered is put back when another plan comes, and at the end of the run.
//
// One governor decides for the devices of all hosts, so that no waiting is spent twice. Those of other hosts are opened, set and restored
// by their agents (package devices). Nothing waits for them: a host that does not answer has no device until it does.

// governorConfig lets less be gained by a change than is the governor's default: what the other dimensions leave to clocks
// is often one percent.
var governorConfig = dvfs.Config{Gain: 0.005}

// governing is the goroutine that sets clocks.
type governing struct {
	holder   *devices.Holder        // of this machine's
	self     string                 // this host, "" where it is alone
	own      func(host string) bool // whose devices the holder has
	queue    *queue[any]            // observed, session.ReleaseClocks and hostSaid
	post     func(session.Event) bool
	newest   atomic.Uint64               // N of the newest plan; what is about another one is dropped
	changes  atomic.Uint64               // of clocks; steps from before the newest tell nothing of it
	emulated atomic.Pointer[map[int]ran] // clocks of workers that are emulated; nil before devices are known
	governor *dvfs.Governor

	// Of the goroutine alone.
	held      bool // the clocks of this machine
	opened    bool
	gaveUp    bool
	processes map[int]int      // that devices are known for
	round     uint64           // of open
	asked     map[string]asked // hosts that have not answered in this round, by their names
	faults    []string         // why hosts have no devices, in this round
	noted     map[string]bool  // of these, those that the run knows
	devices   []device         // those of this machine first
	before    float64          // joules of devices that are no longer there

	last session.ClocksSet // after the end: what was put back
	err  error             // after the end: what could not be
}

// device is one that is governed. A machine's own ones are in the order of its holder.
type device struct {
	devices.Device
	host     int     // its place; ownDevice for those of this machine
	of       string  // the name of the host
	name     string  // for people and metrics, unlike that of any other host's
	now, own int     // MHz at which it is, and at which its workers' times are known to plans
	from     float64 // joules as it was opened
}

// ownDevice stands for the host of a device that this one's holder has.
const ownDevice = -1

// ran is an emulated clock, here or on another host.
type ran interface{ Run(busy, idle float64) }

// observed is a step, and the hosts that have a link. The leader's own is not among them.
type observed struct {
	session.ObserveStep
	hosts []linkedHost
}

type linkedHost struct {
	place int
	name  string
	out   outbox
}

// asked is a host that is asked for its devices.
type asked struct {
	linkedHost
	workers []int
}

// maxUngoverned bounds what hosts have said of their devices and is yet to be taken in.
const maxUngoverned = 1 << 12

// newGoverning returns what sets clocks. own says of which hosts the holder has the devices, those of self among them; with self "" of all.
func newGoverning(h *devices.Holder, self string, own func(host string) bool, cfg dvfs.Config, post func(session.Event) bool) (*governing, error) {
	g, err := dvfs.NewGovernor(cfg)
	if err != nil {
		return nil, err
	}
	return &governing{holder: h, self: self, own: own, queue: newQueue[any](), post: post, governor: g, noted: make(map[string]bool)}, nil
}

// take hands work to the goroutine; it never waits.
func (g *governing) take(e session.Effect, hosts []linkedHost) {
	switch o := e.(type) {
	case session.ObserveStep:
		o.Changes = g.changes.Load()
		g.queue.put(observed{o, hosts})
	case session.ReleaseClocks:
		g.newest.Store(uint64(o.Version.N))
		g.queue.put(o)
	case session.DeviceUsed: // at once, as of a real device: the goroutine may be searching for steps on end
		if all := g.emulated.Load(); all != nil && (*all)[o.Worker] != nil {
			(*all)[o.Worker].Run(o.Busy, o.Idle)
		}
	}
}

// heard hands on what a host says of its devices, and nothing else.
func (g *governing) heard(e hostSaid) {
	switch e.m.(type) {
	case control.Clocks, control.ClockState:
		if g.queue.len() < maxUngoverned {
			g.queue.put(e)
		}
	}
}

// run works until ctx ends, and then puts all clocks back.
func (g *governing) run(ctx context.Context) {
	defer g.close()
	tick := time.NewTicker(devices.MeterEvery)
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

func (g *governing) work(ctx context.Context, e any) {
	switch e := e.(type) {
	case observed:
		if !g.gaveUp && uint64(e.Plan.Version.N) >= g.newest.Load() && e.Changes == g.changes.Load() {
			g.observe(ctx, e)
		}
	case session.ReleaseClocks:
		g.release(e)
	case hostSaid:
		g.hear(e)
	}
}

// close puts everything back. Other hosts do so themselves as their links to this leader end.
func (g *governing) close() {
	if g.held {
		g.err = g.holder.Restore()
	}
	g.last.Joules = g.joules()
	if g.err == nil {
		if g.last.Settings = g.restored(); g.last.Settings != nil {
			g.last.Reason = "clocks are as they were found: the run is over"
		}
	}
	if g.held {
		g.err = g.holder.Release()
	}
}

// restored are the settings of all clocks that are as they were found again.
func (g *governing) restored() (all []rundir.Clock) {
	for i := range g.devices {
		if d := &g.devices[i]; d.now != d.Found() {
			d.now = d.Found()
			all = append(all, rundir.Clock{Device: d.name, MHz: d.now, Workers: d.Workers})
		}
	}
	return all
}

// giveUp leaves the clocks alone from now on, and says why.
func (g *governing) giveUp(why error) {
	g.gaveUp = true
	if g.held {
		g.err = g.holder.Restore()
	}
	g.restoreFar()
	g.restored()
	e := session.ClocksSet{Reason: "clocks are left alone: " + session.OneLine(why.Error()), Joules: g.joules(), Lowered: make(map[id.WorkerID]float64)}
	for _, d := range g.devices {
		for _, w := range d.Workers {
			e.Lowered[id.WorkerID(w)] = 1
		}
	}
	g.post(e)
}

// restoreFar has other hosts restore their clocks.
func (g *governing) restoreFar() {
	for _, d := range g.devices {
		if d.host != ownDevice && d.now != d.Found() {
			_ = d.Restore() // what fails, its host says
		}
	}
}

// open finds the devices of the workers: here at once, and on other hosts as they answer.
func (g *governing) open(ctx context.Context, e observed) {
	g.before = g.joules()
	g.restoreFar()
	g.round++
	g.opened, g.processes, g.devices = true, e.Processes, nil
	g.asked, g.faults = make(map[string]asked), nil
	g.emulated.Store(nil)
	own, others := make(map[int]int), make(map[string][]int)
	for _, w := range e.Plan.Workers {
		if pid, known := e.Processes[int(w.ID)]; !known {
			continue
		} else if g.self == "" || g.own(w.Host) {
			own[int(w.ID)] = pid
		} else {
			others[w.Host] = append(others[w.Host], int(w.ID))
		}
	}
	if err := g.openOwn(ctx, own); ctx.Err() != nil {
		return
	} else if err != nil {
		g.without(g.self, err)
	}
	for _, h := range e.hosts {
		if workers := others[h.name]; workers != nil {
			g.asked[h.name] = asked{h, workers}
			h.out.put(control.OpenClocks{ID: g.round, Workers: workers})
		}
	}
	g.answered()
}

// openOwn opens the devices of this machine.
func (g *governing) openOwn(ctx context.Context, processes map[int]int) error {
	if !g.held {
		if err := g.holder.Acquire(ctx); err != nil {
			return err
		}
		g.held = true
	}
	all, err := g.holder.Open(processes)
	if err != nil {
		return err
	}
	g.add(ownDevice, g.self, all)
	return nil
}

// add adds the devices of a host.
func (g *governing) add(host int, of string, all []devices.Device) {
	emulated := make(map[int]ran)
	if was := g.emulated.Load(); was != nil {
		maps.Copy(emulated, *was)
	}
	for _, d := range all {
		x := device{Device: d, host: host, of: of, name: d.Name(), now: d.Found(), own: d.Found()}
		if of != "" {
			x.name = of + ": " + x.name
		}
		if em, ok := d.Clock.(ran); ok && g.holder.Emulated() {
			for _, w := range d.Workers {
				emulated[w] = em
			}
		}
		var err error
		if x.from, err = d.Energy(); err != nil {
			x.from = math.NaN() // it has no counter
		}
		g.devices = append(g.devices, x)
	}
	g.emulated.Store(&emulated)
}

// without takes in why a host has no devices.
func (g *governing) without(host string, why error) {
	text := session.OneLine(why.Error())
	text = text[:min(len(text), maxFault)]
	if host != "" {
		text = host + ": " + text
	}
	g.faults = append(g.faults, text)
}

const leftAlone = "clocks of a host are left alone: "

// maxFault bounds what another host says of a fault, in bytes.
const maxFault = 1 << 10

// answered concludes a round of open once all hosts have answered.
func (g *governing) answered() {
	if len(g.asked) > 0 {
		return
	}
	if len(g.devices) == 0 {
		if g.faults == nil {
			g.faults = []string{"no worker computes on a device whose clock can be set"}
		}
		g.giveUp(errors.New(strings.Join(g.faults, "; ")))
		return
	}
	for _, text := range g.faults {
		if !g.noted[text] {
			g.noted[text] = true
			g.post(session.Noted{Text: leftAlone + text})
		}
	}
	g.faults = nil
}

// hear takes in what another host says of its devices.
func (g *governing) hear(e hostSaid) {
	if g.gaveUp {
		return
	}
	switch m := e.m.(type) {
	case control.Clocks:
		for name, h := range g.asked {
			if h.place != e.host || m.ID != g.round {
				continue
			}
			delete(g.asked, name)
			all, err := farDevices(m, h)
			if err != nil {
				g.without(name, err)
			} else {
				g.add(e.host, name, all)
			}
			g.answered()
			return
		}
	case control.ClockState:
		var all []*devices.Far
		for _, d := range g.devices {
			if f, ok := d.Clock.(*devices.Far); ok && d.host == e.host {
				all = append(all, f)
			}
		}
		if m.ID != g.round || len(all) == 0 {
			return
		}
		err := devices.Heard(all, m.Devices)
		if m.Err != "" {
			err = errors.New(m.Err)
		}
		if err != nil {
			g.drop(e.host, err)
		}
	}
}

// farDevices returns the devices that a host tells of.
func farDevices(m control.Clocks, h asked) ([]devices.Device, error) {
	if m.Err != "" {
		return nil, errors.New(m.Err)
	}
	all, err := devices.FarDevices(m.Devices, h.workers, func(i, mhz int) {
		h.out.put(control.SetClock{ID: m.ID, Device: i, MHz: mhz})
	})
	if err != nil {
		return nil, fmt.Errorf("what it says of its devices cannot be: %w", err)
	}
	return all, nil
}

// drop leaves the clocks of another host alone, which it has restored.
func (g *governing) drop(host int, why error) {
	e := session.ClocksSet{Lowered: make(map[id.WorkerID]float64), Shares: make(map[id.WorkerID]float64), Joules: g.joules()}
	var left []device
	for _, d := range g.devices {
		if d.host != host {
			left = append(left, d)
			continue
		}
		if e.Reason == "" {
			g.without(d.of, why)
			e.Reason = leftAlone + g.faults[len(g.faults)-1]
		}
		g.before += d.drawn()
		if d.now != d.Found() {
			e.Settings = append(e.Settings, rundir.Clock{Device: d.name, MHz: d.Found(), Workers: d.Workers})
		}
		for _, w := range d.Workers {
			e.Lowered[id.WorkerID(w)], e.Shares[id.WorkerID(w)] = 1, 1
		}
	}
	g.devices = left
	if g.changes.Add(1); len(e.Settings) > 0 {
		g.noted[g.faults[len(g.faults)-1]] = true
		g.post(e)
	}
	g.answered()
}

// forget forgets the devices of hosts that have no link, which restore them by themselves.
func (g *governing) forget(linked []linkedHost) {
	gone := func(host int) bool {
		return host != ownDevice && !slices.ContainsFunc(linked, func(h linkedHost) bool { return h.place == host })
	}
	g.devices = slices.DeleteFunc(g.devices, func(d device) bool {
		if !gone(d.host) {
			return false
		}
		g.before += d.drawn()
		return true
	})
	if len(g.asked) == 0 {
		return
	}
	maps.DeleteFunc(g.asked, func(_ string, a asked) bool { return gone(a.place) })
	g.answered()
}

// drawn is what the device has drawn since it was opened, 0 if it does not tell.
func (d *device) drawn() float64 {
	if j, err := d.Energy(); err == nil && !math.IsNaN(d.from) {
		return j - d.from
	}
	return 0
}

// joules is what all devices have drawn since they were opened, as far as they tell.
func (g *governing) joules() float64 {
	sum := g.before
	for i := range g.devices {
		sum += g.devices[i].drawn()
	}
	return sum
}

func (g *governing) meter() {
	var m session.Metered
	for i := range g.devices {
		d := &g.devices[i]
		x := trace.Device{Name: d.name, Kind: d.Kind, Hertz: float64(d.now) * 1e6, Joules: d.drawn(), Emulated: g.holder.Emulated()}
		if mhz, err := d.Current(); err == nil {
			x.Hertz = float64(mhz) * 1e6
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
	for i, d := range g.devices {
		if d.now < d.own {
			back = append(back, dvfs.Setting{Clock: i, MHz: d.own})
		}
	}
	if len(back) > 0 && !g.gaveUp {
		g.apply(back, fmt.Sprintf("clocks are put back: plan %v is live, and its times are to be measured", e.Version))
	}
}

// observe asks the governor, and does what it says.
func (g *governing) observe(ctx context.Context, e observed) {
	known := g.opened
	for id, pid := range e.Processes {
		known = known && g.processes[id] == pid
	}
	if known {
		g.forget(e.hosts)
	} else {
		g.open(ctx, e)
	}
	if len(g.devices) == 0 || g.gaveUp {
		return
	}
	version := uint64(e.Plan.Version.N)
	o := dvfs.Observation{Plan: version, Seconds: e.Seconds}
	place := make(map[int]int) // of a worker in the plan
	for i, w := range e.Plan.Workers {
		place[int(w.ID)] = i
	}
	for _, d := range g.devices {
		x := dvfs.Device{Steps: d.Steps(), Now: d.now, Power: d.Power, Speed: d.Speed}
		for _, w := range d.Workers {
			if at, ok := place[w]; ok {
				x.Workers = append(x.Workers, at)
			}
		}
		o.Devices = append(o.Devices, x)
	}
	stale := func() bool { return ctx.Err() != nil || g.newest.Load() > version }
	o.Model = func() dvfs.Model { return devices.Model(e.ObserveStep, stale) }
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

// set sets clocks, those of this machine first.
func (g *governing) set(settings []dvfs.Setting) error {
	var own []dvfs.Setting
	for _, s := range settings {
		if g.devices[s.Clock].host == ownDevice {
			own = append(own, s)
		}
	}
	if err := g.holder.Apply(own); err != nil {
		return err
	}
	for _, s := range settings {
		d := g.devices[s.Clock]
		var err error
		switch {
		case d.host == ownDevice:
		case s.MHz == 0:
			err = d.Restore()
		default:
			err = d.Set(s.MHz)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// apply sets clocks and tells of it.
func (g *governing) apply(settings []dvfs.Setting, reason string) {
	e := session.ClocksSet{Reason: reason, Lowered: make(map[id.WorkerID]float64), Shares: make(map[id.WorkerID]float64)}
	if g.holder.Emulated() {
		e.Reason += " (emulated)"
	}
	for i, s := range settings {
		if s.MHz == g.devices[s.Clock].Found() {
			settings[i].MHz = 0 // exactly as it was
		}
	}
	if err := g.set(settings); err != nil {
		g.giveUp(err)
		return
	}
	g.changes.Add(1)
	for _, s := range settings {
		d := &g.devices[s.Clock]
		if s.MHz == 0 {
			s.MHz = d.Found()
		}
		d.now = s.MHz
		speed := func(mhz int) float64 { return float64(mhz) }
		if d.Speed != nil {
			speed = d.Speed
		}
		up := s.MHz > d.own
		if up {
			d.own = s.MHz
		}
		for _, w := range d.Workers {
			id := id.WorkerID(w)
			e.Shares[id] = speed(s.MHz) / speed(d.Found())
			if up {
				e.Raised = append(e.Raised, id)
			} else {
				e.Lowered[id] = max(1, speed(d.own)/speed(s.MHz))
			}
		}
		e.Settings = append(e.Settings, rundir.Clock{Device: d.name, MHz: s.MHz, Workers: d.Workers})
	}
	e.Joules = g.joules()
	g.post(e)
}

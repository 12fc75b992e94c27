package devices

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/net/control"
)

// fakeClocks has an emulated device for each worker that there ever was, and says what is done with them.
type fakeClocks struct {
	t       *testing.T
	all     map[int]Device
	refuses error
	log     []string
}

type fakeClock struct {
	*dvfs.Emulated
	of *fakeClocks
}

func (c fakeClock) Set(mhz int) error {
	if c.of.refuses != nil {
		return c.of.refuses
	}
	c.of.log = append(c.of.log, fmt.Sprint(c.Name(), " ", mhz))
	return c.Emulated.Set(mhz)
}

func (c fakeClock) Restore() error {
	c.of.log = append(c.of.log, c.Name()+" back")
	return c.Emulated.Restore()
}

func (c *fakeClocks) Devices(processes map[int]int) (all []Device, err error) {
	if c.all == nil {
		c.all = make(map[int]Device)
	}
	for w := range processes {
		power := dvfs.DefaultPower(1400)
		e, err := dvfs.NewEmulated(dvfs.EmulatedConfig{Name: fmt.Sprint("card-", w), Steps: []int{700, 1000, 1400}, Power: power})
		if err != nil {
			c.t.Fatal(err)
		}
		if _, ok := c.all[w]; !ok {
			c.all[w] = Device{Clock: fakeClock{e, c}, Kind: "gpu", Workers: []int{w}, Power: power, Speed: func(mhz int) float64 { return math.Sqrt(float64(mhz)) }}
		}
	}
	for _, w := range slices.Sorted(maps.Keys(c.all)) {
		all = append(all, c.all[w])
	}
	return all, nil
}

func (c *fakeClocks) Save(dvfs.Record) error { return nil }
func (c *fakeClocks) Emulated() bool         { return true }
func (c *fakeClocks) Close(restored bool) error {
	c.log = append(c.log, fmt.Sprint("close ", restored))
	return nil
}

// said is what a server answers over a link.
type said struct {
	mu  sync.Mutex
	all []control.Message
}

func (s *said) tell(m control.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, m)
}

// take returns what was said since the last time.
func (s *said) take() (all []control.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, s.all = s.all, nil
	return all
}

// A server opens and sets devices for one link at a time, and restores them when that ends, with everything that still waits.
func TestServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, reset := &fakeClocks{t: t}, 0
		var faults []error
		s := NewServer(NewHolder(c, func() { reset++ }), func(workers []int) map[int]int {
			all := make(map[int]int)
			for _, w := range workers {
				all[w] = 100 + w
			}
			return all
		}, func(err error) { faults = append(faults, err) })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { s.Run(ctx); close(ended) }()
		log := func(want ...string) {
			t.Helper()
			synctest.Wait()
			if !slices.Equal(c.log, want) {
				t.Fatalf("%q, want %q", c.log, want)
			}
			c.log = nil
		}
		var one, two said
		s.Hear(1, one.tell, control.OpenClocks{ID: 3, Workers: []int{1, 2}})
		s.Hear(1, one.tell, control.SetClock{ID: 2, Device: 0, MHz: 700}) // of before
		s.Hear(2, two.tell, control.SetClock{ID: 3, Device: 0, MHz: 700}) // of another link
		s.Hear(1, one.tell, control.SetClock{ID: 3, Device: 1, MHz: 700})
		log("card-2 700")
		told := one.take()[0].(control.Clocks)
		if other := two.take(); told.ID != 3 || told.Err != "" || len(told.Devices) != 2 || len(told.Devices[1].Watts) != 3 || other != nil {
			t.Fatalf("%+v, %+v", told, other)
		}
		time.Sleep(MeterEvery)
		synctest.Wait()
		if m := one.take()[0].(control.ClockState); m.ID != 3 || m.Err != "" || m.Devices[0].MHz != 1400 || m.Devices[1].MHz != 700 {
			t.Fatalf("%+v", m)
		}

		// The same leader opens them again, for other workers.
		s.Hear(1, one.tell, control.OpenClocks{ID: 4, Workers: []int{2}})
		s.Hear(1, one.tell, control.SetClock{ID: 4, Device: 0, MHz: 1000})
		log("card-2 back", "card-2 1000")
		if told := one.take()[0].(control.Clocks); len(told.Devices) != 1 || told.Devices[0].Name != "card-2" || reset != 1 {
			t.Fatalf("%+v, %d resets", told, reset)
		}

		// The link ends, and another leader comes. What is still to be done for the first one is not done.
		s.Hear(1, one.tell, control.SetClock{ID: 4, Device: 0, MHz: 700})
		s.End(1)
		s.Hear(2, two.tell, control.OpenClocks{ID: 1, Workers: []int{1}})
		s.Hear(2, two.tell, control.SetClock{ID: 1, Device: 0, MHz: 700})
		s.End(1)
		log("card-2 back", "close true", "card-1 700")
		if reset != 2 {
			t.Errorf("%d resets", reset)
		}

		// What cannot be set ends it all.
		for _, m := range []control.SetClock{{ID: 1, Device: 1, MHz: 700}, {ID: 1, Device: -1}, {ID: 1, Device: 0, MHz: 699}, {ID: 1, Device: 0, MHz: math.MaxInt}} {
			two.take()
			s.Hear(2, two.tell, control.OpenClocks{ID: 1, Workers: []int{1}})
			s.Hear(2, two.tell, m)
			s.Hear(2, two.tell, control.SetClock{ID: 1, Device: 0, MHz: 700})
			synctest.Wait()
			if all := two.take(); len(all) != 2 || all[1].(control.ClockState).Err == "" {
				t.Fatalf("%+v: %+v", m, all)
			}
		}
		s.Hear(2, two.tell, control.OpenClocks{ID: 1, Workers: make([]int, control.MaxClocks+1)})
		synctest.Wait()
		if told := two.take()[0].(control.Clocks); told.Err == "" {
			t.Errorf("%+v", told)
		}

		// At the end all is as it was.
		s.Hear(2, two.tell, control.OpenClocks{ID: 5, Workers: []int{1}})
		s.Hear(2, two.tell, control.SetClock{ID: 5, Device: 0, MHz: 700})
		synctest.Wait()
		c.log = nil
		cancel()
		<-ended
		log("card-1 back", "close true")
		if faults != nil {
			t.Error(faults)
		}
	})
}

// A leader that floods a server is told so, and the end of its link is not lost.
func TestServerIsFlooded(t *testing.T) {
	s := NewServer(NewHolder(&fakeClocks{t: t}, nil), nil, nil)
	for range maxOrders {
		if !s.Hear(1, nil, control.SetClock{}) {
			t.Fatal("refused too early")
		}
	}
	if s.Hear(1, nil, control.SetClock{}) {
		t.Error("taken")
	}
	s.End(1)
	if len(s.orders) != 1 || s.orders[0].said != nil {
		t.Errorf("%d orders", len(s.orders))
	}
}

// What is told of a device is all that decisions need of it.
func TestFarDevices(t *testing.T) {
	c := &fakeClocks{t: t}
	here, err := c.Devices(map[int]int{4: 1, 5: 1})
	if err != nil {
		t.Fatal(err)
	}
	var set []string
	there, err := FarDevices(Describe(here), []int{5, 4, 6}, func(device, mhz int) { set = append(set, fmt.Sprint(device, " ", mhz)) })
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range there {
		h := here[i]
		if d.Name() != h.Name() || d.Kind != h.Kind || d.Found() != h.Found() || !reflect.DeepEqual(d.Steps(), h.Steps()) || !reflect.DeepEqual(d.Workers, h.Workers) {
			t.Errorf("%+v", d)
		}
		for _, mhz := range d.Steps() {
			if d.Power.Busy(mhz) != h.Power.Busy(mhz) || d.Power.Idle() != h.Power.Idle() || d.Speed(mhz) != h.Speed(mhz) {
				t.Errorf("%d MHz: %v W, %v", mhz, d.Power.Busy(mhz), d.Speed(mhz))
			}
		}
	}
	d := there[1]
	if got, want := d.Power.Busy(850), (d.Power.Busy(700)+d.Power.Busy(1000))/2; math.Abs(got-want) > 1e-12 || d.Power.Busy(1) != d.Power.Busy(700) || d.Power.Busy(9999) != d.Power.Busy(1400) {
		t.Errorf("%v W between, want %v", got, want)
	}
	if err := errors.Join(d.Set(700), d.Restore()); err != nil || fmt.Sprint(set) != "[1 700 1 0]" {
		t.Errorf("%v, %v", set, err)
	}
	if err := d.Set(699); !errors.Is(err, dvfs.ErrUnsupported) {
		t.Error(err)
	}
	far := d.Clock.(*Far)
	far.Run(2, 1)
	if j, err := d.Energy(); err != nil || math.Abs(j-(2*d.Power.Busy(1400)+d.Power.Idle())) > 1e-12 {
		t.Errorf("%v J, %v", j, err)
	}
	if err := Heard([]*Far{far}, []control.ClockNow{{MHz: 1000, Joules: -1}}); err != nil {
		t.Error(err)
	}
	if mhz, err := d.Current(); mhz != 1000 || err != nil {
		t.Errorf("%d MHz, %v", mhz, err)
	}
	if _, err := d.Energy(); !errors.Is(err, dvfs.ErrUnsupported) {
		t.Error(err)
	}
	for _, m := range [][]control.ClockNow{nil, {{}, {}}, {{MHz: -1}}, {{MHz: math.MaxInt}}, {{Joules: math.NaN()}}, {{Joules: math.Inf(1)}}} {
		if err := Heard([]*Far{far}, m); err == nil {
			t.Errorf("%+v is taken in", m)
		}
	}
}

// What a host says of devices that cannot be is an error.
func TestHostileDevices(t *testing.T) {
	good := func() control.ClockDevice {
		return control.ClockDevice{Name: "card", Kind: "gpu", Steps: []int{700, 1400}, Found: 1400, Workers: []int{1}, Joules: -1, Watts: []float64{1, 2}, Idle: 0.5, Speed: []float64{1, 2}}
	}
	if _, err := FarDevices([]control.ClockDevice{good()}, []int{1}, nil); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*control.ClockDevice){
		"no name":         func(d *control.ClockDevice) { d.Name = "" },
		"long name":       func(d *control.ClockDevice) { d.Name = strings.Repeat("x", control.MaxClockText+1) },
		"kind":            func(d *control.ClockDevice) { d.Kind = "x" },
		"no steps":        func(d *control.ClockDevice) { d.Steps, d.Watts, d.Speed = nil, nil, nil },
		"steps of zero":   func(d *control.ClockDevice) { d.Steps[0] = 0 },
		"large steps":     func(d *control.ClockDevice) { d.Steps[1] = math.MaxInt },
		"equal steps":     func(d *control.ClockDevice) { d.Steps[0] = 1400 },
		"falling steps":   func(d *control.ClockDevice) { d.Steps[0] = 1500 },
		"many steps":      func(d *control.ClockDevice) { d.Steps = dvfs.Grid(1, 5000, 1); d.Steps = append(d.Steps, d.Steps...) },
		"found elsewhere": func(d *control.ClockDevice) { d.Found = 1401 },
		"worker":          func(d *control.ClockDevice) { d.Workers = []int{2} },
		"worker twice":    func(d *control.ClockDevice) { d.Workers = []int{1, 1} },
		"few watts":       func(d *control.ClockDevice) { d.Watts = d.Watts[:1] },
		"no watts":        func(d *control.ClockDevice) { d.Watts[0] = 0 },
		"watts":           func(d *control.ClockDevice) { d.Watts[0] = math.NaN() },
		"idle":            func(d *control.ClockDevice) { d.Idle = math.Inf(1) },
		"many speeds":     func(d *control.ClockDevice) { d.Speed = append(d.Speed, 3) },
		"speed":           func(d *control.ClockDevice) { d.Speed[1] = -1 },
		"joules":          func(d *control.ClockDevice) { d.Joules = math.NaN() },
	} {
		d := good()
		spoil(&d)
		if _, err := FarDevices([]control.ClockDevice{d}, []int{1}, nil); err == nil {
			t.Errorf("%s: taken in", name)
		}
	}
	if _, err := FarDevices(make([]control.ClockDevice, control.MaxClocks+1), nil, nil); err == nil {
		t.Error("many devices are taken in")
	}
	var many []control.ClockDevice
	for range control.MaxClockSteps/1000 + 1 {
		d := good()
		d.Steps, d.Watts, d.Speed, d.Workers = dvfs.Grid(401, 1400, 1), nil, nil, nil
		many = append(many, d)
	}
	if _, err := FarDevices(many, nil, nil); err == nil {
		t.Error("many frequencies are taken in")
	}
}

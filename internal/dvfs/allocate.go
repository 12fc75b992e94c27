package dvfs

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/soliton-train/soliton/internal/faults"
)

// Device is a clock, and the workers that compute under it, as decisions see them.
type Device struct {
	// Workers are the indices of the workers in the model whose speed the clock sets.
	Workers []int

	// Steps are the frequencies to choose from, in MHz, ascending. Of more than 32, 32 are tried.
	Steps []int

	// Now is the frequency in MHz at which the model's times were measured.
	Now int

	// Power is what the device draws; nil means [DefaultPower] of the highest step.
	Power Power

	// Speed is the speed of the work at a frequency, relative to any one; nil means proportional to
	// the frequency.
	Speed func(mhz int) float64
}

// Model predicts a step of the plan.
type Model struct {
	// Workers is how many there are.
	Workers int

	// Step returns how long a step takes, in seconds, when worker i computes speeds[i] times as fast as was
	// measured. It should not get shorter when a worker gets slower, and must not keep speeds.
	Step func(speeds []float64) float64

	// Busy is how many seconds of a step each worker computes at speed 1; nil means all of the step.
	Busy []float64
}

// Allocation is a frequency for each device, and the predicted effect.
type Allocation struct {
	MHz     []int
	Seconds float64 // of a step
	Energy  float64 // of a step, in the unit of the devices' Power and seconds

	Now       float64 // seconds of a step at the devices' present frequencies
	NowEnergy float64
	Fastest   float64 // seconds of a step with all clocks at their highest, or at the present ones if that is shorter
}

// callsPerDevice bounds how long Allocate takes: calls of the model.
const callsPerDevice = 196

// maxTried is how many frequencies of a device are tried. Finer steps than a thirtieth of the range gain less
// than the model knows.
const maxTried = 32

// Allocate returns the frequencies at which a step takes at most tolerance longer than with all clocks at their highest
// (0.01 is 1 %) or at the present ones, whichever is shorter: a faster worker takes tasks in another order, which may be a
// worse one. Workers that the step waits for run fast, workers that wait run slowly.
//
// It descends from the highest frequencies: each time it lowers the clock that saves most energy for what it adds to the time of
// the step and, with less weight, to its own computing time. So workers that share the waiting along one path end at similar
// frequencies, which is best where power grows faster than frequency. Then it raises one clock after the other, to see whether others
// can use the time better, and repeats all of it with other clocks held at their highest. The result need not be optimal.
//
// It calls model.Step at most 200 times for each device. The error lists the faults of the arguments, one on a line.
func Allocate(devices []Device, model Model, tolerance float64) (Allocation, error) {
	if err := check(devices, model, tolerance); err != nil {
		return Allocation{}, err
	}
	s := newSearch(devices, model)
	var a Allocation
	a.Now, a.Fastest = ends(devices, model)
	a.Fastest = min(a.Fastest, a.Now)
	if !(a.Fastest > 0) || math.IsInf(a.Fastest, 0) {
		return Allocation{}, fmt.Errorf("the model says that a step takes %v s", a.Fastest)
	}
	s.fastest, s.limit = a.Fastest, a.Fastest*(1+tolerance)
	s.budget = callsPerDevice * len(devices)
	s.descend(-1)
	s.exchange()
	s.again()
	for i := range devices {
		a.MHz = append(a.MHz, s.devices[i].steps[s.at[i]])
	}
	a.Seconds = s.seconds()
	a.Energy = s.energy(a.Seconds)
	for i := range devices {
		a.NowEnergy += s.devices[i].drawn(devices[i].Now, a.Now)
	}
	return a, nil
}

// ends returns the seconds of a step at the present frequencies and at the highest ones.
func ends(devices []Device, model Model) (now, highest float64) {
	return model.Step(slices.Repeat([]float64{1}, model.Workers)), newSearch(devices, model).seconds()
}

func check(devices []Device, model Model, tolerance float64) error {
	var errs faults.List
	errs.If(!(tolerance >= 0) || tolerance > 1, "tolerance is %v: give 0 to 1", tolerance)
	errs.If(model.Step == nil || model.Workers < 1, "Model: give Step, and at least one of Workers")
	errs.If(model.Busy != nil && len(model.Busy) != model.Workers, "Model: Busy has %d values: give one for each of %d workers, or none", len(model.Busy), model.Workers)
	seen := make(map[int]bool)
	for i, d := range devices {
		if err := checkSteps(d.Steps); err != nil {
			errs.Add(fmt.Errorf("Device %d: Steps: %w", i, err))
		}
		errs.If(d.Now < 1, "Device %d: Now is %d MHz: give what the model was measured at", i, d.Now)
		for _, w := range d.Workers {
			errs.If(w < 0 || w >= model.Workers || seen[w], "Device %d: worker %d: give each of 0 to %d to one device at most", i, w, model.Workers-1)
			seen[w] = true
		}
	}
	return errs.Err()
}

// search is the state of Allocate.
type search struct {
	devices []candidate
	at      []int // index of the step of each device
	speeds  []float64
	step    func([]float64) float64

	fastest, limit float64 // seconds of a step: with all clocks at their highest, and the most that is allowed
	budget         int     // calls that may still be made
}

// candidate is a device with what is looked up often.
type candidate struct {
	Device
	steps []int
	speed func(mhz int) float64 // relative to Now
	busy  float64               // seconds at speed 1, mean of its workers; below 0: all the step
}

func newSearch(devices []Device, model Model) *search {
	s := &search{speeds: make([]float64, model.Workers), step: model.Step}
	for i := range s.speeds {
		s.speeds[i] = 1 // of workers without a clock
	}
	for i, d := range devices {
		c := candidate{Device: d, steps: thin(d.Steps), busy: -1}
		speed := d.Speed
		if speed == nil {
			speed = func(mhz int) float64 { return float64(mhz) }
		}
		now := speed(d.Now)
		c.speed = func(mhz int) float64 { return speed(mhz) / now }
		if c.Power == nil {
			c.Power = DefaultPower(d.Steps[len(d.Steps)-1])
		}
		if model.Busy != nil && len(d.Workers) > 0 {
			c.busy = 0
			for _, w := range d.Workers {
				c.busy += model.Busy[w] / float64(len(d.Workers))
			}
		}
		s.devices, s.at = append(s.devices, c), append(s.at, 0)
		s.set(i, len(c.steps)-1)
	}
	return s
}

// thin returns at most maxTried of the steps, with both ends.
func thin(steps []int) []int {
	if len(steps) <= maxTried {
		return steps
	}
	var few []int
	for i := range maxTried {
		few = append(few, steps[i*(len(steps)-1)/(maxTried-1)])
	}
	return few
}

func (s *search) set(i, at int) {
	s.at[i] = at
	c := &s.devices[i]
	for _, w := range c.Workers {
		s.speeds[w] = c.speed(c.steps[at])
	}
}

// ownTime is what a second of a device's computing time counts beside a second of the step.
const ownTime = 0.01

// move is a clock that may be lowered.
type move struct {
	device, to int
	gain       float64 // what it saves for the time it adds
	exact      bool    // gain is of the present clocks, not of earlier ones with which it was no smaller
}

// descend lowers clocks, except one, until none can be lowered within the limit.
func (s *search) descend(except int) {
	var moves []move
	for i := range s.devices {
		if i != except {
			moves = append(moves, move{device: i, to: -1, gain: math.Inf(1)})
		}
	}
	now := s.seconds()
	for len(moves) > 0 && s.budget > 0 {
		best := 0
		for i := range moves {
			if moves[i].gain > moves[best].gain {
				best = i
			}
		}
		m := &moves[best]
		if m.exact {
			s.set(m.device, m.to)
			now = s.seconds()
			for i := range moves {
				moves[i].exact = false
			}
			m.gain = math.Inf(1) // of the next step nothing is known
			continue
		}
		to, after, saved, longer := s.jump(m.device)
		if to < 0 {
			moves = slices.Delete(moves, best, best+1)
			continue
		}
		m.to, m.exact = to, true
		m.gain = saved / max(max(after-now, 0)+ownTime*longer, 1e-9*s.fastest)
	}
}

// exchange raises one clock after the other, by a step or to the highest, and lowers the others as far as that lets them;
// what saves energy stays. It ends when nothing does.
func (s *search) exchange() {
	best := s.energy(s.fastest)
	for better := true; better && s.budget > 0; {
		better = false
		for i := range s.devices {
			top := len(s.devices[i].steps) - 1
			for _, to := range []int{s.at[i] + 1, top} {
				if to > top || s.budget <= 0 {
					continue
				}
				was := slices.Clone(s.at)
				s.set(i, to)
				s.descend(i)
				if e := s.energy(s.fastest); e < best*(1-1e-6) {
					best, better = e, true
					continue
				}
				for j, at := range was {
					s.set(j, at)
				}
			}
		}
	}
}

// again repeats the search from where it ended with some clocks at their highest, other ones each time, as long as calls are
// left; what saves most stays. A slower worker takes tasks in another order, so the least is seldom at the end of
// one descent.
func (s *search) again() {
	n := len(s.devices)
	if n < 2 {
		return
	}
	r := rand.New(rand.NewPCG(uint64(n), 1))
	kept, best := slices.Clone(s.at), s.energy(s.fastest)
	for s.budget > 0 { // each descent asks at least once
		raise := 1 + r.IntN(n)
		for _, i := range r.Perm(n)[:raise] {
			s.set(i, len(s.devices[i].steps)-1)
		}
		s.descend(-1)
		s.exchange()
		if e := s.energy(s.fastest); e < best*(1-1e-6) {
			kept, best = slices.Clone(s.at), e
		}
		for i, at := range kept {
			s.set(i, at)
		}
	}
}

// seconds asks for the step. The slice is its own, so that no model can alter it.
func (s *search) seconds() float64 {
	s.budget--
	return s.step(slices.Clone(s.speeds))
}

func (s *search) energy(seconds float64) (sum float64) {
	for i := range s.devices {
		c := &s.devices[i]
		sum += c.drawn(c.steps[s.at[i]], seconds)
	}
	return sum
}

// jump returns the next lower step of a device that draws less and with which a step is within the limit, -1 if there is
// none; how long the step takes then, what it saves, and how many seconds the device computes longer. The very next one
// may not be: a slower worker takes tasks in another order, which may be a worse one.
func (s *search) jump(i int) (to int, after, saved, longer float64) {
	c, was := &s.devices[i], s.at[i]
	defer func() { s.set(i, was) }()
	mhz := c.steps[was]
	now := c.drawn(mhz, s.fastest)
	for to := was - 1; to >= 0 && s.budget > 0; to-- {
		work := c.work(c.steps[to], s.fastest)
		if work > s.limit {
			break
		}
		if saved = now - c.drawn(c.steps[to], s.fastest); saved <= 0 {
			continue
		}
		s.set(i, to)
		if after = s.seconds(); after <= s.limit {
			return to, after, saved, work - c.work(mhz, s.fastest)
		}
	}
	return -1, 0, 0, 0
}

// work returns how long a device computes in a step of so many seconds, which may be more than there are.
func (c *candidate) work(mhz int, seconds float64) float64 {
	switch {
	case len(c.Workers) == 0:
		return 0
	case c.busy >= 0:
		return c.busy / c.speed(mhz)
	}
	return seconds
}

// drawn returns the energy of a step of so many seconds at a frequency.
func (c *candidate) drawn(mhz int, seconds float64) float64 {
	busy := min(c.work(mhz, seconds), seconds)
	return c.Power.Busy(mhz)*busy + c.Power.Idle()*(seconds-busy)
}

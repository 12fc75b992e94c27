package chaos

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A Due says which faults are due at a point of a run. It has no clock: the caller waits for [Fault.After].
// The zero Due has no faults.
type Due struct {
	left []Fault
}

// NewDue returns the Due of faults.
func NewDue(faults []Fault) *Due { return &Due{append([]Fault(nil), faults...)} }

// Begin returns the faults of a step that begins now; each is due after its After. It returns each fault once.
func (d *Due) Begin(step int) []Fault {
	return d.take(func(h Fault) bool { return h.Step == step && h.Phase == "" })
}

// Enter returns the faults that are due because a phase of a step begins. It returns each fault once.
func (d *Due) Enter(step int, phase Phase) []Fault {
	return d.take(func(h Fault) bool { return h.Step == step && h.Phase == phase })
}

// Left returns the number of faults that have not been returned yet.
func (d *Due) Left() int { return len(d.left) }

func (d *Due) take(due func(Fault) bool) (taken []Fault) {
	kept := d.left[:0]
	for _, h := range d.left {
		if due(h) {
			taken = append(taken, h)
		} else {
			kept = append(kept, h)
		}
	}
	d.left = kept
	return taken
}

// Hooks are called by a [Trigger], one call at a time, from the goroutine that reported the step or phase, or from one of the
// Trigger's own for a fault with a time. They must not call the Trigger. A hook that no fault needs may be nil.
type Hooks struct {
	// Stamp receives every fault just before it is injected, with the moment as of Now. The time that Stamp takes lies between
	// that moment and the fault, so it should be quick.
	Stamp func(h Fault, moment int64)
	// Flip flips one bit.
	Flip func(t Target)
	// SlowLink sets the speed of the link between two workers, of which this is one: 1 is full speed.
	SlowLink func(a, b int, factor float64)
}

// A Trigger injects faults into the worker in whose process it is. A nil Trigger injects none. Its methods may be called
// from several goroutines.
type Trigger struct {
	self  Process
	hooks Hooks

	waiting atomic.Int64  // faults in due; most runs have none, and this is read at every task
	speed   atomic.Uint64 // bits of the factor of slow

	mu     sync.Mutex
	due    *Due
	owed   time.Duration // of Throttle
	closed bool

	inject sync.Mutex // held while a fault is injected; taken before mu
	done   chan struct{}
	wg     sync.WaitGroup
}

// NewTrigger returns the trigger of a worker's own faults ([Schedule.Worker]) for the process self, usually [Self].
func NewTrigger(faults []Fault, self Process, hooks Hooks) *Trigger {
	t := &Trigger{self: self, hooks: hooks, due: NewDue(faults), done: make(chan struct{})}
	t.waiting.Store(int64(len(faults)))
	t.speed.Store(math.Float64bits(1))
	return t
}

// StepBegan says that the worker begins a step.
func (t *Trigger) StepBegan(step int) {
	t.ask(func(d *Due) []Fault { return d.Begin(step) })
}

// Phase says that the worker is in a phase of a step. Only the first time counts, so it may be called at every task.
func (t *Trigger) Phase(step int, phase Phase) {
	t.ask(func(d *Due) []Fault { return d.Enter(step, phase) })
}

func (t *Trigger) ask(due func(*Due) []Fault) {
	if t == nil || t.waiting.Load() == 0 {
		return
	}
	var now []Fault
	t.mu.Lock()
	if !t.closed {
		for _, h := range due(t.due) {
			if h.After > 0 {
				timer := time.NewTimer(h.After)
				t.wg.Go(func() { t.later(h, timer) })
			} else {
				now = append(now, h)
			}
		}
		t.waiting.Store(int64(t.due.Left()))
	}
	t.mu.Unlock()
	for _, h := range now {
		t.do(h)
	}
}

func (t *Trigger) later(h Fault, timer *time.Timer) {
	defer timer.Stop()
	select {
	case <-timer.C:
		t.do(h)
	case <-t.done:
	}
}

func (t *Trigger) do(h Fault) {
	t.inject.Lock()
	defer t.inject.Unlock()
	select {
	case <-t.done:
		return
	default:
	}
	if t.hooks.Stamp != nil {
		t.hooks.Stamp(h, Now())
	}
	var err error
	switch h.Kind {
	case KindKill:
		err = t.self.Signal(syscall.SIGKILL)
	case KindFreeze:
		err = t.self.Signal(syscall.SIGSTOP)
	case KindLeave:
		err = t.self.Signal(syscall.SIGTERM)
	case KindSlow:
		t.Slow(h.Factor)
	case KindFlip:
		t.hooks.Flip(h.Target)
	case KindSlowLink:
		t.hooks.SlowLink(h.A, h.B, h.Factor)
	}
	if err != nil { // a run without the fault would prove nothing
		panic(fmt.Sprintf("chaos: %s was not injected: %v", h, err))
	}
}

// Slow sets the speed of Throttle: a share of the full speed, 0 < factor <= 1.
func (t *Trigger) Slow(factor float64) { t.speed.Store(math.Float64bits(factor)) }

// leastPause is the shortest pause of Throttle: timers are inaccurate below it.
const leastPause = time.Millisecond

// Throttle is called after each compute task with the time that the task took, and the share of full speed that the clock of an
// emulated device allows, 1 without one. While the worker is slowed, Throttle pauses, so that task and pause together take
// 1/FACTOR/clock of that time; pauses that are too short for a timer add up. It returns early when the Trigger is closed.
func (t *Trigger) Throttle(took time.Duration, clock float64) {
	if t == nil {
		return
	}
	factor := math.Float64frombits(t.speed.Load()) * clock
	if factor == 1 {
		return
	}
	t.mu.Lock()
	t.owed += time.Duration(float64(took) * (1/factor - 1))
	pause := t.owed
	if pause < leastPause || t.closed {
		t.mu.Unlock()
		return
	}
	t.owed = 0
	t.mu.Unlock()
	begin := time.Now()
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.done:
	}
	t.mu.Lock()
	t.owed -= time.Since(begin) - pause // timers are late
	t.mu.Unlock()
}

// Close drops waiting faults, ends pauses, and returns when no goroutine of the Trigger is left. No fault is injected afterwards.
func (t *Trigger) Close() {
	if t == nil {
		return
	}
	t.inject.Lock() // after a fault that is being injected
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.done)
	}
	t.mu.Unlock()
	t.inject.Unlock()
	t.wg.Wait()
}

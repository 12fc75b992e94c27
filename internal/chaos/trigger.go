package chaos

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A Due says which of some harms strike at a point of a run. It has no clock: whoever asks waits for what is left of [Harm.After].
// The zero Due has no harms.
type Due struct {
	left []Harm
}

// NewDue returns the Due of some harms.
func NewDue(harms []Harm) *Due { return &Due{append([]Harm(nil), harms...)} }

// Begin returns the harms that strike in a step which begins now, each After so long. It returns each harm once.
func (d *Due) Begin(step int) []Harm {
	return d.take(func(h Harm) bool { return h.Step == step && h.Phase == "" })
}

// Enter returns the harms that strike now, because a phase of a step is entered. It returns each harm once.
func (d *Due) Enter(step int, phase Phase) []Harm {
	return d.take(func(h Harm) bool { return h.Step == step && h.Phase == phase })
}

// Left returns how many harms have not been returned yet.
func (d *Due) Left() int { return len(d.left) }

func (d *Due) take(due func(Harm) bool) (taken []Harm) {
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

// Hooks are what a [Trigger] calls, one call at a time, in the goroutine that reported the step or phase, or in one of the
// Trigger's own for a harm with a time. They must not call the Trigger. One may be nil if no harm needs it.
type Hooks struct {
	// Stamp hears of every harm just before it strikes, with the moment as of Now. What Stamp takes comes between that moment and
	// the harm, so it should be quick.
	Stamp func(h Harm, moment int64)
	// Flip flips one bit.
	Flip func(t Target)
	// SlowLink sets the speed of the link between two workers, of which this is one: 1 is full speed.
	SlowLink func(a, b int, factor float64)
}

// A Trigger does harm to the worker in whose process it is. A nil Trigger does none. Its methods may be called by several
// goroutines.
type Trigger struct {
	self  Process
	hooks Hooks

	waiting atomic.Int64  // harms in due; most runs have none, and ask at every task
	speed   atomic.Uint64 // bits of the factor of slow

	mu     sync.Mutex
	due    *Due
	owed   time.Duration // of Throttle
	closed bool

	strike sync.Mutex // held while a harm is done; taken before mu
	done   chan struct{}
	wg     sync.WaitGroup
}

// NewTrigger returns the trigger of a worker's own harms ([Schedule.Worker]), which strike the process self: usually [Self]. The
// error has one line for each harm that no worker can do or that has no hook.
func NewTrigger(harms []Harm, self Process, hooks Hooks) (*Trigger, error) {
	var faults []error
	for _, h := range harms {
		missing := ""
		switch h.Kind {
		case KindKill, KindFreeze, KindLeave, KindSlow:
		case KindFlip:
			if hooks.Flip == nil {
				missing = "Flip"
			}
		case KindSlowLink:
			if hooks.SlowLink == nil {
				missing = "SlowLink"
			}
		default:
			faults = append(faults, fmt.Errorf("chaos: %s is nothing that a worker can do to itself", h))
		}
		if missing != "" {
			faults = append(faults, fmt.Errorf("chaos: %s needs Hooks.%s", h, missing))
		}
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	t := &Trigger{self: self, hooks: hooks, due: NewDue(harms), done: make(chan struct{})}
	t.waiting.Store(int64(len(harms)))
	t.speed.Store(math.Float64bits(1))
	return t, nil
}

// StepBegan says that the worker begins a step.
func (t *Trigger) StepBegan(step int) {
	t.ask(func(d *Due) []Harm { return d.Begin(step) })
}

// Phase says that the worker is in a phase of a step. Only the first time counts, so it may be called at every task.
func (t *Trigger) Phase(step int, phase Phase) {
	t.ask(func(d *Due) []Harm { return d.Enter(step, phase) })
}

func (t *Trigger) ask(due func(*Due) []Harm) {
	if t == nil || t.waiting.Load() == 0 {
		return
	}
	var now []Harm
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

func (t *Trigger) later(h Harm, timer *time.Timer) {
	defer timer.Stop()
	select {
	case <-timer.C:
		t.do(h)
	case <-t.done:
	}
}

func (t *Trigger) do(h Harm) {
	t.strike.Lock()
	defer t.strike.Unlock()
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
	if err != nil { // a run that went on would prove what it has not shown
		panic(fmt.Sprintf("chaos: %s was not done: %v", h, err))
	}
}

// Slow sets the speed of Throttle: a share of the full speed, 0 < factor <= 1.
func (t *Trigger) Slow(factor float64) { t.speed.Store(math.Float64bits(factor)) }

// leastPause is the shortest pause of Throttle. Timers are not good at less.
const leastPause = time.Millisecond

// Throttle is called after each compute task with the time that the task took, and the share of its speed that the clock of an
// emulated device leaves the worker: 1 where there is none, and that is no harm. While the worker is slowed it pauses, so that
// task and pause together take 1/FACTOR/clock of that time; pauses that are too short for a timer are saved up. It returns early when
// the Trigger is closed.
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

// Close drops the harms that wait, ends pauses, and returns when no goroutine of the Trigger is left. Nothing strikes afterwards.
func (t *Trigger) Close() {
	if t == nil {
		return
	}
	t.strike.Lock() // a harm that is being done comes before
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.done)
	}
	t.mu.Unlock()
	t.strike.Unlock()
	t.wg.Wait()
}

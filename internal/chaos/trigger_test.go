package chaos

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func faults(t *testing.T, spec string) []Fault {
	t.Helper()
	s, err := Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	return s.Faults
}

func TestDue(t *testing.T) {
	d := NewDue(faults(t, "kill:0@3,freeze:0@2+5,flip:0@3/commit,slow:0@3:0.5,flip:0@4/commit"))
	for i, c := range []struct {
		got  []Fault
		want string
	}{
		{d.Begin(1), ""},
		{d.Enter(2, PhaseCommit), ""},
		{d.Begin(2), "freeze:0@2+5"},
		{d.Enter(3, PhaseForward), ""},
		{d.Begin(3), "kill:0@3,slow:0@3:0.5"},
		{d.Begin(3), ""}, // a step that runs again gets its fault once
		{d.Begin(4), ""},
		{d.Enter(3, PhaseCommit), "flip:0@3/commit:own"}, // phases of two steps overlap
		{d.Enter(3, PhaseCommit), ""},
	} {
		if got := (Schedule{Faults: c.got}).String(); got != c.want {
			t.Errorf("question %d: got %q, want %q", i, got, c.want)
		}
	}
	if d.Left() != 1 {
		t.Errorf("%d faults are left, want 1", d.Left())
	}
}

// record writes down what a Trigger does and when, since its beginning.
type record struct {
	mu    sync.Mutex
	begin time.Time
	lines []string
	err   error // of Signal
}

func (r *record) add(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprintf("%v ", time.Since(r.begin))+fmt.Sprintf(format, args...))
}

func (r *record) Signal(sig os.Signal) error {
	r.add("%v", sig)
	return r.err
}

func (r *record) hooks() Hooks {
	return Hooks{
		Stamp:    func(h Fault, moment int64) { r.add("stamp %s", h) },
		Flip:     func(t Target) { r.add("flip %s", t) },
		SlowLink: func(a, b int, factor float64) { r.add("link %d-%d %v", a, b, factor) },
	}
}

func (r *record) check(t *testing.T, want ...string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Equal(r.lines, want) {
		t.Errorf("done:\n%s\nwant:\n%s", strings.Join(r.lines, "\n"), strings.Join(want, "\n"))
	}
}

func start(t *testing.T, spec string) (*Trigger, *record) {
	t.Helper()
	r := &record{begin: time.Now()}
	return NewTrigger(faults(t, spec), r, r.hooks()), r
}

func TestTrigger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trigger, r := start(t, "freeze:0@2,kill:0@3+2.5,flip:0@3/reduce:mirror,flip:0@4+1:moment,leave:0@4/gather,slowlink:0-1@5:0.5")
		defer trigger.Close()
		for step := 1; step <= 5; step++ {
			trigger.StepBegan(step)
			for _, p := range phases {
				for range 2 { // two tasks of each phase
					trigger.Phase(step, p)
					time.Sleep(200 * time.Microsecond)
				}
			}
		}
		r.check(t,
			"2ms stamp freeze:0@2", "2ms stopped (signal)",
			"4.8ms stamp flip:0@3/reduce:mirror", "4.8ms flip mirror",
			"6.5ms stamp kill:0@3+2.5", "6.5ms killed", // step 3 is over by then
			"7ms stamp flip:0@4+1:moment", "7ms flip moment",
			"7.6ms stamp leave:0@4/gather", "7.6ms terminated",
			"8ms stamp slowlink:0-1@5:0.5", "8ms link 0-1 0.5",
		)
	})
}

// Close drops what waits, joins the goroutines, and leaves a Trigger that does nothing; so does a nil one.
func TestTriggerClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trigger, r := start(t, "kill:0@1+5,kill:0@2,slow:0@1:0.001")
		trigger.StepBegan(1)
		paused := make(chan struct{})
		go func() {
			trigger.Throttle(time.Hour, 1)
			close(paused)
		}()
		synctest.Wait()
		trigger.Close()
		<-paused
		trigger.Close()
		trigger.StepBegan(2)
		trigger.Throttle(time.Hour, 1)
		r.check(t, "0s stamp slow:0@1:0.001")

		trigger = nil
		trigger.StepBegan(1)
		trigger.Phase(1, PhaseCommit)
		trigger.Throttle(time.Hour, 1)
		trigger.Close()
	})
}

func TestThrottle(t *testing.T) {
	for _, c := range []struct {
		factor string
		want   time.Duration // for a second of work
	}{
		{"0.1", 10 * time.Second}, {"0.25", 4 * time.Second}, {"0.8", 1250 * time.Millisecond}, {"1", time.Second},
	} {
		for _, task := range []time.Duration{100 * time.Microsecond, 10 * time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				trigger, _ := start(t, "slow:0@2:"+c.factor+",slow:0@3:1")
				defer trigger.Close()
				for i, want := range []time.Duration{time.Second, c.want, time.Second} {
					trigger.StepBegan(i + 1)
					begin := time.Now()
					for done := time.Duration(0); done < time.Second; done += task {
						time.Sleep(task)
						trigger.Throttle(task, 1)
					}
					if got := time.Since(begin); (got - want).Abs() > leastPause {
						t.Errorf("factor %s, tasks of %v, step %d: a second of work took %v, want %v", c.factor, task, i+1, got, want)
					}
				}
			})
		}
	}
}

// A clock that is lowered adds to what slows the worker.
func TestThrottleByAClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trigger, _ := start(t, "slow:0@2:0.5")
		defer trigger.Close()
		for i, want := range []time.Duration{1250 * time.Millisecond, 2500 * time.Millisecond} {
			trigger.StepBegan(i + 1)
			begin := time.Now()
			time.Sleep(time.Second)
			trigger.Throttle(time.Second, 0.8)
			if got := time.Since(begin); (got - want).Abs() > leastPause {
				t.Errorf("step %d: a second of work took %v, want %v", i+1, got, want)
			}
		}
	})
}

// A fault that cannot be injected ends the process, so that it does not look survived.
func TestTriggerPanics(t *testing.T) {
	trigger, r := start(t, "kill:0@1")
	defer trigger.Close()
	r.err = errors.New("no permission")
	defer func() {
		if got := recover(); got != "chaos: kill:0@1 was not injected: no permission" {
			t.Errorf("recovered %v, want a panic that says what was not injected", got)
		}
	}()
	trigger.StepBegan(1)
}

// Many goroutines may report; each fault is done once, one at a time.
func TestTriggerConcurrent(t *testing.T) {
	count, inside := map[Target]int{}, false
	trigger := NewTrigger(faults(t, "flip:0@1,flip:0@1/commit:copy,flip:0@2+0.001:moment,flip:0@2/reduce:mirror"), Self(), Hooks{
		Flip: func(target Target) {
			if inside {
				t.Error("two faults at once")
			}
			inside = true
			count[target]++
			inside = false
		},
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for step := 1; step <= 3; step++ {
				trigger.StepBegan(step)
				trigger.Phase(step, PhaseCommit)
				trigger.Phase(step, PhaseReduce)
				trigger.Throttle(time.Microsecond, 1)
			}
		})
	}
	wg.Wait()
	trigger.Close()
	delete(count, TargetMoment) // Close may have come first
	for _, target := range []Target{TargetOwn, TargetCopy, TargetMirror} {
		if count[target] != 1 {
			t.Errorf("%s was flipped %d times, want once", target, count[target])
		}
	}
}

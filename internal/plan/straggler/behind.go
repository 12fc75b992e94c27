package straggler

import (
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
)

// Pace is how far a worker was in a step.
type Pace struct {
	Worker      id.WorkerID
	Stages      []int
	Step        int
	Left, Ready int           // pairs that are not finished; those of them that could begin
	Each        time.Duration // from the end of one pair to that of the next; 0: not known
	Stuck       time.Duration // for how long a pass has run beyond what it should have taken
	Idle        time.Duration // for how long it had had nothing left to do
	Age         time.Duration // since it was so
}

// Late is a worker that others wait for in a step.
type Late struct {
	Worker id.WorkerID
	Step   int
	Gain   time.Duration // by which all are ready sooner if workers that have nothing left to do take over what it has not begun
}

// muchSlower is how many times as long as others a worker takes for a pair at least where others are to take over what it has. Workers that share
// processors end a step up to twice as soon as each other.
const muchSlower = 2.5

// Whole returns how long the worker is expected to take for all that it could begin. A pass that has run for too long is expected to run for as long again.
func (x *Pace) Whole() time.Duration {
	return time.Duration(max(x.Ready, 1))*x.Each + x.Stuck
}

// stays is for what part of the time that a pair takes others have had nothing left to do before a worker counts as late. Those that share processors
// become faster by themselves when the first have ended the step.
const stays = 0.5

// Behind returns the worker by whose relief most is gained, false where none gains anything. Workers are compared
// as they are: on a busy machine, or with a slow disk, a worker may be late for no fault of its own.
func Behind(all []Pace) (most Late, ok bool) {
	for _, x := range all {
		if x.Each <= 0 || x.Ready == 0 {
			continue
		}
		helpers, each := 0, time.Duration(0)
		for _, y := range all {
			shares := slices.ContainsFunc(y.Stages, func(s int) bool { return slices.Contains(x.Stages, s) })
			if y.Worker != x.Worker && shares && y.Step == x.Step && y.Left == 0 && y.Each > 0 && float64(y.Idle+y.Age-x.Age) >= stays*float64(y.Each) {
				helpers, each = helpers+1, max(each, y.Each)
			}
		}
		// What it has done since is not left.
		left := x.Whole() - x.Age
		if helpers == 0 || float64(left) < muchSlower*float64(x.Ready)*float64(each) {
			continue
		}
		rounds := (x.Ready + helpers - 1) / helpers
		// A pass that runs is waited for in any case.
		gain := min(left-time.Duration(rounds)*each, time.Duration(x.Ready)*x.Each-x.Age)
		if gain > most.Gain {
			most, ok = Late{x.Worker, x.Step, gain}, true
		}
	}
	return most, ok
}

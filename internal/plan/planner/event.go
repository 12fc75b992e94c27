package planner

import (
	"errors"
	"fmt"
	"strings"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// Reason says in one sentence why a plan is as it is.
type Reason string

// Event is what made a new plan necessary.
type Event struct {
	Kind  EventKind
	Cause string // for Lost and Relieve, such as "worker 2 exited: signal: killed"; "" names the workers

	// After is the newest version that was given so far, if the plan that has
	// it did not go live; the next one is greater than this and the current
	// plan's.
	After id.Version

	// For Start.
	Micros   int // micro-batches of a step
	Stages   int // 0 means 1
	Mirrors  int // of each shard; 0 is none
	FromStep int // 0 means 1

	// Later has [Join] leave the shards where they are: the new workers get theirs by [Spread].
	Later bool

	// Least is how many parameters the fair share of a worker must have for [Spread] to give it one.
	Least int

	// Late is for [Relieve].
	Late Late

	// Fixed restricts [Rebalance] to rerouting micro-batches: layers and workers stay in their
	// stages.
	Fixed bool
}

// EventKind is the kind of an [Event].
type EventKind uint8

// The kinds of events.
const (
	Start   EventKind = iota // the job begins: Micros, Stages and Mirrors count
	Lost                     // workers of the plan do not live any more
	Leave                    // those of View.Leaving are to leave
	Protect                  // after a loss: every shard is to have its mirrors again
	Join                     // workers of the view are not in the plan
	Spread                   // workers that own nothing of their stage get a share
	Relieve                  // a worker is late in a step: others take what it has not begun
	// Rebalance: the times have changed, or the plan is not what fits them best.
	Rebalance
)

// FlagError says that a job as it was asked for is impossible.
type FlagError struct {
	Flag  string // "--stages", "--workers", ...
	Value int
	Why   string // what is wrong and what would be right
}

func (e *FlagError) Error() string { return fmt.Sprintf("%s %d: %s", e.Flag, e.Value, e.Why) }

// LostError says that a shard has no living holder, so that no plan can save
// the step: the job goes back to a checkpoint.
type LostError struct {
	Shard plan.Shard // the first one
	Count int        // of such shards
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%s without a living owner or mirror, the first is [%d,%d) of layer %d, which worker %d owned",
		plan.Count(e.Count, "shard"), e.Shard.Lo, e.Shard.Hi, e.Shard.Layer, e.Shard.Owner)
}

// ErrNoWorkers is the error of [Next] when no worker lives.
var ErrNoWorkers = errors.New("no worker lives")

// ErrNoGain is the error of [Next] for [Rebalance] when no plan is better than the current
// one by enough, for [Spread] when no worker lacks a share, and for [Relieve] when nothing is to be taken over.
var ErrNoGain = errors.New("no plan is better by enough")

// workers says what workers do, such as "worker 3 joins".
func workers(ids []id.WorkerID, do string) string {
	if len(ids) == 1 {
		return fmt.Sprintf("worker %d %ss", ids[0], do)
	}
	return "workers " + join(ids) + " " + do
}

func join(ids []id.WorkerID) string {
	var s []string
	for _, id := range ids {
		s = append(s, fmt.Sprint(id))
	}
	return strings.Join(s, ", ")
}

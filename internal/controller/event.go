package controller

import (
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
)

// Event is something that happens to a [Controller]. It is one of Dead, Stamp, Ended, Answered, Agreed,
// Applied, Late, LinkLost, Behind, Suspected, Leaving, Joined, Level, Measured, Finished, Saved and Led.
type Event any

type (
	// Dead says that a worker's session is over, other than by [Ended].
	Dead struct {
		Worker plan.Worker
		Cause  string // such as "worker 2 exited: signal: killed"
		Died   time.Time
		How    Evidence

		// Begun are pairs the worker had begun in the step it was in, as far as that is
		// known.
		Begun   []graph.Pair
		BegunIn int // that step; 0 if it is not known
		// Awaits says that others may come without being asked for: they start, or were lost with a host that may be back.
		Awaits bool
		// Crashed is what ran as the worker ended, where a fault of its own ended it.
		Crashed []Crash
	}

	// Stamp brings the time at which an injected fault killed a worker, if that is known later than its death.
	Stamp struct {
		Worker plan.Worker
		At     time.Time
	}

	// Ended says that a worker has ended well: after it had finished, or left.
	Ended struct{ Worker plan.Worker }

	// Answered is a worker's answer to [Ask].
	Answered struct {
		Worker plan.Worker
		Ballot id.Ballot
		Report control.Report
	}

	// Agreed says that what [Propose] asked for is agreed.
	Agreed struct {
		Version  id.Version
		Proposed time.Time // when the proposing began
	}

	// Applied says that a worker has applied a plan. See control.Applied.
	Applied struct {
		Worker  plan.Worker
		Ballot  id.Ballot
		Version id.Version
		Opened  int // links

		Edit, Resume, Update time.Duration
	}

	// Late says that a timer has run out.
	Late struct{ Timer Timer }

	// LinkLost says that a worker lost the link to another.
	LinkLost struct{ From, To plan.Worker }

	// Behind says that workers have nothing left to do in a step, and that another one of their stage has pairs that it has not begun.
	// It answers. Where nothing else is under way, they take over some of them.
	Behind struct {
		Worker plan.Worker
		Step   int
		Each   map[id.WorkerID]float64 // how long workers take for a pair in this step, relative to each other, as far as that is known
		Cause  string
	}

	// Suspected says that By, a member of the gossip ring, cannot reach a worker; "" ends the
	// suspicion. It evicts no worker by itself: it tells which end of a broken link is to blame.
	Suspected struct {
		Worker plan.Worker
		By     string
	}

	// Leaving says that a worker was asked to end, and wants to hand over.
	Leaving struct{ Worker plan.Worker }

	// Joined says that a worker is ready that is in no plan yet.
	Joined struct {
		Worker plan.Worker
		Addr   string
	}

	// Level says that a worker has all that a fill was to bring it. See
	// control.Level.
	Level struct {
		Worker plan.Worker
		ID     id.Fill
		Step   int
	}

	// Measured brings what a worker has measured of itself; the newest counts. Times are
	// best told with every heartbeat whose times differ from what was told before.
	Measured struct {
		Worker plan.Worker
		Times  plan.Times
	}

	// Finished says that a worker has passed the last point, with the result
	// of it. It answers queries on.
	Finished struct {
		Worker plan.Worker
		Step   int
		Result []byte
	}

	// Saved says that there is a checkpoint after a step, which is now the newest that can be
	// used; Dir is "" and Step 0 if there is none any more. It may be older than the one before.
	Saved struct {
		Step int
		Dir  string
	}

	// Led says that this controller leads in a new term.
	Led struct{ Term uint64 }

	// Balanced answers [Balance].
	Balanced struct {
		Look   int
		Plan   plan.Plan
		Reason planner.Reason
		Err    error
	}
)

// Crash is the task that ran as a worker crashed.
type Crash struct {
	Step int
	graph.Pair
}

// Effect is something a [Controller] wants done. It is one of Ask, Command, Copy, Propose, Adopt,
// Kill, Dismiss, SetTimer, CancelTimer, Note, Hold, Recovered, Relieved, StopAll and End.
type Effect any

type (
	// Ask sends a query to a worker.
	Ask struct {
		Worker plan.Worker
		Ballot id.Ballot
	}

	// Command sends an order to a worker.
	Command struct {
		Worker plan.Worker
		Order  control.Order
	}

	// Copy makes a worker copy state in the background.
	Copy struct {
		Worker plan.Worker
		Fill   control.Fill
	}

	// Propose brings an order before the agents. [Agreed] answers it.
	Propose struct {
		Order  control.Order
		Cause  Cause
		Reason planner.Reason
	}

	// Balance asks for a plan that divides the work better, which takes too long to wait for. What
	// Make returns answers it; meanwhile the controller goes on.
	Balance struct {
		Look    int
		Current plan.Plan
		View    plan.View
		Profile plan.Profile
		Event   planner.Event
	}

	// Adopt says that a plan is the run's from now on: an agreed one after a
	// recovery, or a boundary plan that is live at the first worker.
	Adopt struct {
		Order  control.Order
		Cause  Cause
		Reason planner.Reason
	}

	// Kill ends a worker; its Dead follows. One that is well has done nothing wrong: its process may join again.
	Kill struct {
		Worker plan.Worker
		Reason string
		Well   bool
	}

	// Dismiss lets a worker end that the plan does without.
	Dismiss struct {
		Worker plan.Worker
		Reason string
	}

	// SetTimer starts a timer, or restarts it.
	SetTimer struct {
		Timer Timer
		After time.Duration
	}

	// CancelTimer stops a timer.
	CancelTimer struct{ Timer Timer }

	// Note is a decision in one sentence.
	Note struct{ Reason string }

	// Hold says that there are too few workers to go on with.
	Hold struct{ Have, Need int }

	// Recovered ends a recovery.
	Recovered struct{ Recovery Recovery }

	// Relieved ends a recovery that was to give work of a late worker to others. None was lost, so it is not among the recoveries of a run.
	Relieved struct{ Relief Relief }

	// StopAll says that all workers want to leave, so the run ends at the next commit.
	StopAll struct{}

	// End ends the run.
	End struct{ Err error }
)

// Make makes the plan. It is a pure function and reads nothing that the controller alters.
func (b Balance) Make() Balanced {
	p, reason, err := planner.Next(b.Current, b.View, b.Profile, b.Event)
	return Balanced{b.Look, p, reason, err}
}

// Recovery is the account of a recovery. The phases follow one another, and their sum
// is Total.
type Recovery struct {
	Step     int    // that was interrupted
	Cause    string // of all failures, in their order
	How      Evidence
	Lost     int // workers
	Ballots  int // attempts
	Rollback bool
	From     int // step after which a rollback goes on
	Version  id.Version

	Detect time.Duration // death until the controller knew of it
	Query  time.Duration // until all had answered
	Plan   time.Duration // until there was a plan
	Agree  time.Duration // until it was agreed
	Edit   time.Duration // until the slowest worker had applied it
	Resume time.Duration // until the last had work of it, or none left
	Update time.Duration // the part of Edit until the last had updated its shards by the step before
	Total  time.Duration

	// Again counts (stage, micro-batch) pairs that the dead are known to have begun and
	// that run again: by Dead.Begun, and because a survivor holds what came out. What a
	// rollback does again is not counted.
	Again  int
	Opened int // links
}

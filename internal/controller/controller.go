package controller

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

// Config says what a controller begins with.
type Config struct {
	Plan    plan.Plan      // the first plan, which is live
	Peers   []control.Peer // its workers
	Profile plan.Profile

	// Term is that of the agents' agreement. Attempt and Fills are the newest numbers that an earlier
	// controller of this term has given, see [Controller.Last].
	Term    uint64
	Attempt uint64
	Fills   int

	// Of a run that goes on under another leader: what is agreed of it. Live is the order
	// of the newest recovery, whose plan is Plan or comes before it. Coming is a
	// boundary plan that may be live already. Issued is the newest version that was given.
	Live   *control.Order
	Epoch  int // of the newest order
	Coming *control.Order
	Issued id.Version
	Saved  Saved

	// Causes are those of failures from which an earlier leader has not recovered to the end, although the plan does
	// without the failed workers. The first was known at Failed. The next recovery accounts for them.
	Causes []string
	Failed time.Time

	// Home is the host that gets the model, and Leader the one that gets it when Home has no worker left; see
	// plan.Plan.ModelHost.
	Home, Leader string

	// Stages and Mirrors are those of the job, for a plan made from scratch. 0 stages mean 1.
	Stages, Mirrors int

	// Large is how many bytes of state workers may have to receive before they join. Where it is more they join without it, and
	// receive it while they train. 0 means 64 MiB.
	Large int64

	// MinWorkers is the fewest workers to go on with. 0 means 1.
	MinWorkers int

	// Respawn says that lost workers are replaced, so a run without any worker waits for them.
	Respawn bool

	// Reshape says what may change when the workers or their speeds change. The zero value is
	// [Full].
	Reshape Reshape

	// Detect is the budget of all waits: a worker may take half of it for its answer to a
	// query, and a link may be down for all of it. 0 means for ever.
	Detect time.Duration

	// Hold is how long to wait for more workers. 0 means 2 min.
	Hold time.Duration
}

// mostAtOnce is Large in parameters.
func (c Config) mostAtOnce() int {
	large := c.Large
	if large == 0 {
		large = 64 << 20
	}
	return int(large / (plan.StateParts * plan.BytesPerParameter))
}

// Controller decides about the workers of one run. It composes two machines, a recovery and a reconfiguration.
type Controller struct {
	run
	recovery recovery
	reconf   reconfiguration
	crashes  []crashed // in the newest step that had one
}

type crashed struct {
	Crash
	worker plan.Worker
}

// New returns the controller of a run whose first plan is live.
func New(cfg Config) *Controller {
	cfg.Stages, cfg.MinWorkers = max(cfg.Stages, 1), max(cfg.MinWorkers, 1)
	cfg.Hold = cmp.Or(cfg.Hold, timing.Hold)
	c := &Controller{run: run{
		cfg: cfg, timing: timing.Of(cfg.Detect), plan: cfg.Plan, live: cfg.Live, epoch: cfg.Epoch, issued: cfg.Plan.Version, saved: cfg.Saved,
		members: make(map[id.WorkerID]*member), joining: make(map[id.WorkerID]*member), times: make(map[id.WorkerID]plan.Times),
		reliefs: make(map[id.WorkerID]relief),
	}}
	if cfg.Issued.Compare(c.issued) > 0 {
		c.issued = cfg.Issued
	}
	for _, p := range cfg.Peers {
		c.members[p.ID] = &member{Peer: p}
	}
	if cfg.Coming != nil {
		c.boundary = &change{order: *cfg.Coming, cause: CauseInherited, agreed: true, reason: "it was agreed before this agent led"}
		c.proposed = c.boundary
	}
	c.recovery = recovery{run: &c.run, ballot: id.Ballot{Term: cfg.Term, Attempt: cfg.Attempt}}
	c.reconf = reconfiguration{run: &c.run, fill: id.Fill{Term: cfg.Term, N: cfg.Fills}}
	return c
}

// Plan returns the run's newest plan.
func (c *Controller) Plan() *plan.Plan { return &c.plan }

// Profile returns what is known of the model and the workers, by what they measured.
func (c *Controller) Profile() plan.Profile { return c.profile() }

// Last returns the newest numbers of ballots and fills. A controller that replaces this one in the
// same term counts on from them: workers drop older ballots and fills.
func (c *Controller) Last() (attempt uint64, fills int) {
	return c.recovery.ballot.Attempt, c.reconf.fill.N
}

// Busy reports whether a recovery is under way.
func (c *Controller) Busy() bool { return c.recovery.state != idle }

// Holding reports whether the run waits for more workers, so that no step is committed.
func (c *Controller) Holding() bool { return c.recovery.state == holding }

// Step takes in what has happened and returns what is to be done. An event of
// a session that is over changes nothing.
func (c *Controller) Step(now time.Time, e Event) []Effect {
	if c.over {
		return nil
	}
	effects := c.step(now, e)
	c.reconf.suspend(c.Busy())
	return effects
}

func (c *Controller) step(now time.Time, e Event) []Effect {
	switch e := e.(type) {
	case Dead:
		return c.dead(now, e)
	case Ended:
		if m := c.member(e.Worker); m != nil {
			c.forget(m)
			return c.fewer(now)
		}
	case Stamp:
		c.recovery.stamped(e)
	case Answered:
		return c.recovery.answered(now, e)
	case Agreed:
		return c.agreed(now, e)
	case Applied:
		if e.Ballot == (id.Ballot{}) {
			return c.reconf.applied(e)
		}
		return c.recovery.applied(now, e)
	case Late:
		return c.late(now, e.Timer)
	case LinkLost:
		return c.linkLost(now, e)
	case Behind:
		return c.behind(now, e)
	case Suspected:
		if m := c.member(e.Worker); m != nil {
			m.suspect = e.By
		}
	case Leaving:
		return c.reconf.leaving(e)
	case Joined:
		return c.joined(now, e)
	case Level:
		return c.reconf.level(e)
	case Measured:
		return c.reconf.measured(e)
	case Balanced:
		return c.reconf.balanced(e)
	case Finished:
		if c.finished == nil && c.member(e.Worker) != nil {
			c.finished = &e
		}
	case Saved:
		return c.recovery.checkpoint(e)
	case Led:
		if e.Term > c.reconf.fill.Term {
			c.reconf.fill = id.Fill{Term: e.Term}
		}
		return c.recovery.lead(now, e.Term)
	default:
		panic(fmt.Sprintf("controller: event %T", e))
	}
	return nil
}

// dead handles the failure of a worker. It needs a recovery if the worker is in a plan.
func (c *Controller) dead(now time.Time, e Dead) []Effect {
	c.awaits = e.Awaits
	if c.joining[e.Worker.ID] != nil && c.joining[e.Worker.ID].Worker == e.Worker {
		delete(c.joining, e.Worker.ID)
		effects := []Effect{note("%s, before it had a part in the plan", e.Cause)}
		if !c.Busy() && c.finished == nil && len(c.members)+len(c.joining) < c.cfg.MinWorkers {
			c.recovery.open(now) // the others continued because it would come
			return append(effects, c.recovery.query("too few are left")...)
		}
		return append(append(effects, c.recovery.unhold()...), c.reconf.again(CauseJoin)...)
	}
	m := c.member(e.Worker)
	if m == nil {
		return c.recovery.unhold()
	}
	c.forget(m)
	c.recovery.links.forget(m.Worker)
	if !c.planned(m.Worker) {
		return append([]Effect{note("%s; the plan does without it", e.Cause)}, c.fewer(now)...)
	}
	if again := c.crashedAgain(e); again != nil {
		return c.end(again)
	}
	return c.recovery.lost(now, e)
}

// crashedAgain notes what ran as a worker ended by a fault of its own, and returns an error if some of it ran on another one that did.
func (c *Controller) crashedAgain(e Dead) error {
	var again *CrashError
	for _, crash := range e.Crashed {
		for _, was := range c.crashes {
			switch {
			case was.Crash != crash || was.worker == e.Worker:
			case again == nil:
				again = &CrashError{Crash: crash, Workers: [2]id.WorkerID{was.worker.ID, e.Worker.ID}, Cause: e.Cause}
			case crash != again.Crash && !slices.Contains(again.Beside, crash.Pair):
				again.Beside = append(again.Beside, crash.Pair)
			}
		}
		c.crashes = append(slices.DeleteFunc(c.crashes, func(was crashed) bool { return was.Step < crash.Step }), crashed{crash, e.Worker})
	}
	if again == nil {
		return nil
	}
	return again
}

// fewer continues without a member whose state is not needed.
func (c *Controller) fewer(now time.Time) []Effect {
	if c.Busy() {
		return c.recovery.fewer(now)
	}
	return c.reconf.complete()
}

// agreed hands an agreed order to the machine that proposed it.
func (c *Controller) agreed(now time.Time, e Agreed) []Effect {
	ch := c.proposed
	if ch == nil || ch.agreed || ch.order.Plan.Version != e.Version {
		return nil
	}
	ch.agreed = true
	switch {
	case ch != c.boundary:
		return c.recovery.agreed(now, ch, e.Proposed)
	case !c.Busy(): // else the recovery withdraws it
		return c.reconf.agreed()
	}
	return nil
}

func (c *Controller) late(now time.Time, t Timer) []Effect {
	switch t {
	case LinkTimer:
		return c.recovery.reconnect(now)
	case LookTimer:
		c.reconf.looking = false
		return c.reconf.next()
	case WishTimer:
		return c.reconf.next()
	case RestTimer:
		c.exhausted = nil
		return c.reconf.next()
	}
	return c.recovery.late(t)
}

func (c *Controller) linkLost(now time.Time, e LinkLost) []Effect {
	if c.session(e.From) == nil || c.session(e.To) == nil {
		return nil // the failure of an end explains it
	}
	from, to := c.member(e.From), c.member(e.To)
	if from == nil || to == nil {
		return c.reconf.again(CauseJoin) // what was lost is sent again
	}
	return c.recovery.linkLost(now, from.Worker, to.Worker)
}

func (c *Controller) joined(now time.Time, e Joined) []Effect {
	if c.member(e.Worker) != nil || c.joining[e.Worker.ID] != nil {
		return nil
	}
	effects := c.reconf.joined(e)
	if c.recovery.state == holding {
		effects = append(effects, c.recovery.decide(now)...)
	}
	return effects
}

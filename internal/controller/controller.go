package controller

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Config says what a controller begins with.
type Config struct {
	Plan    plan.Plan // the first plan, which is live
	Peers   []Peer    // its workers
	Profile plan.Profile

	// Term is that of the agents' agreement. Attempt and Fills are the newest numbers that an earlier
	// controller of this term has given, see [Controller.Last].
	Term    uint64
	Attempt uint64
	Fills   int

	// Of a run that goes on under another leader: what is agreed of it. Live is the order
	// of the newest recovery, whose plan is Plan or comes before it. Coming is a
	// boundary plan that may be live already. Issued is the newest version that was given.
	Live   *Order
	Epoch  int // of the newest order
	Coming *Order
	Issued id.Version
	Saved  Saved

	// Stages and Mirrors are those of the job, for a plan that begins anew. 0 stages mean 1.
	Stages, Mirrors int

	// MinWorkers is the fewest workers to go on with. 0 means 1.
	MinWorkers int

	// Reshape says what may change when the workers or their speeds have. The zero value is
	// [Full].
	Reshape Reshape

	// Detect is the budget of all waits: a worker may take half of it for its answer to a
	// query, and a link may be down for all of it. 0 means for ever.
	Detect time.Duration

	// Hold is how long to wait for more workers. 0 means 2 min.
	Hold time.Duration
}

// Controller decides about the workers of one run.
type Controller struct {
	cfg    Config
	ballot id.Ballot
	phase  phase
	// patience is how many query timeouts are borne yet while nobody answers.
	patience int

	plan    plan.Plan              // the run's newest, as far as known
	live    *Order                 // of the newest recovery; nil before the first
	epoch   int                    // of the newest restart
	issued  id.Version             // the newest that any plan has got
	pending map[id.Version]*change // proposed and not out of date
	coming  *change                // the boundary plan under way, agreed or not
	members map[id.WorkerID]*member
	joining map[id.WorkerID]*member // ready, and in no plan that is agreed
	filling *filling                // what a boundary plan waits for
	before  *plan.Plan              // what came before plan since, which a recovery found live; nil when all have applied it
	since   id.Version
	went    id.Point                   // with which it went live
	times   map[id.WorkerID]plan.Times // measured by sessions that live
	looking bool                       // LookTimer runs
	seen    *look                      // what no better plan was found for
	looks   int
	balance *Balance // under way
	fill    id.Fill  // the newest
	broken  []link
	kept    *Finished // the first: all is written

	saved    Saved // newest checkpoint; zero: none
	recovery *recovery
	crashes  []crashed // that may be the same one again
	over     bool
}

type phase uint8

const (
	steady    phase = iota
	asking          // for answers to c.ballot
	proposing       // what c.recovery.order says
	applying        // the same
	holding         // sealed workers, but too few
)

// member is a living session.
type member struct {
	Peer
	report  *Report // answer to c.ballot
	applied bool    // the order of c.ballot, or the coming plan
	leaving bool
	suspect string // who of the ring cannot reach it; "" for nobody
}

// change is a plan with what it is for.
type change struct {
	order  Order
	cause  string
	reason plan.Reason
	again  int // pairs of the dead that run again
	agreed bool
}

// link is down between two that live, as far as is known.
type link struct {
	a, b  plan.Worker
	since time.Time
	again time.Time // when it was told of last
}

type crashed struct {
	Crash
	worker plan.Worker
}

// recovery is one that is under way.
type recovery struct {
	Recovery
	first  plan.Worker // that died
	causes []string
	dead   map[id.WorkerID]Dead
	again  int // by plans that were agreed, and followed by others

	died, known, answered, proposed, agreed time.Time
}

// New returns the controller of a run whose first plan is live.
func New(cfg Config) *Controller {
	c := &Controller{
		cfg: cfg, ballot: id.Ballot{Term: cfg.Term, Attempt: cfg.Attempt}, fill: id.Fill{Term: cfg.Term, N: cfg.Fills}, plan: cfg.Plan, issued: cfg.Plan.Version,
		pending: make(map[id.Version]*change), members: make(map[id.WorkerID]*member), joining: make(map[id.WorkerID]*member),
		times: make(map[id.WorkerID]plan.Times),
	}
	c.cfg.Stages, c.cfg.MinWorkers = max(cfg.Stages, 1), max(cfg.MinWorkers, 1)
	if cfg.Hold == 0 {
		c.cfg.Hold = 2 * time.Minute
	}
	for _, p := range cfg.Peers {
		c.members[p.ID] = &member{Peer: p}
	}
	c.saved = cfg.Saved
	if cfg.Live != nil {
		c.live = cfg.Live
	}
	c.epoch = cfg.Epoch
	if cfg.Coming != nil {
		c.coming = &change{order: *cfg.Coming, cause: "agreed", agreed: true, reason: "it was agreed before this agent led"}
		c.pending[cfg.Coming.Plan.Version] = c.coming
	}
	if cfg.Issued.Compare(c.issued) > 0 {
		c.issued = cfg.Issued
	}
	return c
}

// Plan returns the run's newest plan.
func (c *Controller) Plan() *plan.Plan { return &c.plan }

// Profile returns what is known of the model and the workers, by what they measured.
func (c *Controller) Profile() plan.Profile { return c.profile() }

// Last returns the newest numbers of ballots and fills. A controller that replaces this one in the
// same term counts on from them: workers drop older ballots and fills.
func (c *Controller) Last() (attempt uint64, fills int) { return c.ballot.Attempt, c.fill.N }

// Busy reports whether a recovery is under way.
func (c *Controller) Busy() bool { return c.phase != steady }

// Step takes in what has happened and returns what is to be done. An event of
// a session that is over changes nothing.
func (c *Controller) Step(now time.Time, e Event) []Effect {
	if c.over {
		return nil
	}
	switch e := e.(type) {
	case Dead:
		return c.dead(now, e)
	case Ended:
		return c.ended(now, e)
	case Harmed:
		if r := c.recovery; r != nil && r.first == e.Worker && r.Lost > 0 && e.At.Before(r.died) {
			r.died, r.How = e.At, Stamped
		}
		return nil
	case Answered:
		return c.answered(now, e)
	case Agreed:
		return c.agreed(now, e)
	case Applied:
		return c.applied(now, e)
	case Late:
		return c.late(now, e.Timer)
	case LinkLost:
		return c.linkLost(now, e)
	case Suspected:
		if m := c.member(e.Worker); m != nil {
			m.suspect = e.By
		}
		return nil
	case Leaving:
		return c.leaving(e)
	case Joined:
		return c.joined(now, e)
	case Level:
		return c.level(e)
	case Measured:
		return c.measured(e)
	case Balanced:
		return c.balanced(e)
	case Finished:
		if c.kept == nil && c.member(e.Worker) != nil {
			c.kept = &e
		}
		return nil
	case Saved:
		return c.save(e)
	case Led:
		if e.Term > c.ballot.Term {
			c.ballot, c.fill = id.Ballot{Term: e.Term}, id.Fill{Term: e.Term}
		}
		c.recover(now)
		return c.ask(fmt.Sprintf("this agent leads in term %d", e.Term))
	}
	panic(fmt.Sprintf("elastic: event %T", e))
}

// member returns the living session, nil if it is over.
func (c *Controller) member(w plan.Worker) *member {
	if m := c.members[w.ID]; m != nil && m.Worker.Incarnation == w.Incarnation {
		return m
	}
	return nil
}

// all returns the living by their IDs.
func (c *Controller) all() []*member {
	var all []*member
	for _, m := range c.members {
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b *member) int { return int(a.ID - b.ID) })
	return all
}

// planned reports whether a session is in the run's newest plan, or in the one
// that is coming.
func (c *Controller) planned(w plan.Worker) bool {
	in := func(p *plan.Plan) bool { was, ok := p.Worker(w.ID); return ok && was.Incarnation == w.Incarnation }
	return in(&c.plan) || c.coming != nil && in(&c.coming.order.Plan)
}

// end is the last that the controller does.
func (c *Controller) end(err error) []Effect {
	c.over = true
	return []Effect{End{err}}
}

func note(format string, args ...any) Note { return Note{fmt.Sprintf(format, args...)} }

// recover begins the account of a recovery, or goes on with the one that is under way.
func (c *Controller) recover(now time.Time) *recovery {
	if c.recovery == nil {
		c.recovery = &recovery{died: now, known: now, dead: make(map[id.WorkerID]Dead)}
	}
	return c.recovery
}

func (c *Controller) dead(now time.Time, e Dead) []Effect {
	if j := c.joining[e.Worker.ID]; j != nil && j.Worker == e.Worker {
		delete(c.joining, e.Worker.ID)
		effects := []Effect{note("%s, before it had a part in the plan", e.Cause)}
		if c.phase == steady && c.kept == nil && len(c.members)+len(c.joining) < c.cfg.MinWorkers {
			c.recover(now) // those that are left went on because it would come
			return append(effects, c.ask("too few are left")...)
		}
		return append(effects, c.refill("join")...)
	}
	m := c.member(e.Worker)
	if m == nil {
		return nil
	}
	delete(c.members, e.Worker.ID)
	delete(c.times, e.Worker.ID)
	c.broken = slices.DeleteFunc(c.broken, func(l link) bool { return l.a == m.Worker || l.b == m.Worker })
	if !c.planned(m.Worker) {
		return append([]Effect{note("%s; the plan does without it", e.Cause)}, c.fewer(now)...)
	}
	if e.Crashed != nil {
		for _, was := range c.crashes {
			if was.Crash == *e.Crashed && was.worker != e.Worker {
				return c.end(&CrashError{Crash: was.Crash, Workers: [2]id.WorkerID{was.worker.ID, e.Worker.ID}, Cause: e.Cause})
			}
		}
		c.crashes = append(slices.DeleteFunc(c.crashes, func(was crashed) bool { return was.Step < e.Crashed.Step }), crashed{*e.Crashed, e.Worker})
	}
	if len(c.members) == 0 {
		return c.end(&NobodyError{Worker: e.Worker.ID, Cause: e.Cause})
	}
	first := c.recovery == nil
	r := c.recover(now)
	if first {
		r.first, r.How = e.Worker, e.How
		if !e.Died.IsZero() && e.Died.Before(now) {
			r.died = e.Died
		}
	}
	r.Lost++
	r.causes = append(r.causes, e.Cause)
	r.dead[e.Worker.ID] = e
	return c.ask(e.Cause)
}

func (c *Controller) ended(now time.Time, e Ended) []Effect {
	m := c.member(e.Worker)
	if m == nil {
		return nil
	}
	delete(c.members, m.ID)
	return c.fewer(now)
}

// fewer goes on where one less is waited for.
func (c *Controller) fewer(now time.Time) []Effect {
	if c.phase == asking {
		return c.decide(now)
	}
	return c.check(now)
}

// ask begins a ballot: all that live are asked what they have.
func (c *Controller) ask(why string) []Effect {
	c.ballot.Attempt++
	c.recovery.Ballots++
	var effects []Effect
	if c.phase == holding {
		effects = append(effects, CancelTimer{HoldTimer})
	}
	c.phase, c.filling, c.patience = asking, nil, queryPatience
	all := c.all()
	effects = append(effects, note("%s: ask %s what they have, ballot %v", why, workers(all), c.ballot))
	for _, m := range all {
		m.report, m.applied = nil, false
		effects = append(effects, Ask{m.Worker, c.ballot})
	}
	if c.cfg.Detect > 0 {
		effects = append(effects, SetTimer{QueryTimer, c.cfg.Detect / 2})
	}
	return effects
}

func (c *Controller) answered(now time.Time, e Answered) []Effect {
	m := c.member(e.Worker)
	if m == nil || c.phase != asking || e.Ballot != c.ballot {
		return nil
	}
	m.report = &e.Report
	return c.decide(now)
}

// decide makes the plan when all have answered.
func (c *Controller) decide(now time.Time) []Effect {
	all := c.all()
	if len(all) == 0 || slices.ContainsFunc(all, func(m *member) bool { return m.report == nil }) {
		return nil
	}
	var effects []Effect
	switch {
	case c.phase == holding:
		effects = append(effects, CancelTimer{HoldTimer})
	case c.cfg.Detect > 0:
		effects = append(effects, CancelTimer{QueryTimer})
	}
	c.recovery.answered = now
	// Who has never applied a plan has nothing of the run yet.
	var fresh []*member
	all = slices.DeleteFunc(all, func(m *member) bool {
		begun := m.report.Plan != id.Version{}
		if !begun {
			fresh = append(fresh, m)
		}
		return !begun
	})
	at, err := c.verdict(all)
	if err != nil {
		return append(effects, c.end(err)...)
	}
	was := c.plan
	effects = append(effects, c.settleComing(at.plan)...)
	if c.plan.Version != was.Version {
		c.before, c.since, c.went = &was, c.plan.Version, at.point
	}
	for _, m := range at.missed {
		all = slices.DeleteFunc(all, func(x *member) bool { return x == m })
		delete(c.members, m.ID)
		effects = append(effects, Kill{m.Worker, fmt.Sprintf("worker %d left, and the others went on without it before it heard so", m.ID)})
	}
	for _, m := range fresh {
		delete(c.members, m.ID)
		if c.planned(m.Worker) {
			effects = append(effects, Kill{m.Worker, fmt.Sprintf("worker %d had not begun when its plan was struck", m.ID)})
		} else {
			c.joining[m.ID] = m
		}
	}
	var alive []plan.Worker
	have := 0
	for _, m := range c.members {
		if was, ok := c.plan.Worker(m.ID); ok && was.Incarnation == m.Worker.Incarnation {
			alive = append(alive, was)
			have++
		}
	}
	slices.SortFunc(alive, func(a, b plan.Worker) int { return int(a.ID - b.ID) })
	if have+len(c.joining) < c.cfg.MinWorkers && at.point.Gate != id.Kept {
		c.phase = holding
		return append(effects, note("%d of at least %d workers are left: hold for more", have, c.cfg.MinWorkers),
			Hold{have, c.cfg.MinWorkers}, SetTimer{HoldTimer, c.cfg.Hold})
	}
	change, err := c.change(all, alive, at)
	if err != nil {
		return append(effects, c.end(err)...)
	}
	c.phase = proposing
	return append(effects, c.propose(change)...)
}

// propose brings a plan before the agents.
func (c *Controller) propose(ch *change) []Effect {
	v := ch.order.Plan.Version
	clear(c.pending) // an older one would be of a lower ballot, or withdrawn
	c.pending[v] = ch
	return []Effect{note("propose plan %v: %s", v, ch.reason), Propose{ch.order, ch.cause, ch.reason}}
}

// standing is what all answers together say.
type standing struct {
	point  id.Point
	result []byte
	plan   id.Version // under which the run goes on from point
	behind bool       // a living worker has not begun anew, as it was told to
	missed []*member  // have left with the plan, and do not know: a link broke on them
}

// verdict finds out how far the run is: the furthest point that anyone alive has
// passed. That is certain to hold: all had come to it. A point that only the dead have
// passed is come to again, with the same result.
func (c *Controller) verdict(all []*member) (at standing, err error) {
	at.plan, at.point = c.plan.Version, id.Point{Step: c.cfg.Plan.FromStep - 1}
	if c.live != nil {
		at.point, at.result = c.live.Passed, c.live.Result
		at.behind = c.live.Restart && slices.ContainsFunc(all, func(m *member) bool { return m.report.Plan.Compare(c.live.Plan.Version) < 0 })
	}
	if at.behind {
		// Nobody commits before all have begun anew, so there is nothing to keep.
		return at, nil
	}
	further := func(p id.Point, result []byte) {
		if n := p.Compare(at.point); n > 0 || n == 0 && at.result == nil {
			at.point, at.result = p, result
		}
	}
	for _, m := range all {
		further(m.report.Passed, m.report.Result)
	}
	if c.kept != nil {
		further(id.Point{Step: c.kept.Step, Gate: id.Kept}, c.kept.Result)
	}
	p := &c.plan
	for _, m := range all {
		r := m.report
		if r.Passed != at.point || r.Plan.Compare(at.plan) <= 0 {
			continue
		}
		if c.coming == nil || r.Plan != c.coming.order.Plan.Version {
			return at, &ReportError{m.ID, fmt.Sprintf("works under plan %v, which is not known", r.Plan)}
		}
		at.plan, p = r.Plan, &c.coming.order.Plan
	}
	for _, m := range all {
		switch _, stays := p.Worker(m.ID); {
		case follows(m.report.Passed, at.point):
		case stays:
			return at, &ReportError{m.ID, fmt.Sprintf("has passed %v, and another one %v", m.report.Passed, at.point)}
		default:
			at.missed = append(at.missed, m)
		}
	}
	return at, nil
}

// follows reports whether who has passed one point can be where another is passed: it is
// the same, or the one before.
func follows(p, latest id.Point) bool {
	switch {
	case p == latest:
		return true
	case latest.Repair > 0:
		return p == id.Point{Step: latest.Step, Gate: latest.Gate, Repair: latest.Repair - 1}
	case latest.Gate == id.Committed:
		return p.Step == latest.Step-1
	}
	return p.Step == latest.Step && p.Gate < latest.Gate
}

// settleComing takes the boundary plan that is under way for the run's, if it is
// live, and withdraws it if it is not.
func (c *Controller) settleComing(v id.Version) []Effect {
	ch := c.coming
	c.coming = nil
	switch {
	case ch == nil:
		return nil
	case v == ch.order.Plan.Version:
		return c.adopt(ch)
	}
	return []Effect{note("plan %v is withdrawn", ch.order.Plan.Version)}
}

// adopt makes a plan the run's.
func (c *Controller) adopt(ch *change) []Effect {
	if c.plan.Version == ch.order.Plan.Version {
		return nil
	}
	c.plan = ch.order.Plan
	return []Effect{Adopt{ch.order, ch.cause, ch.reason}}
}

// change makes the order that the recovery ends with.
func (c *Controller) change(all []*member, alive []plan.Worker, at standing) (*change, error) {
	r := c.recovery
	ch := &change{cause: "lost", order: Order{Ballot: c.ballot, Passed: at.point, Result: at.result}}
	r.Step = at.point.Step + 1
	current, short, none := c.held(all, at.point)
	switch {
	case len(alive) < len(c.plan.Workers), none != nil:
	case !at.behind:
		// Only a link or the agents' leader was lost, or who died was out of the plan. The
		// version is new all the same, since what the workers exchanged while they were
		// sealed did not count.
		ch.cause, ch.reason = "kept", "nobody of the plan is lost: the same plan, so that all go on with it"
		if len(c.broken) > 0 || short {
			ch.cause, ch.reason = "link", plan.Reason(strings.Join(r.causes, "; ")+": the same plan, so that what was lost is sent again")
		}
		ch.order.Plan = c.same(current, at.point)
		return c.address(ch), nil
	}
	view := plan.View{Workers: alive, Step: at.point.Step + 1}
	if !at.behind {
		for _, m := range all {
			if m.report.Passed == at.point {
				for _, w := range m.report.Works {
					view.Works = append(view.Works, plan.Work{Worker: m.ID, Status: w})
				}
			}
		}
		view.Complete = c.complete(all, at.point)
		var p plan.Plan
		var reason plan.Reason
		var err error
		if none != nil {
			err = none
		} else {
			p, reason, err = plan.Next(current, view, c.profile(), plan.Event{Kind: plan.Lost, Cause: strings.Join(r.causes, "; "), After: c.issued})
		}
		switch {
		case err == nil:
			c.issued = p.Version
			ch.order.Plan, ch.reason = p, reason
			r.Rollback = false
			ch.again = c.again(&p, view)
			return c.address(ch), nil
		case !errors.As(err, &none):
			return nil, err
		case at.point.Gate == id.Kept:
			// All is written; the plan only says who is left.
			p, _, err := c.anew(alive, at.point)
			ch.order.Plan, ch.reason = p, plan.Reason(strings.Join(r.causes, "; ")+": all is done, the others end")
			return c.address(ch), err
		default:
			ch.reason = plan.Reason(fmt.Sprintf("%s: %v; ", strings.Join(r.causes, "; "), none))
		}
	} else {
		ch.reason = plan.Reason(strings.Join(r.causes, "; ") + ": not all had begun anew; ")
	}
	ch.cause = "restart"
	ch.order.Restart, ch.order.From, ch.order.Passed, ch.order.Result = true, c.saved.Dir, id.Point{Step: c.saved.Step}, nil
	p, reason, err := c.anew(alive, ch.order.Passed)
	if err != nil {
		return nil, err
	}
	from := "the beginning"
	if c.saved.Dir != "" {
		from = fmt.Sprintf("the checkpoint of step %d", c.saved.Step)
	}
	ch.order.Plan = p
	ch.reason += plan.Reason("go on from "+from+", ") + reason
	r.Rollback, r.From, r.again = true, c.saved.Step, 0
	return c.address(ch), nil
}

// held returns the plan with holders that have the state of their shards. A boundary plan may
// be live that some have not applied, and what was on its way to them may be lost: they hold
// nothing then. Where no other holder lives, it is one of the plan before, which keeps what it
// hands over until the next commit. short says that the plan was changed, and none that there is
// nobody.
func (c *Controller) held(all []*member, at id.Point) (p plan.Plan, short bool, none *plan.LostError) {
	p = c.plan
	if c.before == nil {
		return p, false, nil
	}
	held := make(map[id.WorkerID][]id.Range) // by the plan before
	for _, s := range c.before.Shards {
		for _, w := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			held[w] = append(held[w], id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi})
		}
	}
	lives := make(map[id.WorkerID]*member)
	for _, m := range all {
		lives[m.ID] = m
		if was, ok := c.before.Worker(m.ID); !ok || was.Incarnation != m.Worker.Incarnation {
			delete(held, m.ID)
		}
		for _, f := range m.report.Filled {
			if f.Step == at.Step {
				held[m.ID] = append(held[m.ID], f.Range)
			}
		}
	}
	p.Shards = slices.Clone(p.Shards)
	for i := range p.Shards {
		s := &p.Shards[i]
		var holders []id.WorkerID
		alive := false
		for _, w := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			m := lives[w]
			if m != nil && m.report.Holds.Compare(c.since) < 0 && !covers(held[w], *s) {
				continue
			}
			holders = append(holders, w) // the plan will do without who is dead
			alive = alive || m != nil
		}
		if !alive && at == c.went {
			for _, m := range all {
				if _, stays := p.Worker(m.ID); stays && covers(held[m.ID], *s) {
					holders, alive = append([]id.WorkerID{m.ID}, holders...), true
					break
				}
			}
		}
		if len(holders) == 0 {
			if none == nil {
				none = &plan.LostError{Shard: *s}
			}
			none.Count++
			continue
		}
		if holders[0] != s.Owner || len(holders) != 1+len(s.Mirrors) {
			short = true
			s.Owner, s.Mirrors = holders[0], holders[1:]
		}
	}
	return p, short, none
}

// same makes the plan once more, for the rest of the step.
func (c *Controller) same(p plan.Plan, at id.Point) plan.Plan {
	if p.FromStep != at.Step+1 {
		p.FromStep, p.Settled, p.First = max(at.Step+1, p.FromStep), nil, nil
	}
	p.InStep, p.Degraded = true, false
	c.issued = id.Version{Generation: c.issued.Generation, N: c.issued.N + 1}
	p.Version = c.issued
	return p
}

// anew makes a plan that owes nothing to the one before but its version.
func (c *Controller) anew(alive []plan.Worker, at id.Point) (plan.Plan, plan.Reason, error) {
	p, reason, err := plan.Next(plan.Plan{}, plan.View{Workers: alive}, c.profile(), plan.Event{
		Kind: plan.Start, Micros: c.plan.Micros(),
		Stages: min(c.cfg.Stages, len(alive)), Mirrors: c.cfg.Mirrors, FromStep: at.Step + 1,
	})
	p.Version = id.Version{Generation: c.issued.Generation, N: c.issued.N + 1}
	c.issued = p.Version
	return p, reason, err
}

// address fills in the workers of the plan and where they are.
func (c *Controller) address(ch *change) *change {
	ch.order.Epoch = c.epoch
	if ch.order.Restart {
		ch.order.Epoch = ch.order.Plan.Version.N
	}
	for _, w := range ch.order.Plan.Workers {
		if m := cmp.Or(c.members[w.ID], c.joining[w.ID]); m != nil {
			ch.order.Peers = append(ch.order.Peers, m.Peer)
		}
	}
	return ch
}

// complete returns who has the gradient of which shard.
func (c *Controller) complete(all []*member, at id.Point) (list []plan.Complete) {
	for i, s := range c.plan.Shards {
		for _, m := range all {
			if m.report.Passed == at && covers(m.report.Complete, s) {
				list = append(list, plan.Complete{Shard: i, Worker: m.ID})
			}
		}
	}
	return list
}

// covers reports whether ranges together hold a shard.
func covers(ranges []id.Range, s plan.Shard) bool {
	at := s.Lo
	for found := true; found && at < s.Hi; {
		found = false
		for _, r := range ranges {
			if r.Layer == s.Layer && r.Lo <= at && at < r.Hi {
				at, found = r.Hi, true
			}
		}
	}
	return at >= s.Hi
}

// again counts the pairs that were begun on the dead and run again.
func (c *Controller) again(p *plan.Plan, v plan.View) int {
	begun := make(map[graph.Pair]bool)
	for _, w := range v.Works {
		// What a pair needs from its neighbours is there: so they were begun.
		if w.Begun() || w.Input {
			begun[graph.Pair{Stage: w.Stage - 1, Micro: w.Micro}] = true
		}
		if w.Phase >= graph.Backing || w.Gradient {
			begun[graph.Pair{Stage: w.Stage + 1, Micro: w.Micro}] = true
		}
	}
	n := 0
	for s, route := range c.plan.Route {
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			was, dead := c.recovery.dead[w]
			told := (was.BegunIn == 0 || was.BegunIn == v.Step) && slices.Contains(was.Begun, pair)
			if dead && c.plan.Runs(pair, v.Step) && p.Runs(pair, v.Step) && (begun[pair] || told) {
				n++
			}
		}
	}
	return n
}

func (c *Controller) agreed(now time.Time, e Agreed) []Effect {
	ch := c.pending[e.Version]
	if ch == nil || ch.agreed {
		return nil
	}
	ch.agreed = true
	order := &ch.order
	if ch == c.coming {
		if c.phase != steady {
			return nil // it will be withdrawn
		}
		effects := []Effect{note("plan %v is agreed and goes live between two steps", order.Plan.Version)}
		for _, m := range c.all() {
			m.applied = false
			effects = append(effects, Command{m.Worker, *order})
		}
		return effects
	}
	effects := c.adopt(ch)
	c.live, c.epoch = order, order.Epoch
	if order.Restart {
		c.before = nil
	}
	r := c.recovery
	r.again += ch.again
	if c.phase != proposing || order.Ballot != c.ballot {
		return append(effects, note("plan %v is agreed, and not sent: ballot %v is under way", order.Plan.Version, c.ballot))
	}
	r.proposed, r.agreed = e.Proposed, now
	if r.proposed.Before(r.answered) || now.Before(r.proposed) {
		r.proposed = r.answered
	}
	c.phase = applying
	for _, m := range c.all() {
		effects = append(effects, Command{m.Worker, *order})
	}
	return effects
}

func (c *Controller) applied(now time.Time, e Applied) []Effect {
	m := c.member(e.Worker)
	if m == nil {
		return nil
	}
	if e.Ballot == (id.Ballot{}) {
		if c.coming == nil || e.Version != c.coming.order.Plan.Version || c.phase != steady {
			return nil
		}
		m.applied = true
		return c.check(now)
	}
	if c.phase != applying || e.Ballot != c.ballot {
		return nil
	}
	m.applied = true
	r := c.recovery
	r.Opened += e.Opened
	r.Edit = max(r.Edit, e.Edit)
	return c.check(now)
}

// check looks whether all have applied what they were to.
func (c *Controller) check(now time.Time) []Effect {
	if slices.ContainsFunc(c.all(), func(m *member) bool { return !m.applied }) {
		return nil
	}
	switch {
	case c.phase == applying:
		r := c.recovery
		c.phase, c.recovery, c.before = steady, nil, nil
		c.broken = slices.DeleteFunc(c.broken, func(l link) bool { return !l.again.After(r.agreed) })
		r.Cause, r.Version = strings.Join(r.causes, "; "), c.plan.Version
		r.Detect, r.Query, r.Plan, r.Agree = r.known.Sub(r.died), r.answered.Sub(r.known), r.proposed.Sub(r.answered), r.agreed.Sub(r.proposed)
		rest := now.Sub(r.agreed)
		r.Edit = min(r.Edit, rest)
		r.Resume, r.Total, r.Again = rest-r.Edit, now.Sub(r.died), r.again
		effects := []Effect{note("all have applied plan %v", r.Version)}
		if len(r.causes) > 0 {
			effects = append(effects, Recovered{r.Recovery})
		}
		effects = append(effects, c.dismiss()...)
		// The struck step comes first.
		return append(effects, SetTimer{WishTimer, wishAfter})
	case c.phase == steady && c.coming != nil && c.coming.agreed:
		effects := c.adopt(c.coming)
		c.coming = nil
		effects = append(effects, note("plan %v is live", c.plan.Version))
		return append(append(effects, c.dismiss()...), c.wishes()...)
	}
	return nil
}

// queryPatience is how many query timeouts are borne while nobody answers.
const queryPatience = 4

// wishAfter is the time from a recovery to the next boundary plan.
const wishAfter = 10 * time.Millisecond

func (c *Controller) late(now time.Time, t Timer) []Effect {
	switch {
	case t == QueryTimer && c.phase == asking:
		all := c.all()
		answered := func(m *member) bool { return m.report != nil }
		if c.patience--; c.patience > 0 && !slices.ContainsFunc(all, answered) {
			// That is the machine, not each of them.
			return []Effect{note("nobody has answered within %v: wait on", c.cfg.Detect/2), SetTimer{QueryTimer, c.cfg.Detect / 2}}
		}
		var effects []Effect
		for _, m := range all {
			if !answered(m) {
				effects = append(effects, Kill{m.Worker, fmt.Sprintf("worker %d has not answered within %v", m.ID, c.cfg.Detect/2)})
			}
		}
		return effects // the next ballot begins with the first of their deaths
	case t == HoldTimer && c.phase == holding:
		return c.end(&FewError{Have: len(c.members), Need: c.cfg.MinWorkers, Held: c.cfg.Hold})
	case t == WishTimer:
		return c.wishes()
	case t == LookTimer:
		c.looking = false
		return c.wishes()
	case t == LinkTimer && len(c.broken) > 0:
		return c.repair(now)
	}
	return nil
}

func (c *Controller) linkLost(now time.Time, e LinkLost) []Effect {
	from, to := c.member(e.From), c.member(e.To)
	if from == nil || to == nil {
		if c.session(e.From) != nil && c.session(e.To) != nil {
			return c.refill("join") // what was lost comes once more
		}
		return nil // who is dead explains it
	}
	l := link{from.Worker, to.Worker, now, now}
	if l.a.ID > l.b.ID {
		l.a, l.b = l.b, l.a
	}
	if i := slices.IndexFunc(c.broken, func(was link) bool { return was.a == l.a && was.b == l.b }); i >= 0 {
		c.broken[i].again = now
		return nil
	}
	c.broken = append(c.broken, l)
	effects := []Effect{note("the link between workers %d and %d is down, and both live", l.a.ID, l.b.ID)}
	if len(c.broken) == 1 && c.cfg.Detect > 0 {
		effects = append(effects, SetTimer{LinkTimer, c.cfg.Detect / 10})
	}
	return effects
}

// repair is called when the ends of a broken link should have died if that was why: all
// get the plan once more, which makes links anew and sends again what was lost. Where that
// does not help within the budget, one end has to go.
func (c *Controller) repair(now time.Time) []Effect {
	if c.phase == holding || c.phase == proposing {
		// What ends that makes the links anew, which nobody has tried yet.
		for i := range c.broken {
			c.broken[i].since = now
		}
		return []Effect{SetTimer{LinkTimer, c.cfg.Detect}}
	}
	effects := c.evict(now)
	if len(c.broken) == 0 {
		return effects
	}
	effects = append(effects, SetTimer{LinkTimer, c.broken[0].since.Add(c.cfg.Detect).Sub(now)})
	if c.phase == steady {
		l := c.broken[0]
		r := c.recover(now)
		r.How, r.died = Broken, l.since
		r.causes = append(r.causes, fmt.Sprintf("the link between workers %d and %d broke", l.a.ID, l.b.ID))
		effects = append(effects, c.ask(r.causes[0])...)
	}
	return effects
}

// evict ends workers until no broken link is left between two that live: first those
// with most of them, then those that the ring suspects, then those whose loss the plan can
// bear, then those that own least.
func (c *Controller) evict(now time.Time) []Effect {
	var effects []Effect
	var links, younger []link
	for _, l := range c.broken {
		if now.Sub(l.since) >= c.cfg.Detect {
			links = append(links, l)
		} else {
			younger = append(younger, l)
		}
	}
	c.broken = younger
	for len(links) > 0 {
		count := make(map[id.WorkerID]int)
		for _, l := range links {
			count[l.a.ID]++
			count[l.b.ID]++
		}
		type candidate struct {
			w       plan.Worker
			suspect string // who suspects it
			fatal   int    // shards that would have no holder left
			owns    int
		}
		var best *candidate
		for _, l := range links {
			for _, w := range []plan.Worker{l.a, l.b} {
				k := candidate{w: w}
				if m := c.member(w); m != nil {
					k.suspect = m.suspect
				}
				for _, s := range c.plan.Shards {
					if s.Owner == w.ID {
						k.owns += s.Hi - s.Lo
						if len(s.Mirrors) == 0 {
							k.fatal++
						}
					}
				}
				switch {
				case best == nil, count[w.ID] > count[best.w.ID]:
				case count[w.ID] < count[best.w.ID], k.suspect == "" && best.suspect != "":
					continue
				case k.suspect != "" && best.suspect == "":
				case k.fatal > best.fatal:
					continue
				case k.fatal == best.fatal && (k.owns > best.owns || k.owns == best.owns && w.ID <= best.w.ID):
					continue
				}
				best = &k
			}
		}
		var others []string
		links = slices.DeleteFunc(links, func(l link) bool {
			switch best.w {
			case l.a:
				others = append(others, fmt.Sprint(l.b.ID))
			case l.b:
				others = append(others, fmt.Sprint(l.a.ID))
			default:
				return false
			}
			return true
		})
		reason := fmt.Sprintf("worker %d is evicted: its link to worker %s has been down for %v", best.w.ID, strings.Join(others, ", "), c.cfg.Detect)
		if best.suspect != "" {
			reason += fmt.Sprintf(", and %s cannot reach it", best.suspect)
		}
		effects = append(effects, Kill{best.w, reason})
	}
	return effects
}

func (c *Controller) leaving(e Leaving) []Effect {
	if m := c.joining[e.Worker.ID]; m != nil && m.Worker.Incarnation == e.Worker.Incarnation {
		delete(c.joining, m.ID)
		return append([]Effect{Dismiss{m.Worker, fmt.Sprintf("worker %d leaves before it had a part in the plan", m.ID)}}, c.refill("join")...)
	}
	m := c.member(e.Worker)
	if m == nil || m.leaving || c.kept != nil {
		return nil
	}
	m.leaving = true
	if !slices.ContainsFunc(c.all(), func(m *member) bool { return !m.leaving }) {
		return []Effect{note("all workers want to leave"), StopAll{}}
	}
	return append(append([]Effect{note("worker %d wants to leave", m.ID)}, c.refill("join", "protect", "leave", "rebalance")...), c.wishes()...)
}

// save takes note of the checkpoint to go back to. One that is older than that which a proposed
// plan goes on from says that the newer one cannot be used.
func (c *Controller) save(e Saved) []Effect {
	was := c.saved
	c.saved = e
	if c.phase != proposing || e.Step >= was.Step {
		return nil
	}
	for _, ch := range c.pending {
		if ch.order.Restart && ch.order.Ballot == c.ballot && ch.order.Passed.Step > e.Step {
			return c.ask(fmt.Sprintf("the checkpoint of step %d cannot be used", ch.order.Passed.Step))
		}
	}
	return nil
}

// workers prints members.
func workers(all []*member) string {
	var ids []string
	for _, m := range all {
		ids = append(ids, fmt.Sprint(m.ID))
	}
	if len(ids) == 1 {
		return "worker " + ids[0]
	}
	return "workers " + strings.Join(ids, ", ")
}

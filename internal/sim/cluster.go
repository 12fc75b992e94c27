package sim

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// Config describes the run of a [Cluster].
type Config struct {
	Seed                             uint64
	Workers, Stages, Micros          int
	Mirrors, MinWorkers, Steps, Zero int
	Layers                           []plan.Layer
	Detect                           time.Duration // failure-detection timeout
	Checkpoint                       int           // a checkpoint follows this step; 0: none
	Trace                            bool          // keep a log of events
}

// Violation is the value of the panic with which a cluster ends a run that breaks an invariant.
type Violation struct {
	Text string
	Log  []string
}

func (v *Violation) Error() string { return v.Text + "\n" + strings.Join(v.Log, "\n") }

// Cluster is a simulated run.
type Cluster struct {
	cfg    Config
	rnd    *rand.Rand
	now    time.Time
	events events
	count  int

	ctl    *controller.Controller
	term   uint64
	reign  int  // of the leader; what was on its way to an earlier one is lost
	vacant bool // there is no leader
	timers map[controller.Timer]int
	agreed []control.Order
	logged time.Time // when the newest is agreed

	workers map[id.Session]*worker
	order   []*worker // by start
	links   map[pair]*link
	plans   map[id.Version]plan.Plan
	results map[int]core.Result
	over    bool
	err     error
	log     []string

	// Recoveries counts the recoveries that have ended.
	Recoveries int
	// Watch, if it is not nil, is called with what the controller wants, before that is done. It may inject faults.
	Watch func(controller.Effect)
}

// event is something that happens at a time.
type event struct {
	at time.Time
	n  int // of equal times, the first first
	do func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at.Before(e[j].at) || e[i].at.Equal(e[j].at) && e[i].n < e[j].n
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// New returns a cluster whose workers begin with the first step.
func New(cfg Config) *Cluster {
	c := &Cluster{
		cfg: cfg, rnd: rand.New(rand.NewPCG(cfg.Seed, 1)), now: time.Unix(0, 0), term: 1,
		timers: make(map[controller.Timer]int), workers: make(map[id.Session]*worker), links: make(map[pair]*link),
		plans: make(map[id.Version]plan.Plan), results: make(map[int]core.Result),
	}
	var v plan.View
	var peers []control.Peer
	for i := range cfg.Workers {
		w := plan.Worker{ID: id.WorkerID(i)}
		v.Workers = append(v.Workers, w)
		peers = append(peers, control.Peer{Worker: w, Addr: addr(w)})
	}
	p, _, err := planner.Next(plan.Plan{}, v, c.profile(), planner.Event{Kind: planner.Start, Micros: cfg.Micros, Stages: cfg.Stages, Mirrors: cfg.Mirrors})
	if err != nil {
		panic(err)
	}
	started := control.Order{Plan: p, Peers: peers, Passed: id.Point{Step: p.FromStep - 1}}
	c.agreed = []control.Order{started}
	c.known(p)
	c.ctl = controller.New(c.config(p, peers))
	for _, w := range p.Workers {
		c.start(w, started)
	}
	return c
}

func addr(w plan.Worker) string { return fmt.Sprintf("addr-%d.%d", w.ID, w.Incarnation) }

func (c *Cluster) profile() plan.Profile { return plan.Profile{Layers: c.cfg.Layers} }

func (c *Cluster) config(p plan.Plan, peers []control.Peer) controller.Config {
	return controller.Config{
		Plan: p, Peers: peers, Profile: c.profile(), Term: c.term, Stages: c.cfg.Stages, Mirrors: c.cfg.Mirrors,
		MinWorkers: c.cfg.MinWorkers, Detect: c.cfg.Detect,
	}
}

// violated ends the run.
func (c *Cluster) violated(format string, args ...any) {
	panic(&Violation{fmt.Sprintf("at %v: ", c.now.Sub(time.Unix(0, 0))) + fmt.Sprintf(format, args...), c.log})
}

func (c *Cluster) note(format string, args ...any) {
	if c.cfg.Trace {
		c.log = append(c.log, fmt.Sprintf("%12v  ", c.now.Sub(time.Unix(0, 0)))+fmt.Sprintf(format, args...))
	}
}

// At has f called at a time after the start.
func (c *Cluster) At(d time.Duration, f func()) {
	c.count++
	heap.Push(&c.events, event{time.Unix(0, 0).Add(d), c.count, f})
}

// after has f called after a delay.
func (c *Cluster) after(d time.Duration, f func()) { c.At(c.now.Add(d).Sub(time.Unix(0, 0)), f) }

// delay draws a delay: mostly near the mean, and rarely a multiple of it.
func (c *Cluster) delay(mean time.Duration) time.Duration {
	return time.Duration(c.rnd.ExpFloat64() * float64(mean))
}

// Run runs until the run has ended or the time after the start is up, and reports whether it has ended. The error is that
// with which the controller has ended it.
func (c *Cluster) Run(until time.Duration) (ended bool, err error) {
	end := time.Unix(0, 0).Add(until)
	for !c.over && len(c.events) > 0 && !c.events[0].at.After(end) {
		e := heap.Pop(&c.events).(event)
		c.now = e.at
		e.do()
	}
	return c.over, c.err
}

// Log returns the log of the run so far.
func (c *Cluster) Log() []string { return c.log }

// find returns the living session of a worker, nil if there is none.
func (c *Cluster) find(w id.WorkerID) *worker {
	for _, x := range c.order {
		if x.self.ID == w && x.alive {
			return x
		}
	}
	return nil
}

// Kill kills a worker as SIGKILL does.
func (c *Cluster) Kill(w id.WorkerID) {
	c.kill(c.find(w), fmt.Sprintf("worker %d exited: signal: killed", w), controller.Reaped)
}

func (c *Cluster) kill(w *worker, cause string, how controller.Evidence) {
	if w == nil || !w.alive {
		return
	}
	c.note("%s", cause)
	w.stop()
	died := c.now
	w.death = func() {
		c.step(controller.Dead{Worker: w.self, Cause: cause, Died: died, How: how})
	}
	c.toLeader(w, w.report)
}

// Freeze stops a worker for a while. The host kills it after the failure-detection timeout.
func (c *Cluster) Freeze(id id.WorkerID, d time.Duration) {
	w := c.find(id)
	if w == nil || w.frozen {
		return
	}
	c.note("worker %d is frozen for %v", id, d)
	w.frozen = true
	c.after(min(d, c.cfg.Detect), func() {
		if !w.alive {
			return
		}
		if d >= c.cfg.Detect {
			c.kill(w, fmt.Sprintf("worker %d has been silent for %v", id, c.cfg.Detect), controller.Silent)
			return
		}
		w.thaw()
	})
}

// Cut breaks the link between two workers. It can be opened again after d.
func (c *Cluster) Cut(a, b id.WorkerID, d time.Duration) {
	x, y := c.find(a), c.find(b)
	if x == nil || y == nil || x == y {
		return
	}
	c.note("the link between workers %d and %d is cut for %v", a, b, d)
	l := c.link(x, y)
	l.cuts++
	l.refresh()
	c.after(d, func() {
		l.cuts--
		l.refresh()
	})
}

// Join starts one more worker.
func (c *Cluster) Join() {
	w := plan.Worker{}
	for _, x := range c.order {
		w.ID = max(w.ID, x.self.ID+1)
	}
	c.launch(w)
}

// Replace starts a worker in the place of one that has failed.
func (c *Cluster) Replace(w id.WorkerID) {
	life := 0
	for _, x := range c.order {
		if x.self.ID == w {
			if x.alive {
				return
			}
			life = x.self.Incarnation + 1
		}
	}
	c.launch(plan.Worker{ID: w, Incarnation: life})
}

func (c *Cluster) launch(w plan.Worker) {
	c.note("worker %d.%d starts", w.ID, w.Incarnation)
	x := c.start(w, control.Order{})
	c.after(c.delay(2*time.Millisecond), func() {
		if x.alive {
			x.announce()
		}
	})
}

// Leave asks a worker to hand over its state and exit.
func (c *Cluster) Leave(id id.WorkerID) {
	if w := c.find(id); w != nil && !w.done {
		c.note("worker %d is asked to leave", id)
		c.toLeader(w, func() { c.step(controller.Leaving{Worker: w.self}) })
	}
}

// Measure has a worker report how long a layer takes it.
func (c *Cluster) Measure(id id.WorkerID, d time.Duration) {
	w := c.find(id)
	if w == nil {
		return
	}
	var times plan.Times
	p := c.ctl.Plan()
	for _, s := range p.StagesOf(id) {
		for l := p.Stages[s].Lo; l < p.Stages[s].Hi; l++ {
			times.Layers = append(times.Layers, plan.LayerTime{Layer: l, Forward: d, Backward: 2 * d})
		}
	}
	c.toLeader(w, func() { c.step(controller.Measured{Worker: w.self, Times: times}) })
}

// Lead ends the leadership and has another agent take over: a new controller is made from the agreed orders.
func (c *Cluster) Lead() {
	c.note("the leader is lost")
	c.reign++
	c.vacant = true
	reign := c.reign
	clear(c.timers)
	c.after(c.delay(5*time.Millisecond), func() {
		if c.reign == reign && !c.over {
			c.takeOver()
		}
	})
}

// takeOver makes the controller of a new term, as the session of a host does.
func (c *Cluster) takeOver() {
	c.term++
	c.vacant = false
	live, coming := c.agreed[0].Plan, (*control.Order)(nil)
	var recovered *control.Order
	for i := range c.agreed {
		switch o := &c.agreed[i]; {
		case i == 0:
		case o.Ballot == id.Ballot{}:
			if coming != nil {
				live = coming.Plan
			}
			coming = o
		default:
			live, recovered, coming = o.Plan, o, nil
		}
	}
	members := slices.Clone(live.Workers)
	if coming != nil {
		members = append(members, coming.Plan.Workers...)
	}
	var peers []control.Peer
	var others []*worker
	for _, w := range c.order {
		switch {
		case slices.Contains(members, w.self): // alive or not, as the session does: of each death, the new controller is told
			w.gone = false
			peers = append(peers, control.Peer{Worker: w.self, Addr: addr(w.self)})
		case w.alive && !w.gone:
			others = append(others, w)
		}
	}
	newest := c.agreed[len(c.agreed)-1]
	cfg := c.config(live, peers)
	cfg.Live, cfg.Coming, cfg.Issued, cfg.Epoch = recovered, coming, newest.Plan.Version, newest.Epoch
	c.note("another agent leads in term %d", c.term)
	c.ctl = controller.New(cfg)
	if s := c.cfg.Checkpoint; s > 0 && c.results[s].Step > 0 {
		c.step(controller.Saved{Step: s, Dir: "checkpoint"})
	}
	c.step(controller.Led{Term: c.term})
	for _, w := range others {
		c.kill(w, fmt.Sprintf("worker %d has no part in the run", w.self.ID), controller.Reaped)
		w.gone = true
	}
	for _, w := range c.order {
		if w.death != nil && !w.gone {
			c.toLeader(w, w.report)
		}
		if w.done {
			w.finished()
		}
	}
}

// toLeader brings a worker's word to the leader, after what it said before.
func (c *Cluster) toLeader(w *worker, f func()) {
	reign := c.reign
	at := c.now.Add(c.delay(200 * time.Microsecond))
	if at.Before(w.told) {
		at = w.told
	}
	w.told = at
	c.At(at.Sub(time.Unix(0, 0)), func() {
		if reign == c.reign && !c.vacant {
			f()
		}
	})
}

// toWorker brings the leader's word to a worker, after what it said before.
func (c *Cluster) toWorker(w *worker, f func()) {
	reign := c.reign
	at := c.now.Add(c.delay(200 * time.Microsecond))
	if at.Before(w.heard) {
		at = w.heard
	}
	w.heard = at
	c.At(at.Sub(time.Unix(0, 0)), func() {
		if reign == c.reign {
			w.run(f)
		}
	})
}

// known takes note of a plan.
func (c *Cluster) known(p plan.Plan) {
	if was, ok := c.plans[p.Version]; ok && !reflect.DeepEqual(was, p) {
		c.violated("two plans have version %v", p.Version)
	}
	c.plans[p.Version] = p
}

// step lets the controller step and does what it wants.
func (c *Cluster) step(e controller.Event) {
	if c.cfg.Trace {
		text := fmt.Sprintf("%T %+v", e, e)
		c.note("%s", text[:min(len(text), 150)])
	}
	for _, e := range c.ctl.Step(c.now, e) {
		if c.Watch != nil {
			c.Watch(e)
		}
		switch e := e.(type) {
		case controller.Ask:
			w := c.session(e.Worker)
			c.toWorker(w, func() { w.query(e.Ballot) })
		case controller.Command:
			c.known(e.Order.Plan)
			w := c.session(e.Worker)
			c.toWorker(w, func() { w.command(e.Order) })
		case controller.Copy:
			w := c.session(e.Worker)
			c.toWorker(w, func() { w.step(core.Fill{Fill: e.Fill}) })
		case controller.Propose:
			c.agree(e.Order)
		case controller.Balance:
			reign := c.reign
			c.after(c.delay(time.Millisecond), func() {
				if reign == c.reign {
					c.step(e.Make())
				}
			})
		case controller.Adopt:
			c.note("adopt plan %v (%v)", e.Order.Plan.Version, e.Cause)
		case controller.Kill:
			c.kill(c.session(e.Worker), e.Reason, controller.Reaped)
		case controller.Dismiss:
			w := c.session(e.Worker)
			c.toWorker(w, func() {
				w.stop()
				w.death = func() { c.step(controller.Ended{Worker: w.self}) }
				c.toLeader(w, w.report)
			})
		case controller.SetTimer:
			c.count++
			n := c.count
			c.timers[e.Timer] = n
			c.after(e.After, func() {
				if c.timers[e.Timer] == n {
					delete(c.timers, e.Timer)
					c.step(controller.Late{Timer: e.Timer})
				}
			})
		case controller.CancelTimer:
			delete(c.timers, e.Timer)
		case controller.Note:
			c.note("  %s", e.Reason)
		case controller.Recovered:
			c.Recoveries++
			c.recovered(e.Recovery)
		case controller.End:
			c.note("END %v", e.Err)
			c.over, c.err = true, e.Err
		}
	}
	c.conclude()
}

// agree brings an order before the agents. If the leader is lost meanwhile, its successor finds it agreed or not at all.
func (c *Cluster) agree(o control.Order) {
	reign, began := c.reign, c.now
	at := c.now.Add(c.delay(300 * time.Microsecond))
	if at.Before(c.logged) { // the log keeps the order
		at = c.logged
	}
	c.logged = at
	c.At(at.Sub(time.Unix(0, 0)), func() {
		if reign != c.reign && (!c.vacant || reign+1 != c.reign || c.rnd.IntN(2) == 0) {
			return
		}
		c.known(o.Plan)
		c.agreed = append(c.agreed, o)
		if reign == c.reign {
			c.step(controller.Agreed{Version: o.Plan.Version, Proposed: began})
		}
	})
}

// recovered holds that the phases of a recovery add up.
func (c *Cluster) recovered(r controller.Recovery) {
	phases := []time.Duration{r.Detect, r.Query, r.Plan, r.Agree, r.Edit, r.Resume}
	var sum time.Duration
	for _, d := range phases {
		sum += d
	}
	if sum != r.Total || slices.Min(phases) < 0 {
		c.violated("the phases of a recovery do not add up: %+v", r)
	}
}

func (c *Cluster) session(w plan.Worker) *worker {
	return c.workers[id.Session{Worker: w.ID, Incarnation: w.Incarnation}]
}

// conclude ends the run when all living workers of the plan have finished.
func (c *Cluster) conclude() {
	if c.over || c.ctl.Busy() {
		return
	}
	living := 0
	for _, p := range c.ctl.Plan().Workers {
		switch w := c.session(p); {
		case !w.alive:
		case w.finishedSaid:
			living++
		default:
			return
		}
	}
	c.over = living > 0
}

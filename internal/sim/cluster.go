package sim

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/session/skips"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// Config describes the run of a [Cluster].
type Config struct {
	Seed                             uint64
	Workers, Stages, Micros          int
	Hosts                            int // of the workers, and of the leaders; 0: one without a name
	Mirrors, MinWorkers, Steps, Zero int
	Layers                           []plan.Layer
	Large                            int64         // bytes of state that workers may have to receive before they join; 0: the default
	Detect                           time.Duration // failure-detection timeout
	Checkpoint                       time.Duration // between two checkpoints; 0: none
	Evaluate                         int           // an evaluation follows every so many steps, beside the last; 0: none does
	Respawn                          bool          // failed workers are replaced
	Digests                          bool          // memory is checked
	Derive                           bool          // the run begins with moments that are zeros
	Beside                           bool          // first values are made beside passes, if Derive is set
	Passes                           int           // that a worker runs at a time; 0 means 1
	Flying                           int           // see core.Config
	Keeping                          bool          // passes keep gradients until the last one of a step
	Verify                           int           // micro-batches that a worker runs for each that it repeats; 0: none
	Trace                            bool          // keep a log of events

	// Samples, if it is not nil, makes what a process reads data with. Micro-batches have microBatch samples. What no worker can read is
	// skipped.
	Samples func() Reader
}

const (
	microBatch = 2
	maxMicros  = 8
)

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

	leader
	agreed []session.Propose
	skips  []skips.Spot // that are agreed
	logged time.Time    // when the newest is agreed
	books  books

	workers map[id.Session]*worker
	order   []*worker // by start
	links   map[pair]*link
	plans   map[id.Version]plan.Plan
	results map[int]core.Result
	seen    map[reflect.Type]bool // events and duties of cores
	asked   bool                  // to stop
	over    bool
	spots   int               // micro-batches that were repeated
	used    map[int][]batches // by step and layer: the samples whose gradients an update has used
	users   map[[2]int][]user // by step and layer: the workers with these updates
	most    int               // newest step that was ever written to metrics.jsonl
	refused int               // workers that cannot read what others can
	log     []string

	collector id.WorkerID // which has written the model
	model     string      // its host

	// Recoveries counts the recoveries that have ended.
	Recoveries int
	// Watch, if it is not nil, is called with what the session wants, before that is done. It may inject faults.
	Watch func(session.Effect)
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

// New returns a cluster whose workers are about to begin.
func New(cfg Config) *Cluster {
	c := &Cluster{
		cfg: cfg, rnd: rand.New(rand.NewPCG(cfg.Seed, 1)), now: time.Unix(0, 0), workers: make(map[id.Session]*worker),
		links: make(map[pair]*link), plans: make(map[id.Version]plan.Plan), results: make(map[int]core.Result), books: newBooks(), seen: make(map[reflect.Type]bool),
		used: make(map[int][]batches), users: make(map[[2]int][]user),
	}
	if cfg.Micros > maxMicros {
		panic("sim: too many micro-batches")
	}
	for i := range cfg.Workers {
		c.launch(plan.Worker{ID: id.WorkerID(i), Host: c.host(i)})
	}
	c.lead(nil, slices.Clone(c.order))
	c.tick()
	return c
}

func addr(w plan.Worker) string { return fmt.Sprintf("addr-%d.%d", w.ID, w.Incarnation) }

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

// Run runs until the run has ended or the time after the start is up, and reports whether it has ended, and how.
func (c *Cluster) Run(until time.Duration) (ended bool, out session.Outcome) {
	end := time.Unix(0, 0).Add(until)
	for !c.over && len(c.events) > 0 && !c.events[0].at.After(end) {
		c.next()
	}
	return c.over, c.session.Outcome()
}

// next lets one thing happen.
func (c *Cluster) next() {
	e := heap.Pop(&c.events).(event)
	c.now = e.at
	e.do()
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
func (c *Cluster) Kill(w id.WorkerID) { c.kill(c.find(w)) }

// KillAll kills all workers at once.
func (c *Cluster) KillAll() {
	for _, w := range c.order {
		c.kill(w)
	}
}

func (c *Cluster) kill(w *worker) {
	if w != nil && w.alive {
		c.note("worker %v is killed", w.session)
		if b := w.before; b != nil {
			w.before = nil
			b.end()
		}
		w.exit(session.Status{Code: -1, Text: "signal: killed"})
	}
}

// Freeze stops a worker for a while, which shows by its missed heartbeats only.
func (c *Cluster) Freeze(id id.WorkerID, d time.Duration) { c.freeze(c.find(id), d) }

// Halt stops a worker for a while by a signal, of which its host tells.
func (c *Cluster) Halt(id id.WorkerID, d time.Duration) {
	if w := c.find(id); w != nil && w.alive && !w.frozen {
		tell := func(stopped bool, since time.Duration) {
			newest := w
			for newest.next != nil {
				newest = newest.next
			}
			newest.tell(func(place int) session.Event {
				return session.WorkerHalted{Worker: place, Stopped: stopped, For: since}
			})
		}
		c.freeze(w, d)
		tell(true, 0)
		if d > timing.Halt {
			c.after(timing.Halt, func() { tell(true, timing.Halt) })
		}
		c.after(d, func() { tell(false, 0) })
	}
}

// FreezeAll stops all workers for a while.
func (c *Cluster) FreezeAll(d time.Duration) {
	for _, w := range c.order {
		c.freeze(w, d)
	}
}

func (c *Cluster) freeze(w *worker, d time.Duration) {
	if w == nil || !w.alive || w.frozen {
		return
	}
	c.note("worker %v is frozen for %v", w.session, d)
	w.frozen = true
	c.after(d, func() {
		if w.alive {
			w.thaw()
		}
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

// Join has one more worker started.
func (c *Cluster) Join() { c.do(session.AddWorkers{N: 1}) }

// Stop asks the run to stop at the next commit.
func (c *Cluster) Stop() {
	if !c.vacant && !c.asked { // a second time would end it at once
		c.asked = true
		c.do(session.StopAsked{Reason: session.Terminated})
	}
}

// launch starts a process.
func (c *Cluster) launch(who plan.Worker) *worker {
	c.note("worker %d.%d starts", who.ID, who.Incarnation)
	w := c.start(who)
	w.in(c.delay(2*time.Millisecond), w.introduce)
	w.beat()
	return w
}

// Flip alters a block of a worker's memory, while no other one is altered: it may be repaired by this one.
func (c *Cluster) Flip(of id.WorkerID, n int) {
	if slices.ContainsFunc(c.order, func(w *worker) bool { return w.alive && w.core != nil && len(w.altered) > 0 }) {
		return
	}
	if w := c.find(of); c.cfg.Digests && w != nil && !w.frozen && w.core != nil && w.flip(n) {
		c.note("memory of worker %v is altered", w.session)
	}
}

// Hold keeps a worker from entering exchanges for a while, as where its host is cut off.
func (c *Cluster) Hold(of id.WorkerID, d time.Duration) {
	w := c.find(of)
	if w == nil || w.core == nil {
		return
	}
	c.note("worker %v is held for %v", w.session, d)
	w.run(func() { w.step(core.Hold{On: true}) })
	c.after(d, func() { w.run(func() { w.step(core.Hold{}) }) })
}

// Leave asks a worker to hand over its state and exit.
func (c *Cluster) Leave(id id.WorkerID) {
	if w := c.find(id); w != nil && w.core != nil {
		c.note("worker %v is asked to leave", w.session)
		w.say(control.Leave{})
	}
}

// Measure has all workers report how long a layer takes them: the one d, the others a millisecond.
func (c *Cluster) Measure(slow id.WorkerID, d time.Duration) {
	for _, w := range c.order {
		if w.alive && w.core != nil {
			took := time.Millisecond
			if w.self.ID == slow {
				took = d
			}
			w.say(w.measures(took))
		}
	}
}

// Late makes the passes of a worker slow for a while, in which all workers tell that the others have nothing left to do, true or not.
func (c *Cluster) Late(of id.WorkerID, d time.Duration) {
	w := c.find(of)
	if w == nil || w.core == nil {
		return
	}
	c.note("worker %v is late for %v", w.session, d)
	w.slow = 20
	c.after(d, func() { w.slow = 0 })
	c.after(min(d/2, time.Millisecond), func() {
		if w.core == nil {
			return
		}
		step, _, _ := w.core.Backlog()
		for _, x := range c.order {
			if p := (control.Pace{Step: step, Each: 1e6, Idle: 1e9}); x.alive && x.core != nil && step > 0 {
				if x == w {
					p.Left, p.Ready, p.Each, p.Idle = maxMicros, maxMicros, 1e9, 0
				}
				x.say(control.Beat{Pace: &p})
			}
		}
	})
}

// known takes note of a plan.
func (c *Cluster) known(p plan.Plan) {
	if was, ok := c.plans[p.Version]; ok && !reflect.DeepEqual(was, p) {
		c.violated("two plans have version %v", p.Version)
	} else if ok {
		return // another leader may have made it
	}
	c.plans[p.Version] = p
	has := func(host string) bool {
		return slices.ContainsFunc(p.Workers, func(w plan.Worker) bool { return w.Host == host })
	}
	if home := c.host(0); has(home) && p.ModelHost != home || has(c.host(int(c.term)-1)) && !has(p.ModelHost) {
		c.violated("plan %v gives the model to %q", p.Version, p.ModelHost)
	}
}

// host returns the name of the host of the i-th worker or leader. The first is where the run was started.
func (c *Cluster) host(i int) string {
	if c.cfg.Hosts == 0 {
		return ""
	}
	return fmt.Sprintf("host-%d", i%c.cfg.Hosts)
}

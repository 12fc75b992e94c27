package sim

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// leader is the host that leads: a session and its shell.
type leader struct {
	session *session.Session
	term    uint64
	reign   int       // counts leaders; what was on its way to an earlier one is lost
	vacant  bool      // there is no leader
	places  []*worker // of the session
	alarm   time.Time
	done    uint64 // newest plan under which it has heard that the model is written
}

// books are the run directory.
type books struct {
	rundir.History
	joining map[int]bool
	saved   int      // step of the newest checkpoint
	skips   []uint64 // skips.jsonl
}

func newBooks() books {
	return books{joining: make(map[int]bool), History: rundir.History{Started: make(map[int]int), JoinedBy: make(map[int]uint64), Away: make(map[int]string)}}
}

// lead lets a session lead.
func (c *Cluster) lead(in *session.Inherited, places []*worker) {
	c.term++
	c.vacant, c.alarm, c.done = false, time.Time{}, 0
	c.places = places
	var all []plan.Worker
	for _, w := range places {
		all = append(all, w.self)
	}
	mirrors := c.cfg.Mirrors
	if mirrors == 0 {
		mirrors = -1
	}
	cfg := session.Config{
		Settings: session.Settings{
			Detect: c.cfg.Detect, Respawn: c.cfg.Respawn, Command: "./gpt", Mirrors: mirrors, Stages: c.cfg.Stages, MinWorkers: c.cfg.MinWorkers,
			Zero: c.cfg.Zero, Threads: 1, SkipBad: c.cfg.Samples != nil,
		}.WithDefaults(c.cfg.Workers),
		Workers: c.cfg.Workers, CanStart: true, RunDir: "/runs/a", Shown: "runs/a", Large: c.cfg.Large, Term: c.term, Leader: c.host(int(c.term) - 1), Home: c.host(0), Inherited: in,
		Skipped: c.ledger(),
	}
	c.session = session.New(cfg, all)
	c.react(c.session.Begin(c.now))
}

// Lead ends the leadership and has another host take over.
func (c *Cluster) Lead() {
	c.note("the leader is lost")
	c.reign++
	c.vacant = true
	reign := c.reign
	c.after(c.delay(5*time.Millisecond), func() {
		if c.reign == reign && !c.over {
			c.takeOver()
		}
	})
}

// takeOver lets another host lead.
func (c *Cluster) takeOver() {
	if len(c.agreed) == 0 { // the run has not begun
		c.lead(nil, slices.Clone(c.order[:c.cfg.Workers]))
	} else {
		in := &session.Inherited{History: c.books.History, Saved: c.books.saved}
		for _, p := range c.agreed {
			in.Add(p.Order, p.Reason)
		}
		in.History.Started, in.History.JoinedBy = maps.Clone(c.books.Started), maps.Clone(c.books.JoinedBy)
		for _, w := range slices.Sorted(maps.Keys(c.books.joining)) {
			if c.books.joining[w] {
				in.History.Joining = append(in.History.Joining, w)
			}
		}
		places := slices.Clone(c.order[:c.cfg.Workers])
		for _, m := range in.Members() {
			if w := c.workers[id.Session{Worker: m.ID, Incarnation: m.Incarnation}]; !slices.Contains(places, w) {
				places = append(places, w)
			}
		}
		c.lead(in, places)
	}
	for _, w := range c.order {
		if slices.Contains(c.places, w) {
			w.account(c.books.Last)
		} else if w.before != nil && w.before.next == nil {
			w.alive = false // its host has not heard of it
		} else if w.alive { // it was to join under another leader
			c.kill(w)
		}
	}
}

// tick has missed heartbeats looked for.
func (c *Cluster) tick() {
	due := c.now.Add(timing.Of(c.cfg.Detect).Watch)
	c.At(due.Sub(time.Unix(0, 0)), func() {
		c.do(session.WatchTick{Due: due})
		c.tick()
	})
}

// tell brings what happens to a worker to the leader, after what happened to it before.
func (w *worker) tell(e func(place int) session.Event) {
	c := w.c
	if c.vacant {
		return // the next leader hears of it all
	}
	reign := c.reign
	at := c.now.Add(c.delay(200 * time.Microsecond))
	if at.Before(w.told) {
		at = w.told
	}
	w.told = at
	c.At(at.Sub(time.Unix(0, 0)), func() {
		if place := slices.Index(c.places, w); reign == c.reign && place >= 0 {
			c.do(e(place))
		}
	})
}

// send brings a message of the leader to a worker, after what it was told before.
func (c *Cluster) send(w *worker, m control.Message) {
	reign := c.reign
	at := c.now.Add(c.delay(200 * time.Microsecond))
	if at.Before(w.heard) {
		at = w.heard
	}
	w.heard = at
	c.At(at.Sub(time.Unix(0, 0)), func() {
		if reign == c.reign {
			w.relay(m)
		}
	})
}

// do lets the session take in an event.
func (c *Cluster) do(e session.Event) {
	if c.over || c.vacant {
		return
	}
	if c.cfg.Trace {
		if _, tick := e.(session.WatchTick); !tick {
			text := fmt.Sprintf("%T %+v", e, e)
			if r, ok := e.(session.Received); ok {
				text = fmt.Sprintf("worker %v: %T %+v", c.places[r.Worker].session, r.Message, r.Message)
			}
			c.note("%s", text[:min(len(text), 180)])
		}
	}
	if r, ok := e.(session.Received); ok {
		if d, ok := r.Message.(control.Done); ok {
			c.done = max(c.done, d.Plan)
		}
	}
	c.react(c.session.Step(c.now, e))
}

// answer has the session take in an event later, unless another one leads then.
func (c *Cluster) answer(mean time.Duration, events ...session.Event) {
	reign := c.reign
	c.after(c.delay(mean), func() {
		for _, e := range events {
			if reign == c.reign {
				c.do(e)
			}
		}
	})
}

// react does what the session wants.
func (c *Cluster) react(effects []session.Effect) {
	led := false
	for _, e := range effects {
		if w, ok := e.(session.WriteEvent); ok && w.Event.Kind == "lead" {
			led = true
		} else if ok && w.Event.Kind == "failed" && !errors.As(c.session.Outcome().Err, new(*session.StoppedError)) {
			c.lost(w.Event.Reason, led)
		}
	}
	for _, e := range effects {
		if c.Watch != nil {
			c.Watch(e)
		}
		switch e := e.(type) {
		case session.Send:
			if o, ok := e.Message.(control.Order); ok {
				c.known(o.Plan)
			}
			if b, ok := e.Message.(control.BadSample); ok && b.Do == control.SkipSample && c.skipped(b.Sample) <= b.Skips {
				c.violated("worker %v hears that sample %d is skipped, which is not in skips.jsonl", c.places[e.Worker].session, b.Sample)
			}
			c.send(c.places[e.Worker], e.Message)
		case session.Kill:
			c.kill(c.places[e.Worker])
		case session.Fence:
			c.kill(c.places[e.Worker])
		case session.Propose:
			c.agree(e)
		case session.ProposeSkip:
			c.agreeSkip(e.Question)
		case session.Balance:
			c.answer(time.Millisecond, session.Balanced{Balanced: e.Make()})
		case session.FenceWorker:
			reign, w := c.reign, c.places[e.Worker]
			c.after(0, func() {
				if reign == c.reign && !c.over {
					next := c.start(e.As)
					next.before = w
					c.places = append(c.places, next)
					c.do(session.Fenced(e))
					c.send(w, control.Fence{Next: e.As.Incarnation})
				}
			})
		case session.StartWorker:
			reign, who := c.reign, e.Worker
			who.Host = cmp.Or(who.Host, c.host(int(who.ID)))
			c.after(c.delay(time.Millisecond), func() {
				if reign == c.reign && !c.over {
					c.places = append(c.places, c.launch(who))
					c.do(session.WorkerStarted{Worker: who})
				}
			})
		case session.CommitCheckpoint:
			reign, step := c.reign, e.Manifest.Step
			c.after(c.delay(time.Millisecond), func() {
				if reign == c.reign {
					c.books.saved = step
				}
			})
			c.answer(5*time.Millisecond, session.CheckpointCommitted{Step: step}, session.CheckpointsPruned{})
		case session.VerifyCheckpoint:
			v := session.CheckpointVerified{Propose: e.Propose, Step: e.Propose.Order.Passed.Step}
			if c.rnd.IntN(4) == 0 {
				v.Step, v.Refused, c.books.saved = 0, []string{"it is damaged"}, 0
			}
			c.answer(time.Millisecond, v)
		case session.Show:
			if r, ok := e.Event.(view.Recovered); ok {
				c.Recoveries++
				c.recovered(r.Recovery)
			}
		default:
			c.write(e)
		}
	}
	if at := c.session.Alarm(); at != c.alarm {
		if c.alarm = at; !at.IsZero() {
			c.At(cmp.Or(max(at.Sub(time.Unix(0, 0)), c.now.Sub(time.Unix(0, 0))), 0), func() {
				if c.alarm == at {
					c.alarm = time.Time{}
					c.do(session.AlarmDue{})
				}
			})
		}
	}
	c.over = c.session.Over()
}

// agree brings a plan before the hosts. If the leader is lost meanwhile, its successor finds it agreed or not at all.
func (c *Cluster) agree(p session.Propose) {
	c.known(p.Order.Plan)
	began := c.now
	c.enter(func(leads bool) {
		if c.agreed = append(c.agreed, p); leads {
			c.do(session.Agreed{Version: p.Order.Plan.Version, Proposed: began})
		}
	}, func() { delete(c.plans, p.Order.Plan.Version) }) // it counts for nothing
}

// enter brings an entry into the log. Then it calls agreed, with whether the same leader still leads, or lost.
func (c *Cluster) enter(agreed func(leads bool), lost func()) {
	reign := c.reign
	at := c.now.Add(c.delay(300 * time.Microsecond))
	if at.Before(c.logged) { // the log keeps the order
		at = c.logged
	}
	c.logged = at
	c.At(at.Sub(time.Unix(0, 0)), func() {
		if reign != c.reign && (!c.vacant || reign+1 != c.reign || c.rnd.IntN(2) == 0) {
			lost()
			return
		}
		agreed(reign == c.reign)
	})
}

// write keeps the books, and holds that the steps in them follow one another.
func (c *Cluster) write(e session.Effect) {
	b := &c.books
	switch e := e.(type) {
	case session.WriteJob:
		b.Job = e.Job
	case session.WritePlan:
		b.Plan = &e.Plan
	case session.WriteMetrics:
		if last := c.step(); e.Metrics.Step != last+1 {
			c.violated("step %d follows step %d in metrics.jsonl", e.Metrics.Step, last)
		}
		b.Last = &e.Metrics
		c.most = max(c.most, e.Metrics.Step)
		b.Tokens += e.Metrics.Tokens
		b.MS += e.Metrics.MS
	case session.WriteSkip:
		b.skips = append(b.skips, e.Skip.Sample)
	case session.WriteSummary:
		b.Summary = &e.Summary
	case session.WriteEvent:
		x := e.Event
		c.note("  %s %s", x.Kind, x.Reason)
		switch x.Kind {
		case "begin":
			b.Started[x.Worker]++
			b.joining[x.Worker] = true
		case "joined":
			b.Joined++
			b.JoinedBy[x.Worker] = x.Plan
			b.joining[x.Worker] = false
		case "lost":
			b.Lost++
			b.joining[x.Worker] = false
		case "stop":
			c.asked = true // all workers may have asked to leave
		case "left", "refused":
			b.joining[x.Worker] = false
		case "rollback":
			b.Rollbacks++
		}
		if x.Recovery != nil {
			b.Recoveries = append(b.Recoveries, *x.Recovery)
		}
	}
}

// step is the newest step that the books count.
func (c *Cluster) step() int {
	last := c.books.Last
	for _, p := range slices.Backward(c.agreed) {
		if o := p.Order; o.Rollback && (last == nil || last.Plan < uint64(o.Plan.Version.N)) {
			return o.Passed.Step
		}
	}
	if last == nil {
		return 0
	}
	return last.Step
}

// recovered holds that the phases of a recovery add up.
func (c *Cluster) recovered(r rundir.Recovery) {
	phases := []float64{r.DetectMS, r.QueryMS, r.PlanMS, r.AgreeMS, r.EditMS, r.ResumeMS}
	var sum float64
	for _, ms := range phases {
		sum += ms
	}
	if math.Abs(sum-r.TotalMS) > 0.001*float64(len(phases)) || slices.Min(phases) < 0 { // each is rounded
		c.violated("the phases of a recovery do not add up: %+v", r)
	}
}

// lost holds that a run which fails has no worker left to go on with, and none to come unless the model is written. led says that a
// leader has just taken over, which cannot replace workers if it finds none that knows the job.
func (c *Cluster) lost(why string, led bool) {
	var parts []plan.Worker
	for _, p := range slices.Backward(c.agreed) {
		parts = append(parts, p.Order.Plan.Workers...)
		if p.Order.Ballot != (id.Ballot{}) {
			break // the boundary plans after it may be live or not
		}
	}
	for _, w := range c.order {
		if w.alive && w.next == nil && w.core != nil && w.core.Err() == nil && len(w.core.Plan().Workers) > 0 && session.HasPart(parts, w.self) {
			c.violated("the run has failed (%s), and worker %v could go on", why, w.session)
		}
	}
	var from uint64 // what was written under an earlier plan is of before a rollback
	for _, p := range c.agreed {
		if p.Order.Rollback {
			from = uint64(p.Order.Plan.Version.N)
		}
	}
	written := c.done > 0 && c.done >= from
	if c.cfg.Respawn && !c.asked && !led && !written {
		c.violated("the run has failed (%s), and its workers could be replaced", why)
	}
}

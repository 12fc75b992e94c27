package core

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// sim is a run: the cores of several workers and the controller in one goroutine, with a network and computing goroutines that are
// made of lists. What happens next is drawn.
type sim struct {
	t     testing.TB
	draw  func(n int) int
	job   form
	prof  plan.Profile
	ctl   *controller.Controller
	now   time.Time
	nodes []*node // that live
	lives map[id.WorkerID]int

	lanes  []*lane
	timers map[controller.Timer]time.Duration
	broken map[groupVersion]bool
	ticks  int
	ended  bool
	seen   map[string]int // events and duties, by type
}

// form is the form of a run.
type form struct {
	workers, stages, mirrors, layers, micros, steps int
	digests                                         bool
}

type groupVersion struct {
	group   uint16
	version id.Version
}

// lane is a list of what happens in order.
type lane struct {
	owner *node // nil: of the run
	inner bool  // it ends with the core
	items []item
}

type item struct {
	ready func() bool // nil: at once
	do    func()
}

// node is a worker: its core, and what its shell would hold.
type node struct {
	s       *sim
	w       *Worker
	self    plan.Worker
	host    *lane // from the host
	report  *lane // to it
	tasks   *lane
	members map[id.Session]bool
	expects map[comm.Key]Expect
	tickets map[Ticket]comm.Key
	early   map[comm.Key][]message // all copies, as long as their senders are admitted
	taken   map[comm.Key]bool
	gates   map[int]bool         // that are shut
	sums    map[int]map[int]bool // micro-batches in the sums of a layer
	ops     map[Op]*operating    // of groups
	dims    map[Buffer][]int     // of boundary tensors
	asked   map[uint64]id.Ballot // queries
	next    id.Point             // operation
	stopped bool                 // the job of the operation
	offends bool                 // a block was altered
	base    int                  // step of the last update
	left    bool
	done    bool
}

type operating struct {
	d       Duty
	key     string
	group   groupVersion
	members []id.Session
	got     map[id.Session][]byte
}

type message struct {
	from  *node
	bytes int
	data  []byte
}

const simLayer = 5000 // parameters of a layer: two blocks

func newSim(t testing.TB, job form, draw func(n int) int) *sim {
	s := &sim{
		t: t, draw: draw, job: job, now: time.Unix(0, 0), lives: make(map[id.WorkerID]int), timers: make(map[controller.Timer]time.Duration),
		broken: make(map[groupVersion]bool), seen: make(map[string]int),
	}
	var v plan.View
	var peers []control.Peer
	for range job.layers {
		s.prof.Layers = append(s.prof.Layers, plan.Layer{Tensors: []int{simLayer}})
	}
	for i := range job.workers {
		v.Workers = append(v.Workers, plan.Worker{ID: id.WorkerID(i)})
		peers = append(peers, control.Peer{Worker: v.Workers[i], Addr: fmt.Sprint(i)})
	}
	first, _, err := planner.Next(plan.Plan{}, v, s.prof, planner.Event{Stages: job.stages, Micros: job.micros, Mirrors: job.mirrors})
	if err != nil {
		t.Fatal(err)
	}
	s.ctl = controller.New(controller.Config{Plan: first, Peers: peers, Profile: s.prof, Term: 1, Stages: job.stages, Mirrors: job.mirrors, Detect: time.Second})
	for _, x := range v.Workers {
		s.start(x, control.Order{Plan: first, Peers: peers})
	}
	return s
}

// start begins a worker.
func (s *sim) start(self plan.Worker, first control.Order) *node {
	n := &node{s: s, self: self, members: make(map[id.Session]bool), early: make(map[comm.Key][]message), taken: make(map[comm.Key]bool)}
	n.host, n.report, n.tasks = s.lane(n), s.lane(n), n.inner()
	s.nodes = append(s.nodes, n)
	n.enter(first)
	return n
}

// enter begins with an order: at the beginning, or after a rollback.
func (n *node) enter(first control.Order) {
	for _, l := range n.s.lanes {
		if l.owner == n && l.inner {
			l.items = nil
		}
	}
	n.expects, n.tickets = make(map[comm.Key]Expect), make(map[Ticket]comm.Key)
	n.gates, n.sums = make(map[int]bool), make(map[int]map[int]bool)
	n.ops, n.dims, n.asked = make(map[Op]*operating), make(map[Buffer][]int), make(map[uint64]id.Ballot)
	n.next, n.done = id.Point{}, false
	c := Config{Self: n.self, Micros: n.s.job.micros, First: first, Moments: 2, ClipNorm: 1, Digests: n.s.job.digests}
	for l := range n.s.job.layers {
		c.Layers = append(c.Layers, Layer{fmt.Sprint(l), zero.Blocks([]zero.Tensor{{Size: simLayer}})})
	}
	n.w = New(c)
	n.step(nil)
}

func (s *sim) lane(owner *node) *lane {
	l := &lane{owner: owner}
	s.lanes = append(s.lanes, l)
	return l
}

// inner returns a lane of what happens between a core and its shell.
func (n *node) inner() *lane {
	l := n.s.lane(n)
	l.inner = true
	return l
}

func (l *lane) put(ready func() bool, do func()) { l.items = append(l.items, item{ready, do}) }

func (n *node) session() id.Session { return SessionOf(n.self) }

func (s *sim) node(x id.Session) *node {
	for _, n := range s.nodes {
		if n.session() == x {
			return n
		}
	}
	return nil
}

// step tells a core of an event, if it is not nil, and does what comes of it.
func (n *node) step(ev Event) {
	was, sealed := n.w.passed, n.w.state == Sealed
	if ev != nil {
		n.s.seen[fmt.Sprintf("%T", ev)]++
		n.w.Step(ev)
	}
	for again := true; again; {
		duties := slices.Clone(n.w.Ready())
		again = len(duties) > 0
		for _, d := range duties {
			n.perform(d)
		}
	}
	if now := n.w.passed; now != was {
		if _, ordered := ev.(Order); sealed && !ordered {
			n.s.t.Fatalf("worker %v passed %v while it was sealed, by %T", n.session(), now, ev)
		}
		if now.Compare(was) < 0 {
			n.s.t.Fatalf("worker %v went back from %v to %v", n.session(), was, now)
		}
		// What only failed workers saw counts as not passed.
		for _, x := range n.s.nodes {
			if x.w.Epoch() == n.w.Epoch() && x.w.passed == now && string(x.w.result) != string(n.w.result) {
				n.s.t.Fatalf("%v was passed with two results", now)
			}
		}
	}
	if err := n.w.Err(); err != nil && !n.left {
		var corrupt *CorruptError
		switch n.left = true; {
		case errors.Is(err, ErrLeft):
		case errors.As(err, &corrupt):
			n.s.kill(n, err.Error())
		default:
			n.s.t.Fatalf("worker %v: %v", n.session(), err)
		}
		return
	}
	if len(n.w.plan.Workers) > 0 && n.w.req == nil && !n.done && !n.left {
		n.proceed()
	}
}

// proceed asks for the next operation.
func (n *node) proceed() {
	p := n.w.passed
	ask := Ask{Point: id.Point{Step: p.Step + 1}}
	switch {
	case p.Gate == id.Kept:
		n.done = true
		point, result := n.w.Passed()
		n.report.put(nil, func() { n.s.control(controller.Finished{Worker: n.self, Step: point.Step, Result: result}) })
		return
	case p.Gate == id.Committed && p.Step > 0 && p.Step%2 == 0:
		ask = Ask{Point: id.Point{Step: p.Step, Gate: id.Evaluated}, Micros: 3}
	case p.Step == n.s.job.steps:
		ask = Ask{Point: id.Point{Step: p.Step, Gate: id.Kept}, Words: 5}
	}
	n.step(ask)
}

// perform does what a shell does with a duty.
func (n *node) perform(d Duty) {
	s, w := n.s, n.w
	s.seen[fmt.Sprintf("%T", d)]++
	switch d := d.(type) {
	case Admit:
		clear(n.members)
		for _, p := range d.Peers {
			n.members[p.Session] = true
		}
		for k, copies := range n.early {
			n.early[k] = slices.DeleteFunc(copies, func(m message) bool { return !n.members[m.from.session()] })
		}
	case Advance:
		maps.DeleteFunc(n.early, func(k comm.Key, _ []message) bool { return k.Step < d.Word })
	case Expect:
		n.dims[d.Into] = d.Dims
		n.expects[d.Key], n.tickets[d.Ticket] = d, d.Key
		switch copies := n.early[d.Key]; {
		case n.taken[d.Key]:
			n.take(d, message{}, true)
		case len(copies) > 0:
			n.take(d, copies[0], false)
		}
	case Cancel:
		if k, ok := n.tickets[d.Ticket]; ok && n.expects[k].Ticket == d.Ticket {
			delete(n.expects, k)
		}
	case Keep:
		if k, ok := n.tickets[d.Cancel]; ok && n.expects[k].Ticket == d.Cancel {
			delete(n.expects, k)
		}
	case Send:
		n.send(d.To, d.Key, d.From, d.Data)
	case SendFill:
		data, r := d.Data, d.Transfer.Range
		into := Buffer{Content: d.Content, Range: r}
		if d.Content == BaseState {
			data = binary.NativeEndian.AppendUint32(nil, uint32(n.base))
		}
		n.send(d.Transfer.To, d.Key, into, data)
	case Attest:
		n.send(d.To, d.Key, Buffer{}, make([]byte, digestSize))
	case Compare:
		n.tasks.put(nil, func() { n.step(Compared{d.Attempt, d.Tensor, true}) })
	case Edit:
		alive := func() bool {
			return !slices.ContainsFunc(d.Groups[0].Members, func(x id.Session) bool { return s.node(x) == nil })
		}
		o := &operating{d: d}
		n.ops[d.Op] = o
		n.inner().put(alive, func() {
			if n.ops[d.Op] == o {
				delete(n.ops, d.Op)
				n.step(OpDone{Op: d.Op, Opened: 1})
			}
		})
	case Reduce:
		members := make([]id.Session, len(d.Tree.Nodes))
		covered := make([]int, s.job.micros)
		for rank, nodes := range d.Tree.Nodes {
			members[rank] = w.session(w.plan.Stages[w.plan.StageOf(d.Layer)].Workers[rank])
			for _, x := range nodes {
				for m := x.Lo; m < x.Hi; m++ {
					covered[m]++
					if members[rank] == n.session() && !n.sums[d.Layer][m] {
						s.t.Fatalf("worker %v reduces layer %d without micro-batch %d", n.session(), d.Layer, m)
					}
				}
			}
		}
		for m, times := range covered {
			if times != 1 {
				s.t.Fatalf("layer %d: micro-batch %d counts %d times", d.Layer, m, times)
			}
		}
		n.gather(d.Op, d, d.Group, d.Call, members, nil)
	case Exchange:
		members := make([]id.Session, len(w.plan.Workers))
		for i, x := range w.plan.Workers {
			members[i] = SessionOf(x)
		}
		said := make([]byte, d.Parts[d.Rank+1]-d.Parts[d.Rank])
		copy(said, d.Said)
		n.gather(d.Op, d, 0, d.Call, members, said)
	case CancelOps:
		for op := range n.ops {
			delete(n.ops, op)
			n.inner().put(nil, func() { n.step(OpDone{Op: op, Broken: true}) })
		}
	case Run:
		n.run(d)
	case Say:
		r := Record{LR: 0.1, Suspect: -1, Spoiled: -1}
		for _, x := range d.Nodes {
			r.Losses = append(r.Losses, LossSum{x, Loss{1, int64(x.Size())}})
		}
		n.tasks.put(nil, func() { n.step(Said{r, n.check(d.Tainted)}) })
	case Operate:
		n.stopped = false
		size := 0
		switch d.Point.Gate {
		case id.Evaluated:
			for m := range n.w.req.Micros {
				if Evaluator(w.plan, len(w.plan.Stages)-1, m) == n.self.ID {
					size += EvalSize
				}
			}
		case id.Kept:
			if w.plan.Workers[0].ID == n.self.ID {
				size = n.w.req.Words
			}
		}
		n.tasks.put(func() bool { return n.stopped || len(n.gates) == 0 }, func() {
			n.step(Answered{Said: append(n.check(false), make([]byte, size)...)})
		})
	case StopOperate:
		n.stopped = true
	case Prepare:
		n.tasks.put(nil, func() { n.step(Prepared(d)) })
	case Replay:
		n.tasks.put(nil, func() { n.step(Replayed{}) })
	case Update:
		n.base = d.Update.Step
		for _, sh := range w.inOrder() {
			if sh.owner {
				n.tasks.put(nil, func() { n.step(ShardUpdated{sh.Range}) })
			}
		}
		var all []Transfer
		for _, c := range d.Copies {
			all = append(all, c.Transfer)
		}
		n.tasks.put(nil, func() { n.step(Copied{all}) })
		n.tasks.put(nil, func() { n.step(Updated{}) })
	case Clear:
		clear(n.sums)
	case Total:
		if len(n.sums[d.Layer]) != s.job.micros {
			s.t.Fatalf("worker %v has %d micro-batches of layer %d", n.session(), len(n.sums[d.Layer]), d.Layer)
		}
	case Await:
		n.gates[d.Layer] = true
	case Arrived:
		delete(n.gates, d.Layer)
	case Apply:
		for _, l := range append(slices.Clone(d.Fresh), d.Stale...) {
			delete(n.sums, l)
		}
	case Answer:
		b := n.asked[d.Token]
		n.report.put(nil, func() { s.control(controller.Answered{Worker: n.self, Ballot: b, Report: d.Report}) })
	case Live:
		n.report.put(nil, func() { s.control(controller.Applied{Worker: n.self, Ballot: d.Ballot, Version: d.Version}) })
	case Level:
		n.report.put(nil, func() { s.control(controller.Level{Worker: n.self, ID: d.Fill, Step: d.Step}) })
	case Begin, StopFills, Found, Forget, Restore, Mark, Tell, Conclude, End:
	default:
		s.t.Fatalf("duty %T", d)
	}
}

// run runs a pass. A forward pass waits for the parameters of its layers.
func (n *node) run(d Run) {
	st := n.w.plan.Stages[d.Task.Stage]
	last := d.Task.Stage == len(n.w.plan.Stages)-1
	done := PassDone{Task: d.Task}
	if d.Task.Kind == graph.Forward {
		if !last {
			done.Made = []int{1}
		}
		if d.Learn {
			for range st.Hi - st.Lo - 1 {
				done.Within = append(done.Within, []int{1})
			}
		}
		open := func() bool {
			for l := st.Lo; l < st.Hi; l++ {
				if n.gates[l] {
					return false
				}
			}
			return true
		}
		n.tasks.put(open, func() { n.step(done) })
		return
	}
	for l := st.Hi - 1; l >= st.Lo; l-- {
		n.tasks.put(nil, func() {
			if n.sums[l] == nil {
				n.sums[l] = make(map[int]bool)
			}
			if n.sums[l][d.Task.Micro] {
				n.s.t.Fatalf("worker %v adds micro-batch %d of layer %d twice", n.session(), d.Task.Micro, l)
			}
			n.sums[l][d.Task.Micro] = true
			n.step(GradientDone{l, d.Task.Micro})
		})
	}
	n.tasks.put(nil, func() { n.step(done) })
}

// check says that all blocks are as they were written, but for one if that was altered.
func (n *node) check(tainted bool) []byte {
	if !n.s.job.digests {
		return nil
	}
	var found []Offence
	var all []Attested
	for i, p := range n.w.plan.Shards {
		holds := n.w.computes(RangeOf(p))
		if n.offends && p.Owner == n.self.ID && holds {
			n.offends = false
			found = append(found, Offence{i, n.w.blockAt(p.Layer, p.Lo), Own})
		}
		if holds || n.w.serves(p.Layer) {
			all = append(all, Attested{1, 2, holds})
		}
	}
	return AppendCheck(tainted, found, all)
}

// send puts a message on its way. It arrives when the receiver admits the sender.
func (n *node) send(to id.Session, k comm.Key, from Buffer, data []byte) {
	m := message{n, len(data), data}
	switch r := from.Range; from.Content {
	case Boundary:
		m.bytes = 4 * tensor.Size([]int{1})
	case RepairBlock:
		m.bytes = 4 * (from.Block.Hi - from.Block.Lo)
	case BaseState:
		m.bytes = 4 * (BaseHead + 3*(r.Hi-r.Lo))
	case Gradient, Parameters, Increment:
		m.bytes = 4 * (r.Hi - r.Lo)
	}
	if !n.members[to] {
		return
	}
	n.s.lane(n).put(func() bool {
		x := n.s.node(to)
		return x == nil || x.members[n.session()]
	}, func() {
		if x := n.s.node(to); x != nil && n.members[to] {
			x.arrive(k, m)
		}
	})
}

// arrive takes the first message with a key.
func (n *node) arrive(k comm.Key, m message) {
	d, ok := n.expects[k]
	switch {
	case n.taken[k]:
	case ok:
		n.take(d, m, false)
	default:
		n.early[k] = append(n.early[k], m)
	}
}

// take gives a message to the receive that waits for it. The loop hears of it later.
func (n *node) take(d Expect, m message, duplicate bool) {
	delete(n.expects, d.Key)
	delete(n.early, d.Key)
	n.taken[d.Key] = true
	ev := Received{Ticket: d.Ticket, Bytes: m.bytes, Data: m.data, Duplicate: duplicate}
	if m.from != nil {
		ev.From = m.from.session()
	}
	n.inner().put(nil, func() { n.step(ev) })
}

// gather begins an operation in which all members hear of all others.
func (n *node) gather(op Op, d Duty, group uint16, call group.Call, members []id.Session, said []byte) {
	o := &operating{
		d: d, key: fmt.Sprint(group, call.Version, call.Step, call.Tag), group: groupVersion{group, call.Version}, members: members,
		got: map[id.Session][]byte{n.session(): said},
	}
	n.ops[op] = o
	if n.s.broken[o.group] {
		n.s.breakOps(n, o.group)
		return
	}
	s := n.s
	for _, to := range members {
		if to == n.session() {
			continue
		}
		begun := func() *operating {
			if x := s.node(to); x != nil {
				for _, theirs := range x.ops {
					if theirs.key == o.key {
						return theirs
					}
				}
			}
			return nil
		}
		s.lane(n).put(func() bool { return s.broken[o.group] || s.node(to) == nil || begun() != nil }, func() {
			if theirs := begun(); theirs != nil && !s.broken[o.group] {
				theirs.got[n.session()] = said
				s.node(to).finish(theirs)
			}
		})
	}
	n.finish(o)
}

// finish ends an operation that has heard of all members.
func (n *node) finish(o *operating) {
	if len(o.got) < len(o.members) {
		return
	}
	n.inner().put(nil, func() {
		for op, x := range n.ops {
			if x == o {
				delete(n.ops, op)
				ev := OpDone{Op: op}
				for _, m := range o.members {
					ev.All = append(ev.All, o.got[m]...)
				}
				n.step(ev)
			}
		}
	})
}

// breakOps ends the operations of a version of a group on a worker.
func (s *sim) breakOps(n *node, g groupVersion) {
	for op, o := range n.ops {
		if o.group == g && o.members != nil {
			delete(n.ops, op)
			n.inner().put(nil, func() { n.step(OpDone{Op: op, Broken: true}) })
		}
	}
}

// lose breaks the link of two workers: half of what is under way is lost, and the versions of groups of both end.
func (s *sim) lose(a, b id.Session) {
	for _, n := range s.nodes {
		for _, o := range n.ops {
			if slices.Contains(o.members, a) && slices.Contains(o.members, b) {
				s.broken[o.group] = true
			}
		}
	}
	for _, n := range s.nodes {
		for g := range s.broken {
			s.breakOps(n, g)
		}
		for _, pair := range [][2]id.Session{{a, b}, {b, a}} {
			if n.session() == pair[0] {
				n.host.put(nil, func() { n.step(LinkLost{pair[1]}) })
			}
		}
	}
}

// kill ends a worker. Half of what it has sent arrives.
func (s *sim) kill(n *node, cause string) {
	if s.node(n.session()) == nil {
		return
	}
	s.nodes = slices.DeleteFunc(s.nodes, func(x *node) bool { return x == n })
	for _, l := range s.lanes {
		if l.owner == n && (l == n.host || l == n.tasks || s.draw(2) == 0) {
			l.items = nil
		}
	}
	for _, x := range slices.Clone(s.nodes) {
		s.lose(n.session(), x.session())
	}
	s.lane(nil).put(nil, func() {
		s.control(controller.Dead{Worker: n.self, Cause: cause, How: controller.Reaped, Died: s.now})
	})
}

// control tells the controller of an event, and does what it wants.
func (s *sim) control(ev controller.Event) {
	s.now = s.now.Add(time.Millisecond)
	of := func(x plan.Worker) *node { return s.node(SessionOf(x)) }
	for _, e := range s.ctl.Step(s.now, ev) {
		switch e := e.(type) {
		case controller.Ask:
			if n := of(e.Worker); n != nil {
				n.host.put(nil, func() {
					token := uint64(len(n.asked) + 1)
					n.asked[token] = e.Ballot
					n.step(Query{e.Ballot, token})
				})
			}
		case controller.Command:
			if n := of(e.Worker); n != nil {
				n.host.put(nil, func() {
					if e.Order.Rollback {
						n.left = false
						n.enter(e.Order)
					} else {
						n.step(Order{e.Order})
					}
				})
			}
		case controller.Copy:
			if n := of(e.Worker); n != nil {
				n.host.put(nil, func() { n.step(Fill{e.Fill}) })
			}
		case controller.Propose:
			s.lane(nil).put(nil, func() { s.control(controller.Agreed{Version: e.Order.Plan.Version, Proposed: s.now}) })
		case controller.Kill:
			if n := of(e.Worker); n != nil {
				s.kill(n, e.Reason)
			}
		case controller.Dismiss:
			if n := of(e.Worker); n != nil {
				s.nodes = slices.DeleteFunc(s.nodes, func(x *node) bool { return x == n })
				for _, x := range slices.Clone(s.nodes) {
					s.lose(n.session(), x.session())
				}
				s.lane(nil).put(nil, func() { s.control(controller.Ended{Worker: e.Worker}) })
			}
		case controller.SetTimer:
			s.timers[e.Timer] = e.After
		case controller.CancelTimer:
			delete(s.timers, e.Timer)
		case controller.End:
			var report *controller.ReportError
			if s.ended = true; errors.As(e.Err, &report) {
				s.t.Fatal(e.Err)
			}
		case controller.StopAll:
			s.ended = true
		}
	}
}

// tick lets one thing happen, and reports whether there was any.
func (s *sim) tick() bool {
	s.ticks++
	s.lanes = slices.DeleteFunc(s.lanes, func(l *lane) bool {
		return len(l.items) == 0 && (l.owner == nil || l != l.owner.host && l != l.owner.report && l != l.owner.tasks)
	})
	if len(s.lanes) == 0 {
		return false
	}
	from := s.draw(len(s.lanes))
	for i := range s.lanes {
		l := s.lanes[(from+i)%len(s.lanes)]
		if len(l.items) > 0 && (l.items[0].ready == nil || l.items[0].ready()) {
			x := l.items[0]
			l.items = l.items[1:]
			x.do()
			return true
		}
	}
	return false
}

// settle lets all happen that can, timers last, until the run has ended.
func (s *sim) settle() {
	for limit := s.ticks + 200_000; !s.over(); {
		if s.ticks > limit {
			s.stuck("it goes round in circles")
		}
		if s.tick() {
			continue
		}
		if len(s.timers) == 0 {
			s.stuck("nothing happens any more")
		}
		var first controller.Timer
		for t, after := range s.timers {
			if first == 0 || after < s.timers[first] || after == s.timers[first] && t < first {
				first = t
			}
		}
		s.now = s.now.Add(s.timers[first])
		delete(s.timers, first)
		s.control(controller.Late{Timer: first})
	}
}

// over reports whether the run has ended: no worker is left, or all that have a part in the plan are done.
func (s *sim) over() bool {
	if s.ended || len(s.nodes) == 0 {
		return true
	}
	return !slices.ContainsFunc(s.nodes, func(n *node) bool { return !n.done && !n.left && len(n.w.plan.Workers) > 0 }) &&
		slices.ContainsFunc(s.nodes, func(n *node) bool { return n.done })
}

func (s *sim) stuck(why string) {
	s.t.Helper()
	for _, n := range s.nodes {
		w := n.w
		said, entered := w.Exchanging()
		s.t.Logf("worker %v: %v, %v under %v, live %v, busy %d, said %v, entered %v, broken %v, %d ops, gates %v, ordered %v", n.session(), w.state,
			w.passed, w.plan.Version, w.live, w.busy, said, entered, w.broken, len(w.ops), n.gates, w.order != nil)
		if w.step != nil {
			s.t.Logf("  step %d: %v", w.step.number, w.step.queue.Statuses())
			for r, sh := range w.all {
				s.t.Logf("  %v: %+v", r, *sh)
			}
			for x, b := range w.step.tensors {
				s.t.Logf("  %v: %+v", x, *b)
			}
			for i, x := range w.shapes {
				s.t.Logf("  shape %d: %+v, taken %v, early %v", i, x, n.taken[key.Shape(w.Epoch(), i)], n.early[key.Shape(w.Epoch(), i)])
			}
		}
	}
	s.t.Fatalf("%s after %d ticks, the controller's plan is %v, busy %v", why, s.ticks, s.ctl.Plan().Version, s.ctl.Busy())
}

// pick draws a live worker.
func (s *sim) pick() *node { return s.nodes[s.draw(len(s.nodes))] }

// join starts a worker that is in no plan.
func (s *sim) join(x id.WorkerID) {
	s.lives[x]++
	n := s.start(plan.Worker{ID: x, Incarnation: s.lives[x]}, control.Order{})
	s.control(controller.Joined{Worker: n.self, Addr: fmt.Sprint(n.session())})
}

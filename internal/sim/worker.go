package sim

import (
	"bytes"
	"errors"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// worker is one process: the shell of a core, its network, its memory, and the program that asks for one step after the
// other.
type worker struct {
	c       *Cluster
	self    plan.Worker
	session id.Session

	alive, frozen bool
	slow          int      // how many times as long passes take; 0: once
	before        *worker  // the fenced session whose process this is, until it continues
	next          *worker  // the session that follows, once the host has fenced this one
	deferred      []func() // what came while it was frozen
	local                  // what its host keeps
	sample        Reader
	reads         *reads // nil before the session begins

	core   *core.Worker // nil before it has begun
	life   int          // counts cores: a rollback makes a new one
	early  []control.Message
	asking bool // an operation of the program is under way
	ready  bool // Ready is being carried out
	opened time.Time
	came   time.Time
	program

	memory

	// The network.
	members  map[id.Session]bool
	since    uint64 // keys of earlier steps are over
	expected map[comm.Key]core.Expect
	arrived  map[comm.Key][]message // too early
	taken    map[comm.Key]bool
	groups   map[uint16]membership
	aborted  map[uint16]id.Version
	ops      []*operation
	parts    map[call]map[id.Session]any
	editing  *editing
}

// membership is a group as a worker knows it.
type membership struct {
	version id.Version
	members []id.Session
}

// editing is an edit of groups, which waits for links.
type editing struct {
	op     core.Op
	groups map[uint16]membership
	up     bool // all links are, and its end is on its way to the core
}

// program is the program that a worker runs: steps, evaluations and the end.
type program struct {
	base    int    // the step that it began after
	joined  bool   // it has begun in the middle, and asks for nothing yet
	asked   bool   // for a checkpoint
	writing int    // parts of checkpoints
	reason  string // to stop, as the worker was asked
	stop    string // why the run has ended early
	loss    float64
	val     *float64
	pending *control.Step // it is told after an evaluation
	over    bool
}

// start starts a process.
func (c *Cluster) start(self plan.Worker) *worker {
	w := &worker{
		c: c, self: self, session: core.SessionOf(self), alive: true,
		members: make(map[id.Session]bool), expected: make(map[comm.Key]core.Expect), arrived: make(map[comm.Key][]message),
		taken: make(map[comm.Key]bool), groups: make(map[uint16]membership),
		aborted: make(map[uint16]id.Version), parts: make(map[call]map[id.Session]any),
	}
	if c.cfg.Samples != nil {
		w.sample = c.cfg.Samples()
	}
	c.workers[w.session] = w
	c.order = append(c.order, w)
	return w
}

// begins makes a core that begins with an order.
func (w *worker) begins(first control.Order) {
	w.life++
	w.asking = false
	w.program = program{base: first.Passed.Step, joined: len(first.Plan.Workers) == 0, reason: w.reason}
	w.editing, w.ops = nil, nil
	if first.Rollback {
		w.reads.begin()
	}
	clear(w.expected)
	w.memory = newMemory(w)
	var layers []core.Layer
	for i, l := range w.c.cfg.Layers {
		var all []zero.Tensor
		for _, n := range l.Tensors {
			all = append(all, zero.Tensor{Size: n})
		}
		layers = append(layers, core.Layer{Name: layerName(i), Blocks: zero.Blocks(all)})
	}
	w.core = core.New(core.Config{
		Self: w.self, Layers: layers, Micros: w.c.cfg.Micros, First: first, Moments: 1, NormScale: 1, Derive: w.c.cfg.Derive, Beside: w.c.cfg.Beside, Passes: w.c.cfg.Passes, Flying: w.c.cfg.Flying,
		Job: rundir.Job{Zero: w.c.cfg.Zero, NoDigests: !w.c.cfg.Digests, Verify: w.c.cfg.Verify, MicroBatch: microBatch, Seed: w.c.cfg.Seed},
	})
	early := w.early
	w.early = nil
	if !first.Rollback {
		for _, m := range early {
			w.hear(m)
		}
	}
	w.later(w.drive)
}

// run calls f, or puts it off while the worker is frozen.
func (w *worker) run(f func()) {
	switch {
	case !w.alive:
	case w.frozen:
		w.deferred = append(w.deferred, f)
	default:
		f()
	}
}

// thaw ends a freeze.
func (w *worker) thaw() {
	w.frozen = false
	for len(w.deferred) > 0 && !w.frozen && w.alive {
		f := w.deferred[0]
		w.deferred = w.deferred[1:]
		f()
	}
}

// later calls f soon, unless the worker or the core has ended by then.
func (w *worker) later(f func()) { w.in(w.c.delay(20*time.Microsecond), f) }

func (w *worker) in(d time.Duration, f func()) {
	life := w.life
	w.c.after(d, func() {
		w.run(func() {
			if life == w.life {
				f()
			}
		})
	})
}

// step lets the core step and does what it wants. A sealed worker must pass no point, and no worker another one than others pass: what
// dead and fenced workers have passed is passed again.
func (w *worker) step(e core.Event) {
	was, _ := w.core.Passed()
	sealed, x := w.core.State() == core.Sealed, w.core
	w.c.seen[reflect.TypeOf(e)] = true
	w.endsTask(e)
	x.Step(e)
	if now, result := x.Passed(); now != was {
		if _, ordered := e.(control.Order); sealed && !ordered || now.Compare(was) < 0 {
			w.c.violated("worker %v went from %v to %v by %T, sealed: %v", w.session, was, now, e, sealed)
		}
		for _, o := range w.c.order {
			if o.alive && o.next == nil && o.core != nil && o.core.Epoch() == x.Epoch() {
				if at, other := o.core.Passed(); at == now && !bytes.Equal(result, other) {
					w.c.violated("workers %v and %v passed %v with different results", w.session, o.session, now)
				}
			}
		}
	}
	w.drive()
}

// tellCore tells the core something in the middle of a task.
func (w *worker) tellCore(e core.Event) {
	w.c.seen[reflect.TypeOf(e)] = true
	w.core.Step(e)
}

func (w *worker) drive() {
	if w.ready {
		return
	}
	life := w.life
	w.ready = true
	for duties := w.core.Ready(); len(duties) > 0 && life == w.life; duties = w.core.Ready() {
		for _, d := range slices.Clone(duties) {
			w.perform(d)
		}
	}
	w.ready = false
	if err := w.core.Err(); err != nil && !errors.Is(err, core.ErrLeft) {
		w.fail(err)
		return
	}
	w.proceed()
}

// fail ends the process with an error.
func (w *worker) fail(err error) {
	corrupt := new(core.CorruptError)
	switch {
	case !w.alive:
	case errors.As(err, &corrupt):
		w.say(control.Failed{Kind: control.Corrupt, Text: err.Error()})
		w.exit(session.Status{Code: 1, Text: "exit status 1"})
	default:
		w.c.violated("worker %v fails: %v", w.session, err)
	}
}

// proceed asks for the next operation.
func (w *worker) proceed() {
	if !w.alive || w.asking || w.over || len(w.core.Plan().Workers) == 0 || w.core.Err() != nil {
		return
	}
	at, result := w.core.Passed()
	if w.joined {
		w.committed(w.core.Committed())
		w.joined = false
	}
	point := id.Point{Step: at.Step + 1}
	switch {
	case at.Gate == id.Kept:
		w.finish(at.Step, result)
		return
	case at.Gate == id.Committed && at.Step > w.base && w.c.evaluates(at.Step):
		point = id.Point{Step: at.Step, Gate: id.Evaluated}
	case at.Step == w.c.cfg.Steps || w.stop != "":
		point = id.Point{Step: at.Step, Gate: id.Kept}
	}
	w.asking = true
	w.in(w.c.delay(50*time.Microsecond), func() { w.step(core.Ask{Point: point, Micros: w.c.cfg.Micros, Words: words}) })
}

// words is what the collector says at the end, in bytes.
const words = 5

// evaluates reports whether an evaluation follows a step.
func (c *Cluster) evaluates(step int) bool {
	return step == c.cfg.Steps || c.cfg.Evaluate > 0 && step%c.cfg.Evaluate == 0
}

// save writes the worker's part of a checkpoint.
func (w *worker) save(of *plan.Plan, step int) {
	w.asked = false
	v := of.Version
	if step == w.c.cfg.Steps || !slices.ContainsFunc(of.Shards, func(p plan.Shard) bool { return p.Owner == w.self.ID }) {
		return
	}
	w.writing++
	w.in(w.c.delay(time.Millisecond), func() {
		w.writing--
		w.say(control.Saved{Step: step, Generation: v.Generation, N: v.N, Rule: "adamw", File: []byte("{}")})
	})
}

// finish tells the result, after the worker's part of a checkpoint.
func (w *worker) finish(step int, result []byte) {
	if w.over = true; w.writing > 0 {
		w.later(func() { w.finish(step, result) })
		return
	}
	d := control.Done{Steps: step, Loss: w.loss, ValLoss: w.val, ParamsSHA256: "aa", StateSHA256: "bb", Result: result, Collector: int(w.c.collector), Plan: uint64(w.core.Plan().Version.N)}
	if step < w.c.cfg.Steps {
		d.StoppedBy = w.stop
	}
	w.say(d)
}

// ended takes the end of an operation.
func (w *worker) ended(r core.Result, err error) {
	w.asking = false
	pending := w.pending
	w.pending = nil
	switch {
	case errors.Is(err, core.ErrLeft):
		if pending != nil {
			pending.Left = true
			w.say(*pending)
		}
	case err != nil:
		w.fail(err)
	case r.Step > 0:
		w.committed(r)
	case pending != nil: // evaluated
		pending.ValLoss = w.val
		w.say(*pending)
	}
}

// committed holds that all commits of a step are the same.
func (w *worker) committed(r core.Result) {
	said := control.Step{
		Step: r.Step, Loss: r.Loss, LR: r.LR, GradNorm: r.GradNorm, Tokens: r.Targets, MS: 5, Time: w.c.now, Plan: uint64(r.Plan.N),
		Forwards: r.Forwards, Backwards: r.Backwards, Joined: w.joined,
	}
	w.loss, w.stop = r.Loss, r.Stop
	if w.pending = nil; w.c.evaluates(r.Step) {
		w.pending = &said
	} else {
		w.say(said)
	}
	r.Plan, r.Forwards, r.Backwards, r.Stop = id.Version{}, 0, 0, ""
	if was, ok := w.c.results[r.Step]; ok && !reflect.DeepEqual(was, r) {
		w.c.violated("worker %v commits %+v, and another one %+v", w.session, r, was)
	}
	if w.c.results[r.Step] = r; r.Targets != int64(w.c.cfg.Micros) {
		w.c.violated("step %d counts %d of %d micro-batches", r.Step, r.Targets, w.c.cfg.Micros)
	}
}

// perform does a duty, or begins it.
func (w *worker) perform(d core.Duty) {
	w.c.seen[reflect.TypeOf(d)] = true
	switch d := d.(type) {
	case core.Admit:
		w.admit(d.Peers)
	case core.Begin:
		w.advance(d.Word)
	case core.Expect:
		w.expect(d)
	case core.Cancel:
		for k, e := range w.expected {
			if e.Ticket == d.Ticket {
				delete(w.expected, k)
			}
		}
	case core.Send:
		w.post(d.To, message{key: d.Key, value: w.load(d.From, d.Data)})
	case core.SendFill:
		w.post(d.Transfer.To, message{key: d.Key, value: w.loadFill(d)})
		if d.Content == core.BaseState {
			w.in(w.c.delay(2*time.Millisecond), func() { w.step(core.BaseSent{Transfer: d.Transfer}) })
		}
	case core.Edit:
		w.edit(d)
	case core.Reduce:
		w.reduce(d)
	case core.Exchange:
		w.exchange(d)
	case core.CancelOps:
		if w.editing != nil {
			w.breakEdit()
		}
		for _, o := range slices.Clone(w.ops) {
			w.abort(o.call.group, o.call.version)
		}
	case core.Operate:
		w.beginsTask(d)
		w.in(w.c.delay(time.Millisecond), func() { w.operate(d) })
	case control.Answer:
		w.say(d)
	case core.Mark:
		if w.opened = w.c.now; !d.Live {
			w.came = w.c.now
		}
	case control.Applied:
		w.c.note("worker %v applies plan %v", w.session, d.Version)
		d.Edit, d.Resume = w.opened.Sub(w.came), w.c.now.Sub(w.opened)
		w.say(d)
	case control.Level:
		w.say(d)
	case control.Repaired:
		w.say(d)
	case core.Attest:
		w.post(d.To, message{key: d.Key, value: w.tensors[d.Tensor].digest()})
	case core.Conclude:
		at, _ := w.core.Passed()
		if at.Gate == id.Evaluated {
			val := 1 / float64(at.Step)
			w.val = &val
		}
		w.ended(core.Result{}, nil)
	case core.End:
		w.ended(d.Result, d.Err)
	case core.StopOperate:
		w.sayStop = true
	default:
		w.remember(d)
	}
}

// admit sets the members of the network.
func (w *worker) admit(peers []comm.Peer) {
	was := w.members
	w.members = make(map[id.Session]bool)
	for _, p := range peers {
		if p.Session != w.session {
			w.members[p.Session] = true
		}
	}
	for _, x := range w.c.order {
		if x != w && was[x.session] != w.members[x.session] {
			w.c.link(w, x).refresh()
		}
	}
	for k := range w.arrived {
		w.arrived[k] = slices.DeleteFunc(w.arrived[k], func(m message) bool { return !w.members[m.from] })
	}
}

// advance ends all keys of earlier steps.
func (w *worker) advance(word uint64) {
	w.since = word
	for k := range w.arrived {
		if k.Step < word {
			delete(w.arrived, k)
		}
	}
	for k := range w.taken {
		if k.Step < word {
			delete(w.taken, k)
		}
	}
	for k := range w.expected {
		if k.Step < word {
			delete(w.expected, k)
		}
	}
}

// linkUp is called when a link has opened.
func (w *worker) linkUp() { w.run(w.edited) }

// linkLost is called when a link has broken.
func (w *worker) linkLost(other *worker) {
	for _, g := range slices.Sorted(maps.Keys(w.groups)) {
		if x := w.groups[g]; slices.Contains(x.members, other.session) {
			w.abort(g, x.version)
		}
	}
	if e := w.editing; e != nil && e.has(other.session) {
		w.breakEdit()
	}
	if w.core == nil {
		return
	}
	w.say(control.LinkLost{Peer: other.session})
	w.step(core.LinkLost{Session: other.session})
}

// receive takes a message.
func (w *worker) receive(m message) {
	if m.part != nil {
		if m.part.aborts {
			w.abort(m.part.call.group, m.part.call.version)
		} else {
			w.take(*m.part)
		}
		return
	}
	if w.taken[m.key] || m.key.Step < w.since {
		return
	}
	if e, ok := w.expected[m.key]; ok {
		delete(w.expected, m.key)
		w.deliver(e, m)
		return
	}
	w.arrived[m.key] = append(w.arrived[m.key], m)
}

// expect takes a message that is early, or waits for it.
func (w *worker) expect(e core.Expect) {
	if w.taken[e.Key] {
		w.later(func() { w.step(core.Received{Ticket: e.Ticket, Duplicate: true}) })
		return
	}
	if all := w.arrived[e.Key]; len(all) > 0 {
		delete(w.arrived, e.Key)
		w.deliver(e, all[0])
		return
	}
	w.expected[e.Key] = e
}

// deliver puts a message where it is expected.
func (w *worker) deliver(e core.Expect, m message) {
	w.taken[m.key] = true
	n, data := w.store(e, m.value)
	w.later(func() { w.step(core.Received{Ticket: e.Ticket, From: m.from, Bytes: n, Data: data}) })
}

// edit edits the groups once links to all members are open.
func (w *worker) edit(d core.Edit) {
	w.editing = &editing{op: d.Op, groups: make(map[uint16]membership)}
	for _, g := range d.Groups {
		w.editing.groups[g.ID] = membership{d.Version, g.Members}
	}
	w.edited()
}

// has reports whether a session is to be a member of one of the groups.
func (e *editing) has(s id.Session) bool {
	for _, g := range e.groups {
		if slices.Contains(g.members, s) {
			return true
		}
	}
	return false
}

// breakEdit ends the edit: it was cancelled, or a link of its groups broke.
func (w *worker) breakEdit() {
	op := w.editing.op
	w.editing = nil
	w.later(func() { w.step(core.OpDone{Op: op, Broken: true}) })
}

func (w *worker) edited() {
	e := w.editing
	if e == nil || e.up {
		return
	}
	for _, g := range e.groups {
		for _, m := range g.members {
			if x := w.c.workers[m]; x != w && !w.c.link(w, x).up {
				return
			}
		}
	}
	e.up = true
	for g, x := range e.groups {
		w.groups[g] = x
	}
	for c := range w.parts {
		if c.version.Compare(w.groups[c.group].version) < 0 {
			delete(w.parts, c)
		}
	}
	w.in(w.c.delay(200*time.Microsecond), func() { // longer than a broken link takes to be noticed
		if w.editing == e {
			w.editing = nil
			w.step(core.OpDone{Op: e.op, Opened: 1})
		}
	})
}

func callOf(group uint16, c group.Call) call { return call{group, c.Version, c.Step, c.Tag} }

// exchange brings what each member says to all.
func (w *worker) exchange(d core.Exchange) {
	g := w.groups[0]
	w.begin(&operation{
		call: callOf(0, d.Call), members: g.members,
		done: func(parts map[id.Session]any) {
			all := make([]byte, d.Parts[len(d.Parts)-1])
			for i, m := range g.members {
				copy(all[d.Parts[i]:d.Parts[i+1]], parts[m].([]byte))
			}
			w.step(core.OpDone{Op: d.Op, All: all})
		},
		broken: func() { w.step(core.OpDone{Op: d.Op, Broken: true}) },
	}, d.Said)
}

package sim

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// unit is the number of elements whose step is kept together.
const unit = 4096

// memory is what a worker computes with: of everything, the step it is of.
type memory struct {
	plan     *plan.Plan
	params   [][]int // where the layers read them, by layer and unit; -1: none
	shards   map[id.Range]*shard
	former   []*shard
	updating bool // a committed update goes on
	initial  map[id.Range]*shard
	incoming map[id.Range]*incoming
	bases    map[core.Transfer]int
	copyStop bool // copies of bases are to end

	// Of a step.
	tensors, made map[key.Tensor]content
	passes        map[graph.Pair]content
	kept          map[int][]kept // by stage
	gradients     []gradient     // by layer
	losses        uint64         // micro-batches
	spot          [2][]uint32

	tasks      map[int]string    // that go on, by lane
	repeatStop bool              // see core.StopRepeat
	sayStop    bool              // see core.StopOperate
	altered    map[id.Range]bool // blocks
	shut       map[int]bool      // layers whose parameters are on their way
	waiting    []func()          // passes that wait for parameters
	blocked    []func()          // those that wait for samples
}

// content is what a boundary tensor is made of.
type content struct {
	step    int
	samples string // of the micro-batch
	wrong   bool   // it was computed with memory that was altered
}

func (x content) digest() []byte {
	d := binary.LittleEndian.AppendUint64(nil, uint64(x.step)<<1^uint64(crc32.ChecksumIEEE([]byte(x.samples)))<<8)
	if x.wrong {
		d[0] |= 1
	}
	return d
}

// mix takes in that x is made of another tensor, too. What is made of several samples in one place must not be committed.
func (x *content) mix(in content) {
	switch {
	case x.samples == "":
		x.samples = in.samples
	case x.samples != in.samples:
		x.samples += "and " + in.samples
	}
}

// gradient is a sum of gradients of one step.
type gradient struct {
	step    int
	micros  uint64
	samples batches
	wrong   bool // the same
}

// shard is a range that the worker has a part in.
type shard struct {
	id.Range
	holds bool
	step  int // of parameters and moments
	total gradient
	late  *incoming // what it is made of, until its last update is replayed
}

// incoming is the state of a range that a transfer brings.
type incoming struct {
	id.Range
	step      int
	gradients [2]gradient
}

func newMemory(w *worker) memory {
	m := memory{
		plan: new(plan.Plan), shards: make(map[id.Range]*shard), initial: make(map[id.Range]*shard), incoming: make(map[id.Range]*incoming),
		bases: make(map[core.Transfer]int), tensors: make(map[key.Tensor]content), made: make(map[key.Tensor]content), passes: make(map[graph.Pair]content), kept: make(map[int][]kept),
		gradients: make([]gradient, len(w.c.cfg.Layers)), altered: make(map[id.Range]bool), shut: make(map[int]bool),
		tasks: make(map[int]string),
	}
	for _, l := range w.c.cfg.Layers {
		size := 0
		for _, n := range l.Tensors {
			size += n
		}
		units := make([]int, (size+unit-1)/unit)
		for i := range units {
			units[i] = -1
		}
		m.params = append(m.params, units)
	}
	return m
}

// all is the set of all micro-batches.
func (w *worker) all() uint64 { return 1<<w.c.cfg.Micros - 1 }

func bits(n tree.Node) uint64 { return 1<<n.Hi - 1<<n.Lo }

func (w *worker) setParams(r id.Range, step int) {
	for u := r.Lo / unit; u < (r.Hi+unit-1)/unit; u++ {
		w.params[r.Layer][u] = step
	}
}

func (w *worker) serves(layer int) bool {
	for _, s := range w.plan.StagesOf(w.self.ID) {
		if w.plan.Stages[s].Lo <= layer && layer < w.plan.Stages[s].Hi {
			return true
		}
	}
	return false
}

// complete holds that a gradient has all micro-batches of a step.
func (w *worker) complete(g gradient, step int, what string) {
	if g != (gradient{step: step, micros: w.all(), samples: g.samples}) {
		w.c.violated("worker %v: %s of step %d has the gradient of step %d and micro-batches %b (wrong: %v)", w.session, what, step, g.step, g.micros, g.wrong)
	}
}

// load returns the content of a buffer.
func (w *worker) load(b core.Buffer, data []byte) any {
	switch b.Content {
	case core.Boundary:
		x, ok := w.tensors[b.Tensor]
		if !ok {
			w.c.violated("worker %v sends %+v, which it does not have", w.session, b.Tensor)
		}
		return x
	case core.Gradient:
		return w.shards[b.Range].total
	case core.Parameters:
		return w.shards[b.Range].step
	case core.RepairBlock:
		return w.altered[b.Block] // it is sent once more after a recovery, and may have been altered since
	}
	return data
}

func (w *worker) loadFill(d core.SendFill) any {
	switch d.Content {
	case core.BaseState:
		step := w.bases[d.Transfer]
		delete(w.bases, d.Transfer)
		return step
	case core.Increment:
		return w.shards[d.Source].total
	}
	return d.Data
}

// store puts the content of a message into a buffer, and returns its size and what the core is told of it.
func (w *worker) store(e core.Expect, value any) (n int, data []byte) {
	r := e.Into.Range
	switch e.Into.Content {
	case core.Boundary:
		w.tensors[e.Into.Tensor] = value.(content)
		n = 4
		for _, d := range e.Dims {
			n *= d
		}
	case core.Gradient:
		w.shards[r].total = value.(gradient)
	case core.Parameters:
		w.setParams(r, value.(int))
	case core.RepairBlock:
		n = 4 * (e.Into.Block.Hi - e.Into.Block.Lo)
		if value.(bool) {
			w.c.violated("worker %v is repaired with a block that was altered at its source", w.session)
		}
	case core.BaseState:
		w.incoming[r] = &incoming{Range: r, step: value.(int)}
		n, data = e.Size, binary.NativeEndian.AppendUint32(nil, uint32(value.(int)))
	case core.Increment:
		w.incoming[r].gradients[e.Into.Array] = value.(gradient)
		n = 4 * (r.Hi - r.Lo)
	default:
		data = value.([]byte)
		n = len(data)
	}
	return n, data
}

// remember does a duty that is about memory or the computing goroutine.
func (w *worker) remember(d core.Duty) {
	w.beginsTask(d)
	switch d := d.(type) {
	case core.Run:
		w.in(w.c.delay(time.Duration(max(w.slow, 1))*300*time.Microsecond), func() { w.compute(d) })
	case core.HandOver:
		w.in(w.c.delay(100*time.Microsecond), func() {
			w.handOver(d.Stage)
			w.step(core.HandedOver(d))
		})
	case core.Repeat:
		w.repeatStop = false
		w.in(w.c.delay(600*time.Microsecond), func() { w.repeat(d) })
	case core.StopRepeat:
		w.repeatStop = true
	case core.Say:
		w.sayStop = false
		w.in(w.c.delay(50*time.Microsecond), func() { w.record(d) })
	case core.Prepare:
		w.in(w.c.delay(300*time.Microsecond), func() { w.prepare(d) })
	case core.Replay:
		in := w.incoming[d.Range]
		w.in(w.c.delay(100*time.Microsecond), func() {
			w.replay(in, d.Update.Step, d.Increment)
			w.step(core.Replayed{})
		})
	case core.CatchUp:
		sh := w.shards[d.Range]
		w.in(w.c.delay(time.Millisecond), func() {
			w.replay(sh.late, d.Update.Step, d.Increment)
			if sh.step, sh.late = sh.late.step, nil; w.serves(sh.Layer) {
				w.setParams(sh.Range, sh.step)
			}
			w.step(core.CaughtUp{Range: d.Range})
		})
	case core.First:
		w.in(w.c.delay(time.Duration(max(w.slow, 1))*300*time.Microsecond), func() { w.first(d.Layer) })
	case core.StopCopies:
		w.copyStop = true
	case core.CopyBases:
		w.copyStop = false
		w.in(w.c.delay(2*time.Millisecond), func() {
			w.copyBases(d.Copies, d.Step)
			w.step(core.BasesCopied{})
		})
	case core.Update:
		w.former, w.copyStop = nil, false
		w.update(d)
	case core.Clear:
		clear(w.tensors)
		clear(w.made)
		clear(w.passes)
		if len(w.kept) > 0 {
			w.c.violated("worker %v ends a step and has kept gradients", w.session)
		}
		clear(w.gradients)
		w.losses, w.spot = 0, [2][]uint32{}
	case core.Keep:
		w.perform(core.Cancel{Ticket: d.Cancel})
		w.tensors[d.Tensor] = w.made[d.Tensor]
		delete(w.made, d.Tensor)
	case core.Compare:
		digest := d.Digest
		if digest == nil {
			digest = w.made[d.Tensor].digest()
			delete(w.made, d.Tensor)
		}
		same := bytes.Equal(digest, w.tensors[d.Tensor].digest())
		w.later(func() { w.step(core.Compared{Attempt: d.Attempt, Tensor: d.Tensor, Same: same}) })
	case core.Restore:
		delete(w.altered, d.Block)
	case core.Total:
		for _, r := range d.Ranges {
			w.shards[r].total = w.gradients[d.Layer]
		}
	case core.Gate:
		if w.shut[d.Layer] = !d.Open; !d.Open {
			return
		}
		delete(w.shut, d.Layer)
		for _, f := range w.waiting {
			w.later(f)
		}
		w.waiting = nil
	case core.Found:
	case core.Forget:
		clear(w.incoming)
	case core.Apply:
		w.apply(d)
	default:
		panic(fmt.Sprintf("sim: unknown duty %T", d))
	}
}

// record makes the record of a commit. Its norm counts every owned element once.
func (w *worker) record(d core.Say) {
	if w.sayStop && w.c.rnd.IntN(4) > 0 { // else it had ended by then
		w.step(core.Failed{Err: context.Canceled, Task: true})
		return
	}
	r := core.Record{LR: 0.5, Suspect: -1, Spoiled: -1, Stop: w.reason, Spot: slices.Concat(w.spot[:]...)}
	if w.asked {
		r.Saving |= core.SavingWanted
	}
	if w.writing > 0 {
		r.Saving |= core.SavingBusy
	}
	for _, n := range d.Nodes {
		if w.losses&bits(n) != bits(n) {
			w.c.violated("worker %v says the loss of %v and has %b", w.session, n, w.losses)
		}
		loss := core.Loss{}
		for m := n.Lo; m < n.Hi; m++ {
			loss = loss.Add(core.Loss{Sum: float64(1 + m), Count: 1})
		}
		r.Losses = append(r.Losses, core.LossSum{Node: n, Loss: core.Measured{Loss: loss}})
	}
	for _, p := range w.plan.Shards {
		if p.Owner != w.self.ID {
			continue
		}
		if g := w.shards[core.RangeOf(p)].total; !g.wrong {
			w.complete(g, d.Step, "a commit")
		}
		r.Squares, _ = r.Squares.Add(zero.Fixed{Lo: uint64(p.Hi - p.Lo)})
	}
	w.step(core.Said{Record: r, Checked: w.check(d.Tainted)})
}

// operate says what an operation other than a step gives.
func (w *worker) operate(d core.Operate) {
	size := 0
	switch d.Point.Gate {
	case id.Evaluated:
		for m := range w.c.cfg.Micros {
			if core.Evaluator(w.plan, len(w.plan.Stages)-1, m) == w.self.ID {
				size += words
			}
		}
	case id.Kept:
		if w.plan.Collector().ID == w.self.ID {
			size = words
			w.c.collector, w.c.model = w.self.ID, w.self.Host
		}
	}
	w.step(core.Answered{Said: append(w.check(false), make([]byte, size)...)})
}

// check says which blocks were altered, and what the worker has of each shard.
func (w *worker) check(tainted bool) []byte {
	if !w.c.cfg.Digests {
		return nil
	}
	var found []core.Offence
	var all []core.Attested
	for i, p := range w.plan.Shards {
		holds := p.Holds(w.self.ID)
		if !holds && !w.serves(p.Layer) {
			continue
		}
		at := uint32(w.params[p.Layer][p.Lo/unit])
		if holds {
			at = uint32(w.shards[core.RangeOf(p)].step)
			for b := p.Lo / unit; b < (p.Hi+unit-1)/unit; b++ {
				if w.altered[id.Range{Layer: p.Layer, Lo: b * unit, Hi: (b + 1) * unit}] {
					target := core.Mirror
					if p.Owner == w.self.ID {
						target = core.Own
					}
					found = append(found, core.Offence{Shard: i, Block: b, Target: target})
				}
			}
		}
		all = append(all, core.Attested{Params: at, State: at, Held: holds})
	}
	return core.AppendCheck(tainted, found, all)
}

// flip alters a block of a shard that the worker holds, and reports whether it could.
func (w *worker) flip(n int) bool {
	var held []id.Range
	for _, p := range w.plan.Shards {
		if sh := w.shards[core.RangeOf(p)]; p.Holds(w.self.ID) && sh != nil && sh.holds {
			held = append(held, sh.Range)
		}
	}
	if said, _ := w.core.Exchanging(); len(held) == 0 || !w.core.Quiet() || said { // what alters after the check is found after the next one
		return false
	}
	lo := held[n%len(held)].Lo / unit * unit
	w.altered[id.Range{Layer: held[n%len(held)].Layer, Lo: lo, Hi: lo + unit}] = true
	return true
}

// user is a worker that has updated a layer, and the epoch that it did so in.
type user struct {
	*worker
	epoch int
}

// copyBases copies the bases of transfers as they are after a step.
func (w *worker) copyBases(copies []core.Copy, step int) {
	var copied []core.Transfer
	for _, c := range copies {
		if sh := w.shards[c.Source]; sh == nil || sh.step != step {
			w.c.violated("worker %v copies %v as of step %d, and has %+v", w.session, c.Source, step, sh)
		}
		if w.copyStop && w.c.rnd.IntN(2) == 0 {
			break
		}
		w.bases[c.Transfer] = step
		copied = append(copied, c.Transfer)
	}
	if len(copied) > 0 {
		w.tellCore(core.Copied{Transfers: copied})
	}
}

// apply goes over to a plan.
func (w *worker) apply(d core.Apply) {
	w.c.known(*d.Plan)
	w.plan = d.Plan
	for _, l := range append(d.Fresh, d.Stale...) {
		w.gradients[l] = gradient{}
	}
	made := make(map[id.Range]*shard)
	for _, n := range d.Shards {
		switch n.From {
		case core.Stateless:
			made[n.Range] = &shard{Range: n.Range}
		case core.Preset:
			made[n.Range] = w.initial[n.Range]
		case core.Derived:
			made[n.Range] = w.derive(n.Range)
		case core.Assembled:
			made[n.Range] = w.assemble(n)
		case core.Late:
			in := w.incoming[n.Range]
			made[n.Range] = &shard{Range: n.Range, holds: true, step: in.step, late: in}
		}
	}
	var gone []id.Range
	gone = append(gone, d.Gone...)
	for r := range made {
		gone = append(gone, r)
	}
	for _, r := range gone {
		if sh := w.shards[r]; sh != nil && sh.holds {
			w.former = append(w.former, sh)
		}
		delete(w.shards, r)
	}
	for r, sh := range made {
		w.shards[r] = sh
	}
	for r, sh := range w.shards {
		if sh.holds && sh.late == nil && w.serves(r.Layer) {
			w.setParams(r, sh.step)
		}
	}
}

// derive makes the state of a range out of its layer.
func (w *worker) derive(r id.Range) *shard {
	at, _ := w.core.Passed()
	for u := r.Lo / unit; u < (r.Hi+unit-1)/unit; u++ {
		if !w.serves(r.Layer) || w.params[r.Layer][u] != at.Step && !w.shut[r.Layer] {
			w.c.violated("worker %v derives %v of step %d from parameters of step %d", w.session, r, at.Step, w.params[r.Layer][u])
		}
	}
	return &shard{Range: r, holds: true, step: at.Step}
}

// assemble makes the state of a range out of what is here of it.
func (w *worker) assemble(n core.NewShard) *shard {
	at, _ := w.core.Passed()
	sh := &shard{Range: n.Range, holds: true, step: at.Step}
	have := make(map[int]int) // steps, by unit
	take := func(r id.Range, step int) {
		if r.Layer != n.Range.Layer {
			return
		}
		for u := r.Lo / unit; u < (r.Hi+unit-1)/unit; u++ {
			have[u] = step
		}
	}
	for _, old := range w.former {
		take(old.Range, old.step)
	}
	for _, old := range w.shards {
		if old.holds {
			take(old.Range, old.step)
		}
	}
	for _, r := range n.Transfers {
		take(r, w.incoming[r].step)
	}
	for u := n.Range.Lo / unit; u < (n.Range.Hi+unit-1)/unit; u++ {
		if step, ok := have[u]; !ok || step != at.Step {
			w.c.violated("worker %v holds unit %d of layer %d as of step %d from here on, and has it of step %d", w.session, u, n.Range.Layer, at.Step, step)
		}
	}
	return sh
}

// reduce adds up the gradient of a layer over the members of a stage.
func (w *worker) reduce(d core.Reduce) {
	g := w.groups[d.Group]
	mine := gradient{step: w.gradients[d.Layer].step, wrong: w.gradients[d.Layer].wrong}
	for rank, m := range g.members {
		if m != w.session {
			continue
		}
		for _, n := range d.Tree.Nodes[rank] {
			if w.gradients[d.Layer].micros&bits(n) != bits(n) || mine.micros&bits(n) != 0 {
				w.c.violated("worker %v is to add the gradients %v of layer %d and has %b", w.session, n, d.Layer, w.gradients[d.Layer].micros)
			}
			mine.micros |= bits(n)
			copy(mine.samples[n.Lo:n.Hi], w.gradients[d.Layer].samples[n.Lo:n.Hi])
		}
	}
	w.begin(&operation{
		call: callOf(d.Group, d.Call), members: g.members,
		done: func(parts map[id.Session]any) {
			var total gradient
			for _, m := range g.members {
				p := parts[m].(gradient)
				if p.micros == 0 {
					continue
				}
				if total.micros&p.micros != 0 || total.micros != 0 && total.step != p.step {
					w.c.violated("worker %v: the gradients of layer %d add up %b of step %d and %b of step %d", w.session, d.Layer, total.micros, total.step, p.micros, p.step)
				}
				total.step, total.micros, total.wrong = p.step, total.micros|p.micros, total.wrong || p.wrong
				for i, samples := range p.samples {
					if p.micros>>i&1 == 1 {
						total.samples[i] = samples
					}
				}
			}
			for _, r := range d.Mine {
				if sh := w.shards[r]; sh != nil && r != (id.Range{}) {
					sh.total = total
				}
			}
			w.step(core.OpDone{Op: d.Op})
		},
		broken: func() { w.step(core.OpDone{Op: d.Op, Broken: true}) },
	}, mine)
}

package core

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Every holder of a block of parameters or moments keeps a digest of it, taken as the block was written, and reads the block again
// before every exchange. Only moments of a mirror, and of a worker without peers, are compared by the update instead, which reads them anyway and marks what comes of one
// that was altered, and before they are copied or written. So a worker whose memory was altered finds it out itself, and says so in the exchange: there is no vote.
// The point of the exchange is then not passed. Instead, all are at the same point as before with its Repair counted up, give up
// what they have of the step, and do it again with the blocks that the good holders send.
//
// Every exchange, and not only some, because what is found later cannot be done again.

// Target is memory in which a block was altered.
type Target uint8

// The targets.
const (
	Own          Target = iota // parameters of a shard that the worker owns
	Mirror                     // parameters or moments of a shard that it mirrors
	CopiedParams               // parameters that came from another worker
	Moment                     // moments of a shard that it owns

	// Passed is not memory of the worker that tells of it: a boundary tensor which it got from a worker that is lost is not what was
	// computed again, so memory of one of the two was altered.
	Passed
	// Differ is a copy that is as it came, but not what the owner has.
	Differ
)

var targetNames = [...]string{"own", "mirror", "copy", "moment", "passed", "differ"}

func (t Target) String() string { return id.NameOf("target", uint8(t), targetNames[:]...) }

// ParseTarget returns the target with a name, of those in which a bit can be flipped.
func ParseTarget(name string) (Target, bool) {
	i := slices.Index(targetNames[:Passed], name)
	return Target(max(i, 0)), i >= 0
}

// CorruptError says that state was altered of which no worker has a good copy.
type CorruptError struct {
	Step   int    // after which the state is
	Layer  string // name
	Block  int    // -1 where holders of a shard differ, and no digest says which is right
	Target Target
}

func (e *CorruptError) Error() string {
	if e.Block < 0 {
		return fmt.Sprintf("after step %d, the holders of a shard of layer %q differ, and no digest tells which one is right", e.Step, e.Layer)
	}
	return fmt.Sprintf("after step %d, block %d of layer %q was altered in memory (%v), and no other worker has it: by a layer that writes to parameters outside of the update, or by the machine", e.Step, e.Block, e.Layer, e.Target)
}

// othersError is an error with which other workers end.
type othersError struct{ error }

// Offence is a block that is not as it was written.
type Offence struct {
	Shard, Block int // of the plan; of the layer
	Target       Target
}

// Attested is what a worker says of a part of the state that it has: digests of the digests of the parameters, and of all where it
// owns or mirrors the shard. Both are 0 for a shard with altered blocks, not all of which it may have named.
type Attested struct {
	Params, State uint32
	Held          bool
}

const (
	// maxOffences is how many blocks a worker names in an exchange. More are named in the next.
	maxOffences = 4
	offenceSize = 12
	checkSize   = 4 + maxOffences*offenceSize // and for each shard heldSize or copySize
	heldSize    = 8                           // of a shard that it owns or mirrors
	copySize    = 4                           // of one whose parameters it has
)

// AppendCheck returns what a worker says of its blocks in an exchange: whether it has computed with a tensor that is wrong, blocks
// that were altered, and what it has of each shard of the plan, in order.
func AppendCheck(tainted bool, found []Offence, shards []Attested) []byte {
	le := binary.LittleEndian
	said := make([]byte, 4, checkSize+heldSize*len(shards))
	if tainted {
		said[0] = 1
	}
	for i := range maxOffences {
		o := Offence{Shard: -1}
		if i < len(found) {
			o = found[i]
		}
		said = le.AppendUint32(said, uint32(1+o.Shard))
		said = le.AppendUint32(said, uint32(o.Block))
		said = le.AppendUint32(said, uint32(o.Target))
	}
	for _, s := range shards {
		said = le.AppendUint32(said, s.Params)
		if s.Held {
			said = le.AppendUint32(said, s.State)
		}
	}
	return said
}

// checkSizes returns how many bytes each worker of the plan says of its blocks.
func (w *Worker) checkSizes() map[id.WorkerID]int {
	sizes := make(map[id.WorkerID]int)
	if w.c.NoDigests {
		return sizes
	}
	for _, x := range w.plan.Workers {
		sizes[x.ID] = checkSize
	}
	for _, p := range w.plan.Shards {
		sizes[p.Owner] += heldSize
		for _, m := range p.Mirrors {
			sizes[m] += heldSize
		}
		for _, c := range w.plan.Stages[w.plan.StageOf(p.Layer)].Workers {
			if !p.Holds(c) {
				sizes[c] += copySize
			}
		}
	}
	return sizes
}

// repair is a block that is sent to the workers that do not have it as it should be.
type repair struct {
	r       id.Range // of the shard
	index   int      // of the block in the layer
	block   id.Range
	need    map[id.WorkerID]bool // they lack it
	good    []plan.Worker        // they have it, with the moments
	altered *Target              // here
	arrays  int                  // that were asked for
	left    int                  // messages on their way here
	told    map[id.WorkerID]bool
}

// saidOf is what a worker says of a shard in which it names no block.
type saidOf struct {
	worker id.WorkerID
	params uint32 // digest of the digests
	state  uint32 // the same of all, of holders
	holds  bool
}

// blockAt returns the index of the block of a layer that begins at an element.
func (w *Worker) blockAt(layer, lo int) int {
	i, _ := slices.BinarySearchFunc(w.c.Layers[layer].Blocks, lo, func(b zero.Block, lo int) int { return b.Lo - lo })
	return i
}

// judge takes what workers say of their blocks off what they say in an exchange, and returns the blocks to be repaired, and whether
// the step has to be done again, for their sake or another.
func (w *Worker) judge(said [][]byte) (words [][]byte, repairs []*repair, again bool, err error) {
	if w.c.NoDigests {
		return said, nil, false, nil
	}
	le := binary.LittleEndian
	sizes := w.checkSizes()
	sums := make([][]saidOf, len(w.plan.Shards))
	type place struct{ shard, block int }
	found := make(map[place]*repair)
	of := func(at place, p plan.Shard, index, lo, hi int) *repair {
		if found[at] == nil {
			found[at] = &repair{
				r: RangeOf(p), index: index, block: id.Range{Layer: p.Layer, Lo: lo, Hi: hi},
				need: make(map[id.WorkerID]bool), told: make(map[id.WorkerID]bool),
			}
			repairs = append(repairs, found[at])
		}
		return found[at]
	}
	for i, b := range said {
		x := w.plan.Workers[i].ID
		bad := fmt.Errorf("worker %d said of its blocks what cannot be", x)
		if len(b) < sizes[x] {
			return nil, nil, false, bad
		}
		words = append(words, b[sizes[x]:])
		if le.Uint32(b) > 1 {
			return nil, nil, false, bad
		}
		again = again || le.Uint32(b) == 1
		b = b[4:]
		offended := make(map[int]bool)
		for range maxOffences {
			shard, block, target := int(le.Uint32(b))-1, int(le.Uint32(b[4:])), Target(le.Uint32(b[8:]))
			b = b[offenceSize:]
			if shard < 0 {
				continue
			}
			if shard >= len(w.plan.Shards) || block >= len(w.c.Layers[w.plan.Shards[shard].Layer].Blocks) || target > Moment {
				return nil, nil, false, bad
			}
			p := w.plan.Shards[shard]
			at := w.c.Layers[p.Layer].Blocks[block]
			if at.Lo < p.Lo || at.Hi > p.Hi {
				return nil, nil, false, bad
			}
			offended[shard] = true
			m := of(place{shard, block}, p, block, at.Lo, at.Hi)
			m.need[x] = true
			if x == p.Owner { // it may have passed it on
				for _, c := range w.plan.Stages[w.plan.StageOf(p.Layer)].Workers {
					if !slices.Contains(p.Mirrors, c) {
						m.need[c] = true
					}
				}
			}
			if x == w.me {
				m.altered = &target
			}
		}
		for s, p := range w.plan.Shards {
			holds := p.Holds(x)
			if !holds && !slices.Contains(w.plan.Stages[w.plan.StageOf(p.Layer)].Workers, x) {
				continue
			}
			has := saidOf{worker: x, params: le.Uint32(b), holds: holds}
			b = b[4:]
			if holds {
				has.state = le.Uint32(b)
				b = b[4:]
			}
			if !offended[s] && (has.params != 0 || has.state != 0) {
				sums[s] = append(sums[s], has)
			}
		}
	}
	for s, all := range sums {
		p := w.plan.Shards[s]
		var held, owned *saidOf // what a holder said, and the owner
		for i := range all {
			x := &all[i]
			if !x.holds {
				continue
			}
			if x.worker == p.Owner {
				owned = x
			}
			if held == nil {
				held = x
			}
			if x.state == held.state {
				continue
			}
			differ := &CorruptError{Step: w.passed.Step, Layer: w.c.Layers[p.Layer].Name, Block: -1}
			if !w.computes(RangeOf(p)) {
				return nil, nil, false, &othersError{differ}
			}
			return nil, nil, false, differ
		}
		// A copy which is as it came, and yet not what the owner has now: its owner had another one when it passed it on, or was
		// another worker that is lost.
		for _, x := range all {
			if owned == nil || x.holds || x.params == owned.params {
				continue
			}
			m := of(place{s, -1}, p, w.blockAt(p.Layer, p.Lo), p.Lo, p.Hi)
			m.need[x.worker] = true
			if x.worker == w.me {
				m.altered = new(Target)
				*m.altered = Differ
			}
		}
	}
	for _, m := range repairs {
		p := w.planned(m.r)
		for _, h := range append([]id.WorkerID{p.Owner}, p.Mirrors...) {
			if !m.need[h] {
				x, _ := w.plan.Worker(h)
				m.good = append(m.good, x)
			}
		}
	}
	return words, repairs, again || len(repairs) > 0, nil
}

// beginRepair begins to repair blocks, instead of passing the point of an exchange.
func (w *Worker) beginRepair(said [][]byte, repairs []*repair) {
	if w.passed.Repair == key.MaxRepair {
		w.fail(fmt.Errorf("after step %d, the memory of workers was altered %d times", w.passed.Step, key.MaxRepair))
		return
	}
	w.passed.Repair++
	w.result = encodeSaid(said)
	if w.step != nil {
		w.endStep()
		w.emit(Clear{})
	}
	w.req.said, w.req.exchanging = nil, false
	w.repairs = repairs
	w.goOnRepairing()
}

// repairing reports whether blocks are on their way here.
func (w *Worker) repairing() bool {
	return slices.ContainsFunc(w.repairs, func(m *repair) bool { return m.need[w.me] })
}

// resumeRepairs continues under another plan. What was sent may be lost. A worker that has become a holder has the block from a
// transfer, or from when it held the range before, unless its own copy was altered, too.
func (w *Worker) resumeRepairs(old *plan.Plan) {
	for _, m := range w.repairs {
		clear(m.told)
		for _, x := range w.plan.Workers {
			held := func(s plan.Shard) bool { return RangeOf(s) == m.r && s.Holds(x.ID) }
			if p := w.planned(m.r); !p.Holds(x.ID) || slices.ContainsFunc(old.Shards, held) {
				continue
			}
			if x.ID == w.me && m.altered == nil {
				delete(m.need, w.me)
			}
			if !m.need[x.ID] {
				m.good = append(m.good, x)
			}
		}
	}
	w.goOnRepairing()
}

// goOnRepairing sends what this worker has, and expects what it lacks.
func (w *Worker) goOnRepairing() {
	for _, m := range w.repairs {
		p := w.planned(m.r)
		serves := slices.Contains(w.plan.Stages[w.plan.StageOf(m.r.Layer)].Workers, w.me)
		arrays, a, at := 1, w.attempt(), w.passed
		if p.Holds(w.me) {
			arrays += w.c.Moments
		}
		switch {
		case m.need[w.me] && !p.Holds(w.me) && !serves:
			delete(m.need, w.me)
		case m.need[w.me] && m.arrays == 0:
			m.left, m.arrays = arrays, arrays
			for j := range arrays {
				b := Buffer{Content: RepairBlock, Range: m.r, Block: m.block, Array: j}
				w.expect(key.Block(a, at.Gate, m.block, j), b, 4*(m.block.Hi-m.block.Lo), expected{content: aBlock, repair: m, at: at})
			}
		}
		lost := !slices.ContainsFunc(m.good, func(g plan.Worker) bool {
			now, ok := w.plan.Worker(g.ID)
			return ok && now == g
		})
		if lost && m.altered != nil && m.need[w.me] && p.Holds(w.me) {
			w.fail(&CorruptError{Step: w.passed.Step, Layer: w.c.Layers[m.r.Layer].Name, Block: m.index, Target: *m.altered})
			return
		}
		if m.need[w.me] || !w.computes(m.r) {
			continue
		}
		for j := range 1 + w.c.Moments {
			for _, x := range w.plan.Workers {
				if m.need[x.ID] && !m.told[x.ID] && (j == 0 || p.Holds(x.ID)) {
					b := Buffer{Content: RepairBlock, Range: m.r, Block: m.block, Array: j}
					w.emit(Send{To: SessionOf(x), Key: key.Block(a, at.Gate, m.block, j), From: b, Priority: comm.Bulk})
				}
			}
		}
		for x := range m.need {
			m.told[x] = true
		}
	}
}

// blockCame takes an array of a block.
func (w *Worker) blockCame(x expected, ev Received) {
	m := x.repair
	if w.over() || w.passed != x.at || !m.need[w.me] {
		return
	}
	if n := 4 * (m.block.Hi - m.block.Lo); ev.Bytes != n {
		w.fail(fmt.Errorf("worker %v sent %d bytes of a block of %d", ev.From, ev.Bytes, n))
		return
	}
	if m.left--; m.left > 0 {
		return
	}
	delete(m.need, w.me)
	held := w.computes(m.r)
	if !held {
		m.arrays = 1 // the moments are not here any more
	}
	w.emit(Restore{m.r, m.block, m.arrays, held})
	if m.altered != nil {
		w.tellRepaired(w.passed.Step+1, m.r.Layer, m.index, *m.altered)
	}
	w.goOnRepairing()
}

// tellRepaired tells that a block was altered here, and is as it was again. step is the one that was done again, or the next one. The
// block is the micro-batch for Passed, and the first of several for Differ.
func (w *Worker) tellRepaired(step, layer, block int, of Target) {
	w.emit(control.Repaired{Step: step, Try: w.passed.Repair, Layer: w.c.Layers[layer].Name, Block: block, Target: of.String()})
}

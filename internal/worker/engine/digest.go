package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Every holder of a block of parameters or moments keeps a digest of it, taken
// as the block was written, and reads the block again before every exchange. So
// the one whose memory has altered finds it out itself, and says so in the
// exchange: nobody has to vote. The point of the exchange is then not passed.
// Instead, all are at the same point as before with its Repair counted up, give
// up what they have of the step, and do it again with the blocks that the good
// holders send.
//
// Every exchange, and not only some, because what is found later cannot be done
// again. It reads 4 bytes of each array of each block; the passes of a step
// compute six numbers for each parameter and target.
//
// Between the check and the update blocks are not in use but by the update,
// which holds each block against its digest once more. One that was altered
// then gets a digest that nothing fits, so the next check finds it.

// Target is memory in which a block was altered.
type Target uint8

// The targets.
const (
	Own    Target = iota // parameters of a shard that the worker owns
	Mirror               // parameters or moments of a shard that it mirrors
	Copy                 // parameters that came from another worker
	Moment               // moments of a shard that it owns

	// Passed is not memory of the worker that tells of it: a boundary tensor which it got from
	// a worker that is lost is not what was computed again, so memory of one of the two was altered.
	Passed
	// Differ is a copy that is as it came, but not what the owner has.
	Differ
)

var targetNames = [...]string{"own", "mirror", "copy", "moment", "passed", "differ"}

func (t Target) String() string {
	if int(t) < len(targetNames) {
		return targetNames[t]
	}
	return fmt.Sprintf("target%d", uint8(t))
}

// ParseTarget returns the target with a name, of those in which a bit can be flipped.
func ParseTarget(name string) (Target, bool) {
	i := slices.Index(targetNames[:Passed], name)
	return Target(max(i, 0)), i >= 0
}

// Repair says that a block of this worker was altered, and is as it was again.
type Repair struct {
	Step   int // that was done again, or the next one
	Try    int // repairs since the point that was passed last
	Layer  int
	Block  int // of the layer, in the order of zero.Blocks; the micro-batch for Passed, the first of several for Differ
	Target Target
}

// CorruptError says that state was altered which nobody has as it was.
type CorruptError struct {
	Step   int    // after which the state is
	Layer  string // name
	Block  int    // -1 where holders of a shard differ, and nobody can tell who is right
	Target Target
}

func (e *CorruptError) Error() string {
	if e.Block < 0 {
		return fmt.Sprintf("after step %d, the holders of a shard of layer %q differ, and nobody can tell who is right", e.Step, e.Layer)
	}
	return fmt.Sprintf("after step %d, block %d of layer %q was altered in memory (%v), and no other worker has it", e.Step, e.Block, e.Layer, e.Target)
}

// othersError is an error with which other workers end.
type othersError struct{ error }

// guard is what the engine knows of its blocks. mu guards sums, of which the
// update writes some while others arrive.
type guard struct {
	blocks [][]zero.Block // of each layer

	mu sync.Mutex
	// sums are the digests of each layer, by array (the parameters, then each
	// moment) and block. Zero are those of blocks that are not here, or come.
	sums [][][]zero.Digest

	mends []*mend // of the point where the run is
}

func newGuard(c *Config) *guard {
	g := &guard{}
	for _, l := range c.Layers {
		blocks := zero.Blocks(l.Tensors)
		arrays := make([][]zero.Digest, 1+c.Rule.Moments())
		for j := range arrays {
			arrays[j] = make([]zero.Digest, len(blocks))
		}
		g.blocks, g.sums = append(g.blocks, blocks), append(g.sums, arrays)
	}
	return g
}

// blocksOf returns the indices of the blocks of a range.
func (g *guard) blocksOf(r id.Range) (first, end int) {
	at := func(lo int) int {
		i, _ := slices.BinarySearchFunc(g.blocks[r.Layer], lo, func(b zero.Block, lo int) int { return b.Lo - lo })
		return i
	}
	return at(r.Lo), at(r.Hi)
}

// of returns the digests of a range.
func (g *guard) of(r id.Range) [][]zero.Digest {
	if g == nil {
		return nil
	}
	first, end := g.blocksOf(r)
	var d [][]zero.Digest
	for _, sums := range g.sums[r.Layer] {
		d = append(d, sums[first:end:end])
	}
	return d
}

// fit reports whether a copy of a range, its arrays one after the other, is as the range was written.
func (g *guard) fit(r id.Range, arrays []float32) bool {
	if g == nil {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	first, end := g.blocksOf(r)
	for j, sums := range g.sums[r.Layer] {
		x := arrays[j*(r.Hi-r.Lo):]
		for i, b := range g.blocks[r.Layer][first:end] {
			if !sums[first+i].Fits(x[b.Lo-r.Lo : b.Hi-r.Lo]) {
				return false
			}
		}
	}
	return true
}

// take takes the digests of arrays that were written just now: of the parameters of a
// range and, if they are given, its moments.
func (g *guard) take(r id.Range, params []float32, moments ...[]float32) {
	if g == nil {
		return
	}
	first, end := g.blocksOf(r)
	for j, x := range append([][]float32{params}, moments...) {
		d := make([]zero.Digest, 0, end-first)
		for _, b := range g.blocks[r.Layer][first:end] {
			d = append(d, zero.DigestOf(x[b.Lo-r.Lo:b.Hi-r.Lo]))
		}
		g.mu.Lock()
		copy(g.sums[r.Layer][j][first:end], d)
		g.mu.Unlock()
	}
}

// watch takes the digests of what a plan has brought here, other than by
// messages.
func (e *Engine) watch(fresh []int) {
	if e.guard == nil {
		return
	}
	for _, l := range fresh {
		if e.passed == e.start {
			params := e.c.Layers[l].Params
			e.guard.take(id.Range{Layer: l, Lo: 0, Hi: len(params)}, params)
		}
	}
	for _, sh := range e.shards {
		if sh.state != nil && !sh.watched {
			sh.watched = true
			e.guard.take(sh.Range, sh.params, sh.state.Moments...)
		}
	}
}

// span is a range of the plan as far as it is held here.
type span struct {
	shard  int // of the plan
	r      id.Range
	first  int // of its blocks
	blocks []zero.Block
	arrays [][]float32
	sums   [][]zero.Digest
	state  bool
	owner  bool
}

// target returns what array j of the span is.
func (s *span) target(j int) Target {
	switch {
	case !s.state:
		return Copy
	case !s.owner:
		return Mirror
	case j > 0:
		return Moment
	}
	return Own
}

// spans returns all that this worker holds, by the plan's shards.
func (e *Engine) spans() (spans []span) {
	for i, p := range e.plan.Shards {
		r := rangeOf(p)
		s := span{shard: i, r: r, sums: e.guard.of(r)}
		switch sh := e.shards[r]; {
		case sh != nil && sh.state != nil:
			s.arrays = append([][]float32{sh.params}, sh.state.Moments...)
			s.state, s.owner = true, sh.owner
		case e.serves(p.Layer):
			s.arrays = [][]float32{e.c.Layers[p.Layer].Params[p.Lo:p.Hi]}
		default:
			continue
		}
		if e.guard != nil {
			first, end := e.guard.blocksOf(r)
			s.first, s.blocks = first, e.guard.blocks[r.Layer][first:end]
		}
		spans = append(spans, s)
	}
	return spans
}

// offence is a block that is not as it was written.
type offence struct {
	shard, block int // of the plan; of the layer
	target       Target
}

const (
	// maxOffences is how many blocks a worker names in an exchange. More are
	// named in the next.
	maxOffences = 4
	offenceSize = 12
	checkSize   = 4 + maxOffences*offenceSize // and for each shard heldSize or copySize
	heldSize    = 8                           // of a shard that it owns or mirrors
	copySize    = 4                           // of one whose parameters it has
)

// checkGrain is the number of blocks whose reading is worth a thread.
const checkGrain = 16

// check reads all blocks again, in the computing goroutine, and returns what this
// worker says of them in an exchange: whether it has computed with a tensor that is
// wrong, blocks that were altered, and for each shard of which it has anything a digest of the
// digests of the parameters, and of all where it owns or mirrors the shard.
func (e *Engine) check(spans []span, tainted bool) []byte {
	if e.guard == nil {
		return nil
	}
	e.guard.mu.Lock()
	defer e.guard.mu.Unlock()
	var mu sync.Mutex
	var found []offence
	for i := range spans {
		s := &spans[i]
		e.c.Pool.For(len(s.blocks), checkGrain, func(lo, hi int) {
			for b := lo; b < hi; b++ {
				for j, x := range s.arrays {
					if s.sums[j][b].Fits(x[s.blocks[b].Lo-s.r.Lo : s.blocks[b].Hi-s.r.Lo]) {
						continue
					}
					mu.Lock()
					found = append(found, offence{s.shard, s.first + b, s.target(j)})
					mu.Unlock()
					break // all of the block is sent again
				}
			}
		})
	}
	le := binary.LittleEndian
	said := make([]byte, 4, checkSize+4*len(spans))
	if tainted {
		said[0] = 1
	}
	for i := range maxOffences {
		var o offence
		o.shard = -1
		if i < len(found) {
			o = found[i]
		}
		said = le.AppendUint32(said, uint32(1+o.shard))
		said = le.AppendUint32(said, uint32(o.block))
		said = le.AppendUint32(said, uint32(o.target))
	}
	for _, s := range spans {
		said = le.AppendUint32(said, digestOf(s.sums[:1]))
		if s.state {
			said = le.AppendUint32(said, digestOf(s.sums))
		}
	}
	return said
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// digestOf returns the digest of digests.
func digestOf(sums [][]zero.Digest) uint32 {
	var b []byte
	for _, d := range sums {
		for _, x := range d {
			b = binary.LittleEndian.AppendUint32(b, uint32(x))
		}
	}
	return crc32.Checksum(b, castagnoli)
}

// checkSizes returns how many bytes each worker of the plan says of its blocks.
func (e *Engine) checkSizes() map[id.WorkerID]int {
	sizes := make(map[id.WorkerID]int)
	if e.guard == nil {
		return sizes
	}
	for _, w := range e.plan.Workers {
		sizes[w.ID] = checkSize
	}
	for _, p := range e.plan.Shards {
		sizes[p.Owner] += heldSize
		for _, m := range p.Mirrors {
			sizes[m] += heldSize
		}
		for _, c := range e.plan.Stages[e.plan.StageOf(p.Layer)].Workers {
			if !p.Holds(c) {
				sizes[c] += copySize
			}
		}
	}
	return sizes
}

// mend is a block that is sent to who does not have it as it should be.
type mend struct {
	r       id.Range // of the shard
	index   int      // of the block in the layer
	block   zero.Block
	need    map[id.WorkerID]bool // who lacks it
	good    []plan.Worker        // who had it, with the moments, when it was found
	altered *Target              // here
	have    bool                 // with the moments
	asked   bool
	left    int // messages on their way here
	bufs    [][]float32
	told    map[id.WorkerID]bool
}

// saidOf is what a worker says of a shard in which it names no block.
type saidOf struct {
	worker id.WorkerID
	params uint32 // digest of the digests
	state  uint32 // the same of all, of holders
	holds  bool
}

// judge takes what workers say of their blocks off what they say in an
// exchange, and returns the blocks to be mended, and whether the step has to be done
// again, for their sake or another.
func (e *Engine) judge(said [][]byte) (words [][]byte, mends []*mend, again bool, err error) {
	if e.guard == nil {
		return said, nil, false, nil
	}
	le := binary.LittleEndian
	sizes := e.checkSizes()
	sums := make([][]saidOf, len(e.plan.Shards))
	type place struct{ shard, block int }
	found := make(map[place]*mend)
	for i, b := range said {
		w := e.plan.Workers[i].ID
		bad := fmt.Errorf("worker %d said of its blocks what cannot be", w)
		if len(b) < sizes[w] {
			return nil, nil, false, bad
		}
		words = append(words, b[sizes[w]:])
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
			if shard >= len(e.plan.Shards) || block >= len(e.guard.blocks[e.plan.Shards[shard].Layer]) || target > Moment {
				return nil, nil, false, bad
			}
			p := e.plan.Shards[shard]
			at := e.guard.blocks[p.Layer][block]
			if at.Lo < p.Lo || at.Hi > p.Hi {
				return nil, nil, false, bad
			}
			offended[shard] = true
			m := found[place{shard, block}]
			if m == nil {
				m = &mend{r: rangeOf(p), index: block, block: at, need: make(map[id.WorkerID]bool), told: make(map[id.WorkerID]bool)}
				found[place{shard, block}] = m
				mends = append(mends, m)
			}
			m.need[w] = true
			if w == p.Owner { // it may have passed it on
				for _, c := range e.plan.Stages[e.plan.StageOf(p.Layer)].Workers {
					if !slices.Contains(p.Mirrors, c) {
						m.need[c] = true
					}
				}
			}
			if w == e.c.Self.ID {
				m.altered = &target
			}
		}
		for s, p := range e.plan.Shards {
			holds := p.Holds(w)
			if !holds && !slices.Contains(e.plan.Stages[e.plan.StageOf(p.Layer)].Workers, w) {
				continue
			}
			x := saidOf{worker: w, params: le.Uint32(b), holds: holds}
			b = b[4:]
			if holds {
				x.state = le.Uint32(b)
				b = b[4:]
			}
			if !offended[s] {
				sums[s] = append(sums[s], x)
			}
		}
	}
	for s, all := range sums {
		p := e.plan.Shards[s]
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
			differ := &CorruptError{Step: e.passed.Step, Layer: e.c.Layers[p.Layer].Name, Block: -1}
			if sh := e.shards[rangeOf(p)]; sh == nil || sh.state == nil {
				return nil, nil, false, &othersError{differ}
			}
			return nil, nil, false, differ
		}
		// A copy which is as it came, and yet not what the owner has now: its owner had another one
		// when it passed it on, or was another worker that is lost.
		for _, x := range all {
			if owned == nil || x.holds || x.params == owned.params {
				continue
			}
			first, _ := e.guard.blocksOf(rangeOf(p))
			m := found[place{s, -1}]
			if m == nil {
				m = &mend{r: rangeOf(p), index: first, block: zero.Block{Lo: p.Lo, Hi: p.Hi}, need: make(map[id.WorkerID]bool), told: make(map[id.WorkerID]bool)}
				found[place{s, -1}] = m
				mends = append(mends, m)
			}
			m.need[x.worker] = true
			if x.worker == e.c.Self.ID {
				m.altered = new(Target)
				*m.altered = Differ
			}
		}
	}
	for _, m := range mends {
		p := e.planned(m.r)
		for _, h := range append([]id.WorkerID{p.Owner}, p.Mirrors...) {
			if !m.need[h] {
				w, _ := e.plan.Worker(h)
				m.good = append(m.good, w)
			}
		}
		sh := e.shards[m.r]
		m.have = sh != nil && sh.state != nil && !m.need[e.c.Self.ID]
	}
	return words, mends, again || len(mends) > 0, nil
}

// repair begins to mend blocks, instead of passing the point of an exchange.
func (e *Engine) repair(said [][]byte, mends []*mend) {
	if e.passed.Repair == key.MaxRepair {
		e.fail(fmt.Errorf("after step %d, the memory of workers was altered %d times", e.passed.Step, key.MaxRepair))
		return
	}
	e.passed.Repair++
	e.result = encodeSaid(said)
	if e.step != nil {
		e.clearStep()
	}
	e.req.said, e.req.exchanging = nil, false
	e.guard.mends = mends
	e.mend()
}

// mending reports whether blocks are on their way here.
func (e *Engine) mending() bool {
	return e.guard != nil && slices.ContainsFunc(e.guard.mends, func(m *mend) bool {
		return m.need[e.c.Self.ID] && (!m.asked || m.left > 0)
	})
}

// remend goes on under another plan. What was sent may be lost.
func (e *Engine) remend() {
	if e.guard == nil {
		return
	}
	for _, m := range e.guard.mends {
		clear(m.told)
	}
	e.mend()
}

// mend sends what this worker has, and expects what it lacks.
func (e *Engine) mend() {
	me := e.c.Self.ID
	for _, m := range e.guard.mends {
		p := e.planned(m.r)
		holds := p.Holds
		serves := func(w id.WorkerID) bool {
			return slices.Contains(e.plan.Stages[e.plan.StageOf(m.r.Layer)].Workers, w)
		}
		arrays := 1
		if holds(me) {
			arrays += e.c.Rule.Moments()
		}
		switch {
		case m.need[me] && !holds(me) && !serves(me):
			delete(m.need, me)
		case m.need[me] && !m.asked:
			m.asked, m.left = true, arrays
			m.bufs = make([][]float32, arrays)
			for j := range m.bufs {
				m.bufs[j] = make([]float32, m.block.Hi-m.block.Lo)
				e.receiveMend(m, j)
			}
		}
		lost := !slices.ContainsFunc(m.good, func(g plan.Worker) bool {
			now, ok := e.plan.Worker(g.ID)
			return ok && now == g
		})
		if lost && m.altered != nil && m.left > 0 && holds(me) {
			e.fail(&CorruptError{Step: e.passed.Step, Layer: e.c.Layers[m.r.Layer].Name, Block: m.index, Target: *m.altered})
			return
		}
		sh := e.shards[m.r]
		if !m.have || sh == nil || sh.state == nil {
			continue
		}
		for j, x := range append([][]float32{sh.params}, sh.state.Moments...) {
			for w := range m.need {
				if _, ok := e.plan.Worker(w); ok && w != me && !m.told[w] && (j == 0 || holds(w)) {
					e.post(w, e.mendKey(m, j), comm.Bytes(x[m.block.Lo-m.r.Lo:m.block.Hi-m.r.Lo]), comm.Bulk)
				}
			}
		}
		for w := range m.need {
			m.told[w] = true
		}
	}
}

// mendKey names array j of a block.
func (e *Engine) mendKey(m *mend, j int) comm.Key {
	return key.Block(e.attempt(), e.passed.Gate, id.Range{Layer: m.r.Layer, Lo: m.block.Lo, Hi: m.block.Hi}, j)
}

func (e *Engine) receiveMend(m *mend, j int) {
	r := e.c.Network.Expect(e.mendKey(m, j), comm.Bytes(m.bufs[j]))
	at := e.passed
	r.OnDone(func() {
		e.mail.put(func() {
			n, from, err := r.Wait(e.ctx) // it has ended
			switch {
			case err != nil || e.err != nil || e.passed != at:
				return
			case n != 4*len(m.bufs[j]):
				e.fail(fmt.Errorf("worker %v sent %d bytes of a block of %d", from, n, len(m.bufs[j])))
				return
			}
			if m.left--; m.left == 0 {
				e.mended(m)
			}
		})
	})
}

// mended puts a block that has come in its place.
func (e *Engine) mended(m *mend) {
	r := id.Range{Layer: m.r.Layer, Lo: m.block.Lo, Hi: m.block.Hi}
	arrays := [][]float32{e.c.Layers[m.r.Layer].Params}
	base := 0
	if sh := e.shards[m.r]; sh != nil && sh.state != nil {
		arrays, base = append([][]float32{sh.params}, sh.state.Moments...), m.r.Lo
		m.have = true
	}
	for j, b := range m.bufs {
		copy(arrays[j][m.block.Lo-base:], b)
	}
	e.guard.take(r, m.bufs[0], m.bufs[1:]...)
	if m.altered != nil && e.c.Repaired != nil {
		e.c.Repaired(Repair{Step: e.passed.Step + 1, Try: e.passed.Repair, Layer: m.r.Layer, Block: m.index, Target: *m.altered})
	}
	e.mend()
}

// settle waits until all parameters have arrived, in the computing goroutine.
func (e *Engine) settle(ctx context.Context) error {
	if e.guard == nil {
		return nil
	}
	for l := range e.arrivals {
		if err := e.arrivals[l].wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Flip flips a bit of this worker's memory, to see what comes of it: as soon as
// nothing reads or writes there, and there is memory of the kind.
func (e *Engine) Flip(t Target) {
	e.mail.put(func() { e.flips = append(e.flips, t) })
}

// flip flips the bits that were asked for, if it may now.
func (e *Engine) flip() {
	if len(e.flips) == 0 || e.busy != idle || !e.arrived() || e.mending() ||
		slices.ContainsFunc(e.sent, func(s *comm.Sending) bool { return !isClosed(s.Done()) }) {
		return
	}
	spans := e.spans()
	e.flips = slices.DeleteFunc(e.flips, func(t Target) bool {
		var at [][]float32
		for i := range spans {
			for j, x := range spans[i].arrays {
				if len(x) > 0 && spans[i].target(j) == t {
					at = append(at, x)
				}
			}
		}
		if len(at) == 0 {
			return false
		}
		x := at[e.draw(len(at))]
		i := e.draw(len(x))
		x[i] = math.Float32frombits(math.Float32bits(x[i]) ^ 1<<e.draw(32))
		return true
	})
}

// draw returns a number below n, of the sequence of splitmix64.
func (e *Engine) draw(n int) int {
	e.drawn += 0x9e3779b97f4a7c15
	z := e.drawn + uint64(e.c.Self.ID)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return int((z ^ z>>31) % uint64(n))
}

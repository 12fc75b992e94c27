package engine

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// guard is what the engine knows of its blocks. mu guards sums, of which the update writes some while others arrive.
type guard struct {
	blocks [][]zero.Block // of each layer

	mu sync.Mutex
	// sums are the digests of each layer, by array (the parameters, then each
	// moment) and block. Zero are those of blocks that are not here, or come.
	sums [][][]zero.Digest
}

func newGuard(c *Config) *guard {
	if c.NoDigests {
		return nil
	}
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
	for j := range g.sums[r.Layer] {
		if !g.fitArray(r, j, arrays[j*(r.Hi-r.Lo):]) {
			return false
		}
	}
	return true
}

// fitArray reports it of one array: of the parameters (0) or of moment j-1.
func (g *guard) fitArray(r id.Range, j int, x []float32) bool {
	if g == nil {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	first, end := g.blocksOf(r)
	for i, b := range g.blocks[r.Layer][first:end] {
		if !g.sums[r.Layer][j][first+i].Fits(x[b.Lo-r.Lo : b.Hi-r.Lo]) {
			return false
		}
	}
	return true
}

// take takes the digests of arrays that were written just now: of the parameters of a range, unless they are nil, and, if they are given, its moments.
func (g *guard) take(r id.Range, params []float32, moments ...[]float32) {
	g.put(r, g.measure(r, params, moments...))
}

// measure returns the digests of such arrays.
func (g *guard) measure(r id.Range, params []float32, moments ...[]float32) (all [][]zero.Digest) {
	if g == nil {
		return nil
	}
	first, end := g.blocksOf(r)
	for _, x := range append([][]float32{params}, moments...) {
		var d []zero.Digest
		if x != nil {
			d = make([]zero.Digest, 0, end-first)
			for _, b := range g.blocks[r.Layer][first:end] {
				d = append(d, zero.DigestOf(x[b.Lo-r.Lo:b.Hi-r.Lo]))
			}
		}
		all = append(all, d)
	}
	return all
}

// takeZeros takes the digests of a range's moments where these are zeros that were made just now. It does not read them: the first use of new memory
// costs a fault for each page.
func (g *guard) takeZeros(r id.Range) {
	if g == nil {
		return
	}
	first, end := g.blocksOf(r)
	blocks := g.blocks[r.Layer][first:end]
	longest := 0
	for _, b := range blocks {
		longest = max(longest, b.Hi-b.Lo)
	}
	zeros := make([]float32, longest)
	digests := make([]zero.Digest, len(blocks))
	for i, b := range blocks {
		if i > 0 && b.Hi-b.Lo == blocks[i-1].Hi-blocks[i-1].Lo {
			digests[i] = digests[i-1]
			continue
		}
		digests[i] = zero.DigestOf(zeros[:b.Hi-b.Lo])
	}
	all := make([][]zero.Digest, len(g.sums[r.Layer]))
	for j := 1; j < len(all); j++ {
		all[j] = digests
	}
	g.put(r, all)
}

// put sets digests of a range.
func (g *guard) put(r id.Range, all [][]zero.Digest) {
	if g == nil {
		return
	}
	first, end := g.blocksOf(r)
	g.mu.Lock()
	defer g.mu.Unlock()
	for j, d := range all {
		copy(g.sums[r.Layer][j][first:end], d)
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
	sends  bool // others are sent what its update makes of it
}

// target returns what array j of the span is.
func (s *span) target(j int) core.Target {
	switch {
	case !s.state:
		return core.CopiedParams
	case !s.owner:
		return core.Mirror
	case j > 0:
		return core.Moment
	}
	return core.Own
}

// culprit returns the array that was altered where array j of a block does not fit: another one where an update has read that.
func (s *span) culprit(j, block int) int {
	if i := slices.IndexFunc(s.sums, func(d []zero.Digest) bool { _, origin := d[block].Altered(); return origin }); i >= 0 {
		return i
	}
	return j
}

// marked reports whether an update has made a block out of one that was altered.
func (s *span) marked() bool {
	return slices.ContainsFunc(s.sums[0], func(d zero.Digest) bool { is, _ := d.Altered(); return is })
}

// corrupt is the error of a block of a shard that is held here and not as it was written, and that no other worker is asked for.
func (e *Engine) corrupt(owner bool, block id.Range, array int) error {
	first, _ := e.guard.blocksOf(block)
	s := span{state: true, owner: owner, sums: e.guard.of(block)}
	return &core.CorruptError{Step: e.updating, Layer: e.c.Layers[block.Layer].Name, Block: first, Target: s.target(s.culprit(array, 0))}
}

// spoiled returns an error for a block of an owned shard that an update has made out of one that was altered, nil if there is none.
func (e *Engine) spoiled(sh *shard) error {
	if e.guard == nil {
		return nil
	}
	e.guard.mu.Lock()
	defer e.guard.mu.Unlock()
	first, end := e.guard.blocksOf(sh.Range)
	for i, b := range e.guard.blocks[sh.Layer][first:end] {
		if is, _ := e.guard.sums[sh.Layer][0][first+i].Altered(); is {
			return e.corrupt(true, id.Range{Layer: sh.Layer, Lo: b.Lo, Hi: b.Hi}, 0)
		}
	}
	return nil
}

// spans returns all that this worker holds, by the plan's shards.
func (e *Engine) spans() (spans []span) {
	for i, p := range e.plan.Shards {
		r := core.RangeOf(p)
		s := span{shard: i, r: r, sums: e.guard.of(r)}
		switch sh := e.shards[r]; {
		case sh != nil && sh.state != nil:
			s.arrays = sh.arrays()
			s.state, s.owner, s.sends = true, sh.owner, sh.owner && len(e.plan.Workers) > 1
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

// checkGrain is the number of blocks whose reading is worth a thread.
const checkGrain = 16

// check reads blocks again, in the computing goroutine, and returns what this worker says of them in an exchange: whether it has computed with a tensor that
// is wrong, blocks that were altered, and for each shard of which it has anything a digest of the digests of the parameters, and of all where it
// owns or mirrors the shard. Its error is that of ctx, which ends it between two blocks.
//
// Moments are read where all is set, and those of an owner with peers, which are sent what its update makes of them. Others are compared as they are used: by the
// update, which marks what it makes of one that was altered, and before they are copied.
func (e *Engine) check(ctx context.Context, spans []span, tainted, all bool) ([]byte, error) {
	if e.guard == nil {
		return nil, nil
	}
	e.guard.mu.Lock()
	defer e.guard.mu.Unlock()
	var mu sync.Mutex
	var found []core.Offence
	for i := range spans {
		s := &spans[i]
		e.c.Pool.For(len(s.blocks), checkGrain, func(lo, hi int) {
			for b := lo; b < hi && ctx.Err() == nil; b++ {
				for j, x := range s.arrays {
					if j > 0 && !all && !s.sends {
						break
					}
					if s.sums[j][b].Fits(x[s.blocks[b].Lo-s.r.Lo : s.blocks[b].Hi-s.r.Lo]) {
						continue
					}
					mu.Lock()
					found = append(found, core.Offence{Shard: s.shard, Block: s.first + b, Target: s.target(s.culprit(j, b))})
					mu.Unlock()
					break // all of the block is sent again
				}
			}
		})
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	shards := make([]core.Attested, len(spans))
	for i, s := range spans {
		if shards[i].Held = s.state; s.marked() {
			continue // it says nothing of the shard, of which it may have named other blocks than this
		}
		shards[i].Params = digestOf(s.sums[:1])
		if s.state {
			shards[i].State = digestOf(s.sums)
		}
	}
	return core.AppendCheck(tainted, found, shards), nil
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

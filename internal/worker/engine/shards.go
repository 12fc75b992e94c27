package engine

import (
	"cmp"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// shard is the memory of a range that this worker has a part in.
type shard struct {
	id.Range
	owner bool
	state *zero.Shard // nil where only the gradient is here
	// params is part of the layer's Params where this worker serves it, else memory of its own.
	params []float32

	total   []float32 // the gradient of the step, once the core says that it is complete
	within  []float32 // the array that it is part of
	own     []float32 // memory for it
	watched bool      // its digests were taken
	zeros   bool      // its moments are as they were made
	late    *incoming // what it is made of, until its last update is replayed
}

// arrays returns the parameters and the moments.
func (sh *shard) arrays() [][]float32 { return append([][]float32{sh.params}, sh.state.Moments...) }

// gradientIn says where the gradient of the shard is, or comes: in a part of an array.
func (sh *shard) gradientIn(within []float32, lo, hi int) {
	sh.total, sh.within = within[lo:hi], within
}

// incoming is the state of a range that a transfer brings.
type incoming struct {
	r         id.Range
	base      []float32
	state     *zero.Shard // nil before the base is here
	params    []float32
	gradients [2][]float32    // used again for further updates
	measured  chan struct{}   // closed when digests are those of the base
	digests   [][]zero.Digest // nil without a guard
}

// increment returns memory for a gradient.
func (in *incoming) increment(i int) []float32 {
	if in.gradients[i] == nil {
		in.gradients[i] = pages.Make(in.r.Hi - in.r.Lo)
	}
	return in.gradients[i]
}

// found makes the state of a range out of the base that has come.
func (e *Engine) found(r id.Range) error {
	in := e.incoming[r]
	n := r.Hi - r.Lo
	array := func(j int) []float32 { return in.base[core.BaseHead+j*n : core.BaseHead+(j+1)*n] }
	var moments [][]float32
	for j := range e.c.Rule.Moments() {
		moments = append(moments, array(1+j))
	}
	state, err := zero.ShardOf(e.c.Rule, r, e.c.Layers[r.Layer].Tensors, moments)
	if err != nil {
		return err
	}
	in.params, in.state, in.measured = array(0), state, make(chan struct{})
	e.tasks.Go(func() { // a plan may wait for what follows
		in.digests = e.guard.measure(r, in.params, moments...)
		close(in.measured)
	})
	return nil
}

// hold makes the shards of a plan.
func (e *Engine) hold(d core.Apply) error {
	made := make(map[id.Range]*shard)
	var derived []id.Range
	for _, n := range d.Shards {
		if n.From == core.Derived {
			derived = append(derived, n.Range)
		}
	}
	moments := lay(derived, e.c.Rule.Moments())
	for _, n := range d.Shards {
		sh := &shard{Range: n.Range}
		switch n.From {
		case core.Preset:
			sh = e.initial.shards[n.Range]
		case core.Derived:
			var err error
			if sh, err = e.derive(n.Range, moments[n.Range]); err != nil {
				return err
			}
		case core.Assembled:
			var err error
			if sh, err = e.assemble(n.Range, n.Transfers); err != nil {
				return err
			}
		case core.Late:
			in := e.incoming[n.Range]
			sh.state, sh.params, sh.watched, sh.late = in.state, in.params, true, in
		}
		made[n.Range] = sh
	}
	for r, sh := range e.shards {
		if _, replaced := made[r]; (replaced || slices.Contains(d.Gone, r)) && sh.state != nil {
			e.former = append(e.former, sh)
		}
	}
	for _, r := range d.Gone {
		delete(e.shards, r)
	}
	for r, sh := range made {
		e.shards[r] = sh
		if sh.state != nil && sh.late == nil && e.serves(sh.Layer) && e.c.Layers[sh.Layer].Params != nil {
			// Of a layer that was served before, the parameters are there.
			view := e.c.Layers[sh.Layer].Params[r.Lo:r.Hi]
			place(view, sh.params)
			sh.params = view
		}
	}
	for _, p := range e.plan.Shards {
		if sh := e.shards[core.RangeOf(p)]; sh != nil {
			sh.owner = p.Owner == e.c.Self.ID
		}
	}
	return nil
}

// watch takes the digests of shards that a plan has brought here, other than by messages, but for first values that are still to be made.
func (e *Engine) watch(initial bool) {
	for _, sh := range e.shards {
		if sh.state != nil && !sh.watched {
			sh.watched = true
			params := sh.params
			if initial && !e.gates[sh.Layer].isOpen() {
				params = nil
			}
			if !sh.zeros {
				e.guard.take(sh.Range, params, sh.state.Moments...)
				continue
			}
			e.guard.take(sh.Range, params)
			e.guard.takeZeros(sh.Range)
		}
	}
}

// derive makes the state of a range out of the first values of its layer. Where these are made and were altered since, they are made again.
func (e *Engine) derive(r id.Range, moments [][]float32) (*shard, error) {
	state, err := zero.ShardOf(e.c.Rule, r, e.c.Layers[r.Layer].Tensors, moments)
	if err != nil {
		return nil, err
	}
	sh := &shard{Range: r, state: state, params: e.c.Layers[r.Layer].Params[r.Lo:r.Hi], zeros: true}
	if e.gates[r.Layer].isOpen() && !e.guard.fitArray(r, 0, sh.params) {
		sh.params = pages.Make(r.Hi - r.Lo)
		err = e.begin(r, sh.params, nil)
	}
	return sh, err
}

// assemble makes the state of a range out of what is here of it.
func (e *Engine) assemble(r id.Range, transfers []id.Range) (*shard, error) {
	if slices.Contains(transfers, r) {
		in := e.incoming[r]
		<-in.measured
		e.guard.put(r, in.digests)
		return &shard{Range: r, state: in.state, params: in.params, watched: true}, nil
	}
	if arrays := e.joined(r); arrays != nil {
		state, err := zero.ShardOf(e.c.Rule, r, e.c.Layers[r.Layer].Tensors, arrays[1:])
		return &shard{Range: r, state: state, params: arrays[0], watched: true}, err
	}
	state, err := zero.NewShard(e.c.Rule, r, e.c.Layers[r.Layer].Tensors)
	if err != nil {
		return nil, err
	}
	// What was held here keeps its digests, which also tell of what alters on the way.
	sh := &shard{Range: r, state: state, params: pages.Make(r.Hi - r.Lo), watched: true}
	take := func(from id.Range, params []float32, moments [][]float32) {
		lo, hi := max(from.Lo, r.Lo), min(from.Hi, r.Hi)
		if from.Layer != r.Layer || lo >= hi {
			return
		}
		pages.Copy(sh.params[lo-r.Lo:hi-r.Lo], params[lo-from.Lo:hi-from.Lo])
		for i, m := range moments {
			pages.Copy(state.Moments[i][lo-r.Lo:hi-r.Lo], m[lo-from.Lo:hi-from.Lo])
		}
	}
	for _, old := range e.former {
		take(old.Range, old.params, old.state.Moments)
	}
	for _, old := range e.shards {
		if old.state != nil {
			take(old.Range, old.params, old.state.Moments)
		}
	}
	for _, x := range transfers {
		in := e.incoming[x]
		take(in.r, in.params, in.state.Moments)
		if x.Layer == r.Layer {
			<-in.measured
			e.guard.put(in.r, in.digests)
		}
	}
	return sh, nil
}

// lay makes as many arrays for each range. Those of ranges of a layer that follow each other do so in memory, too, so that they can be joined when a plan
// has one range of them; and a part of a range is a part of its arrays.
func lay(ranges []id.Range, arrays int) map[id.Range][][]float32 {
	sorted := slices.Clone(ranges)
	slices.SortFunc(sorted, func(a, b id.Range) int { return cmp.Or(a.Layer-b.Layer, a.Lo-b.Lo, a.Hi-b.Hi) })
	made := make(map[id.Range][][]float32)
	for len(sorted) > 0 {
		n := 1
		for n < len(sorted) && sorted[n].Layer == sorted[0].Layer && sorted[n].Lo == sorted[n-1].Hi {
			n++
		}
		lo, hi := sorted[0].Lo, sorted[n-1].Hi
		for range arrays {
			whole := pages.Make(hi - lo)
			for _, r := range sorted[:n] {
				made[r] = append(made[r], whole[r.Lo-lo:r.Hi-lo])
			}
		}
		sorted = sorted[n:]
	}
	return made
}

// joined returns the parameters and moments of a range where they are, nil if what is held here of it does not cover it in one piece of memory.
func (e *Engine) joined(r id.Range) [][]float32 {
	held := slices.Clone(e.former)
	for _, sh := range e.shards {
		held = append(held, sh)
	}
	var whole [][]float32
	for at := r.Lo; at < r.Hi; {
		i := slices.IndexFunc(held, func(sh *shard) bool {
			return sh.state != nil && sh.Layer == r.Layer && sh.Lo <= at && at < sh.Hi && follow(whole, sh.arrays(), at-sh.Lo)
		})
		if i < 0 {
			return nil
		}
		hi := min(held[i].Hi, r.Hi)
		for j, x := range held[i].arrays() {
			if at == r.Lo {
				whole = append(whole, x[at-held[i].Lo:hi-held[i].Lo])
			} else {
				whole[j] = whole[j][:hi-r.Lo]
			}
		}
		at = hi
	}
	return whole
}

// follow reports whether arrays, from an element on, lie in memory where others end, or there are no others.
func follow(others, arrays [][]float32, from int) bool {
	for j, x := range others {
		if n := len(x); cap(x)-n < len(arrays[j])-from || &x[:n+1][n] != &arrays[j][from] {
			return false
		}
	}
	return true
}

// copied brings bases.
type copied struct{ bases map[core.Transfer][]float32 }

// copyBases copies the bases of transfers, but for those whose source was altered, which the next exchange repairs, until it is to stop.
func (e *Engine) copyBases(copies []core.Copy, sources []*shard, step int) map[core.Transfer][]float32 {
	bases := make(map[core.Transfer][]float32)
	for i, c := range copies {
		sh := sources[i]
		lo, hi := c.Range.Lo-sh.Lo, c.Range.Hi-sh.Lo
		m := e.spares.get(core.BaseHead + (1+len(sh.state.Moments))*(hi-lo))
		m[0] = math.Float32frombits(uint32(step))
		for i, x := range sh.arrays() {
			if e.copyStop.Load() {
				return bases
			}
			pages.Copy(m[core.BaseHead+i*(hi-lo):], x[lo:hi])
		}
		if e.guard.fit(c.Range, m[core.BaseHead:]) {
			bases[c.Transfer] = m
		}
	}
	return bases
}

// place writes parameters where a layer reads them. What lies there already is not touched, because it may be on its way to others.
func place(to, params []float32) {
	if same := len(to) > 0 && &to[0] == &params[0]; !same && !slices.Equal(to, params) {
		pages.Copy(to, params)
	}
}

// inOrder returns the shards by layer, then range.
func (e *Engine) inOrder() (all []*shard) {
	for _, p := range e.plan.Shards {
		if sh := e.shards[core.RangeOf(p)]; sh != nil {
			all = append(all, sh)
		}
	}
	return all
}

// restore puts a repaired block in its place.
func (e *Engine) restore(d core.Restore) {
	to, base := [][]float32{e.c.Layers[d.Range.Layer].Params}, 0
	if d.Held {
		to, base = e.shards[d.Range].arrays(), d.Range.Lo
	}
	var arrays [][]float32
	for j := range d.Arrays {
		at := blockArray{d.Block, j}
		arrays = append(arrays, e.blocks[at])
		copy(to[j][d.Block.Lo-base:], e.blocks[at])
		delete(e.blocks, at)
	}
	e.guard.take(d.Block, arrays[0], arrays[1:]...)
}

// replay applies an update to the state that a transfer brings.
func (e *Engine) replay(d core.Replay) {
	in := e.incoming[d.Range]
	e.startBeside(false, core.Replayed{}, func() error {
		<-in.measured
		in.state.Update(e.c.Pool, in.params, in.gradients[d.Increment], d.Update, in.digests...)
		return nil
	}, nil)
}

// catchUp applies the last update to a shard that is late.
func (e *Engine) catchUp(d core.CatchUp) {
	sh := e.shards[d.Range]
	in := sh.late
	var layer []float32
	if e.serves(sh.Layer) {
		layer = e.c.Layers[sh.Layer].Params[sh.Lo:sh.Hi]
	}
	lacks := layer != nil && !e.gates[sh.Layer].isOpen() // else it has the same parameters, or altered ones, which the next check finds
	e.startBeside(false, core.CaughtUp{Range: d.Range}, func() error {
		<-in.measured
		in.state.Update(e.c.Pool, in.params, in.gradients[d.Increment], d.Update, in.digests...)
		if lacks {
			place(layer, in.params)
		}
		return nil
	}, func() {
		e.guard.put(d.Range, in.digests)
		if sh.late = nil; layer != nil {
			sh.params = layer
		}
	})
}

// copy copies the bases of transfers.
func (e *Engine) copy(d core.CopyBases) {
	sources := e.sources(d.Copies)
	e.startBeside(false, core.BasesCopied{}, func() error {
		e.mail.put(copied{e.copyBases(d.Copies, sources, d.Step)})
		return nil
	}, nil)
}

// sources returns the shards of copies that are to be made.
func (e *Engine) sources(copies []core.Copy) (all []*shard) {
	e.copies = e.copies || len(copies) > 0
	e.copyStop.Store(false)
	for _, c := range copies {
		all = append(all, e.shards[c.Source])
	}
	return all
}

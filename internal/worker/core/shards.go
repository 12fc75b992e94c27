package core

import (
	"fmt"
	"maps"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// shards is what the core knows of ranges, layers and their parameters.
type shards struct {
	all      map[id.Range]*shard
	index    map[id.Range]int // of all shards of the plan
	former   []id.Range       // handed over; kept until the next commit, for a recovery before it
	served   []int            // stages that this worker serves
	arrivals []arrivals       // of each layer: parameters on their way from their owners
}

// shard is a range that this worker has a part in. Owner and mirrors hold its state and do the same with it: they apply the same
// updates to the same bits. Others have no state, but the gradient: in stage 1 of ZeRO the workers of the range's stage, and the
// worker that reduces it for an owner that does not serve the stage.
type shard struct {
	id.Range
	holds   bool // the state is here
	owner   bool
	reduces bool // its gradient becomes complete here

	// complete says that the gradient of the step is complete here, which nothing else says.
	complete bool
	ticket   Ticket // where the gradient is reduced elsewhere: it is expected
	told     map[id.WorkerID]bool

	updating bool                   // the update of the step passed is not applied yet
	late     bool                   // the state is of the step before the one passed, and its update about to be replayed
	lackedBy func(id.WorkerID) bool // workers that are to have the parameters then; nil: all
}

// arrivals are the parameters of a layer on their way here.
type arrivals struct {
	missing map[Ticket]comm.Key
	stopped bool // more is missing, which is not expected any more
	waiting bool // passes wait for it
	first   bool // where the run begins: its first values are made here,
	making  bool // but not yet
	late    int  // shards of the layer that are late
}

// gradientKey names the complete gradient of the range under the plan.
func (w *Worker) gradientKey(r id.Range) comm.Key {
	return key.Gradient(w.step.attempt, w.plan.Version, r, w.c.Micros)
}

// try names the gradients of the step up to the next repair, or plan.
func (w *Worker) try() key.Try { return key.Try{Plan: w.plan.Version.N, Repair: w.passed.Repair} }

// expectGradient waits for the complete gradient, where it is not reduced here. In a settled stage no worker reduces, and the owner
// sends its gradient to the mirrors.
func (w *Worker) expectGradient(sh *shard) {
	reduces := sh.reduces && !(sh.holds && w.settled(w.plan.StageOf(sh.Layer)))
	if !reduces && !sh.complete && sh.ticket == 0 {
		sh.ticket = w.expect(w.gradientKey(sh.Range), Buffer{Content: Gradient, Range: sh.Range}, 0, expected{content: aGradient, sh: sh})
	}
}

// completed says that the gradient is complete; the worker that reduces it passes it on.
func (w *Worker) completed(sh *shard) {
	sh.complete = true
	w.forward(sh)
	w.feed(sh)
}

// forward sends the complete gradient to the workers that are to have it, and were not sent it.
func (w *Worker) forward(sh *shard) {
	s := w.plan.StageOf(sh.Layer)
	if !sh.complete || !sh.reduces && !(sh.owner && w.settled(s)) {
		return
	}
	p := w.planned(sh.Range)
	readers := append([]id.WorkerID{p.Owner}, p.Mirrors...)
	if w.c.Zero == 1 {
		readers = append(readers, w.plan.Stages[s].Workers...)
	}
	for _, x := range readers {
		if sh.told[x] || x == w.me {
			continue
		}
		if sh.told == nil {
			sh.told = make(map[id.WorkerID]bool)
		}
		sh.told[x] = true
		w.emit(Send{To: w.session(x), Key: w.gradientKey(sh.Range), From: Buffer{Content: Gradient, Range: sh.Range}, Priority: comm.Bulk})
	}
}

// stopShard ends the wait for the gradient.
func (w *Worker) stopShard(sh *shard) {
	w.cancel(sh.ticket, true)
	sh.ticket = 0
}

// restart begins with the gradient again under a plan made in the step, whose names are others. settled says that the plan counts
// on those that are complete.
func (w *Worker) restart(sh *shard, settled bool) {
	w.stopShard(sh)
	sh.told = nil
	if sh.complete = sh.complete && settled; sh.complete {
		w.completed(sh)
	}
	w.expectGradient(sh)
}

// reduce begins the reductions of layers whose backward passes have all been run here, and of layers that need none.
func (w *Worker) reduce() {
	if w.broken {
		return
	}
	for _, s := range w.served {
		for l := w.plan.Stages[s].Hi - 1; l >= w.plan.Stages[s].Lo; l-- {
			if ls := w.step.layers[l]; !ls.reduced && w.through(s, ls) {
				ls.reduced = true
				w.reduceLayer(s, l)
			}
		}
	}
}

// reduceLayer begins to bring the complete gradient of a layer to the owners of its shards.
func (w *Worker) reduceLayer(s, layer int) {
	workers := w.plan.Stages[s].Workers
	if len(workers) == 1 {
		d := Total{Layer: layer}
		for _, sh := range w.inOrder() {
			if sh.Layer == layer && sh.reduces {
				d.Ranges = append(d.Ranges, sh.Range)
			}
		}
		w.emit(d)
		w.reduced(layer)
		return
	}
	t := group.Tree{Micros: w.c.Micros}
	for _, x := range workers {
		t.Nodes = append(t.Nodes, w.plan.Nodes(s, x, w.step.number))
	}
	var mine []id.Range
	for _, p := range w.plan.Shards {
		if p.Layer != layer {
			continue
		}
		reducer, r := w.reducer(p), id.Range{}
		if reducer == w.me {
			r = RangeOf(p)
		}
		t.Shards = append(t.Shards, group.TreeShard{Layer: p.Layer, Lo: p.Lo, Hi: p.Hi, Owner: slices.Index(workers, reducer)})
		mine = append(mine, r)
	}
	if len(mine) > 0 {
		op := w.begin(operation{kind: opReduce, layer: layer})
		w.emit(Reduce{op, key.OfStage(s), key.Reduction(w.attempt(), w.plan.Version, layer), layer, t, mine})
	}
}

// reduced takes the end of the reduction of a layer.
func (w *Worker) reduced(layer int) {
	for _, sh := range w.inOrder() {
		if sh.Layer == layer && sh.reduces && w.step != nil {
			w.completed(sh)
		}
	}
}

// reducer returns the worker that reduces the gradient of a shard: its owner, if that serves the stage, else another worker of the
// stage.
func (w *Worker) reducer(p plan.Shard) id.WorkerID {
	workers := w.plan.Stages[w.plan.StageOf(p.Layer)].Workers
	if slices.Contains(workers, p.Owner) {
		return p.Owner
	}
	return workers[w.index[RangeOf(p)]%len(workers)]
}

// planned returns what the plan says of a range.
func (w *Worker) planned(r id.Range) plan.Shard { return w.plan.Shards[w.index[r]] }

// inOrder returns the shards by layer, then range.
func (w *Worker) inOrder() (all []*shard) {
	for _, p := range w.plan.Shards {
		if sh := w.all[RangeOf(p)]; sh != nil {
			all = append(all, sh)
		}
	}
	return all
}

// computes reports whether this worker updates a range itself.
func (w *Worker) computes(r id.Range) bool {
	sh := w.all[r]
	return sh != nil && sh.holds
}

// serves reports whether the plan has this worker run the layer.
func (w *Worker) serves(layer int) bool { return slices.Contains(w.served, w.plan.StageOf(layer)) }

// willHold reports whether a plan makes this worker a holder of a part of the range.
func (w *Worker) willHold(p *plan.Plan, r id.Range) bool {
	return slices.ContainsFunc(p.Shards, func(s plan.Shard) bool {
		return s.Layer == r.Layer && s.Lo < r.Hi && r.Lo < s.Hi && s.Holds(w.me)
	})
}

// serve finds the stages that this worker has not served before, also where one has other layers now.
func (w *Worker) serve(old *plan.Plan, d *Apply) {
	had, kept := make(map[int]bool), make(map[int]bool)
	now := w.plan.StagesOf(w.me)
	for _, s := range w.served {
		was := old.Stages[s]
		for l := was.Lo; l < was.Hi; l++ {
			had[l] = true
		}
		if slices.Contains(now, s) && w.plan.Stages[s].Lo == was.Lo && w.plan.Stages[s].Hi == was.Hi {
			kept[s] = true
		} else {
			d.Drop = append(d.Drop, s)
		}
	}
	w.served = now
	for _, s := range now {
		if !kept[s] {
			d.Serve = append(d.Serve, s)
		}
		for l := w.plan.Stages[s].Lo; l < w.plan.Stages[s].Hi; l++ {
			if !had[l] {
				d.Fresh = append(d.Fresh, l)
			}
			delete(had, l)
		}
	}
	for l := range w.arrivals {
		if had[l] {
			// Its parameters stay until the next commit: what has come of them does not come again, should another plan bring the
			// layer back before that.
			w.dropArrivals(l)
			d.Stale = append(d.Stale, l)
		}
	}
}

// hold brings the shards in line with the plan.
func (w *Worker) hold(d *Apply) error {
	mine, fresh := make(map[id.Range]bool), make(map[id.Range]*shard)
	var handed []id.Range
	give := func(sh *shard) {
		if w.cancel(sh.ticket, true); sh.holds {
			handed = append(handed, sh.Range)
		}
	}
	for _, p := range w.plan.Shards {
		r, holds, reduces := RangeOf(p), p.Holds(w.me), w.reducer(p) == w.me
		if !holds && !reduces && !(w.c.Zero == 1 && w.serves(p.Layer)) {
			continue
		}
		mine[r] = true
		sh := w.all[r]
		if sh == nil || sh.holds != holds {
			from := NewShard{Range: r}
			var behind *incoming
			switch {
			case holds && w.passed == w.start && !slices.Contains(w.madeRanges, r) && w.derives(w.plan, r.Layer):
				from.From = Derived
			case holds && w.passed == w.start:
				from.From = Preset
			case holds:
				var ok bool
				from.From = Assembled
				if from.Transfers, ok = w.covered(r); ok {
					break
				}
				if behind = w.behindAs(r); behind != nil {
					from.From = Late
					break
				}
				if w.passed.Gate == id.Kept {
					continue // all is written: it is needed no more
				}
				return fmt.Errorf("plan %v makes this worker a holder of [%d,%d) of layer %d, which it does not have", w.plan.Version, r.Lo, r.Hi, r.Layer)
			}
			if sh != nil {
				give(sh)
			}
			sh = &shard{Range: r, holds: holds}
			if fresh[r] = sh; behind != nil {
				w.putOffUpdate(sh, behind)
			}
			d.Shards = append(d.Shards, from)
		}
		if sh.owner, sh.reduces = p.Owner == w.me, reduces; reduces {
			w.stopShard(sh)
		}
	}
	for r, sh := range w.all {
		if !mine[r] {
			give(sh)
			d.Gone = append(d.Gone, r)
			delete(w.all, r)
		}
	}
	maps.Copy(w.all, fresh)
	w.former = append(w.former, handed...)
	return nil
}

// covered reports whether the state of a range can be put together from what is here of it, and the transfers that are of the
// step passed.
func (w *Worker) covered(r id.Range) (transfers []id.Range, ok bool) {
	have := slices.Clone(w.former)
	for _, sh := range w.all {
		if sh.holds {
			have = append(have, sh.Range)
		}
	}
	for _, in := range w.incoming {
		if in.based && in.step == w.passed.Step {
			transfers = append(transfers, in.r)
			have = append(have, in.r)
		}
	}
	slices.SortFunc(have, func(a, b id.Range) int { return a.Lo - b.Lo })
	at := r.Lo
	for _, x := range have {
		if x.Layer == r.Layer && x.Lo <= at {
			at = max(at, x.Hi)
		}
	}
	return transfers, at >= r.Hi
}

// expectParams expects the parameters of a layer after a step, as far as this worker serves the layer and does not compute them
// itself.
func (w *Worker) expectParams(layer, step int) {
	if !w.serves(layer) {
		return
	}
	a := &w.arrivals[layer]
	wanted := make(map[comm.Key]bool)
	for _, p := range w.plan.Shards {
		if p.Layer == layer && !w.computes(RangeOf(p)) {
			wanted[key.Params(w.after(step), RangeOf(p))] = true
		}
	}
	for _, t := range slices.Sorted(maps.Keys(a.missing)) { // in the order in which they were made
		k := a.missing[t]
		if !wanted[k] {
			delete(a.missing, t)
			w.cancel(t, true)
			continue
		}
		delete(wanted, k) // its copy may be under way, and no other
	}
	if a.stopped = false; a.missing == nil {
		a.missing = make(map[Ticket]comm.Key)
	}
	if len(wanted) > 0 {
		w.waitFor(layer)
	}
	for _, p := range w.plan.Shards {
		if k := key.Params(w.after(step), RangeOf(p)); wanted[k] {
			a.missing[w.expect(k, Buffer{Content: Parameters, Range: RangeOf(p)}, 0, expected{content: params, layer: layer})] = k
		}
	}
	w.checkArrivals(layer)
}

// waitFor lets passes wait for a layer.
func (w *Worker) waitFor(layer int) {
	if a := &w.arrivals[layer]; !a.waiting {
		a.waiting = true
		w.emit(Gate{Layer: layer})
	}
}

// checkArrivals lets passes go on with a layer when nothing is missing.
func (w *Worker) checkArrivals(layer int) {
	if a := &w.arrivals[layer]; a.waiting && len(a.missing) == 0 && !a.stopped && !a.making && a.late == 0 {
		a.waiting = false
		w.emit(Gate{Layer: layer, Open: true})
	}
}

// stopArrivals keeps what is missing of some ranges from coming. Until all that is still missing is expected again, nothing counts
// as there.
func (w *Worker) stopArrivals(layer int, choose func(id.Range) bool) {
	a := &w.arrivals[layer]
	for _, t := range slices.Sorted(maps.Keys(a.missing)) {
		if choose(key.RangeOf(a.missing[t])) {
			delete(a.missing, t)
			w.cancel(t, true)
			a.stopped = true
		}
	}
}

// dropArrivals stops all, of a layer that no pass here waits for any more.
func (w *Worker) dropArrivals(layer int) {
	w.stopArrivals(layer, func(id.Range) bool { return true })
	w.arrivals[layer].stopped = false
	w.checkArrivals(layer)
}

// arrived reports whether no parameters are on their way here, and no shard is late.
func (w *Worker) arrived() bool {
	return !slices.ContainsFunc(w.arrivals, func(a arrivals) bool { return a.waiting || a.late > 0 })
}

// spread sends the parameters of an owned shard to the workers of its stage that do not compute them; only to some, if there is a
// choice.
func (w *Worker) spread(sh *shard, step int, choose func(id.WorkerID) bool) {
	p := w.planned(sh.Range)
	for _, x := range w.plan.Stages[w.plan.StageOf(sh.Layer)].Workers {
		if x != p.Owner && !slices.Contains(p.Mirrors, x) && (choose == nil || choose(x)) {
			w.emit(Send{
				To: w.session(x), Key: key.Params(w.after(step), sh.Range), From: Buffer{Content: Parameters, Range: sh.Range},
				Priority: comm.Bulk + comm.Priority(sh.Layer),
			})
		}
	}
}

// share sends the parameters of owned shards to workers that are new in their stages. In a recovery, others may lack them, too,
// because their owner was lost; the workers that have them drop them.
func (w *Worker) share(old *plan.Plan, recovers bool) {
	if recovers {
		for l := range w.arrivals {
			if w.arrivals[l].waiting {
				w.expectParams(l, w.passed.Step)
			}
		}
	}
	for _, sh := range w.inOrder() {
		if !sh.owner || sh.updating {
			continue // all are sent what is not updated yet
		}
		was := old.StageOf(sh.Layer)
		sh.lackedBy = func(x id.WorkerID) bool {
			before, _ := old.Worker(x)
			now, _ := w.plan.Worker(x)
			return recovers || before != now || was < 0 || !slices.Contains(old.Stages[was].Workers, x)
		}
		if !sh.late {
			w.spread(sh, w.passed.Step, sh.lackedBy)
			sh.lackedBy = nil
		}
	}
}

// update applies a committed update to the shards, and begins to bring the new parameters to all workers of their stages, first
// layers first. try is that of the step which was committed.
func (w *Worker) update(r *request, try key.Try, u zero.Update) {
	w.former = nil
	for l := range w.arrivals {
		w.expectParams(l, u.Step)
	}
	w.tellUpdate(u, try)
	d := Update{Update: u, Save: r.save, Stopped: r.result.Stop != ""}
	for _, o := range w.outgoing {
		if sh := w.source(o.Range); sh != nil && o.tried && !o.based {
			d.Copies = append(d.Copies, Copy{o.Transfer, sh.Range})
		}
	}
	d.Copies = w.dueBases(d.Copies)
	for _, sh := range w.all {
		sh.updating = sh.holds
	}
	w.occupy(onUpdate)
	w.emit(d)
}

// shardUpdated sends the new parameters of a shard on their way, if this worker owns it by now.
func (w *Worker) shardUpdated(sh *shard) {
	if sh.updating = false; sh.owner {
		w.spread(sh, w.passed.Step, nil)
	}
}

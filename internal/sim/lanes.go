package sim

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/worker/core"
)

// job is what a task is called beside which nothing runs.
const job = "job"

// beside stands for a lane, of what runs beside those.
const beside = -1

// beginsTask notes that a task begins, and holds that no lane has two, and that nothing runs beside a job.
func (w *worker) beginsTask(d core.Duty) {
	lane, what := 0, job
	switch d := d.(type) {
	case core.Run:
		lane, what = d.Lane, fmt.Sprint(d.Task)
	case core.Replay:
		lane, what = beside, "replay"
	case core.CatchUp:
		lane, what = beside, "a late update"
	case core.CopyBases:
		lane, what = beside, "bases"
	case core.First:
		lane, what = beside, "first values"
	case core.HandOver, core.Repeat, core.Say, core.Operate, core.Prepare, core.Update:
	default:
		return
	}
	if what == job && len(w.tasks) > 0 || w.tasks[lane] != "" || w.tasks[0] == job || lane < beside || lane >= max(w.c.cfg.Passes, 1) {
		w.c.violated("worker %v begins %T (%s) in lane %d beside %v", w.session, d, what, lane, w.tasks)
	}
	w.tasks[lane] = what
}

// endsTask notes that a task has ended.
func (w *worker) endsTask(e core.Event) {
	what := job
	switch e := e.(type) {
	case core.PassDone:
		what = fmt.Sprint(e.Task)
	case core.Replayed:
		what = "replay"
	case core.CaughtUp:
		what = "a late update"
	case core.BasesCopied:
		what = "bases"
	case core.FirstMade:
		what = "first values"
	case core.HandedOver, core.Repeated, core.Said, core.Answered, core.Prepared, core.Updated, core.Failed:
	default:
		return
	}
	for lane, on := range w.tasks {
		if on == what {
			delete(w.tasks, lane)
		}
	}
}

// prepare makes parameters and shards as they are where the run begins.
func (w *worker) prepare(d core.Prepare) {
	at, _ := w.core.Passed()
	for _, st := range d.Stages {
		for l := st[0]; l < st[1]; l++ {
			for u := range w.params[l] {
				if w.params[l][u] = at.Step; w.c.cfg.Beside {
					w.params[l][u] = -1 // see first
				}
			}
		}
	}
	for _, r := range d.Ranges {
		w.initial[r] = &shard{Range: r, holds: true, step: at.Step}
	}
	w.step(core.Prepared(d))
}

// first makes the first values of a layer.
func (w *worker) first(layer int) {
	at, _ := w.core.Passed()
	if !w.shut[layer] {
		w.c.violated("worker %v makes the first values of layer %d, which passes may read", w.session, layer)
	}
	for u := range w.params[layer] {
		w.params[layer][u] = at.Step
	}
	w.step(core.FirstMade{Layer: layer})
}

// replay applies the update of a step to the state of a range.
func (w *worker) replay(in *incoming, step, buffer int) {
	if in.step != step-1 {
		w.c.violated("worker %v replays step %d on state of step %d", w.session, step, in.step)
	}
	w.complete(in.gradients[buffer], step, "a replay")
	w.c.use(w, step, in.Layer, in.gradients[buffer].samples)
	in.step = step
}

// update applies a committed update, shard after shard, and ends with what follows it. Plans may be applied meanwhile, which leave what is held here as it is.
func (w *worker) update(d core.Update) {
	p, step := w.plan, d.Update.Step
	w.updating = true
	for l := range w.params {
		if !w.serves(l) {
			for u := range w.params[l] {
				w.params[l][u] = -1
			}
		}
	}
	var next func(held []*shard)
	next = func(held []*shard) {
		if len(held) > 0 {
			w.updateShard(held[0], step)
			w.in(w.c.delay(time.Duration(max(w.slow, 1))*100*time.Microsecond), func() { next(held[1:]) })
			return
		}
		w.copyBases(d.Copies, step)
		if d.Save {
			w.save(p, step)
		}
		w.updating = false
		w.step(core.Updated{})
	}
	var held []*shard
	for _, x := range p.Shards {
		if sh := w.shards[core.RangeOf(x)]; sh != nil && sh.holds {
			held = append(held, sh)
		}
	}
	w.in(w.c.delay(200*time.Microsecond), func() { next(held) })
}

// updateShard applies the update to a shard.
func (w *worker) updateShard(sh *shard, step int) {
	w.complete(sh.total, step, "an update")
	w.c.use(w, step, sh.Layer, sh.total.samples)
	for b := range w.altered {
		if b.Layer == sh.Layer && sh.Lo <= b.Lo && b.Lo < sh.Hi {
			w.c.violated("worker %v updates block %v, which was altered", w.session, b)
		}
	}
	if sh.step != step-1 {
		w.c.violated("worker %v updates state of step %d in step %d", w.session, sh.step, step)
	}
	if w.shards[sh.Range] != sh {
		w.c.violated("worker %v updates %v, which a plan took away", w.session, sh.Range)
	}
	if sh.step = step; w.serves(sh.Layer) {
		w.setParams(sh.Range, step)
	}
	w.step(core.ShardUpdated{Range: sh.Range})
}

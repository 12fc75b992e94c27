package sim

import (
	"encoding/binary"
	"slices"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// digests are those of a spot check of passes that made x.
func (x content) digests(n int) []uint32 {
	return slices.Repeat([]uint32{binary.LittleEndian.Uint32(x.digest())}, n)
}

// compute ends a forward or backward pass.
func (w *worker) compute(d core.Run) {
	s, m := d.Task.Stage, d.Task.Micro
	st, last := w.plan.Stages[s], s == len(w.plan.Stages)-1
	ev := core.PassDone{Task: d.Task}
	x := content{step: d.Step}
	tensor := func(t key.Tensor) {
		in, ok := w.tensors[t]
		if x.wrong = x.wrong || in.wrong; !ok || in.step != d.Step {
			w.c.violated("worker %v runs %v of step %d without %+v (%+v, %v)", w.session, d.Task, d.Step, t, in, ok)
		}
		x.mix(in)
	}
	for b := range w.altered {
		x.wrong = x.wrong || st.Lo <= b.Layer && b.Layer < st.Hi
	}
	if d.Task.Kind == graph.Backward {
		if _, ok := w.passes[d.Task.Pair]; !ok {
			w.c.violated("worker %v runs %v without its forward pass", w.session, d.Task)
		}
		if !last {
			tensor(key.Tensor{Boundary: s + 1, Micro: m, Back: true})
		}
		x.mix(w.passes[d.Task.Pair])
		x.wrong = x.wrong || w.passes[d.Task.Pair].wrong
		delete(w.passes, d.Task.Pair)
		// Rarely a plan takes the last pass away. For the core that is as if the last one kept its gradient, too.
		if w.kept[s] = append(w.kept[s], kept{m, x}); !w.c.cfg.Keeping || d.Last && w.c.rnd.IntN(4) > 0 {
			w.handOver(s)
		}
		w.spot[0] = append(w.spot[0], x.digests(d.Digests)...)
		if s > 0 {
			w.made[key.Tensor{Boundary: s, Micro: m, Back: true}] = x
		}
		w.step(ev)
		return
	}
	for l := st.Lo; l < st.Hi; l++ {
		if w.shut[l] {
			w.waiting = append(w.waiting, func() { w.compute(d) })
			return
		}
	}
	w.current(st, d.Step, d.Task)
	for l := st.Lo; l < st.Hi; l++ {
		if d.Learn && l > st.Lo {
			ev.Within = append(ev.Within, []int{4})
		}
	}
	if s == 0 || last {
		var ok bool
		if x.samples, ok = w.read(d.Step, m, func() { w.compute(d) }); !ok {
			return
		}
	}
	if s > 0 {
		tensor(key.Tensor{Boundary: s, Micro: m})
	}
	w.passes[d.Task.Pair] = x
	if last {
		w.losses |= 1 << m
	} else {
		ev.Made = []int{4}
		w.made[key.Tensor{Boundary: s + 1, Micro: m}] = x
	}
	w.step(ev)
}

// kept is the gradient of a micro-batch that is not yet in the sums.
type kept struct {
	micro int
	content
}

// handOver brings what passes of a stage have kept into the sums.
func (w *worker) handOver(s int) {
	st := w.plan.Stages[s]
	for l := st.Hi - 1; l >= st.Lo; l-- {
		for _, k := range w.kept[s] {
			g := &w.gradients[l]
			if g.micros != 0 && g.step != k.step {
				w.c.violated("worker %v adds a gradient of step %d to one of step %d", w.session, k.step, g.step)
			}
			g.step, g.wrong = k.step, g.wrong || k.wrong
			g.micros |= 1 << k.micro
			g.samples[k.micro] = k.samples
			w.tellCore(core.GradientDone{Layer: l, Micro: k.micro})
		}
	}
	delete(w.kept, s)
}

// current holds that the parameters of a stage are those that a step begins with.
func (w *worker) current(st plan.Stage, step int, what any) {
	for l := st.Lo; l < st.Hi; l++ {
		for u, at := range w.params[l] {
			if at != step-1 {
				w.c.violated("worker %v runs %v of step %d with parameters of step %d at unit %d of layer %d", w.session, what, step, at, u, l)
			}
		}
	}
}

// repeat repeats the passes of a pair.
func (w *worker) repeat(d core.Repeat) {
	if w.repeatStop {
		w.step(core.Repeated{Stopped: true})
		return
	}
	s, m := d.Pair.Stage, d.Pair.Micro
	st, x := w.plan.Stages[s], content{step: d.Step}
	if s == 0 || s == len(w.plan.Stages)-1 {
		var ok bool
		if x.samples, ok = w.read(d.Step, m, func() { w.repeat(d) }); !ok {
			return
		}
	}
	w.current(st, d.Step, d)
	for l := range w.shut {
		if st.Lo <= l && l < st.Hi {
			w.c.violated("worker %v repeats %v of step %d while parameters of layer %d are on their way", w.session, d.Pair, d.Step, l)
		}
	}
	for _, t := range []key.Tensor{{Boundary: s, Micro: m}, {Boundary: s + 1, Micro: m, Back: true}} {
		in, ok := w.tensors[t]
		needed := 0 < t.Boundary && t.Boundary < len(w.plan.Stages)
		if needed && (!ok || in.step != d.Step) {
			w.c.violated("worker %v repeats %v of step %d without %+v (%+v, %v)", w.session, d.Pair, d.Step, t, in, ok)
		}
		if needed {
			x.mix(in)
		}
		x.wrong = x.wrong || in.wrong
	}
	for b := range w.altered {
		x.wrong = x.wrong || st.Lo <= b.Layer && b.Layer < st.Hi
	}
	w.spot[1] = x.digests(d.Digests)
	w.c.spots++
	w.step(core.Repeated{})
}

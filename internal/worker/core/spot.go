package core

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
	"github.com/soliton-train/soliton/rng"
)

// A layer that is not deterministic, or a sample that changes between two reads, makes bits that depend on which worker computed
// what, and no digest of memory shows it. So now and then two workers of a stage run the same micro-batch, or the only worker of a
// stage runs it twice. Each makes digests of what goes into the passes and of what every layer makes of it, and says them in the
// commit, so that all workers find the first difference before anything of the step has changed any state.

// spot is a pair that runs twice in a step.
type spot struct {
	pair     graph.Pair
	runner   id.WorkerID // by the plan
	repeater id.WorkerID // runs it once more; the runner itself if the stage has no other worker
	digests  int         // of each of the two
	repeated bool        // here
}

// maxVerify is the most Config.Verify that is told apart from a greater one.
const maxVerify = 1 << 30

// drawSpot returns the pair that runs twice in a step, nil if none does. The choice is a function of the job, the plan and the step,
// so all workers agree on it. On average a worker repeats one pair for every Config.Verify that it runs; the first step has a
// spot check in any case, since most faults of this kind are there from the beginning. A step in which a worker was lost has none.
func (w *Worker) drawSpot(step int) *spot {
	p := w.plan
	if w.c.Verify < 1 || p.InStep && p.FromStep == step {
		return nil
	}
	r := rng.New(w.c.Seed, rng.Place{Step: uint32(step), Layer: 1<<rng.LayerBits - 1, Op: 1<<rng.OpBits - 1})
	pairs := len(p.Stages) * w.c.Micros
	if r.Uint64()%(uint64(min(w.c.Verify, maxVerify))*uint64(len(p.Workers))) >= uint64(pairs) && step > 1 {
		return nil
	}
	n := r.IntN(pairs)
	x := &spot{pair: graph.Pair{Stage: n / w.c.Micros, Micro: n % w.c.Micros}}
	st := p.Stages[x.pair.Stage]
	x.runner = w.runner(x.pair)
	x.repeater = st.Workers[(slices.Index(st.Workers, x.runner)+1)%len(st.Workers)]
	x.digests = w.sampleDigests(x.pair.Stage) + 2 + 3*(st.Hi-st.Lo)
	return x
}

// sampleDigests returns how many of the digests of a stage's passes are of samples: the first stage reads inputs, and the last
// one targets.
func (w *Worker) sampleDigests(stage int) int {
	if stage > 0 && stage < len(w.plan.Stages)-1 {
		return 0
	}
	return w.c.MicroBatch
}

// digestsOf returns how many digests of a spot check a worker says in the commit of the step.
func (st *step) digestsOf(x id.WorkerID) (n int) {
	if st.spot == nil {
		return 0
	}
	if st.spot.runner == x {
		n += st.spot.digests
	}
	if st.spot.repeater == x {
		n += st.spot.digests
	}
	return n
}

// inputs returns the boundary tensors that a pair's passes start from.
func (w *Worker) inputs(p graph.Pair) (all []key.Tensor) {
	if p.Stage > 0 {
		all = append(all, key.Tensor{Boundary: p.Stage, Micro: p.Micro})
	}
	if p.Stage < len(w.plan.Stages)-1 {
		all = append(all, key.Tensor{Boundary: p.Stage + 1, Micro: p.Micro, Back: true})
	}
	return all
}

// repeats reports whether a pair is still to be repeated here.
func (st *step) repeats(me id.WorkerID) bool {
	return st.spot != nil && st.spot.repeater == me && !st.spot.repeated
}

// repeat repeats a pair as soon as all that was assigned here has run, and the pair's inputs and all parameters are here.
func (w *Worker) repeat() {
	st := w.step
	if !w.idle() || !st.repeats(w.me) || st.queue.Left() > 0 || !w.arrived() {
		return
	}
	for _, t := range w.inputs(st.spot.pair) {
		if b := st.tensors[t]; b == nil || !b.here {
			return
		}
	}
	w.occupy(onRepeat)
	w.emit(Repeat{Pair: st.spot.pair, Step: st.number, Digests: st.spot.digests})
}

// MismatchError says that a micro-batch gave other results when it was run once more.
type MismatchError struct {
	Step, Micro int
	// Sample is the number of the sample that was not the same when it was read once more, in the order of the run; -1 if all were.
	Sample int64
	Layer  string // name of the layer that made something else of the same input, "" if none did
	What   string // what is not the same: "output", "gradient", "input gradient"; "loss" or "boundary tensor" if Layer is ""
	// Workers are those that ran it. They are one if its stage has one worker.
	Workers [2]id.WorkerID
}

// inPython is what random numbers come from in a Python program.
const inPython = " (in Python from the generators of torch, random and numpy, which are seeded before each call)"

func (e *MismatchError) Error() string {
	by := fmt.Sprintf("on workers %d and %d", e.Workers[0], e.Workers[1])
	if e.Workers[0] == e.Workers[1] {
		by = fmt.Sprintf("in two runs on worker %d", e.Workers[0])
	}
	switch {
	case e.Sample >= 0:
		return fmt.Sprintf("step %d: sample %d of the run was not the same when it was read again, %s; "+
			"a sample must be the same bits whenever it is read, and draw what is random from Sample.Rand"+inPython, e.Step, e.Sample, by)
	case e.What == "boundary tensor":
		return fmt.Sprintf("step %d: a boundary tensor of micro-batch %d is not the same %s; memory or a link may be faulty", e.Step, e.Micro, by)
	}
	what := "the loss function"
	if e.Layer != "" {
		what = fmt.Sprintf("layer %q", e.Layer)
	}
	return fmt.Sprintf("step %d: the %s of %s for micro-batch %d is not the same %s; "+
		"a layer must make the same bits of the same input, and draw what is random from its Context"+inPython+", or memory is faulty", e.Step, e.What, what, e.Micro, by)
}

// compareSpot compares what the two runs of a pair have said of it.
func (w *Worker) compareSpot(records []Record) error {
	x := w.step.spot
	if x == nil {
		return nil
	}
	said := func(of id.WorkerID) []uint32 {
		return records[slices.IndexFunc(w.plan.Workers, func(p plan.Worker) bool { return p.ID == of })].Spot
	}
	first, second := said(x.runner)[:x.digests], said(x.repeater)
	second = second[len(second)-x.digests:]
	for i := range first {
		if first[i] != second[i] {
			return w.mismatch(x, i)
		}
	}
	return nil
}

// mismatch says what the digest i of a pair's passes is of. They are in the order in which passes make them: of each sample, the
// input, the output of each layer, the gradient of the last output, and, last layer first, the gradient of each layer's parameters
// and of its input.
func (w *Worker) mismatch(x *spot, i int) error {
	err := &MismatchError{Step: w.step.number, Micro: x.pair.Micro, Sample: -1, Workers: [2]id.WorkerID{x.runner, x.repeater}}
	st, samples := w.plan.Stages[x.pair.Stage], w.sampleDigests(x.pair.Stage)
	layers := st.Hi - st.Lo
	switch {
	case i < samples:
		err.Sample = (int64(err.Step-1)*int64(w.c.Micros)+int64(x.pair.Micro))*int64(w.c.MicroBatch) + int64(i)
		return err
	case i == samples || i == samples+1+layers:
		err.What = "boundary tensor"
		if i > samples && x.pair.Stage == len(w.plan.Stages)-1 {
			err.What = "loss"
		}
		return err
	case i < samples+1+layers:
		err.Layer, err.What = w.c.Layers[st.Lo+i-samples-1].Name, "output"
		return err
	}
	i -= samples + 2 + layers
	err.Layer, err.What = w.c.Layers[st.Hi-1-i/2].Name, "gradient"
	if i%2 == 1 {
		err.What = "input gradient"
	}
	return err
}

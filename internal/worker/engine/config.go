package engine

import (
	"time"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/meter"
)

// Layer describes the parameters of one layer.
type Layer struct {
	Name    string
	Tensors []zero.Tensor
	// Params holds all tensors, one after the other. It is nil until Config.Stage makes a stage with the layer.
	Params []float32
}

// Size returns the number of parameters.
func (l Layer) Size() (n int) {
	for _, t := range l.Tensors {
		n += t.Size
	}
	return n
}

// Load fills in and target, tensors without the sample dimension, with sample i of the run. Samples are numbered across epochs. A
// pass in a lane needs it, one of at most Config.Passes at a time.
type Load func(lane int, i uint64, in, target tensor.Tensor) error

// Config describes a job, and a worker's part in it, to the engine. Every field is needed but Passes, Progress and Fast.
type Config struct {
	// Job has the numbers of the job: GlobalBatch, MicroBatch, which divides it, ClipNorm, Seed, Zero (0 means 2), NoDigests and
	// Verify are used here, the same on all workers. In stage 2 of ZeRO the complete gradient of a shard is at its owner and its
	// mirrors only, in stage 1 at all workers of its stage. The bits are the same.
	rundir.Job

	Self plan.Worker
	// Network is the engine's while it runs: the engine sets its members and makes its groups. Groups keeps the groups for an
	// engine that follows on the same network; it is empty at first.
	Network *comm.Endpoint
	Groups  map[uint16]*group.Group
	// First brings the first plan, which is valid. The run continues from its Passed. A plan without workers is that of a joining
	// worker, which waits for a Fill, and for an Order with its first plan.
	First control.Order

	// Stage makes layers [lo, hi) run here, and sets their Params in Layers to memory of unspecified content.
	Stage  func(lo, hi int) Stage
	Layers []Layer // of the whole model
	// Begin fills in the state of a range at the point First.Passed. moments are zero before; nil where they are not wanted.
	Begin func(r id.Range, params []float32, moments [][]float32) error
	// Zeros says that Begin leaves moments as they are.
	Zeros bool
	// Beside says that, where Zeros is set, Begin may be called beside passes, of layers that none has come to.
	Beside bool

	Input, Target tensor.Spec
	Metrics       int // numbers that steps and evaluations add up beside the loss
	Rule          zero.Rule
	LR            func(step int) float64 // the same bits on every worker
	Load          Load
	// Ahead, if it is not nil, is as Load for samples that are needed later. It is called by other goroutines than all else, Readers of them
	// (0: one), at the same time, and an error of it is no more than a reason to call Load.
	Ahead   func(i uint64, in, target tensor.Tensor) error
	Readers int
	// Await calls wait, which waits for a pass in a lane until sample i has been read ahead.
	Await func(lane int, i uint64, wait func())
	// Passes is how many passes run at a time, each in a goroutine that keeps its thread; 0 means 1, and Lanes is the most. Pool has
	// the threads of the worker: while several passes run, each has one, and what runs alone has all.
	Passes int
	Pool   *kernel.Pool
	// Memory, if it is not nil, returns n numbers of unspecified content, for gradients and boundary tensors. Any goroutine calls it. The
	// engine uses them until it and Network are closed.
	Memory func(n int) []float32
	// Meter measures passes. If it is nil, the engine makes one.
	Meter *meter.Meter
	// Pace, if it is not nil, is told how this worker gets on in a step.
	Pace *meter.Pace
	// Progress, if it is not nil, records which pass runs.
	Progress *progress.Record
	// Fast adds gradients in order of arrival, with a plain reduce-scatter between the workers of a stage, instead of over the
	// tree. All workers still get the same result, but its last bits depend on the plan and on timing.
	Fast bool
	// Yield lets the computing threads yield to all other threads of the machine.
	Yield bool
	// Stop returns why this worker was asked to end the run, in at most 24
	// bytes, or "". The commit brings all workers to end after the same step.
	Stop func() string
	// Held, if it is not nil, reports whether this worker must not enter an exchange now, because it may have been evicted. Wake
	// makes the engine ask again.
	Held func() bool
	// Saving, if it is not nil, returns what this worker says about checkpoints at every commit. Save gets its part of each
	// checkpoint after the update of the step: the step, the plan, and the shards that it owned at the commit, by layer, then range.
	// The computing goroutine calls it: it must not block. It may keep the memory, but not change it. Room, if it is not nil, is
	// called before it where the part has to be a copy, and returns memory for so many numbers.
	Saving func(step int) core.Saving
	Room   func(numbers int) []float32
	Save   func(checkpoint.Part)
	// Tell is called by the loop with what the agent is to know: a [control.Applied] for every plan that is live here, a
	// [control.Level] when all state that a Fill copies here has arrived, and a [control.Repaired] for every block that was altered
	// here. It must not block.
	Tell func(control.Message)
	// Span, if it is not nil, is called with what this worker has done, by any goroutine: it must not block.
	Span func(Span)
	// Phase, if it is not nil, is called by the loop when a phase of a step begins, possibly more than once. Phases overlap, and have
	// names of package trace: Forward and Backward (the first pass), Reduce (the gradient of the first layer goes to the owners),
	// Commit (this worker enters it), and Gather (after the commit, parameters come and go).
	Phase func(step int, phase string)
}

// Span is a stretch of time in which this worker did something. Fields that do not apply are -1.
type Span struct {
	Name                string // see package trace
	Start, End          time.Time
	Stage, Micro, Layer int
	First               int // layer of the stage, of a pass
	Peer                id.WorkerID
	Back                bool          // a boundary tensor on its way back
	Bytes               int64         // 0: not known
	Lane                int           // in which that was
	Beside              int           // tasks that were computed at the same time, with this one; 0: it was the only one
	Waited              time.Duration // of a pass: for parameters and samples
}

// now returns the time if spans are wanted. Otherwise the clock is not read.
func (e *Engine) now() (t time.Time) {
	if e.c.Span != nil {
		t = time.Now()
	}
	return t
}

// span reports something that has ended now.
func (e *Engine) span(name string, began time.Time, of Span) {
	if e.c.Span != nil {
		of.Name, of.Start, of.End = name, began, time.Now()
		e.c.Span(of)
	}
}

// spanOf is a span about a layer, or about nothing if that is -1.
func spanOf(layer int, bytes int64) Span {
	return Span{Stage: -1, Micro: -1, Layer: layer, Peer: -1, Bytes: bytes}
}

// laneSpan is a span about a layer, or about nothing if that is -1, in a lane.
func (e *Engine) laneSpan(lane, layer int) Span {
	s := spanOf(layer, 0)
	s.Lane = lane
	return s
}

// waited reports a wait of a pass that has ended now.
func (e *Engine) waited(name string, began time.Time, lane, layer int) {
	if e.c.Span != nil {
		e.span(name, began, e.laneSpan(lane, layer))
		e.lanes[lane].waited += time.Since(began)
	}
}

func (e *Engine) phase(step int, phase string) {
	if e.c.Phase != nil {
		e.c.Phase(step, phase)
	}
}

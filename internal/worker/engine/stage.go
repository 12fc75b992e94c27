package engine

import (
	"maps"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/worker/core"
)

// Micro names the work of one pass: a micro-batch of a step.
type Micro struct {
	Step    int // from 1
	Index   int // of the micro-batch
	First   int // index of its first sample in the global batch
	Of      int // micro-batches of the step
	Samples int
	Train   bool // false in evaluation, where no Backward follows
	Lane    int  // of the goroutine that calls Forward and Loss, from 0 to Lanes-1

	// Target has the targets, in the last stage, so that Forward can go on with the loss.
	Target tensor.Tensor

	// Ready returns when the parameters of a layer, numbered in the model, are those of the step. Forward calls it before it runs
	// the layer. nil means that they are.
	Ready func(layer int) error

	// Values, if it is not nil, numbers the values that the parameters of a layer have had in this process: as long as the number is the
	// same, so are they. It holds for a layer from Ready on until the pass has ended, and is for stages that keep a copy of parameters.
	Values func(layer int) uint64

	// Made, if it is not nil, is called with the output of each layer in Forward and, after Gradients.Done, with the gradient of each
	// layer's input in Backward. It may read the tensor until it returns.
	Made func(t tensor.Tensor)

	// Metric is called by Loss with the sum of each of Config.Metrics, and the number of its terms.
	Metric func(i int, sum float64, count int64)

	// Took, if it is not nil, takes how long a layer has computed, from a stage that runs in another process.
	Took func(layer int, took time.Duration)
}

// Pass is a micro-batch in flight through a stage: what Backward needs of Forward. Only its stage knows what it is.
type Pass any

// Lanes bounds the passes that a worker runs at a time.
const Lanes = progress.Lanes

// Stage is a contiguous range of layers that a worker holds. A micro-batch goes through Forward, Loss (in the last stage) and
// Backward; several may be in flight, and as many goroutines as Config.Passes says run them, each in a lane of its own. Between passes,
// a stage keeps nothing but memory for reuse, and gradients.
type Stage interface {
	// Forward computes the stage's output. in must stay unchanged until the pass has ended, and out is valid until then. The only
	// errors are those of m.Ready, after which there is no pass.
	Forward(m Micro, in tensor.Tensor) (p Pass, out tensor.Tensor, err error)

	// Loss returns the sum of the losses over the targets of the micro-batch, their number, and the gradient of the sum. In
	// evaluation, the gradient may be the zero Tensor.
	Loss(p Pass, target tensor.Tensor) (sum float64, count int64, dout tensor.Tensor)

	// Backward computes the gradients from that of the output, and ends the pass. For every layer, last to first, it asks grads for
	// memory, sets all of it and says so. Where grads.Last is false, and Micro.Made nil, it may keep the gradients of all layers instead,
	// and add them where they are made, in the order of package tree: the next Backward with Last, or HandOver, hands over sums. din is
	// valid until the next Backward in the same lane.
	Backward(p Pass, dout tensor.Tensor, grads Gradients) (din tensor.Tensor)

	// HandOver hands over all gradients that are kept, and Forget gives them up.
	HandOver(grads Gradients)
	Forget()

	// Drop ends the pass without Backward.
	Drop(p Pass)

	// Shapes returns the shapes of the outputs of the stage's layers in the pass, but the
	// last one's: a plan may let a stage end there one day.
	Shapes(p Pass) [][]int

	// Suspect returns the first layer of the stage, numbered in the model, whose output in the pass holds NaN or infinities, or -1.
	Suspect(p Pass) (layer int)
}

// KeepsNothing is for stages that hand over all gradients in Backward.
type KeepsNothing struct{}

// HandOver implements [Stage].
func (KeepsNothing) HandOver(Gradients) {}

// Forget implements [Stage].
func (KeepsNothing) Forget() {}

// Gradients receives the gradients of micro-batches. Layers are numbered in the model.
type Gradients interface {
	// Buffer returns memory, of unspecified content, for the gradient of all parameters of a layer. Several may be asked for at once.
	Buffer(layer int) []float32
	// Done hands over the filled buffer, with the gradient of the pass.
	Done(layer int, grad []float32)
	// Sum hands over the filled buffer, with the sum over a node of the tree of package tree, of passes that were kept.
	Sum(layer int, of tree.Node, grad []float32)
	// Last reports whether all that is kept is to be handed over.
	Last() bool
	// Lane is that of the goroutine that runs the pass. It need not be the one that has run Forward.
	Lane() int
}

// prepare makes stages and shards as they are where the run begins.
func (e *Engine) prepare(d core.Prepare) {
	stages, shards := make(map[[2]int]Stage), make(map[id.Range]*shard)
	e.start(0, taskEnded{event: core.Prepared(d), take: func() {
		maps.Copy(e.initial.stages, stages)
		maps.Copy(e.initial.shards, shards)
	}}, func(*taskEnded) error {
		serves := make(map[int]bool)
		for _, k := range d.Stages {
			stages[k] = e.c.Stage(k[0], k[1])
			for l := k[0]; l < k[1]; l++ {
				serves[l] = true
			}
		}
		memory := lay(d.Ranges, 1+e.c.Rule.Moments())
		// All of a layer follows from the same values: layer by layer, they are made once.
		for l := range e.c.Layers {
			for _, r := range d.Ranges {
				if r.Layer != l {
					continue
				}
				state, err := zero.ShardOf(e.c.Rule, r, e.c.Layers[l].Tensors, memory[r][1:])
				if err != nil {
					return err
				}
				sh := &shard{Range: r, state: state, params: memory[r][0]}
				if err := e.begin(r, sh.params, state.Moments); err != nil {
					return err
				}
				shards[r] = sh
			}
			if serves[l] && !e.c.Beside {
				params := e.c.Layers[l].Params
				if err := e.begin(id.Range{Layer: l, Lo: 0, Hi: len(params)}, params, nil); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// first makes the first values of a layer.
func (e *Engine) first(d core.First) {
	params := e.c.Layers[d.Layer].Params
	r := id.Range{Layer: d.Layer, Lo: 0, Hi: len(params)}
	var digests [][]zero.Digest
	e.startBeside(true, core.FirstMade(d), func() error {
		err := e.begin(r, params, nil)
		digests = e.guard.measure(r, params)
		return err
	}, func() { e.guard.put(r, digests) })
}

// begin fills in the state of a range where the run begins.
func (e *Engine) begin(r id.Range, params []float32, moments [][]float32) error {
	e.beginning.Lock()
	defer e.beginning.Unlock()
	return e.c.Begin(r, params, moments)
}

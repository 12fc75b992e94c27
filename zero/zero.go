// Package zero gives access to the sharded optimizer: its update rules, and the checkpoints that hold its state.
//
// ZeRO stage 1 and 2 split optimizer state and gradients over workers (S. Rajbhandari and others, "ZeRO: memory optimizations
// toward training trillion parameter models", 2020). In a run, workers own ranges of each layer's parameters; package trainer
// chooses the rule.
package zero

import (
	"context"
	"fmt"

	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Rule is an optimizer: [AdamW] or [SGD]. Moments returns how many numbers of state a parameter has.
type Rule = zero.Rule

// AdamW has two moments, the means of the gradient and of its square. The meaning and the order of operations are those of
// PyTorch's torch.optim.AdamW.
type AdamW = zero.AdamW

// SGD has one moment, the momentum. The meaning is that of torch.optim.SGD without dampening.
type SGD = zero.SGD

// Update holds the numbers of one optimizer update.
type Update = zero.Update

// Apply updates params and moments in place, element by element: the same bits on every machine. There are rule.Moments()
// moments of the size of params; decay says whether weight decay applies.
func Apply(rule Rule, u Update, params []float32, moments [][]float32, grad []float32, decay bool) {
	zero.Apply(rule, u, params, moments, grad, zero.Tuning{NoDecay: !decay})
}

// Checkpoint is the state of a run after a step: parameters and moments. Close it after use. Methods other than Close are safe
// for concurrent use.
type Checkpoint struct{ r *checkpoint.Reader }

// OpenCheckpoint opens the newest whole checkpoint of a run directory. It verifies all its files.
func OpenCheckpoint(ctx context.Context, runDir string) (*Checkpoint, error) {
	record, err := rundir.Read(runDir)
	if err != nil {
		return nil, err
	}
	r, refused, err := checkpoint.Newest(ctx, runDir, record.Job.Eras())
	if err != nil {
		if len(refused) > 0 {
			return nil, fmt.Errorf("%w: %w", err, refused[0])
		}
		return nil, fmt.Errorf("%s: %w", runDir, err)
	}
	return &Checkpoint{r}, nil
}

// Step returns the number of steps that are in the state.
func (c *Checkpoint) Step() int { return c.r.Manifest().Step }

// Layers returns the number of parameters of each layer.
func (c *Checkpoint) Layers() []int { return append([]int(nil), c.r.Manifest().Layers...) }

// Moments returns the names of the moments in the order of [Checkpoint.Read]: exp_avg and exp_avg_sq for AdamW, momentum for SGD.
func (c *Checkpoint) Moments() []string { return c.r.Moments() }

// Read reads elements [lo, hi) of a layer's parameters, flattened tensor after tensor, into params, and their moments into
// moments. Each has hi-lo elements; nil leaves one out.
func (c *Checkpoint) Read(ctx context.Context, layer, lo, hi int, params []float32, moments [][]float32) error {
	return c.r.Read(ctx, layer, lo, hi, params, moments)
}

// Close closes the files.
func (c *Checkpoint) Close() error { return c.r.Close() }

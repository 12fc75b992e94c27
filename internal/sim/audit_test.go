package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/internal/worker/order"
	"github.com/soliton-train/soliton/trainer"
)

// numbered is a data set whose samples are their own numbers.
type numbered struct{ n, base int }

func (d numbered) Len() int { return d.n }

func (d numbered) Sample(s trainer.Sample, in, _ trainer.Tensor) error {
	in.I[0] = int32(d.base + s.Index)
	return nil
}

// audited is a mix of data sets as a process has it: with its own shuffle, and its own places in the parts. Several epochs of it, and more
// of its smallest part, go by in a run.
func audited(tb testing.TB, seed uint64) func(i uint64) int {
	spec := trainer.Spec{Shape: []int{1}, Kind: trainer.Int32}
	mix, err := trainer.Bind(data.Mix{Seed: seed, Parts: []data.Part{
		{Data: numbered{31, 0}, Weight: 0.5}, {Data: numbered{7, 1000}, Weight: 0.3}, {Data: numbered{19, 2000}, Weight: 0.2},
	}, Samples: 37}, spec, spec)
	if err != nil {
		tb.Fatal(err)
	}
	places, in := order.New(seed, mix.Len()), trainer.NewTensor(trainer.Int32, 1)
	return func(i uint64) int {
		index, epoch := places.At(i)
		if err := mix.Sample(trainer.Sample{Index: int(index), Epoch: int(epoch), Train: true}, in, trainer.Tensor{}); err != nil {
			tb.Fatal(err)
		}
		return int(in.I[0])
	}
}

// TestSamples audits the numbers of the samples whose gradients random schedules of faults commit: none is lost, none is repeated, and
// the order is that of an undisturbed run.
//
//	go test ./internal/sim -run Samples -schedules 10000 -seed 1
func TestSamples(t *testing.T) {
	steps, recoveries := 0, 0
	for s := *seed; s < *seed+uint64(*schedules); s++ {
		r := rand.New(rand.NewPCG(s, 3))
		c, text := scheduleOf(r, s, false, func(cfg *Config) {
			cfg.Samples = func() func(i uint64) int { return audited(t, s) }
		})
		if err := run(c, nil); err != nil {
			t.Fatalf("seed %d (%s): %v", s, text, err)
		}
		n, err := c.audit(audited(t, s))
		if err != nil {
			t.Fatalf("seed %d (%s): %v", s, text, err)
		}
		steps, recoveries = steps+n, recoveries+c.Recoveries
	}
	t.Logf("%d schedules with %d recoveries commit %d samples", *schedules, recoveries, steps*maxMicros*microBatch)
}

// audit compares the samples in each update of each layer with those of the steps in order, and returns how many steps are committed.
func (c *Cluster) audit(sample func(i uint64) int) (steps int, err error) {
	steps = c.step()
	for step := 1; step <= steps; step++ {
		var want batches
		for m := range want {
			for i := range microBatch {
				want[m] += fmt.Sprint(sample(uint64(((step-1)*c.cfg.Micros+m)*microBatch+i)), " ")
			}
		}
		used := c.used[step]
		if used == nil {
			used = make([]batches, len(c.cfg.Layers))
		}
		for layer, got := range used {
			if got == (batches{}) && step == steps {
				continue // all workers were killed between the commit and the update
			}
			if got != want {
				return steps, fmt.Errorf("step %d, layer %d: samples %q, want %q", step, layer, got, want)
			}
		}
	}
	return steps, nil
}

// The audit sees one sample that a worker reads in place of another.
func TestSamplesFindsFaults(t *testing.T) {
	workers := 0
	c := New(Config{
		Seed: 1, Workers: 3, Stages: 1, Micros: maxMicros, Mirrors: 1, Steps: 3, MinWorkers: 1, Layers: layers(), Detect: 300 * ms,
		Samples: func() func(i uint64) int {
			workers++
			wrong, sample := workers == 2, audited(t, 1)
			return func(i uint64) int {
				if wrong && i/(maxMicros*microBatch) == 1 {
					return sample(i ^ 1)
				}
				return sample(i)
			}
		},
	})
	if err := run(c, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.audit(audited(t, 1)); err == nil || !strings.Contains(err.Error(), "step 2, layer 0: samples") {
		t.Error(errors.Join(err, errors.New("the audit does not name step 2")))
	}
}

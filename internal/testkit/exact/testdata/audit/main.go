// Command audit counts the samples that a run commits. Its model has parameters for each sample, whose gradient is 1 in a step that
// has the sample. With momentum 1/2, a parameter that begins at 0 ends as the sum of 2 - 2^-(steps-s) over the steps s of its sample,
// so it says which they were. The loss is the mean, over a step's samples, of the sum of a sample's numbers.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/trainer"
)

// stride spreads the samples over shards.
const (
	context = 8
	letters = 30 // documents, each of one letter, from A on
	samples = 38 + letters
	stride  = 512
	end     = 256 // token behind a document
)

// numbered is a data set whose samples are their own numbers.
type numbered struct {
	n, base int
	bad     func(s trainer.Sample) bool
}

func (d numbered) Len() int { return d.n }

func (d numbered) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	if d.bad != nil && d.bad(s) {
		return errors.New("bad sector")
	}
	for i := range in.I {
		in.I[i], target.I[i] = int32(d.base+s.Index), int32(d.base+s.Index)
	}
	return nil
}

// first reports whether this process is the first that asks. The answer is the same each time.
func first(dir string) func() bool {
	known, is := false, false
	return func() bool {
		if !known {
			f, err := os.OpenFile(filepath.Join(dir, "first"), os.O_CREATE|os.O_EXCL, 0o600)
			if known, is = true, err == nil; is {
				_ = f.Close()
			}
		}
		return is
	}
}

// count has a parameter for each sample, and passes its numbers on.
type count struct{}

func (count) Params() []trainer.Param {
	return []trainer.Param{{Name: "count", Shape: []int{samples * stride}, NoDecay: true}}
}

func (count) Forward(c *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out := c.Tensor(in.Shape...)
	for i := range out.F {
		out.F[i] = float32(at(in, i))
	}
	return out, in
}

func (count) Backward(c *trainer.Context, _ []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) (din trainer.Tensor) {
	in := stash.(trainer.Tensor)
	clear(dp[0].F)
	for i := 0; i < len(dout.F); i += context {
		dp[0].F[sampleOf(at(in, i))*stride] += dout.F[i]
	}
	if in.I != nil {
		return din
	}
	din = c.Tensor(in.Shape...)
	copy(din.F, dout.F)
	return din
}

// at returns a number of the input or of a layer's output.
func at(x trainer.Tensor, i int) int {
	if x.I != nil {
		return int(x.I[i])
	}
	return int(x.F[i])
}

// sampleOf returns which sample begins with a number: a context has the number of its first document.
func sampleOf(number int) int {
	if number < 'A' {
		return number
	}
	return number - 'A' + samples - letters
}

// number is the sum of the numbers of samples. Inputs and targets must belong together.
type number struct{}

func (number) Loss(c *trainer.Context, out, target trainer.Tensor) (sum float64, n int64, dout trainer.Tensor) {
	dout = c.Tensor(out.Shape...)
	clear(dout.F)
	for i, x := range out.F {
		sum += float64(x)
		if i%context == 0 {
			dout.F[i] = -1 // of descent
			n++
		}
		next := float32(target.I[i])
		last := i%context == context-1
		if next >= 0 && next != end && next != x && (last || next != out.F[i+1]) {
			panic("the target is of another sample")
		}
	}
	return sum, n, dout
}

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		dir := f.String("dir", "", "folder with tokenizer.json and documents.jsonl")
		bad := f.Bool("bad", false, "no process can read sample 4 in its second epoch")
		lone := f.Bool("lone", false, "the first process that reads sample 34 cannot")
		return func() (trainer.Job, error) {
			mine := first(*dir)
			k, err := data.ReadTokenizer(filepath.Join(*dir, "tokenizer.json"))
			if err != nil {
				return trainer.Job{}, err
			}
			documents, err := data.JSONL("text", filepath.Join(*dir, "documents.jsonl"))
			if err != nil {
				return trainer.Job{}, err
			}
			tokens, err := data.Tokenize(k, "<|endoftext|>", documents)
			if err != nil {
				return trainer.Job{}, err
			}
			packed, err := tokens.Pack()
			if err != nil {
				return trainer.Job{}, err
			}
			if last, _ := k.Token("<|endoftext|>"); last != end {
				return trainer.Job{}, fmt.Errorf("documents end with %d, not %d", last, end)
			}
			one := trainer.Spec{Shape: []int{context}, Kind: trainer.Int32}
			return trainer.Job{
				Model: trainer.Model{Name: "audit", Input: one, Target: one, Layers: []trainer.Layer{count{}, count{}, count{}}, Loss: number{}},
				Data: data.Mix{Seed: 5, Parts: []data.Part{
					{Data: numbered{31, 0, func(s trainer.Sample) bool { return *bad && s.Index == 4 && s.Epoch == 1 }}, Weight: 0.5},
					{Data: numbered{7, 31, func(s trainer.Sample) bool { return *lone && s.Index == 3 && s.Train && mine() }}, Weight: 0.2},
					{Data: packed, Weight: 0.3},
				}, Samples: 41},
				Optimizer:   trainer.SGD{LR: trainer.Constant(1), Momentum: 0.5},
				GlobalBatch: 8, MicroBatch: 1, Steps: 20, Seed: 9,
			}, nil
		}
	})
}

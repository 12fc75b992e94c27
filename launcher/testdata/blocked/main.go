// Command blocked is a training program in which a call of its own code does not return.
package main

import (
	"flag"
	"os"
	"strconv"
	"time"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

// The process: trainer.Main removes these variables.
var worker, incarnation = number("SOLITON_WORKER"), number("SOLITON_INCARNATION")

func number(name string) int {
	n, _ := strconv.Atoi(os.Getenv(name))
	return n
}

// where says which call blocks, in which worker, after how many calls.
type where struct {
	call   string
	worker int // -1: in all
	after  int
	until  string // a file; "": for ever
}

// reach blocks if this is the call.
func (w *where) reach(call string) {
	if call != w.call || w.worker >= 0 && (w.worker != worker || incarnation > 0) {
		return
	}
	if w.after--; w.after > 0 {
		return
	}
	if call == "spin" {
		spin()
	}
	block(w.until)
}

//go:noinline
func block(until string) {
	if until == "" {
		select {}
	}
	for {
		if _, err := os.Stat(until); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

//go:noinline
func spin() {
	for i := 0; ; i++ {
		if i < 0 {
			return
		}
	}
}

// pass is a layer that changes nothing.
type pass struct{ where *where }

func (pass) Params() []trainer.Param { return nil }

func (l pass) Forward(_ *trainer.Context, _ []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	l.where.reach("forward")
	l.where.reach("spin")
	return in, nil
}

func (l pass) Backward(_ *trainer.Context, _ []trainer.Tensor, _ any, dout trainer.Tensor, _ []trainer.Tensor) trainer.Tensor {
	l.where.reach("backward")
	return dout
}

// points are random; the class of one is the sign of its first element.
type points struct{ where *where }

func (points) Len() int { return 1000 }

func (d points) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	if s.Train {
		d.where.reach("sample")
	} else {
		d.where.reach("check")
	}
	draw := rng.New(1, rng.Place{Sample: uint32(s.Index)})
	for i := range in.F {
		in.F[i] = 2*draw.Float32() - 1
	}
	target.I[0] = 0
	if in.F[0] > 0 {
		target.I[0] = 1
	}
	return nil
}

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		var w where
		f.StringVar(&w.call, "block", "", "call that does not return")
		f.IntVar(&w.worker, "who", 1, "worker in which it does not")
		f.IntVar(&w.after, "after", 30, "number of the call")
		f.StringVar(&w.until, "until", "", "file that ends it when it is there")
		return func() (trainer.Job, error) {
			w.reach("job")
			return trainer.Job{
				Model: trainer.Model{
					Name:  "points",
					Input: trainer.Spec{Shape: []int{4}}, Target: trainer.Spec{Shape: []int{1}, Kind: trainer.Int32},
					Layers: []trainer.Layer{nn.Linear{In: 4, Out: 16}, pass{&w}, nn.Dropout{Prob: 0.1}, nn.Linear{In: 16, Out: 2}},
					Loss:   nn.CrossEntropy{},
				},
				Data:        points{&w},
				Optimizer:   trainer.AdamW{LR: trainer.Linear(0.02, 10)},
				GlobalBatch: 24, MicroBatch: 2, Steps: 30,
				OnStep: func(trainer.StepInfo) error { w.reach("step"); return nil },
			}, nil
		}
	})
}

// Command calls records the calls of OnStep, and ends its process in some of them.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

type points struct{}

func (points) Len() int { return 40 }

func (points) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	in.F[0], in.F[1], target.I[0] = float32(s.Index%5)-2, float32(s.Index%3)-1, int32(s.Index%2)
	return nil
}

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		die := f.String("die", "", "end the process in the calls for these `STEPS`, the first time")
		return func() (trainer.Job, error) {
			lines := trainer.LineWriter{Path: "calls"}
			return trainer.Job{
				Model: nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{8}, Classes: 2}), Data: points{},
				Optimizer: trainer.SGD{LR: trainer.Constant(0.1)}, GlobalBatch: 8, MicroBatch: 2, Steps: 60,
				OnStep: func(s trainer.StepInfo) error {
					if err := lines.Printf(s, "%d %v", s.Step, s.Redelivered); err != nil {
						return err
					}
					if !strings.Contains(","+*die+",", ","+strconv.Itoa(s.Step)+",") {
						return nil
					}
					f, err := os.OpenFile(fmt.Sprintf("died-%d", s.Step), os.O_CREATE|os.O_EXCL, 0o600)
					if errors.Is(err, fs.ErrExist) {
						return nil
					}
					if err == nil {
						err = f.Close()
					}
					if err != nil {
						return err
					}
					if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
						return err
					}
					select {}
				},
			}, nil
		}
	})
}

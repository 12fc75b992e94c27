// Command unread trains on data of which some samples cannot be read while there is a file "bad", which lists them.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

type points struct{}

func (points) Len() int { return 40 }

func (points) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	if bad, err := os.ReadFile("bad"); err == nil && s.Train && slices.Contains(strings.Fields(string(bad)), strconv.Itoa(s.Index)) {
		return fmt.Errorf("point %d: bad sector", s.Index)
	}
	in.F[0], in.F[1], target.I[0] = float32(s.Index%7)-3, float32(s.Index%5)-2, int32(s.Index%2)
	return nil
}

func main() {
	trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
		wait := f.Bool("wait", false, "wait after every fourth step for a file, such as go-4")
		return func() (trainer.Job, error) {
			job := trainer.Job{
				Model: nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{8}, Classes: 2}), Data: points{},
				Optimizer: trainer.SGD{LR: trainer.Constant(0.1)}, GlobalBatch: 8, MicroBatch: 2, Steps: 10, CheckpointSteps: 4,
			}
			if *wait {
				job.OnStep = func(s trainer.StepInfo) error {
					for s.Step%4 == 0 {
						if _, err := os.Stat(fmt.Sprintf("go-%d", s.Step)); err == nil {
							break
						}
						time.Sleep(5 * time.Millisecond)
					}
					return nil
				}
			}
			return job, nil
		}
	})
}

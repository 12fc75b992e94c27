package trainer

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/zero"
)

// Schedule is the learning rate over the steps of a job. It rises linearly to Peak
// over the first Warmup steps and ends with the last step of the job. [Constant],
// [Linear], [Cosine] and [Table] make one.
type Schedule struct {
	Kind   ScheduleKind
	Peak   float64
	Warmup int
	// Final is the part of Peak that a linear or cosine schedule falls to after the
	// last step.
	Final float64
	// Steps is the length of the schedule, whatever the length of the job; later steps have its last learning rate. So the
	// steps of a job do not depend on how many it has, and a run that is extended equals one of the whole length. 0 means
	// Job.Steps. --lr-steps
	Steps int
	// Rates are those of the steps of a table, from the first on, and the last one is that of all further steps.
	Rates []float64
}

// ScheduleKind is the shape of the learning rate after the warm-up.
type ScheduleKind uint8

// The kinds of schedules.
const (
	ConstantSchedule ScheduleKind = iota // stays at Peak
	LinearSchedule                       // falls linearly
	CosineSchedule                       // falls along half a cosine wave
	TableSchedule                        // Rates, without warm-up
)

// Constant is lr at every step.
func Constant(lr float64) Schedule { return Schedule{Kind: ConstantSchedule, Peak: lr} }

// Linear rises to peak over the first warmup steps and falls linearly to 0.
func Linear(peak float64, warmup int) Schedule {
	return Schedule{Kind: LinearSchedule, Peak: peak, Warmup: warmup}
}

// Cosine rises to peak over the first warmup steps and falls to 0 along half a
// wave of the cosine (I. Loshchilov and F. Hutter, "SGDR: stochastic gradient
// descent with warm restarts", 2017, without the restarts).
func Cosine(peak float64, warmup int) Schedule {
	return Schedule{Kind: CosineSchedule, Peak: peak, Warmup: warmup}
}

// Table is rates[0] at the first step, and so on. Its Peak is the largest of them.
func Table(rates ...float64) Schedule {
	s := Schedule{Kind: TableSchedule, Rates: rates}
	if len(rates) > 0 {
		s.Peak = slices.Max(rates)
	}
	return s
}

// since returns the schedule with the rates of a table that had another peak before.
func (s Schedule) since(before Schedule) Schedule {
	if s.Peak == before.Peak {
		return s
	}
	s.Rates = slices.Clone(before.Rates)
	for i := range s.Rates {
		s.Rates[i] = float64(s.Rates[i]*s.Peak) / before.Peak
	}
	return s
}

// At returns the learning rate of a step, numbered from 1, of a job of steps
// steps. It has the same bits on every machine.
func (s Schedule) At(step, steps int) float64 {
	if s.Kind == TableSchedule {
		return s.Rates[min(step, len(s.Rates))-1]
	}
	if step <= s.Warmup {
		return float64(s.Peak*float64(step)) / float64(s.Warmup)
	}
	// The part of the way down that the steps before this one have gone.
	t := min(float64(step-1-s.Warmup)/float64(max(cmp.Or(s.Steps, steps)-s.Warmup, 1)), 1)
	fall := 0.0
	switch s.Kind {
	case LinearSchedule:
		fall = t
	case CosineSchedule:
		fall = (1 - float64(kernel.Cos(float64(math.Pi*t)))) / 2 // Cos may be inlined, and end in a product
	}
	return float64(s.Peak * (1 - float64(fall*(1-s.Final))))
}

// String describes the schedule, as job.json has it.
func (s Schedule) String() string {
	length := ""
	if s.Steps != 0 {
		length = fmt.Sprintf(", steps=%d", s.Steps)
	}
	switch s.Kind {
	case ConstantSchedule:
		return fmt.Sprintf("constant(peak=%v, warmup=%d%s)", s.Peak, s.Warmup, length)
	case LinearSchedule:
		return fmt.Sprintf("linear(peak=%v, warmup=%d, final=%v%s)", s.Peak, s.Warmup, s.Final, length)
	case CosineSchedule:
		return fmt.Sprintf("cosine(peak=%v, warmup=%d, final=%v%s)", s.Peak, s.Warmup, s.Final, length)
	case TableSchedule:
		sum := sha256.New()
		for _, r := range s.Rates {
			sum.Write(binary.LittleEndian.AppendUint64(nil, math.Float64bits(r)))
		}
		return fmt.Sprintf("table(peak=%v, rates=%d, sha256=%x)", s.Peak, len(s.Rates), sum.Sum(nil))
	}
	return fmt.Sprintf("schedule(%d)", s.Kind)
}

func (s Schedule) faults(field string) (f faultList) {
	f.when(s.Kind > TableSchedule, field, "", "has the unknown kind %d; use Constant, Linear, Cosine or Table", s.Kind)
	if s.Kind == TableSchedule {
		f.when(len(s.Rates) == 0, field, "", "is a table without rates; give at least one")
		bad := slices.IndexFunc(s.Rates, func(r float64) bool { return !(r >= 0) || math.IsInf(r, 0) })
		f.when(bad >= 0, field, "", "has a rate for step %d that is below 0 or not finite", bad+1)
		f.when(s.Warmup != 0 || s.Final != 0, field, "", "is a table with Warmup or Final; put them into its rates")
	}
	f.when(!(s.Peak > 0) || math.IsInf(s.Peak, 0), field, "lr", "has the peak %v; it must be above 0", s.Peak)
	f.when(s.Steps < 0, field, "lr-steps", "has a length of %d steps; it must be 0 (Job.Steps) or more", s.Steps)
	f.when(s.Warmup < 0, field, "", "has a warm-up of %d steps; it must be 0 or more", s.Warmup)
	f.when(!(s.Final >= 0 && s.Final <= 1), field, "", "falls to %v of its peak; it must be within 0 and 1", s.Final)
	return f
}

// Optimizer is [AdamW] or [SGD].
type Optimizer interface {
	rule() zero.Rule
	schedule() Schedule
	withSchedule(Schedule) Optimizer
	faults() faultList
	String() string
}

// AdamW is Adam with decoupled weight decay (I. Loshchilov and F. Hutter,
// "Decoupled weight decay regularization", 2019), with the meaning and the
// order of operations of PyTorch's torch.optim.AdamW.
type AdamW struct {
	LR          Schedule
	Beta1       float64 // 0 means 0.9
	Beta2       float64 // 0 means 0.999
	Eps         float64 // 0 means 1e-8
	WeightDecay float64 // 0 means none; see [Param].NoDecay
}

func (a AdamW) withDefaults() AdamW {
	a.Beta1, a.Beta2, a.Eps = cmp.Or(a.Beta1, 0.9), cmp.Or(a.Beta2, 0.999), cmp.Or(a.Eps, 1e-8)
	return a
}

// String describes the optimizer without its schedule, as job.json has it.
func (a AdamW) String() string {
	a = a.withDefaults()
	return fmt.Sprintf("adamw(beta1=%v, beta2=%v, eps=%v, weight_decay=%v)", a.Beta1, a.Beta2, a.Eps, a.WeightDecay)
}

func (a AdamW) rule() zero.Rule {
	a = a.withDefaults()
	return zero.AdamW{Beta1: float32(a.Beta1), Beta2: float32(a.Beta2), Eps: float32(a.Eps), WeightDecay: float32(a.WeightDecay)}
}

func (a AdamW) schedule() Schedule { return a.LR }

func (a AdamW) withSchedule(s Schedule) Optimizer {
	a.LR = s
	return a
}

func (a AdamW) faults() faultList {
	f := a.LR.faults("Optimizer.LR")
	a = a.withDefaults()
	// The update computes with float32, where 1-1e-9 is 1.
	f.when(!(a.Beta1 > 0 && float32(a.Beta1) < 1), "Optimizer.Beta1", "", "is %v; it must be above 0 and below 1", a.Beta1)
	f.when(!(a.Beta2 > 0 && float32(a.Beta2) < 1), "Optimizer.Beta2", "", "is %v; it must be above 0 and below 1", a.Beta2)
	f.when(!(float32(a.Eps) > 0) || math.IsInf(a.Eps, 0), "Optimizer.Eps", "", "is %v; it must be above 0", a.Eps)
	return append(f, decayFaults(a.WeightDecay)...)
}

func decayFaults(d float64) (f faultList) {
	f.when(!(d >= 0) || math.IsInf(d, 0), "Optimizer.WeightDecay", "", "is %v; it must be 0 or more", d)
	return f
}

// SGD is gradient descent with momentum, with the meaning of PyTorch's
// torch.optim.SGD without dampening: weight decay is added to the gradient.
type SGD struct {
	LR          Schedule
	Momentum    float64 // 0 means none
	WeightDecay float64 // 0 means none; see [Param].NoDecay
}

// String describes the optimizer without its schedule, as job.json has it.
func (s SGD) String() string {
	return fmt.Sprintf("sgd(momentum=%v, weight_decay=%v)", s.Momentum, s.WeightDecay)
}

func (s SGD) rule() zero.Rule {
	return zero.SGD{Momentum: float32(s.Momentum), WeightDecay: float32(s.WeightDecay)}
}

func (s SGD) schedule() Schedule { return s.LR }

func (s SGD) withSchedule(lr Schedule) Optimizer {
	s.LR = lr
	return s
}

func (s SGD) faults() faultList {
	f := s.LR.faults("Optimizer.LR")
	f.when(!(s.Momentum >= 0 && s.Momentum < 1), "Optimizer.Momentum", "", "is %v; it must be 0 or more and below 1", s.Momentum)
	return append(f, decayFaults(s.WeightDecay)...)
}

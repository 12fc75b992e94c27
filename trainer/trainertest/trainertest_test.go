package trainertest

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/trainer"
)

// dense is out = in·W for W [in, out], with ways to be wrong.
type dense struct {
	in, out int
	fault   string
	kept    []float32
	noise   int
}

func (d *dense) Params() []trainer.Param {
	return []trainer.Param{{Name: "weight", Shape: []int{d.in, d.out}, Init: trainer.Normal(1)}}
}

func (d *dense) Forward(c *trainer.Context, p []trainer.Tensor, in trainer.Tensor) (trainer.Tensor, any) {
	out := c.Tensor(c.Samples(), d.out)
	c.For(c.Samples(), func(lo, hi int) {
		for s := lo; s < hi; s++ {
			for j := range d.out {
				var sum float32
				if d.fault == "unwritten memory" {
					sum = out.F[s*d.out+j]
				}
				for i := range d.in {
					sum += float32(in.F[s*d.in+i] * p[0].F[i*d.out+j])
				}
				if d.fault == "random" {
					r := c.Rand(s, 0)
					sum += float32(r.Normal())
				}
				out.F[s*d.out+j] = sum
			}
		}
	})
	switch d.fault {
	case "threads":
		out.F[0] += float32(c.Threads())
	case "state":
		d.noise++
		out.F[0] += float32(d.noise)
	case "write":
		in.F[0] = 3
	}
	if d.fault == "field" {
		d.kept = in.F
	}
	return out, in
}

func (d *dense) Backward(c *trainer.Context, p []trainer.Tensor, stash any, dout trainer.Tensor, dp []trainer.Tensor) trainer.Tensor {
	in := stash.(trainer.Tensor)
	if d.fault == "field" {
		in.F = d.kept
	}
	if d.fault != "unset" {
		clear(dp[0].F)
	}
	din := c.Tensor(c.Samples(), d.in)
	for s := range c.Samples() {
		for i := range d.in {
			var sum float32
			for j := range d.out {
				g := dout.F[s*d.out+j]
				dp[0].F[i*d.out+j] += float32(g * in.F[s*d.in+i])
				sum += float32(g * p[0].F[i*d.out+j])
			}
			din.F[s*d.in+i] = sum
		}
	}
	switch d.fault {
	case "derivative":
		dp[0].F[3] *= 1.2
	case "input derivative":
		din.F[0] = 0
	}
	return din
}

// recorder is a testing.TB that keeps failures to itself.
type recorder struct {
	testing.TB
	log []string
}

func (r *recorder) Helper()                   {}
func (r *recorder) Failed() bool              { return len(r.log) > 0 }
func (r *recorder) Errorf(f string, a ...any) { r.log = append(r.log, fmt.Sprintf(f, a...)) }
func (r *recorder) Error(a ...any)            { r.log = append(r.log, fmt.Sprint(a...)) }
func (r *recorder) Fatalf(f string, a ...any) {
	r.Errorf(f, a...)
	runtime.Goexit()
}

func record(f func(t testing.TB)) string {
	r := &recorder{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(r)
	}()
	<-done
	return strings.Join(r.log, "\n")
}

func TestLayerFindsFaults(t *testing.T) {
	in := trainer.Spec{Shape: []int{5}}
	for _, c := range []struct{ fault, want string }{
		{"", ""},
		{"random", ""},
		{"unwritten memory", "holds NaN"},
		{"threads", "on 3 threads: the output has other bits"},
		{"state", "run again"},
		{"write", "wrote to its input"},
		{"field", "in flight: the gradient of weight has other bits"},
		{"unset", "weight holds NaN"},
		{"derivative", "weight"},
		{"input derivative", "the gradient of the input"},
	} {
		t.Run(c.fault, func(t *testing.T) {
			got := record(func(t testing.TB) { Layer(t, &dense{in: 5, out: 4, fault: c.fault}, in) })
			if !strings.Contains(got, c.want) || (got == "") != (c.want == "") {
				t.Errorf("the layer was told %q, want something with %q", got, c.want)
			}
		})
	}
}

// square is Σ (out-target)²/2.
type square struct{ wrong bool }

func (l square) Loss(c *trainer.Context, out, target trainer.Tensor) (sum float64, count int64, dout trainer.Tensor) {
	dout = c.Tensor(out.Shape...)
	for i, x := range out.F {
		d := x - target.F[i]
		sum += float64(float64(d)*float64(d)) / 2
		dout.F[i] = d
	}
	if l.wrong {
		dout.F[0]++
	}
	return sum, int64(c.Samples()), dout
}

func TestLossFindsFaults(t *testing.T) {
	spec := trainer.Spec{Shape: []int{4}}
	Loss(t, square{}, spec, spec)
	if got := record(func(t testing.TB) { Loss(t, square{true}, spec, spec) }); !strings.Contains(got, "gradient") {
		t.Errorf("a wrong gradient was told %q", got)
	}
}

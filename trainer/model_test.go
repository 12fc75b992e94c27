package trainer

import (
	"fmt"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tensor"
)

// block is a layer of one parameter, which is never run.
type block struct {
	Layer
	size int
}

func (b block) Params() []Param { return []Param{{Name: "w", Shape: []int{b.size}}} }

func TestMemoryFault(t *testing.T) {
	// Two layers of 1000 and 500 parameters, samples of 30 numbers.
	m := Model{
		Input: Spec{Shape: []int{20}}, Target: Spec{Shape: []int{10}, Kind: tensor.Int32},
		Layers: []Layer{block{size: 1000}, block{size: 500}},
	}
	params := describeParams(&m, 0)
	least := 4 * (4*1500 + 1000 + 2*30) // bytes
	for _, c := range []struct {
		micro     int
		available int
		want      string // "" for no fault
	}{
		{2, least, ""},
		{2, least - 1, "Job.Model takes at least 0.0 GB of memory, and this machine has 0.0 GB to spare; use fewer or narrower layers: it has 1500 parameters, and not much more than 1.8e+03 fit"},
		{1 << 20, least, "use micro-batches of less than 1048576 samples"},
	} {
		got := fmt.Sprint(memoryFault(&m, params, 4, c.micro, float64(c.available)))
		if c.want == "" && got != "[]" || !strings.Contains(got, c.want) {
			t.Errorf("micro-batches of %d, %d bytes: %s, want %q", c.micro, c.available, got, c.want)
		}
	}
	// A job of the largest sizes that can be written down is a fault, not an overflow.
	huge := Model{Input: Spec{Shape: []int{tensor.MaxElements}}, Target: Spec{Shape: []int{tensor.MaxElements}}}
	for range 4000 {
		huge.Layers = append(huge.Layers, block{size: tensor.MaxElements})
	}
	if f := memoryFault(&huge, describeParams(&huge, 0), 4, 1<<62, 1e18); len(f) != 1 {
		t.Errorf("faults %v", f)
	}
}

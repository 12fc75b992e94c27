package elastic_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/soliton-train/soliton/elastic"
)

// A step of eight workers, and what the loss of one of them changes.
func Example() {
	r, err := elastic.Start(elastic.Cluster{
		Workers: 8, Stages: 2, Layers: 16, MicroBatches: 32, Mirrors: 1, LayerParams: 1_000_000, LayerTime: 10 * time.Millisecond,
	})
	if err != nil {
		panic(err)
	}
	before, err := r.Predict()
	if err != nil {
		panic(err)
	}
	if err := r.Lose(3); err != nil {
		panic(err)
	}
	after, err := r.Predict()
	if err != nil {
		panic(err)
	}
	fmt.Println(before.Step, "before,", after.Step, "after")
	fmt.Println(len(r.Reasons()), "plans, the last one for", len(after.Workers), "workers in", len(r.Plan().Stages()), "stages")
	// Output:
	// 2.16s before, 2.4s after
	// 4 plans, the last one for 7 workers in 2 stages
}

func TestImpossible(t *testing.T) {
	for _, c := range []elastic.Cluster{{}, {Workers: 2, Stages: 3, Layers: 8, MicroBatches: 4}, {Workers: 2, Stages: 2, Layers: 1, MicroBatches: 4}} {
		if _, err := elastic.Start(c); err == nil {
			t.Errorf("%+v: a plan was made", c)
		}
	}
	r, err := elastic.Start(elastic.Cluster{Workers: 2, Layers: 2, MicroBatches: 4, LayerParams: 10, LayerTime: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Plan().Validate(); err != nil {
		t.Error(err)
	}
	if err := r.Slow(map[elastic.WorkerID]float64{0: 0.5}); err != nil || r.Plan().Validate() != nil {
		t.Errorf("a slow worker: %v, %v", err, r.Plan().Validate())
	}
	if err := r.Lose(1); err == nil {
		t.Error("a run without mirrors goes on after a loss")
	}
}

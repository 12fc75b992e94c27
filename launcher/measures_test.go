package main

import (
	"encoding/json"
	"testing"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

func TestMeasureLines(t *testing.T) {
	for _, m := range []trace.Measure{
		trace.StepDone{Step: 1, Loss: 2}, trace.WorkerStep{Worker: 1, Reduced: 3}, trace.Traffic{To: 1, Bytes: 2}, trace.Collective{Name: "reduce"},
		trace.RecoveryDone{Seconds: 1, Phases: [6]float64{5: 1}}, trace.MirrorLag{}, trace.Device{Name: "GPU 0", Joules: 1},
	} {
		text, err := json.Marshal(lineOf(m))
		if err != nil {
			t.Fatal(err)
		}
		var l measureLine
		if err := json.Unmarshal(text, &l); err != nil || l.measure() != m {
			t.Errorf("%+v came as %+v, %v", m, l.measure(), err)
		}
	}
	if m := (measureLine{}).measure(); m != nil {
		t.Errorf("nothing came as %v", m)
	}
}

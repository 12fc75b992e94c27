package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/observe/view"
)

// What an agent tells its supervisor arrives as the value that it was.
func TestReports(t *testing.T) {
	for _, v := range []any{
		trace.StepDone{Step: 1, Loss: 2}, trace.WorkerStep{Worker: 1, Reduced: 3}, trace.Traffic{To: 1, Bytes: 2}, trace.Collective{Name: "reduce"},
		trace.RecoveryDone{Seconds: 1, Phases: [6]float64{5: 1}}, trace.MirrorLag{}, trace.Device{Name: "GPU 0", Joules: 1},
		view.Note("reading"), view.Begin{Reason: "first"}, view.Plan{Reason: "next"}, view.Recovered{What: "killed"}, view.Change{Kind: "lost"},
		view.Timeline{ID: 1}, view.Worker{ID: 2, State: "training"}, view.Step{Step: 3, Loss: 1}, view.Stopping{Reason: "interrupt"}, view.End{},
	} {
		sent, err := reportOf(1, v)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(sent)
		if err != nil {
			t.Fatal(err)
		}
		var got report
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		again, err := reportOf(1, got.value())
		if err != nil || again.Kind != sent.Kind || !bytes.Equal(again.Value, sent.Value) || got.value() == nil {
			t.Errorf("%#v came as %#v, %v", v, got.value(), err)
		}
	}
	if v := (report{Kind: reportEnd}).value(); v != nil {
		t.Errorf("nothing came as %v", v)
	}
}

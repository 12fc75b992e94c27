package session

import (
	"errors"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/net/control"
)

// The first time that memory of a worker is altered is written down, and the
// second ends it, where others can go on.
func TestRepaired(t *testing.T) {
	for _, workers := range []int{1, 3} {
		r := trainingOf(t, Config{}, workers)
		layer := r.s.workers[0].ready.Layers[0].Name
		tell := func(step, try int) {
			r.feed(Received{0, control.Repaired{Step: step, Try: try, Layer: layer, Block: 2, Target: "moment"}})
		}
		tell(2, 1)
		tell(2, 1) // another block, found together with it
		if kills := pick[Kill](r.effects); len(kills) > 0 {
			t.Errorf("killed for one time: %v", kills)
		}
		tell(2, 2)
		kills := pick[Kill](r.effects)
		if evicted := len(kills) == 1 && kills[0].Worker == 0; evicted != (workers > 1) {
			t.Errorf("%d workers: kills %v", workers, kills)
		}
		said := 0
		for _, e := range pick[WriteEvent](r.effects) {
			if e.Event.Kind == "repaired" {
				said++
				if e.Event.Worker != 0 || e.Event.Repair == nil || e.Event.Repair.Layer != layer || e.Event.Repair.Block != 2 || e.Event.Repair.Target != "moment" ||
					!strings.Contains(e.Event.Reason, "step 2") {
					t.Errorf("%+v", e.Event)
				}
			}
		}
		if said != 3 {
			t.Errorf("%d lines", said)
		}
	}
}

func TestRepairedHostile(t *testing.T) {
	layer := trainingOf(t, Config{}, 1).s.workers[0].ready.Layers[0].Name
	for _, m := range []control.Repaired{
		{Layer: layer, Target: "other"}, {Layer: layer, Block: -1, Target: "own"}, {Layer: "no such layer", Target: "own"},
	} {
		r := trainingOf(t, Config{}, 2)
		r.feed(Received{0, m})
		var wrong *ProtocolError
		if !errors.As(r.s.end.err, &wrong) {
			t.Errorf("%+v: %v", m, r.s.end.err)
		}
	}
}

// A worker whose state no other has ends like one that is killed; alone it
// is the run that ends.
func TestCorruptIsALoss(t *testing.T) {
	r := trainingOf(t, Config{}, 3)
	r.feed(Received{1, control.Failed{Kind: control.Corrupt, Text: "altered", Step: 2}})
	r.feed(died(1)...)
	if asked := r.answer(1, 1); len(asked) != 2 || r.s.end.err != nil {
		t.Errorf("asked %v after %v", asked, r.s.end.err)
	}
	r = trainingOf(t, Config{}, 1)
	r.feed(Received{0, control.Failed{Kind: control.Corrupt, Text: "altered", Step: 2}})
	if r.s.end.err == nil || !strings.Contains(r.s.end.err.Error(), "altered") {
		t.Errorf("error %v", r.s.end.err)
	}
	// No other worker can continue without a lone one, but a checkpoint.
	r = savingOf(t, Config{}, 1)
	r.now = r.s.Alarm()
	r.feed(AlarmDue{}, partOf(0, 2, 1))
	r.feed(commit(1, 2)...)
	r.feed(CheckpointCommitted{2, nil}, Received{0, control.Failed{Kind: control.Corrupt, Text: "altered", Step: 3}})
	if out := r.s.Outcome(); out.Err == nil || out.Resume != r.s.cfg.Shown {
		t.Errorf("%v, to go on: %q", out.Err, out.Resume)
	}
}

package process

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
)

func TestHeldWithoutAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r recovery
		alone := r.held(0)
		if time.Sleep(time.Hour); alone() {
			t.Error("held by an agent that does not beat")
		}
		held := r.held(time.Second)
		time.Sleep(900 * time.Millisecond)
		if held() {
			t.Error("held within the budget")
		}
		time.Sleep(200 * time.Millisecond)
		if !held() {
			t.Error("not held, with the agent silent for longer than the budget")
		}
		r.beaten()
		if held() {
			t.Error("held, with the agent back")
		}
		for _, on := range []bool{true, false} {
			if r.hold(on); held() != on || alone() != on {
				t.Errorf("held %v, %v; the agent says %v", held(), alone(), on)
			}
		}
	})
}

// A worker begins from the newest order that says so, and gets later ones with the engine.
func TestOrdersToBeginFrom(t *testing.T) {
	w := New(nil, Self{})
	r := &w.recovery
	at := func(step int) (o control.Order) {
		o.Passed.Step = step
		return o
	}
	back := at(3)
	back.Rollback = true
	r.hear(back) // before the first order
	back.Passed.Step = 5
	r.hear(back)
	<-r.ordered()
	if o := r.begin(); o.Passed.Step != 5 {
		t.Errorf("begins from step %d, want 5", o.Passed.Step)
	}
	r.hear(at(6))
	select {
	case <-r.ordered():
		t.Error("begins from the plan of a later step")
	default:
	}
	if len(r.early) != 1 {
		t.Errorf("%d messages for the engine, want 1", len(r.early))
	}
}

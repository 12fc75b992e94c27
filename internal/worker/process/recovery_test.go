package process

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/engine"
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

// A link that never opens is told of like one that breaks, once the other end has had its time to come so far.
func TestLinkThatNeverOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := New(nil, Self{})
		r := &w.recovery
		r.engine = new(engine.Engine)
		peer := id.Session{Worker: 1}
		reported := func(ev comm.LinkEvent) bool {
			r.link(ev)
			select {
			case s := <-r.broken:
				return s == peer
			default:
				return false
			}
		}
		never := comm.LinkEvent{Peer: peer, Err: errors.New("no answer")}
		for range 2 {
			if reported(never) {
				t.Error("the first failure is reported")
			}
			time.Sleep(timing.Handshake - time.Millisecond)
			if reported(never) {
				t.Error("reported early")
			}
			time.Sleep(time.Millisecond)
			for range 2 {
				if !reported(never) {
					t.Error("not reported")
				}
			}
			if reported(comm.LinkEvent{Peer: peer, Up: true, Link: 1}) {
				t.Error("reported when it is up")
			}
		}
	})
}

// A worker that is released ends what it is at, which may wait for what does not come any more, and nothing after that.
func TestReleasedWithinAStep(t *testing.T) {
	w := New(nil, Self{})
	until, end := w.untilReleased(t.Context())
	close(w.release)
	<-until.Done()
	if end(); !errors.Is(context.Cause(until), core.ErrLeft) {
		t.Error(context.Cause(until))
	}
	w = New(nil, Self{})
	until, end = w.untilReleased(t.Context())
	end()
	close(w.release)
	if errors.Is(context.Cause(until), core.ErrLeft) {
		t.Error("a release after the last step ends it")
	}
}

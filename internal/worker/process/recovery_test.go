package process

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestHeldWithoutAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r recovery
		if r.held(0) != nil {
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
	})
}

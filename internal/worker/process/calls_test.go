package process

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
)

func TestCalls(t *testing.T) {
	var c Calls
	if got := c.Running(); got.Kind != control.NoCall {
		t.Errorf("%+v before any call", got)
	}
	before := c.Enter(control.CallForward, 1<<20, 0)
	outer := c.Running()
	if outer.Kind != control.CallForward || outer.Layer != 1<<20 {
		t.Errorf("%+v", outer)
	}
	inner := c.Enter(control.CallSample, 0, 1<<40)
	if got := c.Running(); got.Kind != control.CallSample || got.Sample != 1<<40 || got.Number == outer.Number {
		t.Errorf("%+v", got)
	}
	c.Leave(inner)
	if got := c.Running(); got.Kind != outer.Kind || got.Number != outer.Number {
		t.Errorf("%+v, want %+v", got, outer)
	}
	c.Leave(before)
	if got := c.Running(); got.Kind != control.NoCall {
		t.Errorf("%+v after all calls", got)
	}
	(*Calls)(nil).Leave((*Calls)(nil).Enter(control.CallLoss, 0, 0))
}

// A heartbeat tells of a call that the one before has seen, and leaves out the time for which the machine ran others.
func TestCallClock(t *testing.T) {
	var c callClock
	var queued time.Duration
	now := time.Unix(100, 0)
	look := func(after, waits time.Duration, number uint64) *control.Call {
		now = now.Add(after)
		queued += waits
		call := control.Call{Number: number}
		if number > 0 {
			call.Kind = control.CallSample
		}
		return c.look(call, now, func() time.Duration { return time.Hour + queued })
	}
	const beat = timing.Heartbeat
	for i, number := range []uint64{0, 1, 2, 0, 3} {
		if got := look(beat, 0, number); got != nil {
			t.Fatalf("look %d: %+v of a call that is new", i, got)
		}
	}
	for i := range 20 {
		if got := look(beat, 0, 3); got == nil || got.For != int64(i+1)*int64(beat) || got.Waited != 0 {
			t.Fatalf("look %d: %+v", i, got)
		}
	}
	for _, step := range []struct{ after, waits, waited time.Duration }{
		{beat, beat / 2, beat / 2},
		{beat, 10 * beat, beat * 9 / 10},       // of several threads
		{time.Minute, 0, time.Minute - 2*beat}, // it was stopped
		{beat, -time.Second, 0},                // threads have ended
	} {
		was := c.call
		got := look(step.after, step.waits, 3)
		if got == nil || time.Duration(got.For-was.For) != step.after || time.Duration(got.Waited-was.Waited) != step.waited {
			t.Errorf("%+v after %+v, want %+v", got, was, step)
		}
	}
	if got := look(beat, 0, 4); got != nil {
		t.Errorf("%+v of a call that is new", got)
	}
	if got := look(beat, 0, 4); got == nil || got.For != int64(beat) || got.Waited != 0 {
		t.Errorf("%+v", got)
	}
}

func TestStacks(t *testing.T) {
	blocked := make(chan struct{})
	go neverReturns(blocked)
	<-blocked
	defer func() { blocked <- struct{}{} }()
	var b bytes.Buffer
	writeStacks(&b, "Sample(17)")
	if text := b.String(); !strings.HasPrefix(text, "SIGQUIT: Sample(17) has not returned\n\ngoroutine ") || !strings.Contains(text, "neverReturns(") || strings.Contains(text, "writeStacks(") {
		t.Error(text)
	}
}

func neverReturns(blocked chan struct{}) {
	blocked <- struct{}{}
	<-blocked
}

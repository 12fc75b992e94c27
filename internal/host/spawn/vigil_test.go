package spawn

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

func TestVigil(t *testing.T) {
	const ms = time.Millisecond
	type look struct {
		at      time.Duration
		threads map[int]platform.Thread
		late    bool
		want    Verdict
	}
	one := func(state byte, ran time.Duration) map[int]platform.Thread {
		return map[int]platform.Thread{1: {State: state, Ran: ran}, 2: {State: 'S', Ran: 5}}
	}
	for _, c := range []struct {
		name  string
		looks []look
	}{
		{"nothing runs", []look{{0, one('S', 3), false, Unknown}, {50 * ms, one('S', 3), false, Unknown}, {150 * ms, one('S', 3), false, Unknown}, {200 * ms, one('S', 3), false, Frozen}, {250 * ms, one('S', 4), false, Runs}, {300 * ms, one('S', 4), false, Unknown}}},
		{"under a debugger", []look{{0, one('t', 3), false, Unknown}, {200 * ms, one('t', 3), false, Frozen}, {250 * ms, one('S', 3), false, Frozen}}},
		{"one is runnable and gets no processor", []look{{0, one('R', 3), false, Unknown}, {50 * ms, one('R', 3), false, Runs}, {10 * time.Second, one('R', 3), false, Runs}}},
		{"one has run, and sleeps", []look{{0, one('S', 3), false, Unknown}, {100 * ms, one('S', 4), false, Runs}, {250 * ms, one('S', 4), false, Unknown}, {300 * ms, one('S', 4), false, Frozen}}},
		{"a new one", []look{{0, one('S', 3), false, Unknown}, {100 * ms, map[int]platform.Thread{1: {State: 'S', Ran: 3}, 3: {State: 'S'}}, false, Runs}}},
		{"one has ended", []look{{0, one('S', 3), false, Unknown}, {100 * ms, map[int]platform.Thread{1: {State: 'S', Ran: 3}}, false, Runs}}},
		{"waits for a disk", []look{{0, one('D', 3), false, Unknown}, {time.Second, one('D', 3), false, Unknown}, {2 * time.Second, one('S', 3), false, Frozen}}},
		{"stopped by a signal, as is told otherwise", []look{{0, one('T', 3), false, Unknown}, {time.Second, one('T', 3), false, Unknown}}},
		{"the whole machine was stopped", []look{{0, one('S', 3), false, Unknown}, {time.Hour, one('S', 3), true, Unknown}, {time.Hour + 150*ms, one('S', 3), false, Unknown}, {time.Hour + 200*ms, one('S', 3), false, Frozen}}},
	} {
		var v Vigil
		began := time.Now()
		for i, l := range c.looks {
			if got := v.Look(began.Add(l.at), l.threads, l.late); got != l.want {
				t.Errorf("%s: look %d: %v, want %v", c.name, i, got, l.want)
			}
			if still := v.Still(); l.want == Frozen && began.Add(l.at).Sub(still) < timing.Still {
				t.Errorf("%s: look %d: nothing has run since %v, want for longer", c.name, i, still.Sub(began))
			}
		}
		v.Forget()
		if got := v.Look(began, one('S', 3), false); got != Unknown {
			t.Errorf("%s: after that, as the first look: %v", c.name, got)
		}
	}
}

package host

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// threaded is a worker whose threads a test makes up.
type threaded struct {
	spawn.Worker
	mu    sync.Mutex
	looks int
	state byte
	ran   time.Duration
}

func (w *threaded) Threads(pid int) (map[int]platform.Thread, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	return map[int]platform.Thread{pid: {State: w.state, Ran: w.ran}}, true
}

func (w *threaded) looked() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.looks
}

func (w *threaded) set(state byte, ran time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state, w.ran = state, ran
}

// A host looks at the threads of silent processes alone, and tells what they say.
func TestFrozen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		w := &threaded{Worker: spawn.InProcess(func(context.Context, net.Conn) {}), state: 'S'}
		defer spawn.End(w.Worker)
		out := &sent{}
		l := newLocal(id.Session{Worker: 1})
		l.worker = w
		r := &relay{c: &Config{Settings: session.Settings{Detect: timing.Default}}, locals: []*local{l}, out: out}
		var done sync.WaitGroup
		done.Go(func() { r.feel(ctx) })
		told := func(what string, want ...string) {
			t.Helper()
			synctest.Wait()
			r.mu.Lock()
			defer r.mu.Unlock()
			got := strings.Join(out.list, "; ")
			out.list = nil
			ok := len(want) == 0 && got == ""
			for _, w := range want {
				ok = ok || strings.HasPrefix(got, w)
			}
			if !ok {
				t.Errorf("%s: told %q, want one of %q", what, got, want)
			}
		}
		beat := func() {
			r.said(l, control.Beat{})
			out.list = nil
			time.Sleep(timing.Heartbeat)
		}

		time.Sleep(time.Second)
		told("before its Hello")
		r.said(l, control.Hello{PID: 7})
		out.list = nil
		for range 20 {
			beat()
		}
		told("while it is heard")
		if n := w.looked(); n > 0 {
			t.Errorf("it is looked at %d times while it is heard", n)
		}

		silentSince := time.Now().Add(-timing.Heartbeat)
		time.Sleep(4 * timing.Heartbeat)
		told("nothing runs", "{Worker:1 Incarnation:0 Stopped:true Frozen:true For:")
		if after := time.Since(silentSince); after > 5*timing.Heartbeat {
			t.Errorf("found after %v", after)
		}
		time.Sleep(timing.Heartbeat)
		told("nothing runs yet")
		w.set('S', 1)
		time.Sleep(timing.Heartbeat)
		told("something has run", "{Worker:1 Incarnation:0 Stopped:false Frozen:false For:0}")
		beat()

		w.set('R', 1)
		time.Sleep(3 * timing.Heartbeat)
		told("it waits for a processor", "{Worker:1 Incarnation:0}")
		r.mu.Lock()
		if !l.halted.IsZero() {
			t.Error("it counts as stopped")
		}
		r.mu.Unlock()
		beat()
		told("it is heard")

		r.halted(l, time.Now()) // by a signal, as the system tells
		out.list = nil
		before := w.looked()
		time.Sleep(time.Second)
		told("stopped by a signal")
		if w.looked() != before {
			t.Errorf("it is looked at while a signal has stopped it")
		}
		cancel()
		done.Wait()
	})
}

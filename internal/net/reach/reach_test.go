package reach

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/timing"
)

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name   string
		own    Finding
		others []Finding
		need   int
		want   Finding
	}{
		{"it answers", Answers, []Finding{Silent, Silent}, 1, Answers},
		{"its agent has exited", Refuses, nil, 1, Refuses},
		{"another host knows that its agent has exited", Silent, []Finding{Refuses}, 1, Refuses},
		{"one observer alone", Silent, nil, 1, Unsure},
		{"one observer alone, of two hosts", Silent, nil, 0, Unsure},
		{"one of three is off", Silent, []Finding{Silent}, 1, Silent},
		{"the link between two is cut", Silent, []Finding{Answers}, 1, Unsure},
		{"one reaches it, two do not", Silent, []Finding{Silent, Answers, Silent}, 2, Unsure},
		{"two of five are off", Silent, []Finding{Unsure, Silent, Silent}, 2, Silent},
		{"the observer is cut off", Silent, []Finding{Unsure, Unsure}, 1, Unsure},
		{"a minority is cut off", Silent, []Finding{Unsure, Silent, Unsure}, 2, Unsure},
		{"the observer knows nothing yet", Unsure, []Finding{Silent}, 1, Unsure},
	} {
		if got := Judge(c.own, c.others, c.need); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// A machine that answers is not dialled again and again while its processes are silent: they would find all those connections at once.
func TestPace(t *testing.T) {
	const ms = time.Millisecond
	at := func(after time.Duration) time.Time { return time.Unix(1, 0).Add(after) }
	var p Pace
	for _, c := range []struct {
		now, heard time.Duration
		every      time.Duration
		want       bool
		ends       bool
	}{
		{now: 300 * ms, every: 100 * ms, want: true},
		{now: 320 * ms, every: 100 * ms}, // it is under way
		{now: 500 * ms, every: 100 * ms, ends: true},
		{now: 520 * ms, every: 100 * ms, want: true, ends: true},
		{now: 540 * ms, every: 100 * ms},
		{now: 560 * ms, every: 0, want: true, ends: true},
		{now: 580 * ms, heard: 570 * ms, every: 100 * ms, want: true, ends: true}, // it spoke, and is silent again
		{now: 600 * ms, heard: 570 * ms, every: 100 * ms},
		{now: 680 * ms, heard: 570 * ms, every: 100 * ms, want: true},
	} {
		if got := p.Begin(at(c.now), at(c.heard), c.every); got != c.want {
			t.Errorf("at %v, heard at %v: %v, want %v", c.now, c.heard, got, c.want)
		}
		if c.ends {
			p.End()
		}
	}
}

// answer makes a probe that ends after a time.
func answer(f Finding, after time.Duration) func(context.Context) Finding {
	return func(ctx context.Context) Finding {
		select {
		case <-time.After(after):
			return f
		case <-ctx.Done():
			return Unsure
		}
	}
}

func TestInquire(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name   string
		own    func(context.Context) Finding
		others []func(context.Context) Finding
		want   Finding
		after  time.Duration
	}{
		{"an answer asks no other host", answer(Answers, ms), []func(context.Context) Finding{func(context.Context) Finding { panic("asked") }}, Answers, ms},
		{"both are silent", answer(Silent, 100*ms), []func(context.Context) Finding{answer(Silent, 100*ms)}, Silent, 120 * ms},
		{"the other does not answer", answer(Silent, 100*ms), []func(context.Context) Finding{answer(Unsure, 900*ms)}, Unsure, 920 * ms},
		{"one of the others does not", answer(Silent, 100*ms), []func(context.Context) Finding{answer(Unsure, 900*ms), answer(Silent, 100*ms)}, Silent, 120 * ms},
		{"the observer was stopped", answer(Unsure, 100*ms), []func(context.Context) Finding{answer(Silent, 100*ms)}, Unsure, 100 * ms},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			got := Inquire(t.Context(), 20*ms, 1, c.own, c.others)
			if took := time.Since(began); got != c.want || took != c.after {
				t.Errorf("%s: %v after %v, want %v after %v", c.name, got, took, c.want, c.after)
			}
		})
	}
}

func TestProbe(t *testing.T) {
	const window = 100 * time.Millisecond
	lost := func(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }
	refused := &net.OpError{Op: "dial", Err: unix.ECONNREFUSED}
	var dials atomic.Int32
	for _, c := range []struct {
		name  string
		dial  func(context.Context) (net.Conn, error)
		want  Finding
		after time.Duration
	}{
		{"it answers", func(context.Context) (net.Conn, error) { a, b := net.Pipe(); _ = b.Close(); return a, nil }, Answers, 0},
		{"it refuses", func(context.Context) (net.Conn, error) { return nil, refused }, Refuses, 0},
		{"it is silent", lost, Silent, window + timing.Settle},
		{"the observer has no files", func(context.Context) (net.Conn, error) { return nil, unix.EMFILE }, Unsure, window},
		{"there is no way", func(context.Context) (net.Conn, error) { return nil, unix.EHOSTUNREACH }, Silent, window + timing.Settle},
		{"an answer as late as can be", func(ctx context.Context) (net.Conn, error) {
			if answer(Refuses, window+timing.Settle-1)(ctx) == Unsure {
				return nil, ctx.Err()
			}
			return nil, refused
		}, Refuses, window + timing.Settle - 1},
		{"two packets are lost", func(ctx context.Context) (net.Conn, error) {
			if dials.Add(1) < 3 {
				return lost(ctx)
			}
			return nil, refused
		}, Refuses, 40 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			got := Probe(t.Context(), window, c.dial)
			if took := time.Since(began); got != c.want || took != c.after {
				t.Errorf("%s: %v after %v, want %v after %v", c.name, got, took, c.want, c.after)
			}
		})
	}
	if of(errors.New("x")) != Unsure {
		t.Error("an unknown error is evidence")
	}
}

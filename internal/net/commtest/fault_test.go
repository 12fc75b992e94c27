package commtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/transport"
	"pgregory.net/rapid"
)

func TestFaultPlansAreText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plan := rapid.SliceOf(rapid.Custom(func(t *rapid.T) Fault {
			name := rapid.StringMatching(`[a-z0-9]{1,5}|\*`)
			f := Fault{Kind: FaultKind(rapid.IntRange(1, 4).Draw(t, "kind")), From: name.Draw(t, "from"), To: name.Draw(t, "to")}
			if rapid.Bool().Draw(t, "by frame") {
				f.Frame = rapid.IntRange(1, 1<<31-1).Draw(t, "frame")
			} else {
				f.Byte = rapid.Int64Range(0, 1<<61).Draw(t, "byte")
			}
			if f.Kind != FaultDrop {
				f.For = time.Duration(rapid.Int64Range(1, 1e12).Draw(t, "for"))
			}
			return f
		})).Draw(t, "plan")
		text := FaultPlan(plan).String()
		got, err := ParseFaults(text)
		if err != nil || got.String() != text || len(got) != len(plan) {
			t.Fatalf("%q came back as %q: %v", text, got, err)
		}
		for i := range plan {
			if got[i] != plan[i] {
				t.Fatalf("%v came back as %v", plan[i], got[i])
			}
		}
	})
	_, err := ParseFaults("burn 0>1@frame:1, drop 0-1@frame:1, drop 0>1@frame:0, delay 0>1@byte:3, drop 0>1, cut 0>1@byte:1 -2s")
	if err == nil || strings.Count(err.Error(), "\n") != 5 {
		t.Errorf("six faults, reported as:\n%v", err)
	}
}

// pairUnder is two workers, 0 and 1, under a fault plan.
func pairUnder(t *testing.T, text string, cfg comm.Config) ([]*comm.Endpoint, *Faults) {
	t.Helper()
	plan, err := ParseFaults(text)
	if err != nil {
		t.Fatal(err)
	}
	f, m := NewFaults(plan), transport.NewMem()
	es, _ := Cluster(t, 2, cfg, func(_ testing.TB, i int) transport.Transport { return f.Transport(fmt.Sprint(i), m) })
	return es, f
}

func user(i int) comm.Key { return comm.Key{Kind: comm.KindUser, Step: 1, Lo: int64(i)} }

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A connection that breaks in mid-message fails the send, keeps the receive,
// and is made again; the copy that is sent then arrives whole.
func TestDropInMidMessage(t *testing.T) {
	for _, where := range []string{"drop 0>1@byte:400000", "drop 1>0@frame:2", "drop 0>1@frame:4"} {
		synctest.Test(t, func(t *testing.T) {
			var downs int
			es, f := pairUnder(t, where, comm.Config{OnLink: func(ev comm.LinkEvent) {
				if !ev.Up && ev.Peer.Worker == 1 {
					downs++
				}
			}})
			const size = 1 << 20
			buf := make([]byte, size)
			r := es[1].Expect(user(1), buf)
			sent := 0
			for !closed(r.Done()) {
				err := es[0].Send(t.Context(), es[1].Self(), user(1), content(size, 1), comm.Bulk)
				if err != nil && !errors.Is(err, comm.ErrLink) {
					t.Fatal(err)
				}
				sent++
				synctest.Wait()
			}
			if n, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(buf[:n], content(size, 1)) {
				t.Errorf("receive: %v", err)
			}
			es[0].Send(t.Context(), es[1].Self(), user(2), nil, comm.Bulk)
			synctest.Wait()
			if got := f.Fired().String(); got != where || downs == 0 {
				t.Errorf("fired %q, %d links lost, sent %d times", got, downs, sent)
			}
		})
	}
}

// A stall or a cut holds a message up; the call ends with its context, in
// time, and goes through when the fault is over.
func TestStallAndCut(t *testing.T) {
	for _, text := range []string{"stall 0>1@byte:100000 1h", "cut 0>1@byte:100000 1h", "delay 0>1@byte:100000 1h"} {
		synctest.Test(t, func(t *testing.T) {
			es, _ := pairUnder(t, text, comm.Config{})
			const size = 1 << 20
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			r := es[1].Expect(user(1), make([]byte, size))
			began := time.Now()
			s := es[0].Post(es[1].Self(), user(1), content(size, 1), comm.Bulk)
			if _, _, err := r.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("receive: %v", err)
			}
			if err := s.Wait(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("send: %v", err)
			}
			if d := time.Since(began); d != time.Minute {
				t.Errorf("ended after %v", d)
			}
			time.Sleep(time.Hour)
			buf := make([]byte, size)
			r = es[1].Expect(user(2), buf)
			if err := es[0].Send(t.Context(), es[1].Self(), user(2), content(size, 1), comm.Bulk); err != nil {
				t.Errorf("send afterwards: %v", err)
			}
			if _, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(buf, content(size, 1)) {
				t.Errorf("receive afterwards: %v", err)
			}
		})
	}
}

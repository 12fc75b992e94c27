package comm

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"
)

// A shaped link carries what it is allowed to, and others what they can.
func TestShape(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := cluster(t, 3, Config{Chunk: 128 << 10}, inMem()) // a message has arrived when its last chunk begins to count
		data := pattern(2<<20, 1)
		send := func(to int, key uint64) time.Duration {
			got := make([]byte, len(data))
			r := es[to].Expect(user(key, 1), got)
			began := time.Now()
			if err := es[0].Send(t.Context(), es[to].Self(), user(key, 1), data, Bulk); err != nil {
				t.Fatal(err)
			}
			if _, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("other bytes, %v", err)
			}
			return time.Since(began)
		}
		es[0].Shape(1, 1<<20)
		if took := send(1, 1); took < 1800*time.Millisecond || took > 2200*time.Millisecond {
			t.Errorf("2 MiB at 1 MiB/s took %v", took)
		}
		if took := send(2, 2); took > 100*time.Millisecond {
			t.Errorf("2 MiB over a link that is not shaped took %v", took)
		}
		time.Sleep(time.Second) // of the bubble; idle time is no credit
		if took := send(1, 3); took < 1800*time.Millisecond {
			t.Errorf("after a pause, 2 MiB at 1 MiB/s took %v", took)
		}
		for _, s := range es[0].Stats() {
			if slow := s.Busy > 3*time.Second; slow != (s.Peer.Worker == 1) {
				t.Errorf("the link to worker %v was busy for %v", s.Peer, s.Busy)
			}
		}
		es[0].Shape(1, 0)
		if took := send(1, 4); took > 200*time.Millisecond {
			t.Errorf("2 MiB over a link that is not shaped any more took %v", took)
		}
	})
}

// Who closes does not wait for a shaped link.
func TestShapeClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := cluster(t, 2, Config{}, inMem())
		es[0].Shape(1, 1)
		s := es[0].Post(es[1].Self(), user(1, 1), pattern(1<<10, 1), Bulk)
		synctest.Wait()
		began := time.Now()
		es[0].Close()
		<-s.Done()
		if took := time.Since(began); took > time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

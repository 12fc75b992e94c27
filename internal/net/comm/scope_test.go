package comm

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// A new version of a group ends what waits for earlier ones, on both sides, and leaves nothing of them behind: neither receives,
// nor messages that came early, nor messages that wait for credit. Messages of other groups and of steps stay.
func TestScopeBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		es := cluster(t, 2, Config{}, func(int) transport.Transport { return m })
		var scopes [2]*Scope
		for i, e := range es {
			var err error
			if scopes[i], err = NewScope(e, 5, func(id.Session, error) {}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := NewScope(es[0], 5, nil); !errors.Is(err, ErrUsage) {
			t.Errorf("a second scope of the number: %v", err)
		}
		old, next := id.Version{Generation: 1, N: 1}, id.Version{Generation: 1, N: 2}
		groupKey := func(group uint16, v id.Version, step uint64) Key {
			return GroupKey(group, v, 1, step, 0, 0, tree.Node{})
		}
		post := func(key Key, size int) *Sending { return es[0].Post(es[1].Self(), key, pattern(size, 1), Bulk) }
		post(groupKey(5, old, 1), 100)              // early, in the pool
		waiting := post(groupKey(5, old, 2), 1<<20) // waits for credit
		unsent := es[1].Expect(groupKey(5, old, 3), make([]byte, 10))
		post(groupKey(5, next, 1), 100)
		post(groupKey(6, old, 1), 100)
		post(user(1, 1), 100)
		synctest.Wait()
		for _, s := range scopes {
			s.Lock()
			s.Begin(next)
			s.Unlock()
		}
		synctest.Wait()
		if err := waiting.Wait(t.Context()); !errors.Is(err, ErrVersion) && err != nil {
			t.Errorf("the message that waits for credit: %v", err)
		}
		if _, _, err := unsent.Wait(t.Context()); !errors.Is(err, ErrStale) {
			t.Errorf("the receive of the old version: %v", err)
		}
		if err := es[0].Send(t.Context(), es[1].Self(), groupKey(5, old, 4), nil, Bulk); !errors.Is(err, ErrStale) {
			t.Errorf("a message of the old version: %v", err)
		}
		es[1].lock()
		if len(es[1].in.keys) != 3 {
			t.Errorf("%d keys are left, want 3", len(es[1].in.keys))
		}
		for k := range es[1].in.keys {
			if k.ofGroup() && groupOf(k) == 5 && versionOf(k) != next {
				t.Errorf("%v is left", k)
			}
		}
		es[1].unlock()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for _, k := range []Key{groupKey(5, next, 1), groupKey(6, old, 1), user(1, 1)} {
			if _, _, err := es[1].Receive(ctx, k, make([]byte, 100)); err != nil {
				t.Errorf("%v: %v", k, err)
			}
		}
	})
}

// All members come to the same crowd: that of the machine where members for each processor are most.
func TestCrowd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		es := cluster(t, 4, Config{}, func(int) transport.Transport { return m })
		var members []id.Session
		for i, e := range es {
			members = append(members, e.Self())
			for _, other := range es[:i] {
				if _, err := e.Connect(t.Context(), other.Self()); err != nil {
					t.Fatal(err)
				}
			}
		}
		synctest.Wait()
		ours := thisMachine()
		if ours.Number == 0 {
			t.Skip("the system does not say which machine this is")
		}
		for i, e := range es {
			s, err := NewScope(e, 1, func(id.Session, error) {})
			if err != nil {
				t.Fatal(err)
			}
			s.Lock()
			crowd, together := s.Crowd(members)
			if want := 4 / float64(ours.Processors); crowd != want || !together {
				t.Errorf("worker %d: %v, %v, want %v on one machine", i, crowd, together, want)
			}
			for _, p := range e.peers { // the others are on one with one processor
				p.link.machine = Machine{Number: ours.Number + 1, Processors: 1}
			}
			if crowd, together := s.Crowd(members); crowd != 3 || together {
				t.Errorf("worker %d beside three on another machine: %v, %v", i, crowd, together)
			}
			for _, p := range e.peers {
				p.link.machine = Machine{}
			}
			if crowd, together := s.Crowd(members); crowd != 1/float64(ours.Processors) || together {
				t.Errorf("worker %d beside three on machines that are not known: %v, %v", i, crowd, together)
			}
			s.Unlock()
		}
	})
}

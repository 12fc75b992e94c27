package archiving

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/store/archive"
)

var errAway = errors.New("it does not answer")

// A target that fails is tried again after growing pauses, always with the newest checkpoint.
func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var tried []int
		var at []time.Duration
		began := time.Now()
		var fails atomic.Bool
		fails.Store(true)
		told := make(map[int]error)
		c := New(func(_ context.Context, e session.ArchiveCheckpoint) error {
			tried, at = append(tried, e.Step), append(at, time.Since(began))
			if fails.Load() {
				return errAway
			}
			return nil
		}, func(e session.Event) bool {
			told[e.(session.Archived).Step] = e.(session.Archived).Err
			return true
		})
		c.Put(session.ArchiveCheckpoint{})
		time.Sleep(500 * time.Millisecond)
		c.Put(session.ArchiveCheckpoint{Step: 10})
		c.Put(session.ArchiveCheckpoint{Step: 20})
		time.Sleep(4 * time.Second) // the next try is 3 s after the second one
		fails.Store(false)
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if !slices.Equal(tried, []int{0, 20, 20, 20}) || !slices.Equal(at, []time.Duration{0, time.Second, 3 * time.Second, 7 * time.Second}) || told[20] != nil || told[0] == nil {
			t.Errorf("%v at %v, %v", tried, at, told)
		}
		fails.Store(true)
		c.Put(session.ArchiveCheckpoint{Step: 30})
		synctest.Wait()
		if err := c.End(true); !errors.Is(err, errAway) || len(tried) != 6 || tried[5] != 30 {
			t.Errorf("%v after %v", err, tried)
		}
	})
}

// The end waits for what is under way, for a limited time, and for nothing if another host goes on.
func TestEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := func(ctx context.Context, _ session.ArchiveCheckpoint) error {
			<-ctx.Done()
			return ctx.Err()
		}
		for _, last := range []bool{true, false} {
			c := New(slow, func(session.Event) bool { return true })
			c.Put(session.ArchiveCheckpoint{Step: 10})
			synctest.Wait()
			began := time.Now()
			if err := c.End(last); err == nil || time.Since(began) != map[bool]time.Duration{true: 5 * time.Minute}[last] {
				t.Errorf("%v after %v", err, time.Since(began))
			}
		}
		c := New(func(context.Context, session.ArchiveCheckpoint) error { return archive.ErrStale }, func(session.Event) bool { return true })
		c.Put(session.ArchiveCheckpoint{Step: 10})
		synctest.Wait()
		c.Put(session.ArchiveCheckpoint{Step: 20})
		if err := c.End(true); !errors.Is(err, archive.ErrStale) {
			t.Errorf("after another start of the run: %v", err)
		}
		c = New(slow, nil)
		if err := c.End(true); err != nil {
			t.Errorf("of nothing: %v", err)
		}
	})
}

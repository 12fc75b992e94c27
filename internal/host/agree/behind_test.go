package agree

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/hashicorp/raft"
)

// slowStore stores when it is told how that ends.
type slowStore struct {
	*raft.InmemStore
	end chan error
}

func (s *slowStore) StoreLogs(logs []*raft.Log) error {
	if err := <-s.end; err != nil {
		return err
	}
	return s.InmemStore.StoreLogs(logs)
}

func TestBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		below := &slowStore{raft.NewInmemStore(), make(chan error)}
		b := newBehind(below)
		has := func(s raft.LogStore, index uint64) bool {
			var l raft.Log
			return s.GetLog(index, &l) == nil && l.Index == index
		}
		for i := range uint64(maxBehind) {
			if err := b.StoreLog(&raft.Log{Index: i + 1}); err != nil {
				t.Fatal(err)
			}
		}
		if !has(b, 1) || !has(b, maxBehind) || has(below, 1) {
			t.Fatal("entries are not there at once, or before their time")
		}
		stored := make(chan error, 1)
		go func() { stored <- b.StoreLog(&raft.Log{Index: maxBehind + 1}) }()
		synctest.Wait()
		select {
		case <-stored:
			t.Fatal("more is pending than there may be")
		default:
		}
		below.end <- nil // the writer saw the first entry, or more
		if err := <-stored; err != nil {
			t.Fatal(err)
		}
		if !has(b, 1) || !has(b, maxBehind+1) {
			t.Fatal("entries are gone")
		}
		close(below.end) // the rest is stored at once
		if last, err := b.LastIndex(); err != nil || last != maxBehind+1 || !has(below, maxBehind+1) {
			t.Fatalf("the store ends with %d, %v", last, err)
		}
		if err := b.close(); err != nil {
			t.Fatal(err)
		}
	})
}

// A store that fails takes nothing more, and says why to all who ask.
func TestBehindFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := errors.New("no space left")
		below := &slowStore{raft.NewInmemStore(), make(chan error, 1)}
		b := newBehind(below)
		below.end <- full
		if err := b.StoreLog(&raft.Log{Index: 1}); err != nil {
			t.Fatal(err)
		}
		if err := b.sync(); !errors.Is(err, full) {
			t.Errorf("sync: %v", err)
		}
		<-b.broken
		if err := b.StoreLog(&raft.Log{Index: 2}); !errors.Is(err, full) {
			t.Errorf("store: %v", err)
		}
		if _, err := b.FirstIndex(); !errors.Is(err, full) {
			t.Errorf("first: %v", err)
		}
		if _, err := b.LastIndex(); !errors.Is(err, full) {
			t.Errorf("last: %v", err)
		}
		if err := b.DeleteRange(1, 1); !errors.Is(err, full) {
			t.Errorf("delete: %v", err)
		}
		if err := b.close(); !errors.Is(err, full) {
			t.Errorf("close: %v", err)
		}
	})
}

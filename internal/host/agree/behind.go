package agree

import (
	"slices"
	"sync"

	"github.com/hashicorp/raft"
)

// behind is a log store that has entries as soon as its writer has them, which puts them into the store below, and
// syncs them, beside what follows. It is for a node that agrees with itself: nobody else counts on its
// directory, and who was told of an entry ends with its process.
type behind struct {
	store raft.LogStore

	mu      sync.Mutex
	written *sync.Cond  // pending is shorter, or err is set
	pending []*raft.Log // not known to be in the store, ascending
	err     error       // of the store: nothing is taken after it

	more   chan struct{} // there is something pending
	broken chan struct{} // closed: err is set
	writer sync.WaitGroup
}

// maxBehind bounds how many entries may be pending.
const maxBehind = 64

func newBehind(store raft.LogStore) *behind {
	b := &behind{store: store, more: make(chan struct{}, 1), broken: make(chan struct{})}
	b.written = sync.NewCond(&b.mu)
	b.writer.Go(b.write)
	return b
}

// write owns the store's end until close.
func (b *behind) write() {
	for range b.more {
		b.mu.Lock()
		batch := slices.Clone(b.pending)
		b.mu.Unlock()
		if len(batch) == 0 {
			continue
		}
		err := b.store.StoreLogs(batch)
		b.mu.Lock()
		switch {
		case err == nil:
			b.pending = slices.Clone(b.pending[len(batch):])
		case b.err == nil:
			b.err = err
			close(b.broken)
		}
		b.written.Broadcast()
		b.mu.Unlock()
	}
}

// sync waits until all entries are in the store, and returns why they are not.
func (b *behind) sync() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.pending) > 0 && b.err == nil {
		b.written.Wait()
	}
	return b.err
}

// close syncs and ends the writer; no entry may come any more.
func (b *behind) close() error {
	err := b.sync()
	close(b.more)
	b.writer.Wait()
	return err
}

// StoreLogs implements raft.LogStore. Its error may be of entries before.
func (b *behind) StoreLogs(logs []*raft.Log) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.pending) >= maxBehind && b.err == nil {
		b.written.Wait()
	}
	if b.err != nil {
		return b.err
	}
	b.pending = append(b.pending, logs...)
	select {
	case b.more <- struct{}{}:
	default: // the writer has not looked yet
	}
	return nil
}

// StoreLog implements raft.LogStore.
func (b *behind) StoreLog(log *raft.Log) error { return b.StoreLogs([]*raft.Log{log}) }

// GetLog implements raft.LogStore.
func (b *behind) GetLog(index uint64, log *raft.Log) error {
	b.mu.Lock()
	i := slices.IndexFunc(b.pending, func(l *raft.Log) bool { return l.Index == index })
	if i >= 0 {
		*log = *b.pending[i]
	}
	b.mu.Unlock()
	if i >= 0 {
		return nil
	}
	return b.store.GetLog(index, log)
}

// FirstIndex implements raft.LogStore.
func (b *behind) FirstIndex() (uint64, error) {
	if err := b.sync(); err != nil {
		return 0, err
	}
	return b.store.FirstIndex()
}

// LastIndex implements raft.LogStore.
func (b *behind) LastIndex() (uint64, error) {
	if err := b.sync(); err != nil {
		return 0, err
	}
	return b.store.LastIndex()
}

// DeleteRange implements raft.LogStore.
func (b *behind) DeleteRange(lo, hi uint64) error {
	if err := b.sync(); err != nil {
		return err
	}
	return b.store.DeleteRange(lo, hi)
}

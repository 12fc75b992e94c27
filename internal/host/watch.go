package host

import (
	"sync"
)

// watching is whether timelines are wanted.
type watching struct {
	mu      sync.Mutex
	on      bool
	changed chan struct{} // closed with the next change
}

func newWatching() *watching { return &watching{changed: make(chan struct{})} }

func (w *watching) set(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.on != on {
		w.on = on
		close(w.changed)
		w.changed = make(chan struct{})
	}
}

func (w *watching) now() (on bool, changed <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.on, w.changed
}

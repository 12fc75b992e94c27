package host

import (
	"sync"
)

// Watch says whether somebody wants to see what the workers do within a step. While it is so, the view
// gets a view.Timeline of every worker for some of the steps, a few in a second. It never waits.
func (a *Agent) Watch(on bool) { a.watch.set(on) }

// Watch does what [Agent.Watch] does. Every host has to be told, as any may lead.
func (h *Host) Watch(on bool) { h.watch.set(on) }

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

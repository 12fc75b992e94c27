package host

import (
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
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

// watchAsked says whether timelines are wanted.
type watchAsked struct{ on bool }

// watchEvery is about how many milliseconds lie between two timelines of a worker.
const watchEvery = 250

// watchAsked begins or ends to ask the workers for timelines.
func (s *session) watchAsked(now time.Time, on bool) []effect {
	s.watched = on
	return s.pace(now)
}

// pace has the workers tell of as many steps as people can look at: a power of two apart, and another one
// only when the steps take twice as long as they did, or half.
func (s *session) pace(now time.Time) []effect {
	every := 0
	if s.watched {
		every = max(1, s.every)
		if len(s.times) > 0 {
			sorted := slices.Sorted(slices.Values(s.times))
			ms := sorted[len(sorted)/2]
			for every > 1 && float64(every)*ms > 2*watchEvery {
				every /= 2
			}
			for every < maxLead && float64(every)*ms < watchEvery/2 {
				every *= 2
			}
		}
	}
	s.every = every
	var effects []effect
	for id := range s.workers {
		w := &s.workers[id]
		// One that says nothing is not told again and again: what is sent to it has to be kept.
		if w.every != every && w.state == training && !w.gone && !w.closed && w.heard.After(w.paced) {
			w.every, w.paced = every, now
			effects = append(effects, sendMessage{id, control.Watch{Every: every}})
		}
	}
	return effects
}

// timeline passes on what a worker did in a step.
func (s *session) timeline(id int, m control.Timeline) []effect {
	m.Passes = m.Passes[:min(len(m.Passes), control.MaxPasses)]
	return []effect{show{view.Timeline{ID: s.id(id), Timeline: m}}}
}

// stages is what the view is told of a plan's.
func stages(p *plan.Plan) []view.Stage {
	var to []view.Stage
	for _, st := range p.Stages {
		s := view.Stage{Lo: st.Lo, Hi: st.Hi}
		for _, w := range st.Workers {
			s.Workers = append(s.Workers, int(w))
		}
		to = append(to, s)
	}
	return to
}

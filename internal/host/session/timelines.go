package session

import "github.com/soliton-train/soliton/internal/net/control"

// timelines are what workers tell of single steps while the user looks.
type timelines struct {
	watched bool
	every   int // of which steps; 0: of none
}

// timelineEvery is about how many milliseconds lie between two timelines of a worker.
const timelineEvery = 250

// pace returns of which steps the user can look at timelines, given the milliseconds that a step takes, 0 if that is not known:
// a power of two apart, and another one only when the steps take twice as long as they did, or half.
func (t *timelines) pace(ms float64) int {
	every := 0
	if t.watched {
		every = max(1, t.every)
		for every > 1 && float64(every)*ms > 2*timelineEvery {
			every /= 2
		}
		for ms > 0 && every < maxLead && float64(every)*ms < timelineEvery/2 {
			every *= 2
		}
	}
	t.every = every
	return every
}

// askForTimelines tells the workers of which steps timelines are wanted.
func (s *Session) askForTimelines() {
	ms := 0.
	if len(s.records.recent) > 0 {
		ms = max(s.records.median(), 1e-9)
	}
	every := s.timelines.pace(ms)
	for place := range s.workers {
		w := &s.workers[place]
		// A silent worker is not told again and again: what is sent to it has to be kept.
		if w.every != every && w.state == working && !w.closed() && w.heard.After(w.told) {
			w.every, w.told = every, s.now
			s.send(place, control.Watch{Every: every})
		}
	}
}

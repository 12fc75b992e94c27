package session

import (
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
)

// watchAsked says whether timelines are wanted.
type WatchAsked struct{ On bool }

// watchEvery is about how many milliseconds lie between two timelines of a worker.
const watchEvery = 250

// watchAsked begins or ends to ask the workers for timelines.
func (s *Session) watchAsked(now time.Time, on bool) []Effect {
	s.watched = on
	return s.pace(now)
}

// pace has the workers tell of as many steps as people can look at: a power of two apart, and another one
// only when the steps take twice as long as they did, or half.
func (s *Session) pace(now time.Time) []Effect {
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
	var effects []Effect
	for id := range s.workers {
		w := &s.workers[id]
		// One that says nothing is not told again and again: what is sent to it has to be kept.
		if w.every != every && w.state == training && !w.gone && !w.closed && w.heard.After(w.paced) {
			w.every, w.paced = every, now
			effects = append(effects, Send{id, control.Watch{Every: every}})
		}
	}
	return effects
}

// timeline passes on what a worker did in a step.
func (s *Session) timeline(id int, m control.Timeline) []Effect {
	m.Passes = m.Passes[:min(len(m.Passes), control.MaxPasses)]
	return []Effect{Show{view.Timeline{ID: s.id(id), Timeline: m}}}
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

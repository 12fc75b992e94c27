package agent

import (
	"slices"

	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/view"
)

// Watch says whether somebody wants to see what the workers do within a step. While it is so, the view
// gets a view.Timeline of every worker for some of the steps, a few in a second. It never waits.
func (a *Agent) Watch(on bool) {
	a.watching.Lock()
	defer a.watching.Unlock()
	select {
	case <-a.watches: // nobody has heard it yet, and it is out of date
	default:
	}
	a.watches <- on
}

// watchAsked says whether timelines are wanted.
type watchAsked struct{ on bool }

// watchEvery is about how many milliseconds lie between two timelines of a worker.
const watchEvery = 250

// watchAsked begins or ends to ask the workers for timelines.
func (s *session) watchAsked(on bool) []effect {
	s.watched = on
	return s.pace()
}

// pace has the workers tell of as many steps as people can look at: a power of two apart, and another one
// only when the steps take twice as long as they did, or half.
func (s *session) pace() []effect {
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
	if every == s.every {
		return nil
	}
	s.every = every
	var effects []effect
	for id := range s.workers {
		if w := &s.workers[id]; w.state == training && !w.gone && !w.closed {
			effects = append(effects, sendMessage{id, control.Watch{Every: every}})
		}
	}
	return effects
}

// paceOf tells one worker, which begins to train.
func (s *session) paceOf(id int) []effect {
	if s.every == 0 {
		return nil
	}
	return []effect{sendMessage{id, control.Watch{Every: s.every}}}
}

// timeline passes on what a worker did in a step.
func (s *session) timeline(id int, m control.Timeline) []effect {
	m.Spans = m.Spans[:min(len(m.Spans), control.MaxSpans)]
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

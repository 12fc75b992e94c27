package controller

import (
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// Reshape says in which dimensions work is balanced anew between two steps.
type Reshape uint8

// The values of Reshape.
const (
	Full     Reshape = iota // micro-batches, layers and workers
	Dataflow                // micro-batches only: layers and workers stay in their stages
	Off                     // nothing: what the dead had is with the living, and stays there
)

// lookAfter is the time from a measurement to the next look at all of them.
const lookAfter = 200 * time.Millisecond

// look is a plan and the profile for which no better one was found.
type look struct {
	version id.Version
	profile plan.Profile
}

// news reports whether a plan and a profile are not those of the last look.
func (l *look) news(v id.Version, prof *plan.Profile) bool {
	return l == nil || l.version != v || l.profile.Differs(prof)
}

// measured takes note of what a worker has measured.
func (c *Controller) measured(e Measured) []Effect {
	if c.session(e.Worker) == nil {
		return nil
	}
	c.times[e.Worker.ID] = e.Times
	if c.looking {
		return nil
	}
	c.looking = true
	return []Effect{SetTimer{LookTimer, lookAfter}}
}

// profile is what is known of the model and the workers.
func (c *Controller) profile() plan.Profile { return c.cfg.Profile.With(c.times) }

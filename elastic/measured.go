package elastic

import (
	"time"

	"github.com/soliton-train/soliton/elastic/plan"
)

// lookAfter is the time from a measurement to the next look at all of them.
const lookAfter = 200 * time.Millisecond

// look is a plan and a profile.
type look struct {
	version plan.Version
	profile plan.Profile
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

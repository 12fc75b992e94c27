package elastic

import "time"

// wishes begins a boundary plan where one is called for and nothing else is
// under way.
func (c *Controller) wishes(now time.Time) []Effect {
	return nil
}

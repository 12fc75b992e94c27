package elastic

import (
	"fmt"

	"github.com/soliton-train/soliton/elastic/plan"
)

// wishes begins a boundary plan where one is called for and nothing else is
// under way.
func (c *Controller) wishes() []Effect {
	if c.phase != steady || c.coming != nil || c.kept != nil {
		return nil
	}
	var view plan.View
	for _, m := range c.all() {
		was, ok := c.plan.Worker(m.ID)
		if !ok || was.Incarnation != m.Worker.Incarnation {
			continue
		}
		view.Workers = append(view.Workers, was)
		if m.leaving {
			view.Leaving = append(view.Leaving, m.ID)
		}
	}
	if len(view.Leaving) == 0 || len(view.Leaving) == len(view.Workers) {
		return nil
	}
	if stay := len(view.Workers) - len(view.Leaving); stay < c.cfg.MinWorkers {
		return []Effect{note("nobody leaves: %d of at least %d workers would stay", stay, c.cfg.MinWorkers)}
	}
	p, reason, err := plan.Next(c.plan, view, c.cfg.Profile, plan.Event{Kind: plan.Leave, After: c.issued})
	if err != nil {
		return []Effect{note("nobody leaves: %v", err)}
	}
	if state, parameters := plan.Needs(&c.plan, &p, view); len(state)+len(parameters) > 0 {
		return []Effect{note("nobody leaves: there is no other holder of %d ranges", len(state)+len(parameters))}
	}
	c.issued = p.Version
	c.coming = c.address(&change{order: Order{Plan: p}, cause: "leave", reason: reason})
	return c.propose(c.coming)
}

// dismiss lets those end that the plan does without, as soon as all have
// applied it.
func (c *Controller) dismiss() []Effect {
	var effects []Effect
	for _, m := range c.all() {
		if was, ok := c.plan.Worker(m.ID); !ok || was.Incarnation != m.Worker.Incarnation {
			delete(c.members, m.ID)
			effects = append(effects, Dismiss{m.Worker, fmt.Sprintf("worker %d has handed over what it had", m.ID)})
		}
	}
	return effects
}

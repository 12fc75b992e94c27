package controller

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// links are broken links between living members. They wait for LinkTimer, since the failure of one end often
// explains a broken link.
type links struct {
	broken []link
	due    time.Time // when LinkTimer is to come
}

// link is a broken link.
type link struct {
	a, b     plan.Worker
	since    time.Time
	excused  time.Duration // since then that does not count
	reported time.Time     // last
}

// down returns for how long workers have tried to open the link again.
func (l *link) down(now time.Time) time.Duration { return now.Sub(l.since) - l.excused }

// await sets LinkTimer.
func (l *links) await(now time.Time, after time.Duration) Effect {
	l.due = now.Add(after)
	return SetTimer{LinkTimer, after}
}

// excuse leaves out the time by which LinkTimer came late: the leader was stopped, or all workers were, and no link could be opened.
func (l *links) excuse(now time.Time) {
	late := now.Sub(l.due)
	for i := range l.broken {
		if x := &l.broken[i]; late > 0 {
			x.excused += min(late, x.down(now))
		}
	}
}

// forget removes the links of a worker that has failed.
func (l *links) forget(w plan.Worker) {
	l.broken = slices.DeleteFunc(l.broken, func(x link) bool { return x.a == w || x.b == w })
}

// reopened removes the links that were not reported since an order made the workers open all links again.
func (l *links) reopened(at time.Time) {
	l.broken = slices.DeleteFunc(l.broken, func(x link) bool { return !x.reported.After(at) })
}

// linkLost takes note of a broken link between two members.
func (r *recovery) linkLost(now time.Time, from, to plan.Worker) []Effect {
	l := link{a: from, b: to, since: now, reported: now}
	if l.a.ID > l.b.ID {
		l.a, l.b = l.b, l.a
	}
	broken := r.links.broken
	if i := slices.IndexFunc(broken, func(was link) bool { return was.a == l.a && was.b == l.b }); i >= 0 {
		broken[i].reported = now
		return nil
	}
	r.links.broken = append(broken, l)
	effects := []Effect{note("the link between workers %d and %d is down, and both live", l.a.ID, l.b.ID)}
	if len(broken) == 0 && r.cfg.Detect > 0 {
		effects = append(effects, r.links.await(now, r.timing.LinkGrace))
	}
	return effects
}

// reconnect is called when the failure of an end would be known. All members get the plan once more, which makes them
// open their links again and send again what was lost. If that does not help within the budget, one end is evicted.
func (r *recovery) reconnect(now time.Time) []Effect {
	if len(r.links.broken) == 0 {
		return nil
	}
	r.links.excuse(now)
	if r.state == holding || r.state == agreeing {
		// The order that comes opens the links, which nothing has tried yet.
		for i := range r.links.broken {
			r.links.broken[i].since, r.links.broken[i].excused = now, 0
		}
		return []Effect{r.links.await(now, r.timing.LinkDown)}
	}
	effects := r.evict(now)
	if len(r.links.broken) == 0 {
		return effects
	}
	l := r.links.broken[0]
	effects = append(effects, r.links.await(now, r.timing.LinkDown-l.down(now)))
	if r.state == idle {
		a := r.open(now)
		a.How, a.died = Broken, l.since
		a.causes = append(a.causes, fmt.Sprintf("the link between workers %d and %d broke", l.a.ID, l.b.ID))
		effects = append(effects, r.query(a.causes[0])...)
	}
	return effects
}

// evict kills workers until no link between two members is broken for longer than the budget.
func (r *recovery) evict(now time.Time) []Effect {
	var effects []Effect
	var expired, younger []link
	for _, l := range r.links.broken {
		if l.down(now) >= r.timing.LinkDown {
			expired = append(expired, l)
		} else {
			younger = append(younger, l)
		}
	}
	r.links.broken = younger
	for len(expired) > 0 {
		victim := r.victim(expired)
		var others []string
		expired = slices.DeleteFunc(expired, func(l link) bool {
			switch victim.worker {
			case l.a:
				others = append(others, fmt.Sprint(l.b.ID))
			case l.b:
				others = append(others, fmt.Sprint(l.a.ID))
			default:
				return false
			}
			return true
		})
		reason := fmt.Sprintf("worker %d is evicted: its link to worker %s has been down for %v", victim.worker.ID, strings.Join(others, ", "), r.timing.LinkDown)
		if victim.suspect != "" {
			reason += fmt.Sprintf(", and %s cannot reach it", victim.suspect)
		}
		effects = append(effects, Kill{Worker: victim.worker, Reason: reason})
	}
	return effects
}

// candidate is an end of a broken link.
type candidate struct {
	worker  plan.Worker
	broken  int    // links
	suspect string // member of the ring that cannot reach it
	fatal   int    // shards that would have no holder left
	owns    int    // elements of shards
}

// victim returns the end to evict: the one with most broken links, then one that the ring suspects, then the one with
// the fewest shards without a mirror, then the one that owns least.
func (r *recovery) victim(broken []link) (best candidate) {
	count := make(map[id.WorkerID]int)
	for _, l := range broken {
		count[l.a.ID]++
		count[l.b.ID]++
	}
	for _, l := range broken {
		for _, w := range []plan.Worker{l.a, l.b} {
			k := candidate{worker: w, broken: count[w.ID]}
			if m := r.member(w); m != nil {
				k.suspect = m.suspect
			}
			for _, s := range r.plan.Shards {
				if s.Owner == w.ID {
					k.owns += s.Hi - s.Lo
					if len(s.Mirrors) == 0 {
						k.fatal++
					}
				}
			}
			if best.broken == 0 || k.rather(best) {
				best = k
			}
		}
	}
	return best
}

// rather reports whether k is evicted rather than o. Between equals it is the one with the greater ID.
func (k candidate) rather(o candidate) bool {
	suspected := func(k candidate) int { return min(len(k.suspect), 1) }
	return cmp.Or(cmp.Compare(k.broken, o.broken), cmp.Compare(suspected(k), suspected(o)), cmp.Compare(o.fatal, k.fatal),
		cmp.Compare(o.owns, k.owns), cmp.Compare(k.worker.ID, o.worker.ID)) > 0
}

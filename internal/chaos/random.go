package chaos

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/rng"
)

// DefaultWithin is the longest +MS that is drawn unless [Run.Within] says otherwise.
const DefaultWithin = 50 * time.Millisecond

// A Run is what a schedule has to know of the run that it is for.
type Run struct {
	Steps   int           // at least 1
	Workers int           // it begins with, at least 1
	Hosts   int           // agents; 0 means 1
	Respawn bool          // a killed or frozen worker comes back
	Within  time.Duration // the longest +MS that is drawn, best about the time of a step; 0 means DefaultWithin
}

// Expand replaces the random parts by what they draw for a run, in the order of the steps. The error has one line for each harm
// that cannot happen in the run, and for each random part that has nothing to draw from.
//
// What is drawn in a step depends on the seed, the step, the part's place among the random ones, and what has been drawn before:
// the same text in the same Run gives the same harms on every machine, and a run of more steps only adds some. The numbers are
// those of package rng, whose streams never change, at places that training does not use.
//
// A run must be able to go on, so draws leave enough of it: one of the workers that it begins with is never killed, frozen or
// asked to leave, and neither is a majority of the hosts cut off or lost. Harms that were written out count as if they had
// struck before the first step. Workers that join are not struck. Kinds that are not possible in the run, such as killhost with
// fewer than three hosts, are not drawn.
func (s Schedule) Expand(run Run) (Schedule, error) {
	if run.Hosts == 0 {
		run.Hosts = 1
	}
	if run.Within == 0 {
		run.Within = DefaultWithin
	}
	if faults := s.check(run); len(faults) > 0 {
		return Schedule{}, errors.Join(faults...)
	}
	d := drawer{run: run, lost: map[int]bool{}, lostHosts: map[int]bool{}, left: run.Workers}
	expanded := Schedule{Harms: slices.Clone(s.Harms)}
	seen := map[Harm]bool{}
	for _, h := range s.Harms {
		d.count(h)
		seen[h] = true
	}
	var faults []error
	for _, r := range s.Random {
		if len(d.possible(r)) == 0 {
			faults = append(faults, fmt.Errorf("%s has nothing to draw from in a run of %d workers and %d hosts: one worker and a majority of "+
				"the hosts must be left; name other kinds, or use more workers or hosts", r, run.Workers, run.Hosts))
		}
	}
	for step := 1; len(s.Random) > 0 && step <= run.Steps; step++ {
		for i, r := range s.Random {
			// Training numbers its layers from 0, and operations within a layer too.
			stream := rng.New(r.Seed, rng.Place{
				Step: uint32(step), Sample: uint32(i), Layer: 1<<rng.LayerBits - 1, Op: 1<<rng.OpBits - 1,
			})
			if stream.Float64() >= r.Rate {
				continue
			}
			h, ok := d.draw(&stream, r, step)
			if !ok || seen[h] {
				continue
			}
			if len(expanded.Harms) == MaxHarms {
				return Schedule{}, errors.Join(append(faults, fmt.Errorf("%s draws more than %d harms in %d steps: want a lower rate",
					r, MaxHarms-len(s.Harms), run.Steps))...)
			}
			d.count(h)
			seen[h] = true
			expanded.Harms = append(expanded.Harms, h)
		}
	}
	slices.SortStableFunc(expanded.Harms, func(a, b Harm) int { return a.Step - b.Step })
	return expanded, errors.Join(faults...)
}

// check looks for harms that cannot happen.
func (s Schedule) check(run Run) (faults []error) {
	if run.Steps < 1 || run.Steps > maxNumber || run.Workers < 1 || run.Hosts < 1 || run.Within < 0 || run.Within > MaxAfter {
		return []error{fmt.Errorf("a schedule for %d steps, %d workers, %d hosts and moments up to %v: want at least one of each, and moments "+
			"from 0 to %v", run.Steps, run.Workers, run.Hosts, run.Within, MaxAfter)}
	}
	workers := run.Workers + len(s.Joins())
	if slices.ContainsFunc(s.Random, func(r Random) bool { return len(r.Kinds) == 0 || slices.Contains(r.Kinds, KindJoin) }) {
		workers = math.MaxInt
	}
	for _, h := range s.Harms {
		if h.Step > run.Steps {
			faults = append(faults, fmt.Errorf("%s comes too late: the run has %d steps", h, run.Steps))
		}
		switch f, _ := formOf(h.Kind); {
		case f.who == oneWorker && h.Worker >= workers, f.who == oneLink && h.B >= workers:
			faults = append(faults, fmt.Errorf("%s: there is no worker %d: want one from 0 to %d", h, max(h.Worker, h.B), workers-1))
		case f.who == oneHost && h.Host >= run.Hosts:
			faults = append(faults, fmt.Errorf("%s: there is no host %d: want one from 0 to %d", h, h.Host, run.Hosts-1))
		}
	}
	return faults
}

// drawer draws harms and counts what they leave.
type drawer struct {
	run       Run
	lost      map[int]bool // workers that were killed, frozen or asked to leave
	lostHosts map[int]bool
	left      int // workers that are certainly left, of those that the run began with
}

// count takes note of what a harm costs.
func (d *drawer) count(h Harm) {
	switch h.Kind {
	case KindKill, KindFreeze, KindLeave:
		if d.comesBack(h.Kind) || h.Worker >= d.run.Workers || d.lost[h.Worker] {
			break
		}
		d.lost[h.Worker] = true
		d.left--
	case KindKillHost, KindFreezeHost:
		if !d.lostHosts[h.Host] {
			d.lostHosts[h.Host] = true
			d.left -= d.perHost()
		}
	}
}

func (d *drawer) comesBack(k Kind) bool { return d.run.Respawn && k != KindLeave }

// perHost is the most workers of one host. Which worker is on which host is not known here, so a lost host counts as so many that
// are not lost yet.
func (d *drawer) perHost() int { return (d.run.Workers + d.run.Hosts - 1) / d.run.Hosts }

// possible returns the kinds that a part may draw now.
func (d *drawer) possible(r Random) (possible []Kind) {
	wanted := r.Kinds
	if len(wanted) == 0 {
		wanted = kinds()
	}
	workers := d.run.Workers - len(d.lost)
	majority := len(d.lostHosts)+1 <= (d.run.Hosts-1)/2 // is left without one host more
	for _, k := range wanted {
		ok := true
		switch k {
		case KindKill, KindFreeze, KindLeave:
			ok = workers > 0 && (d.left > 1 || d.comesBack(k))
		case KindFlip, KindSlow:
			ok = workers > 0
		case KindSlowLink:
			ok = workers > 1
		case KindKillHost, KindFreezeHost:
			ok = majority && d.left > d.perHost()
		case KindCut:
			ok = majority
		}
		if ok {
			possible = append(possible, k)
		}
	}
	return possible
}

// draw draws one harm, if any kind is possible.
func (d *drawer) draw(s *rng.Stream, r Random, step int) (Harm, bool) {
	from := d.possible(r)
	if len(from) == 0 {
		return Harm{}, false
	}
	f, _ := formOf(from[s.IntN(len(from))])
	h := Harm{Kind: f.kind, Step: step}
	switch f.who {
	case oneWorker:
		h.Worker = pickOther(s, d.run.Workers, d.lost)
	case oneHost:
		h.Host = pickOther(s, d.run.Hosts, d.lostHosts)
	case oneLink:
		h.A = pickOther(s, d.run.Workers, d.lost)
		for h.B = h.A; h.B == h.A; {
			h.B = pickOther(s, d.run.Workers, d.lost)
		}
		h.A, h.B = min(h.A, h.B), max(h.A, h.B)
	}
	if f.moment && s.IntN(2) == 0 {
		h.Phase = phases[s.IntN(len(phases))]
	} else if f.moment {
		h.After = time.Duration(1+s.IntN(max(1, int(d.run.Within/time.Microsecond)))) * time.Microsecond
	}
	switch f.takes {
	case takesFactor:
		h.Factor = float64(1+s.IntN(4)) / 4
	case takesSeconds:
		h.Seconds = float64(1+s.IntN(20)) / 4
	case takesTarget:
		h.Target = targets[s.IntN(len(targets))]
	}
	return h, true
}

// pickOther draws one of n that is not lost; there must be one.
func pickOther(s *rng.Stream, n int, lost map[int]bool) int {
	nth := s.IntN(n - len(lost))
	for i := range n {
		if lost[i] {
			continue
		}
		if nth == 0 {
			return i
		}
		nth--
	}
	panic("chaos: everybody is lost")
}

package chaos

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/rng"
)

// DefaultWithin is the longest +MS to draw unless [Run.Within] says otherwise.
const DefaultWithin = 50 * time.Millisecond

// A Run describes the run that a schedule is for.
type Run struct {
	Steps   int           // at least 1
	Workers int           // at the start, at least 1
	Hosts   int           // agents; 0 means 1
	Respawn bool          // a killed or frozen worker is replaced
	Within  time.Duration // the longest +MS to draw, best about the time of a step; 0 means DefaultWithin
}

// Expand replaces the random parts by what they draw for a run, in the order of the steps. The error has one line for each fault
// that cannot happen in the run, and for each random part that has nothing to draw from.
//
// The draw of a step depends on the seed, the step, the position of the part among the random ones, and earlier draws:
// the same text in the same Run gives the same faults on every machine, and more steps only add faults. The numbers come
// from package rng, whose streams never change, at places that training does not use.
//
// A run must be able to continue, so draws leave enough of it: at least one of the first workers is never killed, frozen or
// asked to leave, and a majority of the hosts is never cut off or lost. Faults that are written out count as if they came
// before the first step. Workers that join get no faults. Kinds that are impossible in the run, such as killhost with
// fewer than three hosts, are not drawn.
func (s Schedule) Expand(run Run) (Schedule, error) {
	run.Hosts = cmp.Or(run.Hosts, 1)
	run.Within = cmp.Or(run.Within, DefaultWithin)
	if problems := s.check(run); len(problems) > 0 {
		return Schedule{}, errors.Join(problems...)
	}
	d := drawer{run: run, lost: map[int]bool{}, lostHosts: map[int]bool{}, left: run.Workers}
	expanded := Schedule{Faults: slices.Clone(s.Faults)}
	seen := map[Fault]bool{}
	for _, h := range s.Faults {
		d.count(h)
		seen[h] = true
	}
	var problems []error
	for _, r := range s.Random {
		if len(d.possible(r)) == 0 {
			problems = append(problems, fmt.Errorf("%s has nothing to draw from in a run of %d workers and %d hosts: one worker and a majority of "+
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
			if len(expanded.Faults) == MaxFaults {
				return Schedule{}, errors.Join(append(problems, fmt.Errorf("%s draws more than %d faults in %d steps: want a lower rate",
					r, MaxFaults-len(s.Faults), run.Steps))...)
			}
			d.count(h)
			seen[h] = true
			expanded.Faults = append(expanded.Faults, h)
		}
	}
	slices.SortStableFunc(expanded.Faults, func(a, b Fault) int { return a.Step - b.Step })
	return expanded, errors.Join(problems...)
}

// check finds faults that cannot happen.
func (s Schedule) check(run Run) (problems []error) {
	if run.Steps < 1 || run.Steps > maxNumber || run.Workers < 1 || run.Hosts < 1 || run.Within < 0 || run.Within > MaxAfter {
		return []error{fmt.Errorf("a schedule for %d steps, %d workers, %d hosts and moments up to %v: want at least one of each, and moments "+
			"from 0 to %v", run.Steps, run.Workers, run.Hosts, run.Within, MaxAfter)}
	}
	workers := run.Workers + len(s.Joins())
	if slices.ContainsFunc(s.Random, func(r Random) bool { return len(r.Kinds) == 0 || slices.Contains(r.Kinds, KindJoin) }) {
		workers = math.MaxInt
	}
	for _, h := range s.Faults {
		if h.Step > run.Steps {
			problems = append(problems, fmt.Errorf("%s comes too late: the run has %d steps", h, run.Steps))
		}
		switch f, _ := formOf(h.Kind); {
		case f.on == oneWorker && h.Worker >= workers, f.on == oneLink && h.B >= workers:
			problems = append(problems, fmt.Errorf("%s: there is no worker %d: want one from 0 to %d", h, max(h.Worker, h.B), workers-1))
		case f.on == oneHost && h.Host >= run.Hosts:
			problems = append(problems, fmt.Errorf("%s: there is no host %d: want one from 0 to %d", h, h.Host, run.Hosts-1))
		}
	}
	return problems
}

// drawer draws faults and counts what they leave.
type drawer struct {
	run       Run
	lost      map[int]bool // workers that were killed, frozen or asked to leave
	lostHosts map[int]bool
	left      int // workers that are certainly left, of those that the run began with
}

// count records what a fault costs.
func (d *drawer) count(h Fault) {
	switch h.Kind {
	case KindKill, KindFreeze, KindLeave:
		if d.replaced(h.Kind) || h.Worker >= d.run.Workers || d.lost[h.Worker] {
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

func (d *drawer) replaced(k Kind) bool { return d.run.Respawn && k != KindLeave }

// perHost is the most workers of one host. The host of a worker is not known here, so a lost host counts as that many
// more lost workers.
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
			ok = workers > 0 && (d.left > 1 || d.replaced(k))
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

// draw draws one fault, if any kind is possible.
func (d *drawer) draw(s *rng.Stream, r Random, step int) (Fault, bool) {
	from := d.possible(r)
	if len(from) == 0 {
		return Fault{}, false
	}
	f, _ := formOf(from[s.IntN(len(from))])
	h := Fault{Kind: f.kind, Step: step}
	switch f.on {
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
	panic("chaos: all are lost")
}

// Package python measures the training of PyTorch models: whether their bits depend on layouts and faults, and what the Python processes
// cost.
package python

import (
	"fmt"
	"strings"
)

// combination is one run: its layout, and what happens to it.
type combination struct {
	workers, stages, zero      int
	kill, freeze, join, resume bool
}

// valid reports whether a run can have all of it: a worker is left when others fail, and each stage has one.
func (c combination) valid() bool {
	lost := 0
	for _, fails := range []bool{c.kill, c.freeze} {
		if fails {
			lost++
		}
	}
	return c.stages <= c.workers && 2*lost <= c.workers
}

// pairs returns each two of its settings.
func (c combination) pairs() (all []string) {
	settings := []string{
		fmt.Sprint("workers ", c.workers), fmt.Sprint("stages ", c.stages), fmt.Sprint("zero ", c.zero),
		fmt.Sprint("kill ", c.kill), fmt.Sprint("freeze ", c.freeze), fmt.Sprint("join ", c.join), fmt.Sprint("resume ", c.resume),
	}
	for i, a := range settings {
		for _, b := range settings[i+1:] {
			all = append(all, a+", "+b)
		}
	}
	return all
}

// every returns all valid combinations.
func every() (all []combination) {
	yes := []bool{false, true}
	for _, workers := range []int{6, 4, 2, 1} {
		for _, stages := range []int{1, 2, 3} {
			for _, zero := range []int{1, 2} {
				for i := range 16 {
					c := combination{workers, stages, zero, yes[i&1], yes[i>>1&1], yes[i>>2&1], yes[i>>3]}
					if c.valid() {
						all = append(all, c)
					}
				}
			}
		}
	}
	return all
}

// pairwise returns few combinations in which each two settings occur together that can: always the one with most that are new.
func pairwise() (chosen []combination) {
	all, missing := every(), map[string]bool{}
	for _, c := range all {
		for _, p := range c.pairs() {
			missing[p] = true
		}
	}
	for len(missing) > 0 {
		best, most := all[0], 0
		for _, c := range all {
			found := 0
			for _, p := range c.pairs() {
				if missing[p] {
					found++
				}
			}
			if found > most {
				best, most = c, found
			}
		}
		chosen = append(chosen, best)
		for _, p := range best.pairs() {
			delete(missing, p)
		}
	}
	return chosen
}

// faults returns the --chaos of a run of so many steps; "" for none. Workers that fail are not of one stage's mirrors only.
func (c combination) faults() string {
	var all []string
	if c.kill {
		all = append(all, "kill:1@2/backward")
	}
	if c.join {
		all = append(all, "join@3")
	}
	if c.freeze {
		all = append(all, "freeze:0@4/forward")
	}
	return strings.Join(all, ",")
}

// String describes a combination in one line.
func (c combination) String() string {
	text := fmt.Sprintf("%d workers, %d stages, zero %d", c.workers, c.stages, c.zero)
	if f := c.faults(); f != "" {
		text += ", " + strings.ReplaceAll(f, ",", " ")
	}
	if c.resume {
		w, s := c.after()
		text += fmt.Sprintf(", resumed with %d workers and %d stages", w, s)
	}
	return text
}

// after returns the layout with which a run is resumed, another one.
func (c combination) after() (workers, stages int) {
	return 1 + c.workers%3, min(1+c.stages%3, 1+c.workers%3)
}

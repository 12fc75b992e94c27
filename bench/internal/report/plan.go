package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Tool is a program or library that a comparison needs.
type Tool struct {
	Name    string // as people say it
	Install string // the command that brings it
	Found   string // its version; "": it is missing
}

// Comparison is one of the commands that all runs.
type Comparison struct {
	Name  string
	About string        // what is compared, one line
	Needs []string      // names of tools without which it does not run
	Uses  []string      // names of tools without which rows are missing
	Flags []string      // of a round; {round} stands for its number
	Quick []string      // instead, for a trial
	Takes time.Duration // about, for a round on two cores, until a round has been measured
}

// Args returns the command line of a round.
func (c *Comparison) Args(round string, quick bool) []string {
	flags := c.Flags
	if quick {
		flags = c.Quick
	}
	args := []string{c.Name}
	for _, f := range flags {
		args = append(args, strings.ReplaceAll(f, "{round}", round))
	}
	return args
}

// Skip is a comparison that is left out, or that lacks a peer, and why.
type Skip struct {
	Name    string
	Whole   bool // nothing of it can run
	Missing []Tool
}

// Split says which comparisons can run with the tools that were found, and what the others lack.
func Split(all []Comparison, tools []Tool) (can []Comparison, lacking []Skip) {
	missing := func(names []string) (out []Tool) {
		for _, t := range tools {
			if t.Found == "" && slices.Contains(names, t.Name) {
				out = append(out, t)
			}
		}
		return out
	}
	for _, c := range all {
		needs, uses := missing(c.Needs), missing(c.Uses)
		if len(needs) == 0 {
			can = append(can, c)
		}
		if len(needs)+len(uses) > 0 {
			lacking = append(lacking, Skip{c.Name, len(needs) > 0, append(needs, uses...)})
		}
	}
	return can, lacking
}

// Run is one round of a comparison.
type Run struct {
	Comparison string    `json:"comparison"`
	Round      int       `json:"round"`
	Command    string    `json:"command"` // that a person can repeat
	Began      time.Time `json:"began"`
	Seconds    float64   `json:"seconds"`
	Others     float64   `json:"others"` // share of the processors that other programs used meanwhile; negative: unknown
	Peers      []string  `json:"peers"`  // tools that it found
	Rows       []Row     `json:"rows"`
}

// Task is a round that is to be run.
type Task struct {
	Comparison Comparison
	Round      int
}

// Tasks returns what is left to run, round by round, so that a machine that changes in the course of hours changes for all.
func Tasks(all []Comparison, rounds int, done []Run) (tasks []Task) {
	for round := 1; round <= rounds; round++ {
		for _, c := range all {
			if !slices.ContainsFunc(done, func(r Run) bool { return r.Comparison == c.Name && r.Round == round }) {
				tasks = append(tasks, Task{c, round})
			}
		}
	}
	return tasks
}

// Current reports whether a run is of one of these comparisons and had the peers that are there now.
func (r *Run) Current(all []Comparison, tools []Tool) bool {
	return slices.ContainsFunc(all, func(c Comparison) bool { return c.Name == r.Comparison && slices.Equal(r.Peers, PeersOf(c, tools)) })
}

// PeersOf returns the names of a comparison's tools that were found.
func PeersOf(c Comparison, tools []Tool) []string {
	names := []string{}
	for _, t := range tools {
		if t.Found != "" && (slices.Contains(c.Needs, t.Name) || slices.Contains(c.Uses, t.Name)) {
			names = append(names, t.Name)
		}
	}
	return names
}

// Takes returns how long tasks take together, by the rounds that were measured, or else by the guess of each comparison.
func Takes(tasks []Task, done []Run) (sum time.Duration) {
	for _, t := range tasks {
		var took []float64
		for _, r := range done {
			if r.Comparison == t.Comparison.Name {
				took = append(took, r.Seconds)
			}
		}
		sum += cmp.Or(time.Duration(spread(took).Median*float64(time.Second)), t.Comparison.Takes)
	}
	return sum
}

// Incomplete returns the comparisons of which fewer rounds are done.
func Incomplete(all []Comparison, rounds int, done []Run) (names []string) {
	for _, t := range Tasks(all, rounds, done) {
		if !slices.Contains(names, t.Comparison.Name) {
			names = append(names, t.Comparison.Name)
		}
	}
	return names
}

// Choose returns the comparisons with the names of a list that commas separate, in their own order; all for an empty list.
func Choose(all []Comparison, list string) (chosen []Comparison, err error) {
	if list == "" {
		return all, nil
	}
	names := strings.Split(list, ",")
	var known []string
	for _, c := range all {
		known = append(known, c.Name)
		if slices.Contains(names, c.Name) {
			chosen = append(chosen, c)
		}
	}
	for _, n := range names {
		if !slices.Contains(known, n) {
			return nil, fmt.Errorf("%q is no comparison; give some of %s", n, strings.Join(known, ","))
		}
	}
	return chosen, nil
}

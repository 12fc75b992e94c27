// Package report makes tables, the page docs/benchmarks.md and the contents of its plots out of the rows that comparisons measure, and
// says which runs are left. It is pure: it opens no file, starts no process and reads no clock.
package report

import (
	"math"
	"slices"
)

// Kind says what the ratio of a row is.
type Kind string

// A ratio says how many times faster we are, except that of a cost.
const (
	Rate Kind = "rate" // of work by time: ours by theirs
	Time Kind = "time" // that work takes: theirs by ours
	Cost Kind = "cost" // of having something: with it by without it, so 1 is free
)

// Row is what a comparison measures of one case.
type Row struct {
	Comparison string   `json:"comparison"`
	Case       string   `json:"case"`              // shape, batch and what else the case is
	Workers    int      `json:"workers,omitempty"` // processes on each side; 0: not said
	Threads    int      `json:"threads,omitempty"` // compute threads of each; 0: not said
	Ours       string   `json:"ours"`              // what the first figure is of
	Theirs     string   `json:"theirs,omitempty"`  // what the second figure is of; "": there is none, and no ratio
	Unit       string   `json:"unit"`
	Kind       Kind     `json:"kind"`
	Goal       float64  `json:"goal,omitempty"` // for the ratio: at least, and for a cost at most; 0: none
	Samples    []Sample `json:"samples"`
}

// Sample is what both sides measured in one turn.
type Sample struct {
	Ours   float64 `json:"ours"`
	Theirs float64 `json:"theirs,omitempty"`
}

// Add appends the figures of a turn.
func (r *Row) Add(ours, theirs float64) { r.Samples = append(r.Samples, Sample{ours, theirs}) }

// Recorder collects the rows of a comparison. A nil Recorder drops them, as when a person runs one comparison for its text.
type Recorder struct{ Rows []Row }

// Add records rows; those without a sample, such as of a peer that was not found, are left out.
func (r *Recorder) Add(rows ...Row) {
	if r == nil {
		return
	}
	for _, row := range rows {
		if len(row.Samples) > 0 {
			r.Rows = append(r.Rows, row)
		}
	}
}

// Spread is the median and the range of some figures.
type Spread struct {
	N                      int
	Median, P95, Low, High float64
}

func spread(x []float64) Spread {
	if len(x) == 0 {
		return Spread{}
	}
	s := slices.Sorted(slices.Values(x))
	median := s[len(s)/2]
	if len(s)%2 == 0 {
		median = (s[len(s)/2-1] + s[len(s)/2]) / 2
	}
	return Spread{len(s), median, s[int(math.Ceil(0.95*float64(len(s))))-1], s[0], s[len(s)-1]}
}

// OfOurs describes our figures.
func (r *Row) OfOurs() Spread {
	var x []float64
	for _, s := range r.Samples {
		x = append(x, s.Ours)
	}
	return spread(x)
}

// OfTheirs describes the peer's figures.
func (r *Row) OfTheirs() Spread {
	var x []float64
	for _, s := range r.Samples {
		if r.Theirs != "" {
			x = append(x, s.Theirs)
		}
	}
	return spread(x)
}

// OfRatio describes the ratios of the turns. A turn in which a side measured zero or less has none, but for the first of a cost: what is had
// may cost nothing, or less.
func (r *Row) OfRatio() Spread {
	var x []float64
	for _, s := range r.Samples {
		switch {
		case r.Theirs == "" || s.Ours <= 0 && r.Kind != Cost || s.Theirs <= 0:
		case r.Kind == Time:
			x = append(x, s.Theirs/s.Ours)
		default:
			x = append(x, s.Ours/s.Theirs)
		}
	}
	return spread(x)
}

// Reached reports whether the median ratio is what the goal asks for.
func (r *Row) Reached() bool {
	ratio := r.OfRatio()
	if r.Kind == Cost {
		return ratio.N > 0 && ratio.Median <= r.Goal
	}
	return ratio.N > 0 && ratio.Median >= r.Goal
}

// Merge joins the rows of several runs: rows that differ in nothing but their samples become one, in the order of their first run.
func Merge(runs []Run) (rows []Row) {
	for _, run := range runs {
		for _, r := range run.Rows {
			bare := r
			bare.Samples = nil
			i := slices.IndexFunc(rows, func(have Row) bool {
				have.Samples = nil
				return equal(have, bare)
			})
			if i < 0 {
				i, rows = len(rows), append(rows, bare)
			}
			rows[i].Samples = append(rows[i].Samples, r.Samples...)
		}
	}
	return rows
}

// equal compares rows without samples.
func equal(a, b Row) bool {
	return a.Comparison == b.Comparison && a.Case == b.Case && a.Workers == b.Workers && a.Threads == b.Threads &&
		a.Ours == b.Ours && a.Theirs == b.Theirs && a.Unit == b.Unit && a.Kind == b.Kind && a.Goal == b.Goal
}

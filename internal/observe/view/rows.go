package view

import (
	"fmt"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

const (
	mostRows  = 8  // workers that get a row each; more are counted by what they do
	otherRows = 10 // lines that the rest of the view takes

	mostRecoveries = 3 // that are shown, where the view is high enough for them
)

// row is what is known of one worker.
type row struct {
	place rundir.Worker // stages and layers
	news  Worker
}

// doing says what the worker does.
func (r row) doing() string {
	if r.news.State == "" {
		return "training"
	}
	return r.news.State
}

func (s *state) addRow(w Worker) {
	i := slices.IndexFunc(s.rows, func(r row) bool { return r.place.ID == w.ID })
	if i < 0 {
		if s.run == nil || w.State == "" {
			return // before training, where there are no rows yet
		}
		s.rows = append(s.rows, row{place: rundir.Worker{ID: w.ID}})
		i = len(s.rows) - 1
	}
	s.rows[i].news = w
}

// addPlan gives the rows their new stages and layers. A worker that is not in the plan has none.
func (s *state) addPlan(p Plan) {
	if s.run != nil {
		s.run.Reason = p.Reason
	}
	for i := range s.rows {
		s.rows[i].place = rundir.Worker{ID: s.rows[i].place.ID}
	}
	for _, w := range p.Workers {
		i := slices.IndexFunc(s.rows, func(r row) bool { return r.place.ID == w.ID })
		if i < 0 {
			s.rows = append(s.rows, row{})
			i = len(s.rows) - 1
		}
		s.rows[i].place = w
	}
}

// workerLines draws the workers in a view of the given height: a line for each, or where there
// are too many, one for all. A lone worker is the run, of which the view tells anyway.
func (s *state) workerLines(width, height int) []string {
	if len(s.rows) < 2 {
		return nil
	}
	if len(s.rows) > min(mostRows, height-otherRows) {
		return []string{s.fold()}
	}
	cells := make([][]string, len(s.rows))
	for i, r := range s.rows {
		cells[i] = []string{
			fmt.Sprintf("worker %d", r.place.ID),
			r.doing(),
			ranges("stage", r.place.Stages),
			ranges("layer", r.place.Layers),
			fmt.Sprintf("%d forwards", r.news.Forwards),
			fmt.Sprintf("%d backwards", r.news.Backwards),
		}
	}
	lines := make([]string, len(cells))
	for c := range cells[0] {
		wide := 0
		for _, row := range cells {
			wide = max(wide, ansi.StringWidth(row[c]))
		}
		if c > 0 && ansi.StringWidth(lines[0])+2+wide > width {
			break // a column is there for all or for none
		}
		for i, row := range cells {
			if c > 0 {
				lines[i] += "  "
			}
			lines[i] += row[c] + strings.Repeat(" ", wide-ansi.StringWidth(row[c]))
		}
	}
	return lines
}

// fold counts workers by what they do, the most common first.
func (s *state) fold() string {
	counts := make(map[string]int)
	var kinds []string
	for _, r := range s.rows {
		if counts[r.doing()] == 0 {
			kinds = append(kinds, r.doing())
		}
		counts[r.doing()]++
	}
	slices.SortStableFunc(kinds, func(a, b string) int { return counts[b] - counts[a] })
	for i, k := range kinds {
		kinds[i] = fmt.Sprintf("%d %s", counts[k], k)
	}
	return fmt.Sprintf("%s: %s", plan.Count(len(s.rows), "worker"), strings.Join(kinds, ", "))
}

// ranges prints ascending numbers with their noun, as in "layer 3" or "layers 0-3 7".
func ranges(noun string, n []int) string {
	if len(n) == 0 {
		return "no " + noun
	}
	if len(n) > 1 {
		noun += "s"
	}
	return noun + " " + plan.Ranges(n, " ")
}

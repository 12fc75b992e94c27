package report

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Machine is what a page names of the machine.
type Machine struct {
	CPU, OS, Kernel, Go string
	Path                string // of the compute kernels
	Cores               int
	MemoryGB            float64
}

func (m Machine) String() string {
	return fmt.Sprintf("%d cores of %s, %.0f GB of memory, %s, %s, %s, kernel path %s", m.Cores, m.CPU, m.MemoryGB, m.OS, m.Kernel, m.Go, m.Path)
}

// Page is what all has measured.
type Page struct {
	Machine  Machine
	Commit   string
	Dirty    bool    // the work tree differed from the commit
	MaxLoad  float64 // the bound for the share of the processors that other programs use
	Quick    bool
	Rounds   int
	Tools    []Tool
	Compared []Comparison // in the order of the page
	Skipped  []Skip
	Runs     []Run
}

// Section is a comparison on a page.
type Section struct {
	Comparison
	Runs []Run
	Rows []Row
}

// Sections returns the comparisons that were run.
func (p *Page) Sections() (all []Section) {
	for _, c := range p.Compared {
		s := Section{Comparison: c}
		for _, r := range p.Runs {
			if r.Comparison == c.Name {
				s.Runs = append(s.Runs, r)
			}
		}
		if s.Rows = Merge(s.Runs); len(s.Runs) > 0 {
			all = append(all, s)
		}
	}
	return all
}

// Warnings say why the figures are not those of the commit on an idle machine; none if they are.
func (p *Page) Warnings() (all []string) {
	if p.Quick {
		all = append(all, "A trial (-quick): these figures mean nothing.")
	}
	if p.Dirty {
		all = append(all, "The work tree had changes: these figures are not those of the commit.")
	}
	var loaded []string
	unknown := false
	for _, r := range p.Runs {
		if r.Others > p.MaxLoad {
			loaded = append(loaded, fmt.Sprintf("%s round %d (%.0f %%)", r.Comparison, r.Round, 100*r.Others))
		}
		unknown = unknown || r.Others < 0
	}
	if len(loaded) > 0 {
		all = append(all, fmt.Sprintf("Other programs used more than %.0f %% of the processors during %s.", 100*p.MaxLoad, strings.Join(loaded, ", ")))
	}
	if unknown {
		all = append(all, "How much of the processors other programs used is not known on this system.")
	}
	return all
}

// number prints a figure with three digits that count, and all before the point.
func number(x float64) string {
	switch {
	case x >= 100 || x <= -100:
		return strconv.FormatFloat(x, 'f', 0, 64)
	case x >= 10 || x <= -10:
		return strconv.FormatFloat(x, 'f', 1, 64)
	case x >= 1 || x <= -1 || x == 0:
		return strconv.FormatFloat(x, 'f', 2, 64)
	}
	return strconv.FormatFloat(x, 'g', 3, 64)
}

// ratio prints a ratio: costs are close to 1, and need a digit more.
func ratio(x float64) string {
	if x >= 10 {
		return number(x)
	}
	return strconv.FormatFloat(x, 'f', 3, 64)
}

// layout prints workers and threads.
func (r *Row) layout() string {
	count := func(n int, unit string) string {
		if n == 1 {
			return "1 " + unit
		}
		return fmt.Sprintf("%d %ss", n, unit)
	}
	switch {
	case r.Workers > 0 && r.Threads > 0:
		return count(r.Workers, "worker") + ", " + count(r.Threads, "thread")
	case r.Workers > 0:
		return count(r.Workers, "worker")
	case r.Threads > 0:
		return count(r.Threads, "thread")
	}
	return ""
}

// goal prints a row's goal and whether the median reaches it.
func (r *Row) goal() string {
	if r.Goal == 0 {
		return ""
	}
	word := "at least"
	if r.Kind == Cost {
		word = "at most"
	}
	reached := "reached"
	if !r.Reached() {
		reached = "missed"
	}
	return fmt.Sprintf("%s %s: %s", word, strconv.FormatFloat(r.Goal, 'f', -1, 64), reached)
}

// meaning says what the ratio of rows is.
func meaning(k Kind) string {
	switch k {
	case Cost:
		return "with it by without it: 1 is free"
	case Time:
		return "time of the other by ours: above 1 we are faster"
	}
	return "our speed by that of the other: above 1 we are faster"
}

// A table has a head and rows of as many cells.
type table struct {
	head []string
	rows [][]string
}

// kinds returns the kinds of rows with a peer, in the order of their first row.
func kinds(rows []Row) (all []Kind) {
	seen := map[Kind]bool{}
	for _, r := range rows {
		if r.Theirs != "" && !seen[r.Kind] {
			seen[r.Kind] = true
			all = append(all, r.Kind)
		}
	}
	return all
}

// ratios is the table of the rows of a kind that have a peer.
func ratios(rows []Row, k Kind) table {
	t := table{head: []string{"case", "layout", "unit", "ours", "median", "the other", "median", "ratio", "range", "turns", "goal"}}
	for _, r := range rows {
		if r.Theirs == "" || r.Kind != k {
			continue
		}
		all, median, between := r.OfRatio(), "none", ""
		if all.N > 0 {
			median, between = ratio(all.Median), ratio(all.Low)+" to "+ratio(all.High)
		}
		t.rows = append(t.rows, []string{
			r.Case, r.layout(), r.Unit, r.Ours, number(r.OfOurs().Median), r.Theirs, number(r.OfTheirs().Median), median, between, strconv.Itoa(len(r.Samples)), r.goal(),
		})
	}
	return t
}

// alone is the table of the rows without a peer.
func alone(rows []Row) table {
	t := table{head: []string{"case", "layout", "figure", "unit", "median", "95th percentile", "range", "samples"}}
	for _, r := range rows {
		if r.Theirs == "" {
			s := r.OfOurs()
			t.rows = append(t.rows, []string{r.Case, r.layout(), r.Ours, r.Unit, number(s.Median), number(s.P95), number(s.Low) + " to " + number(s.High), strconv.Itoa(s.N)})
		}
	}
	return t
}

// markdown writes a table.
func (t table) markdown(b *strings.Builder) {
	line := func(cells []string) {
		for _, c := range cells {
			b.WriteString("| " + strings.ReplaceAll(c, "|", `\|`) + " ")
		}
		b.WriteString("|\n")
	}
	line(t.head)
	b.WriteString(strings.Repeat("|---", len(t.head)) + "|\n")
	for _, r := range t.rows {
		line(r)
	}
}

// text writes a table in columns.
func (t table) text(b *strings.Builder) {
	width := make([]int, len(t.head))
	for _, cells := range append([][]string{t.head}, t.rows...) {
		for i, c := range cells {
			width[i] = max(width[i], len([]rune(c)))
		}
	}
	for _, cells := range append([][]string{t.head}, t.rows...) {
		line := " "
		for i, c := range cells {
			line += fmt.Sprintf(" %-*s ", width[i], c)
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}

// lacks says what a skipped comparison lacks.
func (s Skip) lacks() string {
	var parts []string
	for _, t := range s.Missing {
		parts = append(parts, fmt.Sprintf("%s is missing (%s)", t.Name, t.Install))
	}
	what := "left out"
	if !s.Whole {
		what = "rows left out"
	}
	return fmt.Sprintf("%s: %s: %s", s.Name, what, strings.Join(parts, "; "))
}

// Peers prints which tools were found and how the rest are installed, and which comparisons are left out for that.
func Peers(tools []Tool, skipped []Skip) string {
	var b strings.Builder
	for _, t := range tools {
		if t.Found != "" {
			fmt.Fprintf(&b, "found    %s: %s\n", t.Name, t.Found)
		} else {
			fmt.Fprintf(&b, "missing  %s: %s\n", t.Name, t.Install)
		}
	}
	for _, s := range skipped {
		fmt.Fprintf(&b, "skipped  %s\n", s.lacks())
	}
	return b.String()
}

// Text prints a section for a terminal.
func (s *Section) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", s.Name, s.About)
	for _, k := range kinds(s.Rows) {
		fmt.Fprintf(&b, "  ratio: %s\n", meaning(k))
		ratios(s.Rows, k).text(&b)
	}
	if t := alone(s.Rows); len(t.rows) > 0 {
		t.text(&b)
	}
	return b.String()
}

// Markdown makes the page. raw is the folder of the raw outputs, and plots that of the plots, both as links from the page.
func (p *Page) Markdown(raw, plots string) string {
	var b strings.Builder
	b.WriteString("# Benchmarks\n\nWritten by `go run ./bench all`; do not edit. [performance.md](performance.md) says how to run it, and what limits the figures.\n")
	for _, w := range p.Warnings() {
		fmt.Fprintf(&b, "\n**%s**\n", w)
	}
	fmt.Fprintf(&b, "\nCommit %s. %v. %d rounds of each comparison, one comparison at a time; within each, both sides take turns. A ratio is the median over all turns, with the range\nbeside it; each turn gives one. [%s](%s) has the output of each round, with the figures of both sides, and `rows.json`.\n",
		p.Commit, p.Machine, p.Rounds, "bench/results/all", raw)
	b.WriteString("\n## Peers\n\n")
	t := table{head: []string{"peer", "version", "to install it"}}
	for _, tool := range p.Tools {
		found := tool.Found
		if found == "" {
			found = "missing"
		}
		t.rows = append(t.rows, []string{tool.Name, found, "`" + tool.Install + "`"})
	}
	t.markdown(&b)
	if len(p.Skipped) > 0 {
		b.WriteString("\n")
	}
	for _, s := range p.Skipped {
		fmt.Fprintf(&b, "- %s\n", s.lacks())
	}
	for _, s := range p.Sections() {
		fmt.Fprintf(&b, "\n## %s\n\n%s. `%s`\n", s.Name, s.About, s.Runs[0].Command)
		for _, k := range kinds(s.Rows) {
			fmt.Fprintf(&b, "\nRatio: %s.\n\n", meaning(k))
			ratios(s.Rows, k).markdown(&b)
		}
		if t := alone(s.Rows); len(t.rows) > 0 {
			b.WriteString("\n")
			t.markdown(&b)
		}
		for _, plot := range s.Plots() {
			fmt.Fprintf(&b, "\n![%s](%s/%s.svg)\n", plot.Title, plots, plot.Name)
		}
		b.WriteString("\nRounds:")
		for i, r := range s.Runs {
			if i > 0 {
				b.WriteString(";")
			}
			others := "unknown"
			if r.Others >= 0 {
				others = fmt.Sprintf("%.1f %%", 100*r.Others)
			}
			fmt.Fprintf(&b, " [%d](%s/%s-%d.txt) on %s, %.0f s, others used %s of the processors", r.Round, raw, r.Comparison, r.Round, r.Began.UTC().Format(time.DateOnly), r.Seconds, others)
		}
		b.WriteString(".\n")
	}
	return b.String()
}

// Plot is the content of a plot: the ratio of each case, with its range.
type Plot struct {
	Name  string  `json:"name"` // of the file, without its ending
	Title string  `json:"title"`
	Axis  string  `json:"axis"`
	Log   bool    `json:"log"` // the ratios differ by more than a factor of ten
	Goal  float64 `json:"goal,omitempty"`
	Bars  []Bar   `json:"bars"`
}

// Bar is one case of a plot.
type Bar struct {
	Label  string  `json:"label"`
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

// Plots returns the plots of a section: one for each kind of ratio.
func (s *Section) Plots() (all []Plot) {
	for _, k := range kinds(s.Rows) {
		p := Plot{Name: s.Name + "-" + string(k), Title: s.About, Axis: meaning(k)}
		low, high, goals := 1.0, 1.0, map[float64]bool{}
		for _, r := range s.Rows {
			x := r.OfRatio()
			if r.Kind != k || x.N == 0 || x.Low <= 0 { // a bar may be on a logarithmic axis
				continue
			}
			label := r.Case + ": " + r.Ours + " / " + r.Theirs
			if l := r.layout(); l != "" {
				label = r.Case + ", " + l + ": " + r.Ours + " / " + r.Theirs
			}
			p.Bars = append(p.Bars, Bar{label, x.Median, x.Low, x.High})
			low, high, goals[r.Goal] = min(low, x.Low), max(high, x.High), true
			p.Goal = r.Goal
		}
		if len(goals) > 1 {
			p.Goal = 0 // each case has its own
		}
		if p.Log = high > 10*low; len(p.Bars) > 0 {
			all = append(all, p)
		}
	}
	return all
}

package view

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/x/ansi"
)

// Pair shows two runs of one job side by side, and below them what was done to them. In a terminal it draws, elsewhere it prints
// lines. Its methods may be called from any goroutine.
type Pair struct {
	drawing *drawing // nil for lines

	mu    sync.Mutex // of what follows; the drawing holds it while it draws
	sides [2]state
	names [2]string
	said  []saying
	plain *os.File // where lines go
}

// saying is a line below the runs: what was done, and what followed, "" while that is not known.
type saying struct{ what, then string }

// OpenPair returns the view of two runs with these names.
func OpenPair(o Options, names [2]string) *Pair {
	out, live := o.terminal()
	p := &Pair{names: names}
	if !live {
		p.plain = out
		fmt.Fprintf(out, "training one job twice: %s and %s\n", names[0], names[1])
		return p
	}
	for i := range p.sides {
		p.sides[i].colour = o.colour()
	}
	p.drawing = draw(out, sizeOf(out), func(now time.Time, width, height int) string {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.render(now, width, height)
	})
	return p
}

// Show takes in an event of one of the two runs.
func (p *Pair) Show(side int, e Event) {
	e = cleaned(e)
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &p.sides[side]
	now := time.Now()
	s.add(now, e)
	if p.plain == nil {
		return
	}
	switch e := e.(type) {
	case Begin:
		fmt.Fprintf(p.plain, "%s: %s\n", p.names[side], strings.Join(s.title(), ", "))
	case Step:
		for _, line := range s.lines(now, e) {
			fmt.Fprintf(p.plain, "%s: %s\n", p.names[side], line)
		}
	}
}

// Say sets line i below the runs; lines count from 0, without gaps.
func (p *Pair) Say(i int, what, then string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i == len(p.said) {
		p.said = append(p.said, saying{})
	}
	what, then = Clean(what), Clean(then)
	p.said[i] = saying{what, then}
	switch {
	case p.plain == nil:
	case then == "":
		fmt.Fprintln(p.plain, what)
	default:
		fmt.Fprintln(p.plain, "  "+then)
	}
}

// Close shows the last state, which stays on the screen. It may be called again.
func (p *Pair) Close() {
	if p.drawing != nil {
		p.drawing.close()
	}
}

// leastColumn is the least width in which a run is shown beside the other.
const leastColumn = 36

// render draws both runs, side by side where the width allows, else one below the other, and what was done.
func (p *Pair) render(now time.Time, width, height int) string {
	width = max(width, 1)
	column := (width - 3) / 2
	beside := column >= leastColumn
	if !beside {
		column = width
	}
	var columns [2][]string
	for i := range p.sides {
		columns[i] = p.sides[i].column(now, p.names[i], column)
	}
	var lines []string
	if beside {
		for i := range max(len(columns[0]), len(columns[1])) {
			var cells [2]string
			for c := range columns {
				if i < len(columns[c]) {
					cells[c] = ansi.Truncate(columns[c][i], column, "…")
				}
			}
			lines = append(lines, strings.TrimRight(cells[0]+strings.Repeat(" ", column-ansi.StringWidth(cells[0]))+"   "+cells[1], " "))
		}
	} else {
		lines = append(append(lines, columns[0]...), columns[1]...)
	}
	s := &p.sides[1]
	var said []string
	for _, l := range p.said {
		said = append(said, s.paint(bold, l.what))
		switch {
		case l.then != "":
			said = append(said, "  "+s.paint(good, l.then))
		case s.end == nil:
			said = append(said, "  "+s.paint(faint, "..."))
		}
	}
	// Where there is no room, the oldest lines are dropped.
	said = said[max(0, len(said)-max(2, height-1-len(lines))):]
	var b strings.Builder
	for _, line := range append(lines, said...) {
		b.WriteString(ansi.Truncate(line, width, "…") + "\n")
	}
	return b.String()
}

// column draws a run in a column of the given width.
func (s *state) column(now time.Time, name string, width int) []string {
	lines := []string{s.paint(bold, name)}
	if s.run == nil {
		return append(lines, s.paint(faint, "starting"))
	}
	if s.end != nil {
		lines = append(lines, s.paint(good, s.verdict()))
	} else {
		lines = append(lines, s.bar(now, width))
	}
	if s.last != nil {
		loss := fmt.Sprintf("loss %.4f  ", s.last.Loss)
		lines = append(lines, loss+s.paint(curve, s.losses.line(width-len(loss))))
	} else {
		lines = append(lines, "")
	}
	for _, r := range s.rows {
		look, mark := good, "●"
		switch {
		case r.news.State == "catching up":
			look, mark = warn, "◌"
		case r.news.State != "":
			look, mark = warn, "✕"
		}
		text := fmt.Sprintf("worker %d  %s", r.place.ID, r.doing())
		if len(r.place.Stages) > 0 {
			text += "  " + ranges("stage", r.place.Stages)
		}
		lines = append(lines, s.paint(look, mark)+" "+s.paint(faint, text))
	}
	return lines
}

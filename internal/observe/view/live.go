package view

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/term"
)

// drawing keeps the last lines of a terminal up to date, from a goroutine of its own, so that a run never waits for a slow or
// halted terminal.
//
// Nothing of the terminal is changed that would have to be put right again: its mode
// stays, its keys belong to the shell, and the cursor waits, visible, below the last line. So a
// process may die at any time.
type drawing struct {
	once sync.Once
	quit chan struct{} // closed by close
	done chan struct{} // closed when the last frame is drawn
}

// live draws a run. Show only notes an event.
type live struct {
	*drawing
	mu     sync.Mutex
	s      state
	closed bool
}

const (
	redraw    = 100 * time.Millisecond // between looks at the state
	closeTime = 2 * time.Second        // how long Close waits for a terminal that takes nothing
)

// newLive shows a run on out, whose size is asked before every frame.
func newLive(out io.Writer, colour bool, size func() (width, height int)) *live {
	l := new(live)
	l.s.began, l.s.colour = time.Now(), colour
	l.drawing = draw(out, size, func(now time.Time, width, height int) string {
		l.mu.Lock()
		defer l.mu.Unlock()
		return render(&l.s, now, width, height)
	})
	return l
}

// sizeOf returns a function that asks for the size of a terminal.
func sizeOf(f *os.File) func() (width, height int) {
	return func() (int, int) {
		width, height, err := term.GetSize(int(f.Fd()))
		if err != nil || width < 1 || height < 1 {
			return 80, 24
		}
		return width, height
	}
}

// draw begins to draw what frame returns for the time and the size.
func draw(out io.Writer, size func() (width, height int), frame func(now time.Time, width, height int) string) *drawing {
	d := &drawing{quit: make(chan struct{}), done: make(chan struct{})}
	go d.loop(&screen{out: out}, size, frame)
	return d
}

func (d *drawing) loop(to *screen, size func() (width, height int), frame func(now time.Time, width, height int) string) {
	defer close(d.done)
	next := time.NewTicker(redraw)
	defer next.Stop()
	for last := false; ; {
		width, height := size()
		// The last column stays free: some terminals wrap when it is written.
		to.show(frame(time.Now(), width-1, height), width, height)
		if last {
			return
		}
		select {
		case <-next.C:
		case <-d.quit:
			last = true
		}
	}
}

// close draws the last frame, unless the terminal takes nothing.
func (d *drawing) close() {
	d.once.Do(func() { close(d.quit) })
	select {
	case <-d.done:
	case <-time.After(closeTime):
	}
}

func (l *live) Show(e Event) {
	e = cleaned(e)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.s.add(time.Now(), e)
	}
}

func (l *live) Close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.close()
}

// screen writes frames, each over the one before.
type screen struct {
	out   io.Writer
	shown []string
	width int
}

// show puts lines, each with its line end, on a terminal of the given size. A terminal that takes
// nothing shows nothing, and the run continues: its files and its exit status say the same.
func (sc *screen) show(text string, width, height int) {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if text == "" {
		lines = nil
	}
	lines = lines[max(0, len(lines)-max(height-1, 1)):] // what has left the screen cannot be reached
	if width == sc.width && strings.Join(lines, "\n") == strings.Join(sc.shown, "\n") {
		return
	}
	up := 0
	for _, line := range sc.shown {
		// A terminal that became narrower has wrapped it.
		up += max(1, (ansi.StringWidth(line)+width-1)/width)
	}
	var b strings.Builder
	b.WriteByte('\r')
	if up = min(up, max(height-1, 0)); up > 0 {
		b.WriteString(ansi.CursorUp(up))
	}
	for _, line := range lines {
		b.WriteString(line + ansi.EraseLineRight + "\n")
	}
	b.WriteString(ansi.EraseScreenBelow)
	_, _ = io.WriteString(sc.out, b.String())
	sc.shown, sc.width = lines, width
}

// style is how a part of a line looks.
type style = ansi.Style

var (
	bold  = ansi.NewStyle().Bold()
	faint = ansi.NewStyle().Faint()
	good  = ansi.NewStyle().ForegroundColor(ansi.Green)
	warn  = ansi.NewStyle().ForegroundColor(ansi.Yellow)
	curve = ansi.NewStyle().ForegroundColor(ansi.Cyan)
)

// paint gives text a style, where there are colours.
func (s *state) paint(look style, text string) string {
	if !s.colour || text == "" {
		return text
	}
	return look.Styled(text)
}

// render draws a state in lines of at most width cells, each with its line end. It
// folds what does not fit into height lines.
func render(s *state, now time.Time, width, height int) string {
	width = max(width, 1)
	var b strings.Builder
	line := func(text string) {
		b.WriteString(ansi.Truncate(text, width, "…"))
		b.WriteByte('\n')
	}

	if s.run == nil {
		if s.end == nil {
			line(cmp.Or(s.note, "starting") + s.paint(faint, "  "+duration(now.Sub(s.began))))
		}
		return b.String()
	}

	title := s.title()
	line(s.paint(bold, title[0]) + s.fit(width-ansi.StringWidth(title[0]), faint, " · ", title[1:]...))

	switch {
	case s.end != nil && s.end.Summary.StoppedBy == "":
		line(s.paint(good, s.verdict()))
	case s.end != nil:
		line(s.paint(warn, s.verdict()))
	default:
		line(s.bar(now, width))
	}

	if s.last != nil {
		// val loss first gets its room, then the curve takes what is left.
		loss := fmt.Sprintf("loss %.4f", s.last.Loss)
		val := ""
		if s.val != nil {
			val = fmt.Sprintf("val %.4f", *s.val)
		}
		room := width - len(loss) - 2
		if val != "" {
			room -= len(val) + 2
		}
		text := loss
		if room > 0 {
			text += "  " + s.paint(curve, s.losses.line(min(room, 60)))
		}
		if val != "" {
			text += "  " + val
		}
		line(text)

		speed := s.speed.perSecond()
		if s.end != nil {
			speed = s.end.Summary.TokensPerSecond
		}
		first := amount(speed) + " tokens/s"
		line(first + s.fit(width-len(first), faint, "  ",
			fmt.Sprintf("lr %.3g", s.last.LR), fmt.Sprintf("grad norm %.3g", s.last.GradNorm)))
	}
	if len(s.rows) > 1 && s.end == nil {
		line(s.paint(faint, s.run.Reason))
	}
	if s.unsaved.Why != "" && s.end == nil {
		line(s.paint(warn, s.unsaved.text(now)))
	}
	recovered := s.recovered
	if height < 24 {
		recovered = recovered[max(0, len(recovered)-1):]
	}
	for _, text := range recovered {
		line(s.paint(warn, text))
	}
	for _, text := range s.workerLines(width, height) {
		line(s.paint(faint, text))
	}
	if s.end != nil && s.end.Summary.ParamsSHA256 != "" {
		line("params_sha256 " + s.end.Summary.ParamsSHA256)
	}
	if s.run.RunDir != "" {
		line(s.paint(faint, shorten(s.run.RunDir, width)))
	}
	switch {
	case s.end != nil:
	case s.stopping != "" && width >= 66:
		line(s.paint(warn, "stopping at the next commit, press Ctrl-C again to stop at once"))
	case s.stopping != "":
		line(s.paint(warn, "stopping at the next commit;"))
		line(s.paint(warn, "Ctrl-C again stops at once"))
	case s.note != "":
		line(s.paint(faint, s.note))
	}
	return b.String()
}

// bar draws how far the run is.
func (s *state) bar(now time.Time, width int) string {
	steps, step := s.run.Job.Steps, 0
	if s.last != nil {
		step = s.last.Step
	}
	part := float64(step) / float64(max(steps, 1))
	percent := fmt.Sprintf("%3d%%", int(part*100))
	rest := []string{fmt.Sprintf("step %d/%d", step, steps)}
	if left, ok := s.left(now); ok {
		rest = []string{duration(left) + " left", rest[0]}
	}
	// The bar has at least a third of the line, and a fixed width for as long as the
	// words beside it fit.
	cells := max(width/3, min(width-36, 60))
	full := min(cells, max(0, int(math.Round(part*float64(cells)))))
	text := s.paint(curve, strings.Repeat("━", full)) + s.paint(faint, strings.Repeat("─", cells-full)) + " " + percent
	return text + s.fit(width-cells-1-len(percent), faint, "  ", rest...)
}

// fit joins as many of the parts as fit into width, each with sep before it.
func (s *state) fit(width int, look style, sep string, parts ...string) string {
	text := ""
	for _, p := range parts {
		if p == "" {
			continue
		}
		if ansi.StringWidth(text)+ansi.StringWidth(sep)+ansi.StringWidth(p) > width {
			break
		}
		text += sep + p
	}
	return s.paint(look, text)
}

// shorten leaves out the beginning of a path that is too long, not its telling end.
func shorten(path string, width int) string {
	if n := ansi.StringWidth(path); n > width && width > 1 {
		return ansi.TruncateLeft(path, n-width+1, "…")
	}
	return path
}

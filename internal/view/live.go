package view

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/bubbles/progress"
	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/lipgloss"
	"github.com/charmbracelet/x/ansi"
)

// live keeps the last lines of a terminal up to date. Show only notes an
// event; the terminal is written by bubbletea's goroutines, so that a run
// never waits for a slow or halted terminal.
type live struct {
	mu     sync.Mutex
	s      state
	closed bool

	program *tea.Program
	done    chan struct{} // closed when the program has ended
}

const (
	redraw    = 100 * time.Millisecond // between looks at the state
	closeTime = 2 * time.Second        // how long Close waits for a terminal that takes nothing
)

func newLive(in io.Reader, out *os.File, interrupt func()) *live {
	l := &live{done: make(chan struct{})}
	l.s.began = time.Now()
	l.program = tea.NewProgram(
		&screen{live: l, interrupt: interrupt, width: 80, height: 24},
		tea.WithInput(in), tea.WithOutput(out), tea.WithoutSignalHandler(), tea.WithoutBracketedPaste(), tea.WithFPS(30),
	)
	go func() {
		defer close(l.done)
		// A terminal that cannot be set up shows nothing, and the run goes on: its
		// files and its exit status say the same.
		_, _ = l.program.Run()
	}()
	return l
}

func (l *live) Show(e Event) {
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
	go l.program.Quit() // ends at the latest when the program does
	select {
	case <-l.done:
	case <-time.After(closeTime):
		l.program.Kill()
	}
}

// screen is bubbletea's side of a live view.
type screen struct {
	live      *live
	interrupt func()
	width     int
	height    int
}

type tick struct{}

func nextTick() tea.Cmd { return tea.Tick(redraw, func(time.Time) tea.Msg { return tick{} }) }

func (m *screen) Init() tea.Cmd { return nextTick() }

func (m *screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyMsg:
		if msg.Type == tea.KeyCtrlC {
			m.interrupt()
		}
	case tick:
		return m, nextTick()
	}
	return m, nil
}

func (m *screen) View() string {
	m.live.mu.Lock()
	defer m.live.mu.Unlock()
	// The last column stays free: some terminals wrap when it is written.
	return render(&m.live.s, time.Now(), m.width-1, m.height)
}

var (
	bold  = lipgloss.NewStyle().Bold(true)
	faint = lipgloss.NewStyle().Faint(true)
	good  = lipgloss.NewStyle().Foreground(lipgloss.Color("2"))
	warn  = lipgloss.NewStyle().Foreground(lipgloss.Color("3"))
	curve = lipgloss.NewStyle().Foreground(lipgloss.Color("6"))
)

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
		note := s.note
		if note == "" {
			note = "starting"
		}
		if s.end == nil {
			line(note + faint.Render("  "+duration(now.Sub(s.began))))
		}
		return b.String()
	}

	title := s.title()
	line(bold.Render(title[0]) + fit(width-ansi.StringWidth(title[0]), faint.Render, " · ", title[1:]...))

	switch {
	case s.end != nil && s.end.Summary.StoppedBy == "":
		line(good.Render(s.verdict()))
	case s.end != nil:
		line(warn.Render(s.verdict()))
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
			text += "  " + curve.Render(s.losses.line(min(room, 60)))
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
		line(first + fit(width-len(first), faint.Render, "  ",
			fmt.Sprintf("lr %.3g", s.last.LR), fmt.Sprintf("grad norm %.3g", s.last.GradNorm)))
	}
	if len(s.rows) > 1 && s.end == nil {
		line(faint.Render(s.run.Reason))
	}
	for _, text := range s.workerLines(width, height) {
		line(faint.Render(text))
	}
	if s.end != nil && s.end.Summary.ParamsSHA256 != "" {
		line("params_sha256 " + s.end.Summary.ParamsSHA256)
	}
	if s.run.RunDir != "" {
		line(faint.Render(shorten(s.run.RunDir, width)))
	}
	switch {
	case s.end != nil:
	case s.stopping != "" && width >= 66:
		line(warn.Render("stopping at the next commit, press Ctrl-C again to stop at once"))
	case s.stopping != "":
		line(warn.Render("stopping at the next commit;"))
		line(warn.Render("Ctrl-C again stops at once"))
	case s.note != "":
		line(faint.Render(s.note))
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
	p := progress.New(progress.WithWidth(cells), progress.WithoutPercentage(), progress.WithSolidFill("6"), progress.WithFillCharacters('━', '─'))
	text := p.ViewAs(part) + " " + percent
	return text + fit(width-cells-1-len(percent), faint.Render, "  ", rest...)
}

// fit joins as many of the parts as fit into width, each with sep before it.
func fit(width int, style func(...string) string, sep string, parts ...string) string {
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
	if text == "" {
		return ""
	}
	return style(text)
}

// shorten leaves out the beginning of a path that is too long, not its telling end.
func shorten(path string, width int) string {
	if n := ansi.StringWidth(path); n > width && width > 1 {
		return ansi.TruncateLeft(path, n-width+1, "…")
	}
	return path
}

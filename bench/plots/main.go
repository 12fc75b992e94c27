// Command plots draws the plots of docs/benchmarks.md: it reads their contents, a JSON array, from its standard input, and writes an SVG file
// for each into a folder:
//
//	go run . -out ../../docs/benchmarks <plots.json
//
// It is a module of its own, so that programs that import Soliton do not download gonum. It imports nothing of Soliton: the type Plot of
// bench/internal/report has the same JSON.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"image/color"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Plot is one file.
type Plot struct {
	Name  string  `json:"name"`
	Title string  `json:"title"`
	Axis  string  `json:"axis"`
	Log   bool    `json:"log"`
	Goal  float64 `json:"goal"` // a second line beside that at 1; 0: none
	Bars  []Bar   `json:"bars"`
}

// Bar is one case, from top to bottom: the median as a dot, the range as a bar.
type Bar struct {
	Label  string  `json:"label"`
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

func main() {
	out := flag.String("out", "", "folder of the files")
	flag.Parse()
	if *out == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "usage: plots -out FOLDER <plots.json")
		os.Exit(2)
	}
	if err := run(os.Stdin, *out); err != nil {
		fmt.Fprintln(os.Stderr, "plots:", err)
		os.Exit(1)
	}
}

// maxInput bounds what is read, and maxBars what is drawn in one plot.
const (
	maxInput = 16 << 20
	maxBars  = 1000
)

func run(in io.Reader, out string) error {
	var plots []Plot
	if err := json.NewDecoder(io.LimitReader(in, maxInput)).Decode(&plots); err != nil {
		return fmt.Errorf("standard input: %w", err)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	for _, p := range plots {
		svg, err := p.draw()
		if err != nil {
			return fmt.Errorf("plot %q: %w", p.Name, err)
		}
		if err := os.WriteFile(filepath.Join(out, p.Name+".svg"), svg, 0o644); err != nil {
			return err
		}
	}
	return nil
}

var fileName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)

// check says what of a plot cannot be drawn.
func (p *Plot) check() error {
	if !fileName.MatchString(p.Name) {
		return errors.New("the name must consist of letters, digits and dashes")
	}
	if len(p.Bars) == 0 || len(p.Bars) > maxBars {
		return fmt.Errorf("%d bars; give 1 to %d", len(p.Bars), maxBars)
	}
	for _, b := range p.Bars {
		if !(0 < b.Low && b.Low <= b.Median && b.Median <= b.High) || math.IsInf(b.High, 1) {
			return fmt.Errorf("bar %q: %g, %g, %g must be positive and in order", b.Label, b.Low, b.Median, b.High)
		}
	}
	if p.Goal < 0 || math.IsInf(p.Goal, 1) || math.IsNaN(p.Goal) {
		return fmt.Errorf("goal %g is negative or no number", p.Goal)
	}
	return nil
}

var (
	ours  = color.RGBA{R: 0x1f, G: 0x77, B: 0xb4, A: 0xff}
	grey  = color.RGBA{R: 0x80, G: 0x80, B: 0x80, A: 0xff}
	green = color.RGBA{R: 0x2c, G: 0xa0, B: 0x2c, A: 0xff}
)

func (p *Plot) draw() ([]byte, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	n := len(p.Bars)
	var dots plotter.XYs
	var errs plotter.XErrors
	names := make([]string, n)
	for i, b := range p.Bars {
		at := n - 1 - i // the first case is on top
		names[at] = b.Label
		dots = append(dots, plotter.XY{X: b.Median, Y: float64(at)})
		errs = append(errs, struct{ Low, High float64 }{b.Median - b.Low, b.High - b.Median})
	}
	scatter, err := plotter.NewScatter(dots)
	if err != nil {
		return nil, err
	}
	scatter.GlyphStyle = draw.GlyphStyle{Color: ours, Radius: vg.Points(3), Shape: draw.CircleGlyph{}}
	ranges, err := plotter.NewXErrorBars(struct {
		plotter.XYer
		plotter.XErrorer
	}{dots, errs})
	if err != nil {
		return nil, err
	}
	ranges.LineStyle = draw.LineStyle{Color: ours, Width: vg.Points(1.5)}

	g := plot.New()
	g.Title.Text = p.Title
	g.X.Label.Text = p.Axis
	g.BackgroundColor = color.White // pages may be dark
	if p.Log {
		g.X.Scale, g.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	g.Add(ranges, scatter)
	for _, l := range []struct {
		at    float64
		color color.Color
	}{{1, grey}, {p.Goal, green}} {
		if l.at == 0 {
			continue
		}
		line, err := plotter.NewLine(plotter.XYs{{X: l.at, Y: -0.5}, {X: l.at, Y: float64(n) - 0.5}})
		if err != nil {
			return nil, err
		}
		line.LineStyle = draw.LineStyle{Color: l.color, Width: vg.Points(1), Dashes: []vg.Length{vg.Points(4), vg.Points(3)}}
		g.Add(line)
	}
	g.NominalY(names...)
	g.Y.Min, g.Y.Max = -0.5, float64(n)-0.5
	g.Y.Tick.Label.Font.Size = vg.Points(9)
	if g.X.Max <= g.X.Min { // a single figure of 1
		g.X.Min, g.X.Max = g.X.Min/2, g.X.Max*2
	}
	g.X.Padding, g.Title.Padding = vg.Points(6), vg.Points(6)
	longest := 0
	for _, name := range names {
		longest = max(longest, len(name))
	}
	w, err := g.WriterTo(6*vg.Inch+vg.Points(4.5*float64(longest)), vg.Points(90+16*float64(n)), "svg")
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if _, err := w.WriteTo(&b); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

package view

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the files in testdata")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	epoch = time.Unix(0, 0)
	begin = Begin{
		Job: rundir.Job{
			Program: "gpt", Model: "gpt", Parameters: 1_582_336, Steps: 200, GlobalBatch: 32, MicroBatch: 2,
			Seed: 1, Workers: 1, Threads: 2, Kernel: "avx512",
		},
		RunDir: "runs/gpt-20260102-150405",
	}
)

// shown returns the state after the given number of steps of half a second.
func shown(steps int, more ...Event) (*state, time.Time) {
	s, now := &state{}, epoch
	s.add(now, Note("reading data"))
	s.add(now, begin)
	for i := range steps {
		now = now.Add(500 * time.Millisecond)
		m := Step{Step: i + 1, Loss: 2.5 + 3*math.Exp(-float64(i)/30), LR: 0.001, GradNorm: 0.875, Tokens: 4096, MS: 500}
		if (i+1)%50 == 0 {
			val := m.Loss + 0.1
			m.ValLoss = &val
		}
		s.add(now, m)
	}
	for _, e := range more {
		s.add(now, e)
	}
	return s, now
}

func end(steps int, stoppedBy string) End {
	val := 2.6125
	sum := rundir.Summary{Steps: steps, Loss: 2.5, ValLoss: &val, Seconds: 100, TokensPerSecond: 8192, StoppedBy: stoppedBy}
	if stoppedBy == "" {
		sum.ParamsSHA256 = strings.Repeat("0123456789abcdef", 4)
	}
	return End{sum}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, want)
	}
}

func TestLive(t *testing.T) {
	var b strings.Builder
	for _, c := range []struct {
		name  string
		steps int
		more  []Event
	}{
		{"begin", 0, nil},
		{"first step", 1, nil},
		{"half way", 100, nil},
		{"evaluating", 150, []Event{Note("evaluating")}},
		{"stopping", 120, []Event{Stopping{"interrupt"}}},
		{"done", 200, []Event{end(200, "")}},
		{"interrupted", 57, []Event{end(57, "interrupt")}},
	} {
		for _, width := range []int{40, 80, 120} {
			s, now := shown(c.steps, c.more...)
			fmt.Fprintf(&b, "--- %s, %d columns\n%s", c.name, width, render(s, now, width, 24))
		}
	}
	s := &state{}
	s.add(epoch, Note("reading data"))
	fmt.Fprintf(&b, "--- before training\n%s", render(s, epoch.Add(3*time.Second), 40, 24))
	s.add(epoch, Stopping{"interrupt"})
	golden(t, "live.txt", b.String())
}

// beginWith is begin with workers.
func beginWith(workers, stages int) Begin {
	b := begin
	b.Job.Workers, b.Job.Stages = workers, stages
	b.Reason = fmt.Sprintf("first plan: %d workers in %d stages, 16 micro-batches per step", workers, stages)
	for id := range workers {
		at := id * stages / workers
		b.Workers = append(b.Workers, rundir.Worker{ID: id, Stages: []int{at}, Layers: []int{2 * at, 2*at + 1}})
	}
	return b
}

func TestRows(t *testing.T) {
	var b strings.Builder
	for _, workers := range []int{4, 12} {
		for _, size := range [][2]int{{40, 24}, {80, 24}, {120, 24}, {80, 10}} {
			s, now := shown(0, beginWith(workers, 2))
			for id := range workers {
				s.add(now, Worker{ID: id, Step: 7, Forwards: int64(100 + id), Backwards: 98})
			}
			s.add(now, Worker{ID: 2, Step: 7, Forwards: 102, Backwards: 98, State: "exited: signal: killed"})
			s.add(now, Worker{ID: 99}) // not of the run
			fmt.Fprintf(&b, "--- %d workers, %d columns, %d lines\n%s", workers, size[0], size[1], render(s, now, size[0], size[1]))
		}
	}
	golden(t, "rows.txt", b.String())
}

func TestPlainSaysThePlan(t *testing.T) {
	var b bytes.Buffer
	p := newPlain(&b, func() time.Time { return epoch })
	p.Show(beginWith(4, 2))
	p.Show(Worker{ID: 1, State: "evaluating"})
	p.Close()
	if got := b.String(); strings.Count(got, "\n") != 4 || !strings.Contains(got, "4 workers in 2 stages, 2 threads") || !strings.Contains(got, "\nfirst plan: ") {
		t.Errorf("got\n%s", got)
	}
}

func TestLiveNeverWraps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var more []Event
		for _, e := range []Event{Note("evaluating"), Stopping{"terminated"}, end(7, strings.Repeat("long ", 30)), end(200, "")} {
			if rapid.Bool().Draw(t, fmt.Sprintf("%T", e)) {
				more = append(more, e)
			}
		}
		s, now := shown(rapid.IntRange(0, 200).Draw(t, "steps"), more...)
		width := rapid.IntRange(-1, 200).Draw(t, "width")
		if n := rapid.IntRange(0, 12).Draw(t, "workers"); n > 0 {
			s.add(now, beginWith(n, 2))
			s.add(now, Worker{ID: 0, State: strings.Repeat("busy ", 20)})
		}
		height := rapid.IntRange(0, 30).Draw(t, "height")
		text := render(s, now, width, height)
		if !strings.HasSuffix(text, "\n") {
			t.Fatalf("no line end: %q", text)
		}
		for _, line := range strings.Split(text, "\n") {
			if n := ansi.StringWidth(line); n > max(width, 1) {
				t.Fatalf("line of %d cells in %d columns: %q", n, width, line)
			}
		}
	})
}

func TestPlain(t *testing.T) {
	var b bytes.Buffer
	now := epoch
	p := newPlain(&b, func() time.Time { return now })
	p.Show(Note("reading data"))
	p.Show(begin)
	for i := range 200 {
		now = now.Add(500 * time.Millisecond)
		m := Step{Step: i + 1, Loss: 5 - float64(i)/100, Tokens: 4096, MS: 500}
		if i+1 == 200 || i+1 == 77 {
			val := 2.75
			m.ValLoss = &val
		}
		p.Show(m)
	}
	p.Show(end(200, ""))
	p.Close()
	p.Show(Note("too late"))
	p.Close()
	golden(t, "plain.txt", b.String())
}

// While checkpoints fail, the view says since when there is none.
func TestUnsaved(t *testing.T) {
	fails := Unsaved{Step: 40, Since: epoch, Why: "worker 1: no space left on device"}
	const line = "no checkpoint since step 40 (50s): worker 1: no space left on device"
	s, now := shown(100, fails)
	if got := render(s, now, 120, 40); !strings.Contains(got, line) {
		t.Errorf("live: no %q in\n%s", line, got)
	}
	if got := s.lines(now, fails); len(got) != 1 || got[0] != line {
		t.Errorf("plain: %q", got)
	}
	s, now = shown(100, Unsaved{Since: epoch, Why: "x"})
	if want := "no checkpoint since the start (50s): x"; !strings.Contains(render(s, now, 120, 40), want) {
		t.Errorf("live: no %q", want)
	}
	s, now = shown(100, fails, Unsaved{})
	if got := render(s, now, 120, 40); strings.Contains(got, "no checkpoint") {
		t.Errorf("live, although checkpoints are made again:\n%s", got)
	}
	if got := s.lines(now, Unsaved{}); len(got) != 1 || got[0] != "checkpoints are made again" {
		t.Errorf("plain: %q", got)
	}
}

func TestPlainWhenStopped(t *testing.T) {
	var b bytes.Buffer
	p := newPlain(&b, func() time.Time { return epoch })
	p.Show(Begin{Job: rundir.Job{Program: "mlp", Model: "mlp", Parameters: 12, Steps: 5, GlobalBatch: 1, MicroBatch: 1, Workers: 1, Threads: 1, Kernel: "generic"}})
	p.Show(Step{Step: 1, Loss: 1})
	p.Show(Stopping{"interrupt"})
	p.Show(End{rundir.Summary{Steps: 1, Loss: 1, StoppedBy: "interrupt"}})
	p.Close()
	golden(t, "plain-stopped.txt", b.String())
}

// A run that ends before a step has no loss and no speed to show.
func TestPlainWithoutSteps(t *testing.T) {
	s, now := shown(0)
	e := End{rundir.Summary{Steps: 40, StoppedBy: "worker 0: no space left on device"}}
	s.add(now, e)
	if got := strings.Join(s.lines(now, e), "\n"); strings.Contains(got, "loss") || strings.Contains(got, "tokens/s") {
		t.Error(got)
	}
}

// A run of slow steps is heard of once a minute.
func TestPlainWhenSlow(t *testing.T) {
	var b bytes.Buffer
	now := epoch
	p := newPlain(&b, func() time.Time { return now })
	p.Show(Begin{Job: rundir.Job{Program: "gpt", Steps: 10_000}})
	for i := range 13 {
		now = now.Add(10 * time.Second)
		p.Show(Step{Step: i + 1, Loss: 1, Tokens: 1, MS: 10_000})
	}
	p.Close()
	var got []string
	for line := range strings.Lines(b.String()) {
		if step, ok := strings.CutPrefix(line, "step "); ok {
			got = append(got, strings.Fields(step)[0])
		}
	}
	if want := "1/10000 7/10000 13/10000"; strings.Join(got, " ") != want {
		t.Errorf("printed steps %v, want %s", got, want)
	}
}

// A pipe without a reader does not hold up the run; what it lacks is there once it is read.
func TestPlainWithoutReader(t *testing.T) {
	r, w := io.Pipe()
	p := newPlain(w, time.Now)
	for i := range plainMost + 2 {
		p.Show(Note(fmt.Sprint(i)))
	}
	text := make(chan string)
	go func() {
		all, _ := io.ReadAll(r)
		text <- string(all)
	}()
	p.Close()
	w.Close()
	got := <-text
	if lines := strings.Count(got, "\n"); lines < plainMost || !strings.HasPrefix(got, "0\n1\n2\n") {
		t.Errorf("%d lines: %.100s", lines, got)
	}
}

func TestOpenIsPlainWhereItMustBe(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	v := Open(Options{Out: f})
	defer v.Close()
	if _, ok := v.(*plain); !ok {
		t.Errorf("a file gets a %T", v)
	}
}

// A live view shows its last state when it is closed, and takes nothing after.
func TestLiveClose(t *testing.T) {
	var b bytes.Buffer
	l := newLive(&b, true, func() (int, int) { return 80, 24 })
	l.Show(begin)
	l.Show(end(200, ""))
	l.Close()
	l.Show(Note("too late"))
	l.Close()
	if got := b.String(); !strings.Contains(got, "done: 200 steps") || !strings.Contains(got, "\x1b[1mgpt") {
		t.Errorf("got %q", got)
	}
}

func TestScreen(t *testing.T) {
	var b bytes.Buffer
	sc := &screen{out: &b}
	for _, c := range []struct {
		text          string
		width, height int
		want          string
	}{
		{"one\ntwo\n", 10, 24, "\rone\x1b[K\ntwo\x1b[K\n\x1b[J"},
		{"one\ntwo\n", 10, 24, ""}, // nothing new
		{"one\n", 10, 24, "\r\x1b[2Aone\x1b[K\n\x1b[J"},
		{"0123456789\n", 11, 24, "\r\x1b[A0123456789\x1b[K\n\x1b[J"},
		{"01\n", 4, 24, "\r\x1b[3A01\x1b[K\n\x1b[J"}, // was wrapped into three
		{"1\n2\n3\n4\n", 4, 3, "\r\x1b[A3\x1b[K\n4\x1b[K\n\x1b[J"},
		{"5\n6\n7\n8\n", 4, 2, "\r\x1b[A8\x1b[K\n\x1b[J"},
		{"", 4, 24, "\r\x1b[A\x1b[J"},
	} {
		b.Reset()
		sc.show(c.text, c.width, c.height)
		if got := b.String(); got != c.want {
			t.Errorf("%q in %dx%d: wrote %q, want %q", c.text, c.width, c.height, got, c.want)
		}
	}
}

func TestHistoryKeepsTheCourse(t *testing.T) {
	var h history
	const n = 100_000
	for i := range n {
		h.add(float64(n - i))
	}
	if len(h.means) >= historySize {
		t.Errorf("holds %d numbers", len(h.means))
	}
	if got := h.line(8); got != "█▇▆▅▄▃▂▁" {
		t.Errorf("line is %s", got)
	}
	for i := 1; i < len(h.means); i++ {
		if h.means[i] >= h.means[i-1] {
			t.Fatalf("mean %d is not below the one before", i)
		}
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-1: "0s", 59400 * time.Millisecond: "59s", 59500 * time.Millisecond: "1m00s", 245 * time.Second: "4m05s",
		200 * time.Minute: "3h20m", 50 * time.Hour: "2d02h",
	} {
		if got := duration(d); got != want {
			t.Errorf("%v is %s, want %s", d, got, want)
		}
	}
}

func TestAmount(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 950: "950", 9999: "9999", 12345: "12.3k", 1_582_336: "1.58M", 7e9: "7.00G"} {
		if got := amount(x); got != want {
			t.Errorf("%v is %s, want %s", x, got, want)
		}
	}
}

func TestRecoveredInOneLine(t *testing.T) {
	for _, c := range []struct {
		r    Recovered
		want string
	}{
		{Recovered{rundir.Recovery{TotalMS: 9.3, RecomputedMicrobatches: 3}, "worker 2 killed"}, "worker 2 killed · training again after 9 ms · 3 micro-batches recomputed"},
		{Recovered{rundir.Recovery{TotalMS: .25, RecomputedMicrobatches: 1}, "worker 0 evicted"}, "worker 0 evicted · training again after 0.2 ms · 1 micro-batch recomputed"},
		{Recovered{rundir.Recovery{TotalMS: 12_345, Cause: "the link broke"}, ""}, "the link broke · training again after 12.3 s"},
	} {
		if got := c.r.line(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	var s state
	now := time.Unix(0, 0)
	s.add(now, Begin{Job: rundir.Job{Steps: 9}})
	for range 5 {
		s.add(now, Recovered{rundir.Recovery{TotalMS: 9}, "worker 2 killed"})
	}
	for height, want := range map[int]int{10: 1, 40: mostRecoveries} {
		if n := strings.Count(render(&s, now, 60, height), "worker 2 killed · training again after 9 ms\n"); n != want {
			t.Errorf("%d lines of recoveries in a view of height %d, want %d", n, height, want)
		}
	}
}

func TestPair(t *testing.T) {
	var b strings.Builder
	for _, size := range [][2]int{{40, 40}, {100, 30}, {100, 12}} {
		p := &Pair{names: [2]string{"undisturbed", "with faults"}}
		fmt.Fprintf(&b, "--- before training, %d columns\n%s", size[0], p.render(epoch, size[0], size[1]))
		for i := range p.sides {
			p.sides[i].add(epoch, beginWith(4, 2))
			for step := range 10 + i {
				p.sides[i].add(epoch.Add(time.Duration(step)*time.Second), Step{Step: step + 1, Loss: 5 - 0.2*float64(step), Tokens: 4096, MS: 1000})
			}
		}
		p.sides[1].add(epoch, Worker{ID: 1, State: "killed by SIGKILL"})
		p.sides[1].add(epoch, Worker{ID: 4, State: "catching up"})
		p.said = []saying{{"step 3: launcher kill run 1", "training again after 9 ms"}, {"step 8: launcher add run", ""}}
		fmt.Fprintf(&b, "--- training, %d columns, %d lines\n%s", size[0], size[1], p.render(epoch.Add(20*time.Second), size[0], size[1]))
		p.sides[0].add(epoch, end(200, ""))
		p.sides[1].add(epoch, end(200, ""))
		fmt.Fprintf(&b, "--- done, %d columns, %d lines\n%s", size[0], size[1], p.render(epoch.Add(30*time.Second), size[0], size[1]))
	}
	golden(t, "pair.txt", b.String())
}

// What programs write reaches no terminal as it is: neither fields of events that exist nor those that are added later.
func TestTextIsClean(t *testing.T) {
	for text, want := range map[string]string{
		"":                                "",
		"worker 1\tis\nback: ∆ é 語":       "worker 1\tis\nback: ∆ é 語",
		"\x1b[2J\x1b]0;x\a":               `\u001b[2J\u001b]0;x\u0007`,
		"50%\r60%\r\nend\r":               `50%\u000d60%` + "\n" + `end\u000d`,
		"\u009b2J \u202e \U000e0001 \x7f": `\u009b2J \u202e \udb40\udc01 \u007f`,
		"\xff\ufffd\xc3":                  `\xff` + "\ufffd" + `\xc3`,
	} {
		if got := Clean(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
		if again := Clean(Clean(text)); again != Clean(text) {
			t.Errorf("%q: the second time %q", text, again)
		}
	}
	const evil = "\x1b[31mred\u202e"
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.String:
			v.SetString(evil)
		case reflect.Struct:
			for i := range v.NumField() {
				if v.Field(i).CanSet() {
					fill(v.Field(i))
				}
			}
		case reflect.Slice:
			if v.Type().Elem().Kind() != reflect.Uint8 {
				v.Set(reflect.MakeSlice(v.Type(), 1, 1))
				fill(v.Index(0))
			}
		case reflect.Pointer:
			if v.Type().Elem().Kind() == reflect.Struct {
				v.Set(reflect.New(v.Type().Elem()))
				fill(v.Elem())
			}
		}
	}
	for _, e := range []Event{Note(""), Begin{}, Plan{}, Recovered{}, Worker{}, Step{}, Change{}, Timeline{}, Unsaved{}, Stopping{}, End{}} {
		v := reflect.New(reflect.TypeOf(e)).Elem()
		fill(v)
		text := func(e any) string {
			b, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			return string(b)
		}
		before := text(v.Interface())
		if got := text(cleaned(v.Interface().(Event))); strings.Contains(got, `"\u001b`) {
			t.Errorf("%T: %s", e, got)
		}
		if text(v.Interface()) != before {
			t.Errorf("%T: the event itself has changed", e)
		}
		var out bytes.Buffer
		p := newPlain(&out, time.Now)
		p.Show(begin)
		p.Show(v.Interface().(Event))
		p.Close()
		if strings.Contains(out.String(), "\x1b") {
			t.Errorf("%T: %q", e, out.String())
		}
	}
}

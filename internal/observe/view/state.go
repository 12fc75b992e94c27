package view

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/plan"
)

// state is what a view has seen of a run.
type state struct {
	colour   bool      // where it is shown
	began    time.Time // of the first event
	note     string    // the newest, while it is true
	run      *Begin
	rows     []row
	training time.Time // when run was set
	last     *Step
	val      *float64
	losses   history
	speed    speed
	stopping string
	unsaved  Unsaved // zero while checkpoints are made

	recovered []string // lines of the newest
	end       *End
	spoke     time.Time // when the plain view printed its newest step
}

func (s *state) add(now time.Time, e Event) {
	if s.began.IsZero() {
		s.began = now
	}
	switch e := e.(type) {
	case Note:
		s.note = string(e)
	case Begin:
		s.run, s.training, s.note = &e, now, ""
		if !e.Since.IsZero() {
			s.training = e.Since
		}
		s.rows = nil
		for _, w := range e.Workers {
			s.rows = append(s.rows, row{place: w})
		}
	case Plan:
		s.addPlan(e)
	case Recovered:
		s.recovered = append(s.recovered, e.line())
		s.recovered = s.recovered[max(0, len(s.recovered)-mostRecoveries):]
	case Worker:
		s.addRow(e)
	case Step:
		s.last, s.note = &e, ""
		s.losses.add(e.Loss)
		s.speed.add(float64(e.Tokens), e.MS)
		if e.ValLoss != nil {
			s.val = e.ValLoss
		}
	case Unsaved:
		s.unsaved = e
	case Stopping:
		s.stopping = e.Reason
	case End:
		s.end, s.note = &e, ""
		if e.Summary.ValLoss != nil {
			s.val = e.Summary.ValLoss
		}
	}
}

// text says it in one line, at a time.
func (u Unsaved) text(now time.Time) string {
	since := "the start"
	if u.Step > 0 {
		since = fmt.Sprintf("step %d", u.Step)
	}
	return fmt.Sprintf("no checkpoint since %s (%s): %s", since, duration(now.Sub(u.Since)), u.Why)
}

// left estimates the time until the last step, from the time all steps took so far,
// evaluations included. ok is false before there is anything to go by.
func (s *state) left(now time.Time) (left time.Duration, ok bool) {
	if s.run == nil || s.last == nil || s.last.Step == 0 {
		return 0, false
	}
	each := float64(now.Sub(s.training)) / float64(s.last.Step)
	return time.Duration(each * float64(s.run.Job.Steps-s.last.Step)), true
}

// speed averages tokens a second over the newest steps.
type speed struct {
	tokens, ms [16]float64
	n          int
}

func (v *speed) add(tokens, ms float64) {
	i := v.n % len(v.tokens)
	v.tokens[i], v.ms[i] = tokens, ms
	v.n++
}

func (v *speed) perSecond() float64 {
	var tokens, ms float64
	for i := range min(v.n, len(v.tokens)) {
		tokens += v.tokens[i]
		ms += v.ms[i]
	}
	if ms == 0 {
		return 0
	}
	return tokens / ms * 1000
}

// history keeps the whole course of a number in bounded memory: when it is
// full, neighbours become their mean.
type history struct {
	means []float64
	each  int // numbers behind one mean
	sum   float64
	n     int // numbers in sum
}

const historySize = 512

func (h *history) add(x float64) {
	if h.each == 0 {
		h.each = 1
	}
	h.sum += x
	h.n++
	if h.n < h.each {
		return
	}
	h.means = append(h.means, h.sum/float64(h.n))
	h.sum, h.n = 0, 0
	if len(h.means) == historySize {
		for i := range historySize / 2 {
			h.means[i] = (h.means[2*i] + h.means[2*i+1]) / 2
		}
		h.means = h.means[:historySize/2]
		h.each *= 2
	}
}

// line draws the course in at most width cells, the lowest value at the bottom.
func (h *history) line(width int) string {
	if width < 1 || len(h.means) == 0 {
		return ""
	}
	cells := make([]float64, min(width, len(h.means)))
	for i := range cells {
		part := h.means[i*len(h.means)/len(cells) : (i+1)*len(h.means)/len(cells)]
		for _, x := range part {
			cells[i] += x / float64(len(part))
		}
	}
	low, high := math.Inf(1), math.Inf(-1)
	for _, x := range cells {
		low, high = min(low, x), max(high, x)
	}
	const marks = "▁▂▃▄▅▆▇█"
	levels := []rune(marks)
	var b strings.Builder
	for _, x := range cells {
		i := 0
		if high > low {
			i = int((x-low)/(high-low)*float64(len(levels)-1) + 0.5)
		}
		b.WriteRune(levels[i])
	}
	return b.String()
}

// duration prints a time as people say it, such as 9s, 4m05s or 3h20m.
func duration(d time.Duration) string {
	s := int64((max(d, 0) + time.Second/2) / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	case s < 48*3600:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	}
	return fmt.Sprintf("%dd%02dh", s/86400, s/3600%24)
}

// amount prints a count in three or four digits, such as 950, 12.3k or 1.58M.
func amount(x float64) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}} {
		if x >= unit.size {
			if unit.name == "k" {
				return strconv.FormatFloat(x/1e3, 'f', 1, 64) + "k"
			}
			return strconv.FormatFloat(x/unit.size, 'f', 2, 64) + unit.name
		}
	}
	return strconv.FormatFloat(x, 'f', 0, 64)
}

// title is the parts of the line that says what runs, the more important first.
func (s *state) title() []string {
	job := s.run.Job
	parts := []string{job.Program}
	if job.Model != "" && job.Model != job.Program {
		parts = append(parts, job.Model)
	}
	workers := plan.Count(job.Workers, "worker")
	if job.Workers > 1 {
		workers += " in " + plan.Count(max(job.Stages, 1), "stage")
	}
	return append(parts,
		amount(float64(job.Parameters))+" parameters",
		workers+", "+plan.Count(job.Threads, "thread"),
		job.Kernel)
}

// verdict is the line that says how training ended.
func (s *state) verdict() string {
	sum := s.end.Summary
	took := duration(time.Duration(sum.Seconds * float64(time.Second)))
	if sum.StoppedBy == "" {
		return fmt.Sprintf("done: %s in %s", plan.Count(sum.Steps, "step"), took)
	}
	if s.run == nil { // this host has not been told of the job
		return fmt.Sprintf("ended after %s: %s", plan.Count(sum.Steps, "step"), sum.StoppedBy)
	}
	return fmt.Sprintf("ended after %d of %s: %s", sum.Steps, plan.Count(s.run.Job.Steps, "step"), sum.StoppedBy)
}

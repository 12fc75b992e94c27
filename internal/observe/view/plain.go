package view

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/plan"
)

// plain prints lines, in a goroutine of its own: where a pipe takes no more, the run goes on.
type plain struct {
	w       io.Writer
	now     func() time.Time
	printed chan struct{} // closed when all lines are

	mu      sync.Mutex
	more    *sync.Cond // there are lines, or there will be none
	s       state
	lines   []string
	omitted int // lines that did not fit in
	closed  bool
}

const (
	plainLines = 20          // about how many lines of steps a run prints
	plainQuiet = time.Minute // how long a slow run stays silent
	plainMost  = 10_000      // lines that wait to be printed
)

// newPlain returns a plain view, whose Close waits until all is printed.
func newPlain(w io.Writer, now func() time.Time) *plain {
	p := &plain{w: w, now: now, printed: make(chan struct{})}
	p.more = sync.NewCond(&p.mu)
	go func() {
		defer close(p.printed)
		for lines, ok := p.next(); ok; lines, ok = p.next() {
			for _, line := range lines {
				fmt.Fprintln(p.w, line)
			}
		}
	}()
	return p
}

// next waits for lines to print, and returns false when there will be none.
func (p *plain) next() (lines []string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.lines) == 0 && !p.closed {
		p.more.Wait()
	}
	lines, p.lines = p.lines, nil
	if p.omitted > 0 {
		lines = append(lines, fmt.Sprintf("%s left out, since the output took no more", plan.Count(p.omitted, "line")))
		p.omitted = 0
	}
	return lines, len(lines) > 0
}

func (p *plain) Show(e Event) {
	e = cleaned(e)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	now := p.now()
	p.s.add(now, e)
	for _, line := range p.s.lines(now, e) {
		if len(p.lines) < plainMost {
			p.lines = append(p.lines, line)
		} else {
			p.omitted++
		}
	}
	p.more.Signal()
}

func (p *plain) Close() {
	p.mu.Lock()
	p.closed = true
	p.more.Signal()
	p.mu.Unlock()
	<-p.printed
}

// lines is what the plain view says about an event that s has taken in already.
func (s *state) lines(now time.Time, e Event) []string {
	switch e := e.(type) {
	case Note:
		return []string{string(e)}
	case Begin:
		job := e.Job
		lines := []string{
			strings.Join(s.title(), ", "),
			fmt.Sprintf("%s of %s in micro-batches of %d, seed %d", plan.Count(job.Steps, "step"), plan.Count(job.GlobalBatch, "sample"), job.MicroBatch, job.Seed),
		}
		if e.Reason != "" {
			lines = append(lines, e.Reason)
		}
		if e.RunDir != "" {
			lines = append(lines, "run directory "+e.RunDir)
		}
		return lines
	case Plan:
		return []string{e.Reason}
	case Recovered:
		return []string{e.line()}
	case Step:
		if s.run == nil {
			return nil
		}
		steps := s.run.Job.Steps
		every := max(1, (steps+plainLines-1)/plainLines)
		if e.Step != 1 && e.Step%every != 0 && e.Step != steps && e.ValLoss == nil && now.Sub(s.spoke) < plainQuiet {
			return nil
		}
		s.spoke = now
		line := fmt.Sprintf("step %*d/%d  loss %.4f", len(fmt.Sprint(steps)), e.Step, steps, e.Loss)
		if e.ValLoss != nil {
			line += fmt.Sprintf("  val_loss %.4f", *e.ValLoss)
			for _, name := range slices.Sorted(maps.Keys(e.Metrics)) {
				line += fmt.Sprintf("  %s %.4f", Clean(name), e.Metrics[name])
			}
		}
		line += fmt.Sprintf("  %s tokens/s", amount(s.speed.perSecond()))
		if left, ok := s.left(now); ok && e.Step < steps {
			line += fmt.Sprintf("  %s left", duration(left))
		}
		return []string{line}
	case Unsaved:
		if e.Why == "" {
			return []string{"checkpoints are made again"}
		}
		return []string{e.text(now)}
	case Stopping:
		return []string{fmt.Sprintf("stopping at the next commit (%s)", e.Reason)}
	case End:
		sum := e.Summary
		lines := []string{s.verdict()}
		var known []string // of a run that ends before it has done a step since a rollback or a resume, neither is
		if sum.Steps > 0 && (sum.Loss != 0 || sum.StoppedBy == "") {
			known = append(known, fmt.Sprintf("loss %.4f", sum.Loss))
		}
		if sum.TokensPerSecond > 0 {
			known = append(known, amount(sum.TokensPerSecond)+" tokens/s")
		}
		if len(known) > 0 {
			lines = append(lines, strings.Join(known, ", "))
		}
		if sum.ValLoss != nil {
			lines = append(lines, fmt.Sprintf("val_loss %.4f", *sum.ValLoss))
		}
		if sum.ParamsSHA256 != "" {
			lines = append(lines, "params_sha256 "+sum.ParamsSHA256)
		}
		if s.run != nil && s.run.RunDir != "" {
			lines = append(lines, "run directory "+s.run.RunDir)
		}
		return lines
	}
	return nil
}

// line says in one line what happened, and what it cost.
func (r Recovered) line() string {
	text := fmt.Sprintf("%s · training again after %s", cmp.Or(r.What, r.Cause), milliseconds(r.TotalMS))
	if n := r.RecomputedMicrobatches; n > 0 {
		text += " · " + plan.Count(n, "micro-batch") + " recomputed"
	}
	return text
}

// milliseconds prints a short time.
func milliseconds(ms float64) string {
	switch {
	case ms < 1:
		return fmt.Sprintf("%.1f ms", ms)
	case ms < 10_000:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f s", ms/1000)
}

package recovery

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

// waitsEvery is how far apart the moments are at which waits looks at a run.
const waitsEvery = 10 * time.Millisecond

// waits makes an undisturbed run and returns, at moments of its steps that are traced in full, how long it is until the last worker runs a pass or has
// run all of the step, ms. A recovery ends when that is so, and one that took no time would end as late. What a worker waits for
// its first pass counts as nothing: that it is not in the update before is not known.
func (b *surviveBench) waits() ([]float64, error) {
	o, err := b.lab.Run(b.trial(2 * b.steps))
	if err != nil {
		return nil, err
	}
	if o.Sum.StoppedBy != "" || o.Sum.Steps != 2*b.steps {
		return nil, fmt.Errorf("the undisturbed run of %d steps ended after %d\n%s", 2*b.steps, o.Sum.Steps, o.Output)
	}
	f, err := os.Open(filepath.Join(o.Dir, "traces.jsonl"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var steps []trace.Span
	passes := make(map[trace.ID]map[int][]trace.Span) // of each step and worker
	if err := trace.Read(f, func(s trace.Span) {
		switch {
		case s.Name == trace.Step && s.Worker == trace.Agent:
			steps = append(steps, s)
		case (s.Name == trace.Forward || s.Name == trace.Backward) && s.Worker != trace.Agent:
			if passes[s.Trace] == nil {
				passes[s.Trace] = make(map[int][]trace.Span)
			}
			passes[s.Trace][s.Worker] = append(passes[s.Trace][s.Worker], s)
		}
	}); err != nil {
		return nil, err
	}
	var all []float64
	for _, step := range steps {
		if len(passes[step.Trace]) < b.workers {
			continue // it is not traced in full
		}
		for at := step.Start; at.Before(step.End); at = at.Add(waitsEvery) {
			longest := time.Duration(0)
			for _, of := range passes[step.Trace] {
				longest = max(longest, untilPass(of, at))
			}
			all = append(all, float64(longest)/1e6)
		}
	}
	return all, os.RemoveAll(o.Dir)
}

// untilPass returns how long after a moment a worker that has begun with its passes, and not ended them, runs one.
func untilPass(passes []trace.Span, at time.Time) time.Duration {
	slices.SortFunc(passes, func(a, b trace.Span) int { return cmp.Compare(a.Start.UnixNano(), b.Start.UnixNano()) })
	i := slices.IndexFunc(passes, func(s trace.Span) bool { return s.Start.After(at) })
	if i <= 0 || slices.ContainsFunc(passes[:i], func(s trace.Span) bool { return s.End.After(at) }) {
		return 0
	}
	return passes[i].Start.Sub(at)
}

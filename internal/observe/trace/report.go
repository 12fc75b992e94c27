package trace

import (
	"cmp"
	"slices"
	"time"
)

// Report is what there is to say about the spans of a run. Times are in milliseconds.
type Report struct {
	Recoveries []RecoveryReport `json:"recoveries"` // the longest first
	Reliefs    []RecoveryReport `json:"reliefs"`    // plans by which others took over work of late workers, the longest first
	Steps      int              `json:"steps"`      // that were told of in full
	Workers    []WorkerReport   `json:"workers"`    // by their IDs
	Links      []LinkReport     `json:"links"`      // the slowest first

	SlowestWorker *int        `json:"slowest_worker"` // the worker that computes longest; null without steps
	SlowestLink   *LinkReport `json:"slowest_link"`   // null without boundary tensors between workers
}

// RecoveryReport is one recovery, or one relief.
type RecoveryReport struct {
	Trace   string        `json:"trace"`
	Step    int           `json:"step"`
	Plan    string        `json:"plan"`
	Cause   string        `json:"cause"`
	TotalMS float64       `json:"total_ms"`
	Phases  []PhaseReport `json:"phases"` // the longest first
	Failed  string        `json:"failed"` // "" for one that went well
	After   string        `json:"after"`  // trace of the recovery that it interrupted, "" for none
	// Superseded says that another fault came before the end; its recovery has the rest.
	Superseded bool `json:"superseded"`
}

// PhaseReport is one phase of a recovery.
type PhaseReport struct {
	Name    string  `json:"name"`
	StartMS float64 `json:"start_ms"` // since the death
	MS      float64 `json:"ms"`
}

// WorkerReport says how the mean step of a worker is made up. The parts add up to Step.
type WorkerReport struct {
	ID         int     `json:"id"`
	Steps      int     `json:"steps"`
	StepMS     float64 `json:"step_ms"`
	ComputeMS  float64 `json:"compute_ms"`  // passes, digests, updates
	CommitMS   float64 `json:"commit_ms"`   // the exchange, which waits for the slowest
	TransferMS float64 `json:"transfer_ms"` // nothing to compute, while gradients, parameters or boundary tensors are under way here
	WaitMS     float64 `json:"wait_ms"`     // nothing at all
}

// LinkReport is the way of boundary tensors from one worker to another, from the producer's post
// until they are there, by the clocks of both.
type LinkReport struct {
	From  int     `json:"from"`
	To    int     `json:"to"`
	Count int     `json:"count"`
	Bytes int64   `json:"bytes"`
	MS    float64 `json:"ms"` // mean
}

func msOf(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Summarize makes the report of a run's spans.
func Summarize(spans []Span) Report {
	r := Report{Recoveries: []RecoveryReport{}, Reliefs: []RecoveryReport{}, Workers: []WorkerReport{}, Links: []LinkReport{}}
	phases := make(map[Context][]Span)
	roots := make(map[Context]bool)
	parts := make(map[Context]*Span) // of workers in steps
	below := make(map[Context][]Span)
	stages := make(map[Context]SpanID) // the part that each is of
	for i := range spans {
		s := &spans[i]
		switch {
		case (s.Name == Recovery || s.Name == Relief) && s.Parent == (SpanID{}):
			roots[s.Context] = true
		case s.Worker == Agent && slices.Contains(Phases[:], s.Name):
			phases[Context{s.Trace, s.Parent}] = append(phases[Context{s.Trace, s.Parent}], *s)
		case s.Name == Step && s.Worker != Agent:
			parts[s.Context] = s
		case s.Name == Stage && s.Worker != Agent:
			stages[s.Context] = s.Parent
		case s.Worker != Agent:
			below[Context{s.Trace, s.Parent}] = append(below[Context{s.Trace, s.Parent}], *s)
		}
	}
	for c, part := range stages {
		of := Context{c.Trace, part}
		below[of] = append(below[of], below[c]...)
	}
	for _, s := range spans {
		if !roots[s.Context] || s.Name != Recovery && s.Name != Relief {
			continue
		}
		x := RecoveryReport{
			Trace: s.Trace.String(), Step: s.Int(KeyStep, 0), Plan: s.Text(KeyPlan), Cause: s.Text(KeyCause), Failed: s.Error,
			TotalMS: msOf(s.End.Sub(s.Start)), Phases: []PhaseReport{},
		}
		for _, p := range phases[s.Context] {
			x.Phases = append(x.Phases, PhaseReport{p.Name, msOf(p.Start.Sub(s.Start)), msOf(p.End.Sub(p.Start))})
		}
		slices.SortStableFunc(x.Phases, func(a, b PhaseReport) int { return cmp.Compare(b.MS, a.MS) })
		for _, l := range s.Links {
			if roots[l.Context] && l.Why == Interrupted {
				x.After = l.Trace.String()
			}
		}
		x.Superseded = s.True(KeySuperseded)
		if s.Name == Recovery {
			r.Recoveries = append(r.Recoveries, x)
		} else {
			r.Reliefs = append(r.Reliefs, x)
		}
	}
	longest := func(a, b RecoveryReport) int { return cmp.Compare(b.TotalMS, a.TotalMS) }
	slices.SortStableFunc(r.Recoveries, longest)
	slices.SortStableFunc(r.Reliefs, longest)
	r.steps(parts, below)
	r.links(spans)
	return r
}

// steps fills in what is known of workers.
func (r *Report) steps(parts map[Context]*Span, below map[Context][]Span) {
	sums := make(map[int]*WorkerReport)
	traces := make(map[ID]bool)
	for c, part := range parts {
		traces[part.Trace] = true
		w := sums[part.Worker]
		if w == nil {
			w = &WorkerReport{ID: part.Worker}
			sums[part.Worker] = w
		}
		took := breakdown(part, below[c])
		w.Steps++
		w.StepMS += msOf(part.End.Sub(part.Start))
		w.ComputeMS, w.CommitMS = w.ComputeMS+msOf(took[computing]), w.CommitMS+msOf(took[committing])
		w.TransferMS, w.WaitMS = w.TransferMS+msOf(took[transferring]), w.WaitMS+msOf(took[waiting])
	}
	r.Steps = len(traces)
	for _, w := range sums {
		n := float64(w.Steps)
		w.StepMS, w.ComputeMS, w.CommitMS, w.TransferMS, w.WaitMS = w.StepMS/n, w.ComputeMS/n, w.CommitMS/n, w.TransferMS/n, w.WaitMS/n
		r.Workers = append(r.Workers, *w)
	}
	slices.SortFunc(r.Workers, func(a, b WorkerReport) int { return a.ID - b.ID })
	most := 0.0
	for _, w := range r.Workers {
		if w.ComputeMS > most {
			most, r.SlowestWorker = w.ComputeMS, &w.ID
		}
	}
}

// What a worker does at a moment: where several are true, the first counts.
const (
	gathering = iota // within a forward pass
	loading          // the same
	computing
	committing
	transferring
	waiting
	doings
)

func doing(name string) int {
	switch name {
	case Gather:
		return gathering
	case Load:
		return loading
	case Forward, Backward, Check, Update:
		return computing
	case Commit:
		return committing
	case Reduce, Transfer:
		return transferring
	}
	return waiting
}

// breakdown says for how long a worker did what in a step.
func breakdown(part *Span, below []Span) (took [doings]time.Duration) {
	type edge struct {
		at   time.Time
		what int
		more int
	}
	var edges []edge
	for _, s := range below {
		start, end := s.Start, s.End
		if start.Before(part.Start) {
			start = part.Start
		}
		if end.After(part.End) {
			end = part.End
		}
		if what := doing(s.Name); what != waiting && start.Before(end) {
			edges = append(edges, edge{start, what, 1}, edge{end, what, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int { return a.at.Compare(b.at) })
	edges = append(edges, edge{part.End, waiting, 0})
	var on [doings]int
	at := part.Start
	for _, e := range edges {
		what := 0
		for what < waiting && on[what] == 0 {
			what++
		}
		if on[computing] > on[gathering]+on[loading] {
			what = computing // where several passes run side by side, not all of them wait
		}
		took[what] += e.at.Sub(at)
		at = e.at
		on[e.what] += e.more
	}
	took[transferring] += took[gathering]
	took[waiting] += took[loading]
	return took
}

// tensor names a boundary tensor of a step on its way.
type tensor struct {
	step         ID
	stage, micro int
	back         bool
	to           int
}

func (s *Span) tensor(to int) tensor {
	return tensor{s.Trace, s.Int(KeyStage, -1), s.Int(KeyMicro, -1), s.Text(KeyDirection) == Backward, to}
}

// links fills in what is known of links.
func (r *Report) links(spans []Span) {
	posted := make(map[tensor]*Span)
	for i := range spans {
		if s := &spans[i]; s.Name == Transfer {
			posted[s.tensor(s.Int(KeyPeer, -1))] = s
		}
	}
	sums := make(map[[2]int]*LinkReport)
	for i := range spans {
		s := &spans[i]
		if s.Name != Arrive {
			continue
		}
		p := posted[s.tensor(s.Worker)]
		if p == nil || p.Worker != s.Int(KeyPeer, -1) || s.Start.Before(p.Start) {
			continue
		}
		l := sums[[2]int{p.Worker, s.Worker}]
		if l == nil {
			l = &LinkReport{From: p.Worker, To: s.Worker}
			sums[[2]int{p.Worker, s.Worker}] = l
		}
		l.Count++
		l.Bytes += int64(s.Int(KeyBytes, 0))
		l.MS += msOf(s.Start.Sub(p.Start))
	}
	for _, l := range sums {
		l.MS /= float64(l.Count)
		r.Links = append(r.Links, *l)
	}
	slices.SortFunc(r.Links, func(a, b LinkReport) int {
		return cmp.Or(cmp.Compare(b.MS, a.MS), a.From-b.From, a.To-b.To)
	})
	if len(r.Links) > 0 {
		r.SlowestLink = &r.Links[0]
	}
}

package simulate

import (
	"fmt"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Prediction is what a step under a plan is expected to be like, by the event simulator:
// every worker computes one task at a time in the order of package graph, reduces or gathers
// beside it, and what goes to other hosts waits for the network card.
type Prediction struct {
	Step     time.Duration
	Workers  []WorkerTime // in the order of the plan
	Critical []Span       // what decided the length of the step, in the order of time
	Spans    []Span       // all tasks of some length, in the order of the graph
}

// WorkerTime is what a worker does with a step: it computes, or waits.
type WorkerTime struct {
	Worker       id.WorkerID
	Stages       []int
	Busy, Bubble time.Duration
}

// Span is a task on a worker, from the begin of the step.
type Span struct {
	graph.Task
	Worker     id.WorkerID
	Begin, End time.Duration
}

// Predict simulates a step under the plan, which must be valid. The times of a profile in
// which nothing is measured are in units of a parameter, not of time.
func Predict(p *plan.Plan, prof plan.Profile) (Prediction, error) {
	g, err := newGraph(p, prof)
	if err != nil {
		return Prediction{}, err
	}
	s, err := g.Simulate()
	if err != nil {
		return Prediction{}, err
	}
	r := Prediction{Step: s.Makespan}
	for i, w := range p.Workers {
		r.Workers = append(r.Workers, WorkerTime{w.ID, p.StagesOf(w.ID), s.Busy[i], s.Idle[i]})
	}
	span := func(n int) Span {
		return Span{g.Nodes[n].Task, p.Workers[g.Nodes[n].Worker].ID, s.Begin[n], s.End[n]}
	}
	for _, n := range s.Critical {
		if s.End[n] > s.Begin[n] {
			r.Critical = append(r.Critical, span(n))
		}
	}
	for n := range g.Nodes {
		if s.End[n] > s.Begin[n] {
			r.Spans = append(r.Spans, span(n))
		}
	}
	return r, nil
}

// Legs tells the critical path in words, what follows itself on a worker in one line.
func (r *Prediction) Legs() []string {
	var legs []string
	for i := 0; i < len(r.Critical); {
		first, n := r.Critical[i], 0
		last := first
		kinds := ""
		for ; i < len(r.Critical); i++ {
			s := r.Critical[i]
			if s.Worker != first.Worker || isPass(s.Kind) != isPass(first.Kind) || s.Stage != first.Stage {
				break
			}
			if !strings.Contains(kinds, s.Kind.String()) {
				kinds = strings.TrimPrefix(kinds+" and "+s.Kind.String(), " and ")
			}
			last = s
			n++
		}
		what := kinds
		if isPass(first.Kind) {
			what = fmt.Sprintf("%s of stage %d, %s", kinds, first.Stage, plan.Count(n, "pass"))
		}
		legs = append(legs, fmt.Sprintf("%8s to %-8s worker %d: %s", short(first.Begin), short(last.End), first.Worker, what))
	}
	return legs
}

func isPass(k graph.Kind) bool { return k == graph.Forward || k == graph.Backward }

// short renders a time with few digits.
func short(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d >= 10*time.Millisecond:
		return d.Round(100 * time.Microsecond).String()
	}
	return d.Round(time.Microsecond).String()
}

// Chart draws the step with one line for each worker: f and b are forward and backward
// passes, u are updates, and a dot is a bubble. Each of width columns shows what took most of
// its time.
func (r *Prediction) Chart(width int) []string {
	rows := make(map[id.WorkerID][][4]time.Duration) // by column: dot, f, b, u
	for _, w := range r.Workers {
		rows[w.Worker] = make([][4]time.Duration, width)
	}
	kinds := map[graph.Kind]int{graph.Forward: 1, graph.Backward: 2, graph.Update: 3}
	each := max(r.Step/time.Duration(width), 1)
	for _, s := range r.Spans {
		k := kinds[s.Kind]
		if k == 0 {
			continue
		}
		for c := int(s.Begin / each); c < width && time.Duration(c)*each < s.End; c++ {
			lo, hi := max(s.Begin, time.Duration(c)*each), min(s.End, time.Duration(c+1)*each)
			rows[s.Worker][c][k] += hi - lo
		}
	}
	var lines []string
	for _, w := range r.Workers {
		var b strings.Builder
		for _, times := range rows[w.Worker] {
			best := 0
			times[0] = each
			for k := 1; k < len(times); k++ {
				times[0] -= times[k]
			}
			for k, t := range times {
				if t > times[best] {
					best = k
				}
			}
			b.WriteByte(".fbu"[best])
		}
		lines = append(lines, fmt.Sprintf("%4d %s", w.Worker, b.String()))
	}
	return lines
}

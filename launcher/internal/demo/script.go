package demo

import (
	"context"
	"fmt"
	"strings"

	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/act"
)

// deed is one thing that launcher demo does to a run.
type deed struct {
	after  float64 // part of the steps that is committed before
	name   string  // command by which it is done; "" adds workers
	worker int     // that it is done to
	add    int     // workers to add
}

var demoActs = []deed{
	{after: 0.1, name: "kill", worker: 1},
	{after: 0.3, name: "freeze", worker: 2},
	{after: 0.5, add: 2},
	{after: 0.75, name: "kill", worker: 0},
}

// script does one act after the other to a run, each when the one before has had its effect.
type script struct {
	run  *demoRun
	pair *view.Pair

	acts  int   // begun
	ids   []int // workers that the newest act is about
	since int   // events of the run that came before it
	done  []outcome
	times []string // to each recovery
}

// outcome is what an act was, and what followed; "" while that is not known.
type outcome struct{ what, then string }

// next looks for the effect of the newest act, and does the next one if its time has come.
func (s *script) next(ctx context.Context) error {
	if n := len(s.done); n > 0 {
		o := &s.done[n-1]
		was := o.then
		over := s.effect(demoActs[s.acts-1], o)
		if o.then != was {
			s.pair.Say(n-1, o.what, o.then)
		}
		if !over {
			return nil
		}
	}
	if s.acts == len(demoActs) || float64(s.run.step) < demoActs[s.acts].after*float64(s.run.steps) || s.run.summary != nil {
		return nil
	}
	a := demoActs[s.acts]
	s.since = len(s.run.seen)
	var o outcome
	if a.name == "" {
		ids, err := act.Add(ctx, s.run.dir, a.add)
		if err != nil {
			return err
		}
		s.ids = ids
		o.what = fmt.Sprintf("step %d: launcher add %s %d", s.run.step+1, s.run.dir, a.add)
		for _, id := range ids {
			s.run.show(view.Worker{ID: id, State: "catching up"})
		}
	} else {
		in, ok := act.Find(a.name)
		if !ok {
			return fmt.Errorf("there is no command %s", a.name)
		}
		if err := in.Inject(ctx, s.run.dir, []int{a.worker}); err != nil {
			return err
		}
		s.ids = []int{a.worker}
		state := map[string]string{"kill": "killed by SIGKILL", "freeze": "frozen by SIGSTOP"}[a.name]
		o.what = fmt.Sprintf("step %d: launcher %s %s %d", s.run.step+1, a.name, s.run.dir, a.worker)
		s.run.show(view.Worker{ID: a.worker, State: state})
	}
	s.acts++
	s.done = append(s.done, o)
	s.pair.Say(len(s.done)-1, o.what, "")
	return nil
}

// effect looks for what followed an act, and reports whether all has.
func (s *script) effect(a deed, o *outcome) bool {
	events := s.run.seen[s.since:]
	if a.name == "" {
		joined := 0
		for _, e := range events {
			for _, id := range s.ids {
				if e.Kind == "joined" && e.Worker == id {
					joined++
					s.run.show(view.Worker{ID: id})
				}
			}
		}
		if joined == len(s.ids) && o.then == "" {
			o.then = fmt.Sprintf("workers %s caught up in the background and joined by step %d, while training went on", numbers(s.ids), s.run.step+1)
		}
		return o.then != ""
	}
	protected := false
	for _, e := range events {
		if r := e.Recovery; r != nil && o.then == "" && strings.Contains(r.Cause, fmt.Sprintf("worker %d ", a.worker)) {
			o.then = recoveryText(r)
			s.times = append(s.times, fmt.Sprintf("%.0f ms after %s %d", r.TotalMS, a.name, a.worker))
			if a.name == "freeze" {
				s.run.show(view.Worker{ID: a.worker, State: "frozen, out of the plan"})
			}
		}
		protected = e.Kind == "protected" || protected && e.Kind != "unprotected"
	}
	return o.then != "" && protected
}

func recoveryText(r *rundir.Recovery) string {
	text := fmt.Sprintf("training again after %.0f ms", r.TotalMS)
	if n := r.RecomputedMicrobatches; n > 0 {
		text += ", " + plan.Count(n, "micro-batch") + " recomputed"
	}
	return text + ": " + r.Cause
}

func numbers(ids []int) string {
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = fmt.Sprint(id)
	}
	return strings.Join(words, " and ")
}

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/launcher/internal/act"
)

// possibleFor returns the kinds of faults that a run can inject.
func possibleFor(hosts int) []chaos.Kind {
	kinds := []chaos.Kind{chaos.KindKill, chaos.KindFreeze, chaos.KindLeave, chaos.KindFlip, chaos.KindSlow, chaos.KindJoin, chaos.KindSlowLink}
	if hosts > 1 {
		kinds = append(kinds, chaos.KindKillHost, chaos.KindFreezeHost)
		if chaos.CanCut() == nil {
			kinds = append(kinds, chaos.KindCut)
		}
	}
	return kinds
}

// parseChaos reads the flag --chaos for a run that begins with so many workers on so many hosts.
func parseChaos(spec string, workers, hosts int) (chaos.Schedule, error) {
	possible := possibleFor(hosts)
	s, err := chaos.Parse(spec)
	if err != nil {
		return s, eachLine(err)
	}
	var faults []error
	absent := func(part fmt.Stringer, kind chaos.Kind) {
		if err := chaos.CanCut(); err != nil && kind == chaos.KindCut {
			faults = append(faults, fmt.Errorf("--chaos: %v: %w", part, err))
		} else if !slices.Contains(possible, kind) {
			faults = append(faults, fmt.Errorf("--chaos: %v: %s needs --emulate-hosts 2 or more; on one host, give %s", part, kind, kindsText(possible)))
		}
	}
	for _, h := range s.Faults {
		absent(h, h.Kind)
	}
	for i, r := range s.Random {
		for _, k := range r.Kinds {
			absent(r, k)
		}
		if len(r.Kinds) == 0 {
			s.Random[i].Kinds = possible
		}
	}
	if len(faults) > 0 {
		return s, errors.Join(faults...)
	}
	// How many steps there are is known later; whether there are such workers is not.
	if _, err := (chaos.Schedule{Faults: s.Faults}).Expand(chaos.Run{Steps: math.MaxInt32, Workers: max(1, workers), Hosts: max(1, hosts)}); err != nil {
		return s, eachLine(err)
	}
	return s, nil
}

func kindsText(possible []chaos.Kind) string {
	var words []string
	for _, k := range possible {
		words = append(words, string(k))
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// eachLine makes every line of an error name the flag.
func eachLine(err error) error {
	return errors.New("--chaos: " + strings.ReplaceAll(err.Error(), "\n", "\n--chaos: "))
}

// faultsFor returns what the agent asks for once it knows the job; nil for a run without faults.
func faultsFor(s chaos.Schedule, workers, hosts int) func(steps int) ([]string, error) {
	if len(s.Faults)+len(s.Random) == 0 {
		return nil
	}
	return func(steps int) ([]string, error) {
		expanded, err := s.Expand(chaos.Run{Steps: steps, Workers: workers, Hosts: hosts})
		if err != nil {
			return nil, eachLine(err)
		}
		var texts []string
		for _, h := range expanded.Faults {
			texts = append(texts, h.String())
		}
		return texts, nil
	}
}

// stepsSeen finds the faults that are due outside of workers: those of hosts, and joins. It follows a run by what a view is
// shown, so the run is not told.
type stepsSeen struct {
	faults         chaos.Schedule
	workers, hosts int
	pick           func(chaos.Schedule) []chaos.Fault

	due *chaos.Due // nil before the run begins
}

// next returns the faults of the step that begins with an event.
func (s *stepsSeen) next(e view.Event) []chaos.Fault {
	switch e := e.(type) {
	case view.Begin:
		if s.due != nil {
			return nil // another host leads
		}
		// The agents do the same, and refuse what cannot be.
		all, err := s.faults.Expand(chaos.Run{Steps: e.Job.Steps, Workers: s.workers, Hosts: s.hosts})
		if err != nil {
			return nil
		}
		s.due = chaos.NewDue(s.pick(all))
		return s.due.Begin(1)
	case view.Step:
		if s.due != nil {
			return s.due.Begin(e.Step + 1)
		}
	}
	return nil
}

// joins adds the workers of join@S to a run, as launcher add does. It is a view of the run.
type joins struct {
	runDir string
	note   func(string)

	mu     sync.Mutex
	steps  stepsSeen
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
}

// openJoins returns the view for the schedule of a run.
func openJoins(ctx context.Context, f *runFlags, runDir string, note func(string)) *joins {
	j := &joins{runDir: runDir, note: note, steps: stepsSeen{faults: f.faults, workers: f.workers, hosts: f.hosts, pick: chaos.Schedule.Joins}}
	j.ctx, j.cancel = context.WithCancel(ctx)
	return j
}

func (j *joins) Show(e view.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ctx.Err() != nil {
		return
	}
	for _, h := range j.steps.next(e) {
		j.tasks.Go(func() { j.add(h) })
	}
}

// joinTries is how often a worker is asked for, joinRetry apart: the host that leads may just have been lost.
const (
	joinTries = 20
	joinRetry = 250 * time.Millisecond
)

func (j *joins) add(h chaos.Fault) {
	var err error
	for range joinTries {
		if _, err = act.Add(j.ctx, j.runDir, 1); err == nil {
			return
		}
		select {
		case <-time.After(joinRetry):
		case <-j.ctx.Done():
			return
		}
	}
	j.note(fmt.Sprintf("chaos: %v: %v", h, err))
}

func (j *joins) Close() {
	j.mu.Lock()
	j.cancel()
	j.mu.Unlock()
	j.tasks.Wait()
}

package controller

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/plan/plantest"
)

var update = flag.Bool("update", false, "write testdata/*.txt")

// Each file tells a story: lines of prose begin with #, commands stand at the beginning
// of a line, and what the controller does follows each, indented. Commands:
//
//	job [workers=3] [stages=1] [micros=6] [mirrors=1] [min=1] [reshape=dataflow|off] [large=BYTES] [respawn]
//	die W [silent] [awaits] [begun=0.1,0.2] [crash=STEP:S.M,S.M]
//	answer W|rest [at=STEP.GATE] [result=R] [plan=N] [ballot=T.A] [complete=owned|held]
//	       [filled=STEP]     what the newest fill was to bring it, as of that step
//	       [former=STEP]     what it held under the plan before, as of that step
//	       [holds=N]         the newest plan it has applied, where that is not plan=
//	       [finished=S.M,...] [forwarded=...] [input=...] [gradient=...]
//	agree [N]                the plan of that number, or the newest
//	applied W|rest [plan=N]
//	finish W step=N          it has passed the last point
//	end W                    it has ended well
//	link A B                 A has lost the link to B
//	behind W [step=1] [slow=5]  others wait for it in a step, and are so many times as fast
//	suspect A [BY]           worker BY of the gossip ring cannot reach A; without BY, no member says so any more
//	late query|link|hold|wish|look|rest [ms=1000]
//	leave W
//	join W                   it is ready, and in no plan yet
//	level W|rest             it has what the newest fill is to bring it
//	measure W|all ms=N       a layer takes it N ms forward, and twice that backward
//	saved STEP DIR
//	lead TERM
//
// W is a WorkerID, or with an incarnation other than 0, WorkerID.INCARNATION.
//
// A worker says of the pairs that the newest plan it knows routes to it that they wait, with
// their input in stage 0, unless the command says more. A millisecond passes with every command.
func TestStories(t *testing.T) {
	for file, text := range stories(t) {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			got := tell(t, text)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o666); err != nil {
					t.Fatal(err)
				}
			} else if got != text {
				t.Errorf("it went like this (-update writes it down):\n%s", got)
			}
		})
	}
}

// stories returns all stories by their files.
func stories(t *testing.T) map[string]string {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	all := make(map[string]string)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all[file] = string(text)
	}
	return all
}

// story runs a controller by commands.
type story struct {
	t     *testing.T
	c     *Controller
	now   time.Time
	args  map[string]string // of the command
	words []string          // without =
	knows map[id.WorkerID]*plan.Plan
	sent  map[id.WorkerID]control.Order
	old   plan.Plan // for what is new in a plan
	plans map[int]plan.Plan
	fill  control.Fill // the newest
}

// filled are the workers that a level command is about.
func (s *story) filled() (all []plan.Worker) {
	if s.words[1] != "rest" {
		return []plan.Worker{s.worker(s.words[1])}
	}
	for _, p := range s.fill.Peers {
		if s.c.reconf.copies != nil && s.c.reconf.copies.wait[p.ID] {
			all = append(all, p.Worker)
		}
	}
	return all
}

func tell(t *testing.T, text string) string {
	s := &story{t: t, now: time.Unix(0, 0), knows: map[id.WorkerID]*plan.Plan{}, sent: map[id.WorkerID]control.Order{}, plans: map[int]plan.Plan{}}
	var out strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, " ") {
			continue
		}
		fmt.Fprintln(&out, line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		s.now = s.now.Add(time.Millisecond)
		for _, e := range s.run(line) {
			fmt.Fprintf(&out, "    %s\n", s.print(e))
		}
	}
	return out.String()
}

func (s *story) number(text string) int {
	s.t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *story) int(key string, otherwise int) int {
	if text, ok := s.args[key]; ok {
		return s.number(text)
	}
	return otherwise
}

// pairs reads "0.1,1.3".
func (s *story) pairs(key string) (all []graph.Pair) {
	for part := range strings.SplitSeq(s.args[key], ",") {
		if stage, micro, ok := strings.Cut(part, "."); ok {
			all = append(all, graph.Pair{Stage: s.number(stage), Micro: s.number(micro)})
		}
	}
	return all
}

func (s *story) worker(word string) plan.Worker {
	n, life, ok := strings.Cut(word, ".")
	w := plan.Worker{ID: id.WorkerID(s.number(n))}
	if ok {
		w.Incarnation = s.number(life)
	}
	return w
}

// workers are those a command is about: one, or the rest by a condition.
func (s *story) workers(rest func(*member) bool) (all []plan.Worker) {
	if s.words[1] != "rest" {
		return []plan.Worker{s.worker(s.words[1])}
	}
	for _, m := range s.c.all() {
		if rest(m) {
			all = append(all, m.Worker)
		}
	}
	return all
}

func (s *story) run(line string) []Effect {
	s.args, s.words = map[string]string{}, nil
	for _, word := range strings.Fields(line) {
		if key, value, ok := strings.Cut(word, "="); ok {
			s.args[key] = value
		} else {
			s.words = append(s.words, word)
		}
	}
	switch s.words[0] {
	case "job":
		s.begin()
		return nil
	case "die":
		w := s.worker(s.words[1])
		e := Dead{Worker: w, Cause: fmt.Sprintf("worker %d exited: signal: killed", w.ID), Died: s.now, How: Reaped, Begun: s.pairs("begun"), Awaits: slices.Contains(s.words, "awaits")}
		if slices.Contains(s.words, "silent") {
			e.Cause, e.How, e.Died = fmt.Sprintf("worker %d has been silent for 1s", w.ID), Silent, s.now.Add(-time.Second)
		}
		if step, _, ok := strings.Cut(s.args["crash"], ":"); ok {
			e.Cause = fmt.Sprintf("worker %d exited: exit status 2", w.ID)
			s.args["crash"] = strings.TrimPrefix(s.args["crash"], step+":")
			for _, p := range s.pairs("crash") {
				e.Crashed = append(e.Crashed, Crash{s.number(step), p})
			}
		}
		return s.step(e)
	case "answer":
		var all []Effect
		for _, w := range s.workers(func(m *member) bool { return m.report == nil }) {
			ballot := s.c.recovery.ballot
			if text := s.args["ballot"]; text != "" {
				fmt.Sscanf(text, "%d.%d", &ballot.Term, &ballot.Attempt)
			}
			all = append(all, s.step(Answered{w, ballot, s.report(w)})...)
		}
		return all
	case "agree":
		n := s.c.issued.N
		if len(s.words) > 1 {
			n = s.number(s.words[1])
		}
		return s.step(Agreed{id.Version{Generation: 1, N: n}, s.now.Add(-300 * time.Microsecond)})
	case "applied":
		var all []Effect
		for _, w := range s.workers(func(m *member) bool { return !m.applied }) {
			order := s.sent[w.ID]
			p := order.Plan
			s.knows[w.ID] = &p
			all = append(all, s.step(Applied{Worker: w, Ballot: order.Ballot, Version: p.Version, Edit: 200 * time.Microsecond})...)
		}
		return all
	case "finish":
		w := s.worker(s.words[1])
		return s.step(Finished{w, s.int("step", 1), []byte(s.args["result"])})
	case "end":
		return s.step(Ended{s.worker(s.words[1])})
	case "link":
		return s.step(LinkLost{s.worker(s.words[1]), s.worker(s.words[2])})
	case "behind":
		w, each := s.worker(s.words[1]), make(map[id.WorkerID]float64)
		for _, m := range s.c.all() {
			each[m.ID] = 1
		}
		each[w.ID] = float64(s.int("slow", 5))
		step := s.int("step", 1)
		return s.step(Behind{Worker: w, Step: step, Each: each, Cause: fmt.Sprintf("worker %d is late in step %d", w.ID, step)})
	case "suspect":
		by := ""
		if len(s.words) > 2 {
			by = "worker " + s.words[2]
		}
		return s.step(Suspected{s.worker(s.words[1]), by})
	case "late":
		s.now = s.now.Add(time.Duration(s.int("ms", 1000)) * time.Millisecond)
		return s.step(Late{Timer(slices.Index(timerNames[:], s.words[1]))})
	case "leave":
		return s.step(Leaving{s.worker(s.words[1])})
	case "join":
		w := s.worker(s.words[1])
		s.knows[w.ID] = &plan.Plan{}
		return s.step(Joined{w, fmt.Sprintf("addr-%s", s.words[1])})
	case "level":
		var all []Effect
		for _, w := range s.filled() {
			all = append(all, s.step(Level{Worker: w, ID: s.fill.ID})...)
		}
		return all
	case "measure":
		var all []Effect
		for _, m := range s.c.all() {
			if s.words[1] != "all" && m.Worker != s.worker(s.words[1]) {
				continue
			}
			var times plan.Times
			for _, stage := range s.c.plan.StagesOf(m.ID) {
				for l := s.c.plan.Stages[stage].Lo; l < s.c.plan.Stages[stage].Hi; l++ {
					ms := time.Duration(s.int("ms", 1)) * time.Millisecond
					times.Layers = append(times.Layers, plan.LayerTime{Layer: l, Forward: ms, Backward: 2 * ms})
				}
			}
			all = append(all, s.step(Measured{m.Worker, times})...)
		}
		return all
	case "saved":
		return s.step(Saved{s.number(s.words[1]), s.words[2]})
	case "lead":
		return s.step(Led{uint64(s.number(s.words[1]))})
	}
	s.t.Fatalf("command %q", line)
	return nil
}

func (s *story) step(e Event) []Effect {
	effects := step(s.c, s.now, e)
	for w := range s.c.times {
		if s.c.members[w] == nil && s.c.joining[w] == nil {
			s.t.Errorf("after %+v: times of worker %d are kept, which is gone", e, w)
		}
	}
	for _, e := range effects {
		switch e := e.(type) {
		case Command:
			s.sent[e.Worker.ID] = e.Order
		case Copy:
			s.fill = e.Fill
		case Propose:
			p := e.Order.Plan
			s.plans[p.Version.N] = p
			for _, err := range []error{p.Validate(storyLayers()), plantest.ValidateAfter(&p, &s.old)} {
				if err != nil && !e.Order.Rollback && s.c.handover == nil && p.Version != s.old.Version {
					s.t.Error(err)
				}
			}
		case Balance:
			effects = append(effects, s.step(e.Make())...)
		}
	}
	return effects
}

// storyLayers have blocks enough for a shard for each of several workers.
func storyLayers() []plan.Layer {
	var layers []plan.Layer
	for range 4 {
		layers = append(layers, plan.Layer{Tensors: []int{8 * 4096}})
	}
	return layers
}

func (s *story) begin() {
	s.c = storyJob(s.t, s.int("workers", 3), s.int("stages", 1), s.int("micros", 6), s.int("mirrors", 1), s.int("min", 1))
	s.c.cfg.Respawn = slices.Contains(s.words, "respawn")
	s.c.cfg.Large = int64(s.int("large", 0))
	if text := s.args["reshape"]; text != "" {
		var err error
		if s.c.cfg.Reshape, err = ParseReshape(text); err != nil {
			s.t.Fatal(err)
		}
	}
	for id := range s.c.members {
		s.knows[id] = &s.c.cfg.Plan
	}
	s.old = s.c.cfg.Plan
	s.plans[1] = s.old
}

// storyJob returns a controller of a new job.
func storyJob(t interface{ Fatal(...any) }, workers, stages, micros, mirrors, least int) *Controller {
	cfg := Config{Profile: plan.Profile{Layers: storyLayers()}, Term: 1, Stages: stages, Mirrors: mirrors, MinWorkers: least, Detect: time.Second}
	var v plan.View
	for worker := range workers {
		w := plan.Worker{ID: id.WorkerID(worker)}
		v.Workers = append(v.Workers, w)
		cfg.Peers = append(cfg.Peers, control.Peer{Worker: w, Addr: fmt.Sprintf("addr-%d", worker)})
	}
	var err error
	cfg.Plan, _, err = planner.Next(plan.Plan{}, v, cfg.Profile, planner.Event{Kind: planner.Start, Micros: micros, Stages: stages, Mirrors: mirrors})
	if err != nil {
		t.Fatal(err)
	}
	return New(cfg)
}

// report is what a worker answers.
func (s *story) report(w plan.Worker) control.Report {
	r := control.Report{Plan: s.knows[w.ID].Version, Result: []byte(s.args["result"])}
	if n, ok := s.args["plan"]; ok {
		r.Plan.N = s.number(n)
	}
	if at := s.args["at"]; at != "" {
		step, gate, _ := strings.Cut(at, ".")
		r.Passed = id.Point{Step: s.number(step), Gate: id.Gate(slices.Index([]string{"committed", "evaluated", "kept"}, gate))}
	}
	r.Holds = r.Plan
	if n, ok := s.args["holds"]; ok {
		r.Holds = id.Version{}
		if n := s.number(n); n > 0 {
			r.Holds = s.plans[n].Version
		}
	}
	if _, ok := s.args["filled"]; ok {
		for _, t := range s.fill.Transfers {
			if t.To == w.ID {
				r.Filled = append(r.Filled, control.Filled{Range: t.Range, Step: s.int("filled", 0)})
			}
		}
	}
	if _, ok := s.args["former"]; ok {
		for _, sh := range s.plans[r.Plan.N-1].Shards {
			if sh.Owner == w.ID || slices.Contains(sh.Mirrors, w.ID) {
				r.Filled = append(r.Filled, control.Filled{Range: id.Range{Layer: sh.Layer, Lo: sh.Lo, Hi: sh.Hi}, Step: s.int("former", 0)})
			}
		}
	}
	p := s.plans[r.Plan.N]
	for stage, route := range p.Route {
		for m, on := range route {
			pair := graph.Pair{Stage: stage, Micro: m}
			if on != w.ID || !p.Runs(pair, r.Passed.Step+1) {
				continue
			}
			st := graph.Status{Pair: pair, Phase: graph.Waiting, Input: stage == 0}
			has := func(key string) bool { return slices.Contains(s.pairs(key), pair) }
			st.Input = st.Input || has("input")
			st.Gradient = has("gradient")
			if has("forwarded") {
				st.Phase, st.Input = graph.Forwarded, true
			}
			if has("finished") {
				st.Phase, st.Input, st.Gradient = graph.Finished, true, true
			}
			r.Works = append(r.Works, st)
		}
	}
	for _, sh := range p.Shards {
		what := s.args["complete"]
		if sh.Owner == w.ID && what != "" || slices.Contains(sh.Mirrors, w.ID) && what == "held" {
			r.Complete = append(r.Complete, id.Range{Layer: sh.Layer, Lo: sh.Lo, Hi: sh.Hi})
		}
	}
	return r
}

// name prints a session as commands do.
func name(w plan.Worker) string {
	if w.Incarnation == 0 {
		return fmt.Sprint(w.ID)
	}
	return fmt.Sprintf("%d.%d", w.ID, w.Incarnation)
}

func (s *story) print(e Effect) string {
	switch e := e.(type) {
	case Note:
		return "- " + e.Reason
	case Ask:
		return fmt.Sprintf("ask worker %s, ballot %v", name(e.Worker), e.Ballot)
	case Command:
		o := e.Order
		text := fmt.Sprintf("order worker %s: plan %v", name(e.Worker), o.Plan.Version)
		if o.Ballot != (id.Ballot{}) {
			text += fmt.Sprintf(", ballot %v", o.Ballot)
		}
		return text
	case Copy:
		return fmt.Sprintf("copy %v on worker %s: %d ranges", e.Fill.ID, name(e.Worker), len(e.Fill.Transfers))
	case Propose:
		return "propose " + s.order(e.Order)
	case Balance:
		return "look for a better plan"
	case Adopt:
		s.old = e.Order.Plan
		return fmt.Sprintf("adopt plan %v (%s)", e.Order.Plan.Version, e.Cause)
	case Kill:
		return fmt.Sprintf("kill worker %s: %s", name(e.Worker), e.Reason)
	case Dismiss:
		return fmt.Sprintf("dismiss worker %s: %s", name(e.Worker), e.Reason)
	case SetTimer:
		return fmt.Sprintf("timer %s in %v", e.Timer, e.After)
	case CancelTimer:
		return fmt.Sprintf("no timer %s", e.Timer)
	case Hold:
		return fmt.Sprintf("hold with %d of %d", e.Have, e.Need)
	case Relieved:
		r := e.Relief
		what := "relieved"
		if !r.Done {
			what = "not relieved"
		}
		return fmt.Sprintf("worker %s %s in step %d, plan %v, ballots %d", name(r.Worker), what, r.Step, r.Version, r.Ballots)
	case Recovered:
		r := e.Recovery
		kind := "recovered"
		if r.Rollback {
			kind = fmt.Sprintf("rolled back to step %d", r.From)
		}
		return fmt.Sprintf("%s in step %d, plan %v, ballots %d, lost %d (%s), again %d; detect %v query %v plan %v agree %v edit %v resume %v, total %v since %s",
			kind, r.Step, r.Version, r.Ballots, r.Lost, r.Cause, r.Again, r.Detect, r.Query, r.Plan, r.Agree, r.Edit, r.Resume, r.Total, r.How)
	case StopAll:
		return "stop at the next commit"
	case End:
		return "END " + e.Err.Error()
	}
	s.t.Fatalf("effect %T", e)
	return ""
}

func (s *story) order(o control.Order) string {
	p := o.Plan
	var b strings.Builder
	kind := "from"
	if p.InStep {
		kind = "in"
	}
	fmt.Fprintf(&b, "plan %v %s step %d:", p.Version, kind, p.FromStep)
	for _, w := range p.Workers {
		fmt.Fprintf(&b, " %s", name(w))
	}
	if o.Ballot != (id.Ballot{}) {
		fmt.Fprintf(&b, "; passed %v %q", o.Passed, o.Result)
	}
	if o.Rollback {
		fmt.Fprintf(&b, "; restart from %q", o.From)
		return b.String()
	}
	d := plantest.Diff(&s.old, &p)
	fmt.Fprintf(&b, "; %d promoted", len(d.Promote))
	for _, r := range d.Reroute {
		if p.Runs(r.Pair, p.FromStep) {
			fmt.Fprintf(&b, "; %d.%d from %d to %d", r.Stage, r.Micro, r.From, r.To)
		}
	}
	if len(p.Settled) > 0 {
		fmt.Fprintf(&b, "; settled %d", len(p.Settled))
	}
	return b.String()
}

package recovery

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Survive kills workers of the GPT with SIGKILL at moments uniform in the run and lists
// what each recovery took, by the run's own account and by the clock of the injector
// that did it. Between them, turn by turn, torchrun restarts after the same, and Gloo
// rebuilds a group.
//
// With -freeze it stops them with SIGSTOP instead, and has no peers: torchrun and Gloo wait for a stopped worker
// until a timeout of minutes.
//
// Each turn also kills a worker of a longer run with --respawn, and one of as many of torchrun; see returns.
//
// Each kill is of a fresh run with all its workers, unless -per-run says otherwise; then
// each one after the first waits until every shard has its mirrors again.
func Survive(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("survive", flag.ExitOnError)
	b := surviveBench{}
	f.IntVar(&b.kills, "kills", 50, "workers to kill")
	freeze := f.Bool("freeze", false, "stop workers with SIGSTOP instead of killing them; without peers")
	f.IntVar(&b.perRun, "per-run", 1, "of them in one run")
	f.IntVar(&b.workers, "workers", 8, "worker processes")
	f.IntVar(&b.stages, "stages", 2, "pipeline stages")
	f.IntVar(&b.mirrors, "mirrors", 1, "replicas of each shard")
	f.IntVar(&b.steps, "steps", 6, "steps of a run")
	model := f.String("model", "small", "small: 3.3 million parameters; 1GB: so many bytes of parameters and optimizer state, in shorter contexts")
	peered := f.Bool("peers", true, "measure peers and replacements, too")
	f.BoolVar(&b.tell, "tell", true, "tell each run when its worker was killed, as launcher kill does; total_ms is from then on, not from the end of the process")
	returns := f.Int("returns", 1, "kills with --respawn, each turn: until as many workers are back, on both sides")
	turns := f.Int("turns", 5, "turns of each side")
	rebuilds := f.Int("rebuilds", 10, "of a Gloo group, each turn")
	restarts := f.Int("restarts", 2, "of torchrun, each turn")
	ranks := f.Int("ranks", 8, "of the Gloo group")
	torchWorkers := f.Int("torch-workers", 4, "of torchrun")
	seed := f.Uint64("seed", 1, "of the moments and the workers")
	if err := f.Parse(args); err != nil {
		return err
	}
	if b.perRun >= b.workers || *returns < 0 || min(b.kills, b.perRun, b.stages, b.steps, *turns, *rebuilds, *restarts, *ranks, *torchWorkers) < 1 {
		return fmt.Errorf("-per-run %d of -workers %d, -kills %d, -stages %d, -steps %d, -returns %d, -turns %d, -rebuilds %d, -restarts %d, -ranks %d, -torch-workers %d: give at least 1 each, 0 -returns, and more workers than -per-run",
			b.perRun, b.workers, b.kills, b.stages, b.steps, *returns, *turns, *rebuilds, *restarts, *ranks, *torchWorkers)
	}
	switch *model {
	case "small":
		b.model, b.context, b.batch = "--layers 4 --width 256 --heads 8", 128, 32
	case "1GB":
		b.model, b.context, b.batch = "--layers 6 --width 1088 --heads 8", 16, 16
	default:
		return fmt.Errorf("-model %q: give small or 1GB", *model)
	}
	if b.fault, b.ended, b.signal = "kill", "exited", "SIGKILL"; *freeze {
		b.fault, b.ended, b.signal = "freeze", "is stopped", "SIGSTOP"
	}
	b.r = rand.New(rand.NewPCG(*seed, 1))
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(l.Dir)
	b.lab = l
	var gloo, torch *peers.Peer
	if *freeze {
		fmt.Println("no peers: they wait for a stopped worker until a timeout of minutes")
	} else if !*peered {
		fmt.Println("without peers and replacements")
	} else if exec.Command("/usr/bin/python3", "-c", "import torch").Run() == nil {
		if gloo, err = peers.StartPeer("gloo_rebuild.py"); err != nil {
			return err
		}
		defer gloo.Close()
		if torch, err = peers.StartPeer("torch_restart.py", "OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"); err != nil {
			return err
		}
		defer torch.Close()
		fmt.Printf("peers: %s; %s\n", gloo.Hello, torch.Hello)
	} else {
		fmt.Println("no peers: /usr/bin/python3 cannot import torch (Debian: python3-torch)")
	}
	fmt.Printf("%s, kernel path %v, %d cores; GPT %s --context %d; global batch %d, micro-batch 1; %d workers, %d stages, %d mirrors, seed %d\n",
		runtime.Version(), kernel.Active(), runtime.NumCPU(), b.model, b.context, b.batch, b.workers, b.stages, b.mirrors, *seed)
	if err := b.undisturbed(); err != nil {
		return err
	}
	waits, err := b.waits()
	if err != nil {
		return err
	}
	if len(waits) > 0 { // with more workers than micro-batches, some run none
		fmt.Printf("undisturbed, %d moments: until the last worker runs a pass or has none left, %s\n", len(waits), lab.Spread95(waits))
	}
	fmt.Printf("\n%d times %s, %d in a run of %d steps; ms\n", b.kills, b.signal, b.perRun, b.steps)
	fmt.Println("  run    at ms worker step  detect  query   plan  agree   edit resume   total   stall  injector: end of process  of recovery  recomputed (of)  links  died at")
	var theirs, restarted []float64
	restart := report.Row{
		Comparison: "survive", Case: fmt.Sprintf("SIGKILL of one of %d workers (torchrun: of %d)", b.workers, *torchWorkers), Workers: b.workers, Threads: 1,
		Ours: "total_ms", Theirs: "torchrun until the first step", Unit: "ms", Kind: report.Time, Goal: 300,
	}
	rebuild := report.Row{
		Comparison: "survive", Case: fmt.Sprintf("the group of %d ranks (Gloo: of %d)", b.workers, *ranks), Workers: b.workers, Threads: 1,
		Ours: "query, plan, agree and edit", Theirs: "Gloo group rebuilt", Unit: "ms", Kind: report.Time,
	}
	stalls := report.Row{
		Comparison: "survive", Case: fmt.Sprintf("SIGKILL of one of %d workers, %d stages: sums over the kills of a turn", b.workers, b.stages), Workers: b.workers, Threads: 1,
		Ours: "stalls, signed", Theirs: "bounds", Unit: "ms", Kind: report.Cost, Goal: 1.3,
	}
	back := b.newReturns()
	for turn := range *turns {
		before, bounds := len(b.total), len(b.bound)
		if err := b.turn((b.kills*(turn+1) + *turns - 1) / *turns); err != nil {
			return err
		}
		if sum := lab.Sum(b.bound[bounds:]); sum > 0 {
			stalls.Add(lab.Sum(b.signed[bounds:]), sum)
		}
		if !*freeze && *peered {
			if err := back.turn(turn, *returns, torch); err != nil {
				return err
			}
		}
		if gloo == nil {
			continue
		}
		x, err := gloo.Ask("%d %d", *ranks, *rebuilds)
		if err != nil {
			return err
		}
		fmt.Printf("  turn %d  Gloo group of %d ranks rebuilt: %s\n", turn, *ranks, lab.List(x))
		theirs = append(theirs, x...)
		if len(b.total) > before {
			rebuild.Add(lab.Median(b.group[before:]), lab.Median(x))
		}
		if x, err = torch.Ask("%d %d %d", *torchWorkers, *restarts, laterSteps); err != nil {
			return err
		}
		x = x[:*restarts]
		fmt.Printf("  turn %d  torchrun, SIGKILL of one of %d workers until the first step: %s\n", turn, *torchWorkers, lab.List(x))
		restarted = append(restarted, x...)
		if len(b.total) > before {
			restart.Add(lab.Median(b.total[before:]), lab.Median(x))
		}
	}
	if !*freeze {
		rec.Add(restart, rebuild, stalls)
		rec.Add(back.rows()...)
	}
	disturbed := fmt.Sprintf("%s of one of %d workers, %d stages", b.signal, b.workers, b.stages)
	for _, figure := range []struct {
		of, name string
		ms       []float64
	}{
		{disturbed, "total_ms", b.total}, {disturbed, "stall_ms", b.stall}, {disturbed, "until the injector saw the end of recovery", b.seen},
		{fmt.Sprintf("%d workers, %d stages, undisturbed", b.workers, b.stages), "until the last worker runs a pass or has none left", waits},
	} {
		row := report.Row{Comparison: "survive", Case: figure.of, Workers: b.workers, Threads: 1, Ours: figure.name, Unit: "ms"}
		for _, x := range figure.ms {
			row.Add(x, 0)
		}
		rec.Add(row)
	}
	if err := b.report(theirs, restarted); err != nil {
		return err
	}
	back.report()
	return nil
}

type surviveBench struct {
	model                                          string // flags of the GPT
	context, batch                                 int
	lab                                            *lab.Lab
	kills, perRun, workers, stages, mirrors, steps int
	tell                                           bool
	fault, ended, signal                           string // what is done to workers, what the cause of a recovery says of them then, and the name of the signal
	r                                              *rand.Rand
	want                                           lab.Outcome
	killed                                         int // kills so far
	runs                                           int
	idle                                           int // kills that came after the end

	total, group, stall  []float64
	signed, bound        []float64 // of each known stall: by how much the struck step is longer, also below 0; and what it has to be longer by
	seen, late, gone     []float64 // by the injector: of the recovery, how much more than total, and until the process had ended
	spanBegan, spanEnded []float64 // the root span less the injector's clock: at the death, and at the end
	spanEvent            []float64 // how much longer than total_ms it is

	again, begun int
	faults       []string
}

func (b *surviveBench) trial(steps int) lab.Trial {
	return lab.Trial{
		Flags: strings.Fields(fmt.Sprintf("--workers %d --stages %d --mirrors %d --threads 1", b.workers, b.stages, b.mirrors)),
		Program: strings.Fields(fmt.Sprintf("%s --context %d --global-batch %d --micro-batch 1 --steps %d --eval-every %d",
			b.model, b.context, b.batch, steps, max(1, b.steps/2))),
		Limit: 10 * time.Minute,
	}
}

// undisturbed makes the run that all others are compared with.
func (b *surviveBench) undisturbed() error {
	o, err := b.lab.Run(b.trial(b.steps))
	if err != nil {
		return err
	}
	if wrong := o.Differs(&o); wrong != "" {
		return fmt.Errorf("the undisturbed run: %s\n%s", wrong, o.Output)
	}
	b.want = o
	held := int64(0)
	for _, w := range o.Sum.Workers {
		held += w.ParamBytes
	}
	fmt.Printf("undisturbed: %.2f s, %.0f tokens/s, a step %.0f ms; workers own %.1f MB of parameters, mirrors included; params_sha256 %s\n",
		o.Sum.Seconds, o.Sum.TokensPerSecond, lab.Median(o.StepMS), float64(held)/1e6, o.Sum.ParamsSHA256)
	return nil
}

// turn makes runs until so many workers were killed.
func (b *surviveBench) turn(upTo int) error {
	for b.killed < upTo {
		if b.runs++; b.runs > 20*b.kills {
			return fmt.Errorf("%d runs, and only %d workers were killed before their end", b.runs, b.killed)
		}
		n := min(b.perRun, upTo-b.killed)
		// Uniform in the run, and one after the other.
		at := make([]int64, n)
		for i := range at {
			at[i] = b.r.Int64N(int64(1e6 * b.want.Sum.Seconds))
		}
		slices.Sort(at)
		var spec []string
		for i, w := range b.r.Perm(b.workers)[:n] {
			spec = append(spec, fmt.Sprintf("%s:%d@%d", b.fault, w, at[i]))
		}
		t := b.trial(b.steps)
		t.Faults, t.Protected, t.Tell = strings.Join(spec, ","), true, b.tell
		o, err := b.lab.Run(t)
		if err != nil {
			return err
		}
		wrong := o.Differs(&b.want)
		if wrong == "" {
			wrong, err = b.count(&o)
		}
		if err != nil {
			return err
		}
		if wrong != "" {
			b.faults = append(b.faults, fmt.Sprintf("run %d, %s: %s", b.runs, t.Faults, wrong))
			fmt.Printf("  run %d FAILED, %s: %s\n%s\n", b.runs, t.Faults, wrong, o.Output)
		}
		if err := os.RemoveAll(o.Dir); err != nil {
			return err
		}
	}
	return nil
}

// count takes in what a run says of its kills, and says what it should not say.
func (b *surviveBench) count(o *lab.Outcome) (wrong string, err error) {
	var began time.Time
	for _, e := range o.Events {
		if e.Kind == "start" {
			began = e.Time.Time
		}
	}
	for _, h := range o.Injected {
		var worker int
		if _, err := fmt.Sscanf(h.Fault, b.fault+":%d@", &worker); err != nil {
			return "", err
		}
		at := time.Unix(0, h.WallNS)
		var s *lab.Seen
		for i := range o.Seen {
			if o.Seen[i].SeenNS > h.AtNS && strings.Contains(o.Seen[i].Recovered.Cause, fmt.Sprintf("worker %d %s", worker, b.ended)) {
				s = &o.Seen[i]
				break
			}
		}
		if h.Error != "" || s == nil {
			b.idle++ // it was no longer needed
			continue
		}
		b.killed++
		r := s.Recovered.Recovery
		share, err := b.share(o, worker, s.Recovered.Plan)
		if err != nil {
			return "", err
		}
		seen, gone := float64(s.SeenNS-h.AtNS)/1e6, float64(o.Gone[worker]-h.AtNS)/1e6
		if b.fault != "kill" {
			gone = math.NaN() // it stays
		}
		stall := math.NaN() // unknown; the step was not over yet when the event was written
		for _, again := range o.Sum.Recoveries {
			if again.Step == r.Step && again.TotalMS == r.TotalMS && again.StallMS != nil {
				stall = *again.StallMS
				b.stall = append(b.stall, stall)
				before := o.StepMS[max(0, r.Step-11) : r.Step-1]
				b.signed = append(b.signed, o.StepMS[r.Step-1]-lab.Median(before))
				b.bound = append(b.bound, b.lost(r.RecomputedMicrobatches, lab.Median(before)))
			}
		}
		fmt.Printf("%5d %8.0f %6d %4d  %6.2f %6.2f %6.2f %6.2f %6.2f %6.2f  %6.2f  %6.1f  %25.2f  %11.2f  %11d (%2d)  %5d  %s\n", b.runs, at.Sub(began).Seconds()*1e3, worker, r.Step,
			r.DetectMS, r.QueryMS, r.PlanMS, r.AgreeMS, r.EditMS, r.ResumeMS, r.TotalMS, stall, gone, seen, r.RecomputedMicrobatches, share, r.LinksOpened, r.DiedAt)
		b.total = append(b.total, r.TotalMS)
		b.group = append(b.group, r.QueryMS+r.PlanMS+r.AgreeMS+r.EditMS)
		mine := seen // from where total_ms begins
		if r.DiedAt == "reap" {
			mine -= gone
		}
		b.seen, b.late = append(b.seen, seen), append(b.late, mine-r.TotalMS)
		b.gone = append(b.gone, gone)
		b.span(o, worker, h, s, o.Gone[worker])
		b.again, b.begun = b.again+r.RecomputedMicrobatches, b.begun+share
		switch {
		case r.LinksOpened != 0 && r.Step > 1: // in the first step those of the first plan may still be missing
			wrong = fmt.Sprintf("%d links were opened", r.LinksOpened)
		case r.RecomputedMicrobatches > share:
			wrong = fmt.Sprintf("%d (stage, micro-batch) pairs ran again, and worker %d had %d", r.RecomputedMicrobatches, worker, share)
		}
	}
	if killed := len(o.Injected); o.Sum.WorkersLost > killed {
		wrong = fmt.Sprintf("%d workers lost, and %d were killed", o.Sum.WorkersLost, killed)
	}
	// What the dead ran in the step they died in is in no count, and all else is counted once.
	var forwards, backwards int64
	for _, w := range o.Sum.Workers {
		forwards, backwards = forwards+w.Forwards, backwards+w.Backwards
	}
	if all := int64(b.steps * b.batch * b.stages); o.Sum.Rollbacks == 0 && (forwards > all || backwards > all) {
		wrong = fmt.Sprintf("%d forwards and %d backwards of %d: what was finished on a survivor ran again", forwards, backwards, all)
	}
	return wrong, nil
}

// lost is how long the survivors have to compute at least what is computed again: the processor time of so many (stage, micro-batch) pairs, whole ones,
// by the processors that survivors have. ms is the time of a step, in which all processors that workers have are busy.
func (b *surviveBench) lost(pairs int, ms float64) float64 {
	busy := ms * float64(min(runtime.NumCPU(), b.workers))
	return float64(pairs) * busy / float64(b.stages*b.batch) / float64(min(runtime.NumCPU(), b.workers-1))
}

// span compares the root span of a recovery with the event and with the injector's clock.
func (b *surviveBench) span(o *lab.Outcome, worker int, h lab.Injected, s *lab.Seen, gone int64) {
	for i := range o.Roots {
		root := &o.Roots[i]
		if !strings.Contains(root.Text(trace.KeyCause), fmt.Sprintf("worker %d %s", worker, b.ended)) || root.End.UnixNano() < h.WallNS {
			continue
		}
		died := h.WallNS
		if s.Recovered.Recovery.DiedAt == "reap" {
			died += gone - h.AtNS
		}
		b.spanBegan = append(b.spanBegan, float64(root.Start.UnixNano()-died)/1e6)
		b.spanEnded = append(b.spanEnded, float64(root.End.UnixNano()-h.WallNS-(s.SeenNS-h.AtNS))/1e6)
		b.spanEvent = append(b.spanEvent, float64(root.End.Sub(root.Start))/1e6-s.Recovered.Recovery.TotalMS)
		return
	}
}

// within counts the figures that differ by at most 1 ms from zero.
func within(x []float64) (n int) {
	for _, d := range x {
		if math.Abs(d) <= 1 {
			n++
		}
	}
	return n
}

// share returns how many (stage, micro-batch) pairs a step gave a worker before the
// plan that did without it: it cannot have begun more.
func (b *surviveBench) share(o *lab.Outcome, worker int, without uint64) (n int, err error) {
	var before *rundir.Plan
	var p plan.Plan
	for i := range o.Plans {
		line := &o.Plans[i]
		q, err := plan.Parse(line.Plan)
		if err != nil {
			return 0, err
		}
		if uint64(q.Version.N) < without {
			before, p = line, q
		}
	}
	if before == nil {
		return 0, fmt.Errorf("plans.jsonl has no plan before %d", without)
	}
	for _, route := range p.Route {
		for _, w := range route {
			if int(w) == worker {
				n++
			}
		}
	}
	return n, nil
}

func (b *surviveBench) report(gloo, torch []float64) error {
	fmt.Printf("\n%d recoveries in %d runs; %d faults more came when the worker was no longer needed\n", len(b.total), b.runs, b.idle)
	if len(b.total) == 0 {
		return nil
	}
	fmt.Printf("  total_ms: %s\n", lab.Spread95(b.total))
	fmt.Printf("  query + plan + agree + edit: %s\n", lab.Spread95(b.group))
	fmt.Printf("  stall_ms: %s\n", lab.Spread95(b.stall))
	if len(b.bound) > 0 {
		fmt.Printf("    signed: %s; their bound, the processor time of what is computed again by the processors that survivors have: %s\n", lab.Spread95(b.signed), lab.Spread95(b.bound))
		fmt.Printf("    sum of %d signed stalls %.0f ms, of their bounds %.0f ms: %.2f\n", len(b.bound), lab.Sum(b.signed), lab.Sum(b.bound), lab.Sum(b.signed)/lab.Sum(b.bound))
	}
	fmt.Printf("  by the injector, from before its signal until it saw the end: %s\n", lab.Spread95(b.seen))
	if b.fault == "kill" {
		fmt.Printf("  by the injector, from before its signal until the process had ended: %s\n", lab.Spread95(b.gone))
	}
	fmt.Printf("  the injector's clock from where total_ms begins, less total_ms: %s; %d of %d within 1 ms\n", lab.Spread95(b.late), within(b.late), len(b.late))
	if len(b.spanBegan) > 0 {
		fmt.Printf("  the root spans of %d recoveries: their begin less the injector's kill (its end of process where died at says reap): %s; %d within 1 ms\n",
			len(b.spanBegan), lab.Spread95(b.spanBegan), within(b.spanBegan))
		fmt.Printf("    their end less the moment at which the injector saw events.jsonl say so: %s; %d within 1 ms\n", lab.Spread95(b.spanEnded), within(b.spanEnded))
		fmt.Printf("    their length less total_ms: %s; %d within 1 ms\n", lab.Spread95(b.spanEvent), within(b.spanEvent))
	}
	fmt.Printf("  recomputed (stage, micro-batch) pairs: %d of %d that the dead had in the steps they died in\n", b.again, b.begun)
	if len(gloo) > 0 {
		fmt.Printf("  a Gloo group rebuilt: %s; by the group's part of a recovery, medians: %.1f\n", lab.Spread95(gloo), lab.Median(gloo)/lab.Median(b.group))
		fmt.Printf("  torchrun: %s; by total_ms, medians: %.0f\n", lab.Spread95(torch), lab.Median(torch)/lab.Median(b.total))
	}
	if len(b.faults) > 0 {
		return fmt.Errorf("survive: %d runs failed:\n%s", len(b.faults), strings.Join(b.faults, "\n"))
	}
	fmt.Printf("  params_sha256, state_sha256 and all metrics of every run are those of the undisturbed one; no link was opened after the first step\n")
	return nil
}

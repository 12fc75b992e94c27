package recovery

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// laterSteps is how many steps after a kill its cost is looked at.
const laterSteps = 5

// returnSteps is the length of a run in which a worker is replaced.
const returnSteps = 16

// returns measures what a kill costs until the run is as before: with --respawn, until a worker that replaces the dead one has joined, and
// by how much later some step after it ends. torchrun has as many workers.
type returns struct {
	b    *surviveBench
	want lab.Outcome

	back, later               []float64 // ours
	restarted, postponed      []float64 // torchrun's
	strength, late, lateTorch report.Row
}

func (b *surviveBench) newReturns() *returns {
	r := &returns{b: b}
	row := report.Row{Comparison: "survive", Workers: b.workers, Threads: 1, Unit: "ms"}
	r.strength = row
	r.strength.Case = fmt.Sprintf("SIGKILL of one of %d workers on both sides, until as many train again", b.workers)
	r.strength.Ours, r.strength.Theirs, r.strength.Kind = "--respawn", "torchrun until the first step", report.Time
	r.late = row
	r.late.Case = fmt.Sprintf("by how much later the %dth step after a SIGKILL ends, %d workers", laterSteps, b.workers)
	r.late.Ours = "--respawn"
	r.lateTorch = r.late
	r.lateTorch.Ours = "torchrun"
	return r
}

// turn makes n kills on each side.
func (r *returns) turn(turn, n int, torch *peers.Peer) error {
	b := r.b
	for range n {
		t := b.trial(returnSteps)
		t.Flags = append(t.Flags, "--respawn")
		t.Program = append(t.Program, "--eval-every", "0") // the last of a flag counts
		if r.want.Dir == "" {
			o, err := b.lab.Run(t)
			if err != nil {
				return err
			}
			if wrong := o.Differs(&o); wrong != "" {
				return fmt.Errorf("the undisturbed run with --respawn: %s\n%s", wrong, o.Output)
			}
			r.want = o
		}
		// Late enough for some steps to compare with, and early enough for the replacement to join.
		at := int64(1e6 * r.want.Sum.Seconds * (0.3 + 0.2*b.r.Float64()))
		worker := b.r.IntN(b.workers)
		t.Faults, t.Protected, t.Tell = fmt.Sprintf("kill:%d@%d", worker, at), true, true
		o, err := b.lab.Run(t)
		if err != nil {
			return err
		}
		if wrong := o.Differs(&r.want); wrong != "" {
			return fmt.Errorf("a run with --respawn and %s: %s\n%s", t.Faults, wrong, o.Output)
		}
		if err := r.count(turn, worker, &o); err != nil {
			return err
		}
		if err := os.RemoveAll(o.Dir); err != nil {
			return err
		}
	}
	if torch == nil || n == 0 {
		return nil
	}
	x, err := torch.Ask("%d %d %d", b.workers, n, laterSteps)
	if err != nil {
		return err
	}
	fmt.Printf("  turn %d  torchrun, SIGKILL of one of %d workers until the first step: %s; the %dth later one ends later by: %s\n", turn, b.workers, lab.List(x[:n]), laterSteps, lab.List(x[n:]))
	r.restarted, r.postponed = append(r.restarted, x[:n]...), append(r.postponed, x[n:]...)
	r.strength.Add(lab.Median(r.back[len(r.back)-n:]), lab.Median(x[:n]))
	for _, ms := range x[n:] {
		r.lateTorch.Add(ms, 0)
	}
	return nil
}

// count takes in a run.
func (r *returns) count(turn, worker int, o *lab.Outcome) error {
	if len(o.Injected) != 1 || o.Injected[0].Error != "" {
		return fmt.Errorf("a run with --respawn: the injector did %+v", o.Injected)
	}
	at := time.Unix(0, o.Injected[0].WallNS)
	joined := slices.IndexFunc(o.Events, func(e rundir.Event) bool { return e.Kind == "joined" && e.Worker == worker })
	steps, err := lab.Lines[rundir.Metrics](o.Dir, "metrics.jsonl")
	if err != nil {
		return err
	}
	last := -1 // committed before the kill
	var took []float64
	for i := range steps {
		if steps[i].Time.After(at) {
			break
		}
		if last = i; i > 0 {
			took = append(took, ms(steps[i].Time.Sub(steps[i-1].Time.Time)))
		}
	}
	if joined < 0 || len(took) == 0 || last+laterSteps >= len(steps) {
		return fmt.Errorf("a run with --respawn: worker %d was killed after step %d of %d and its replacement has not joined, or there are too few steps\n%s",
			worker, last+1, len(steps), o.Output)
	}
	back := ms(o.Events[joined].Time.Sub(at))
	later := ms(steps[last+laterSteps].Time.Sub(steps[last].Time.Time)) - laterSteps*lab.Median(took)
	fmt.Printf("  turn %d  --respawn, SIGKILL of worker %d in step %d: its replacement has joined after %.0f ms; the %dth later step ends later by %.0f ms (a step: %.0f)\n",
		turn, worker, last+2, back, laterSteps, later, lab.Median(took))
	r.back, r.later = append(r.back, back), append(r.later, later)
	r.late.Add(later, 0)
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (r *returns) rows() []report.Row { return []report.Row{r.strength, r.late, r.lateTorch} }

func (r *returns) report() {
	if len(r.back) == 0 {
		return
	}
	fmt.Printf("  until as many workers train again: %s\n", lab.Spread95(r.back))
	fmt.Printf("  by how much later the %dth later step ends: %s\n", laterSteps, lab.Spread95(r.later))
	if len(r.restarted) > 0 {
		fmt.Printf("  torchrun of %d: %s, medians: %.1f times; the %dth later step: %s\n", r.b.workers, lab.Spread95(r.restarted),
			lab.Median(r.restarted)/lab.Median(r.back), laterSteps, lab.Spread95(r.postponed))
	}
	fmt.Println("  torchft is not compared: " + noTorchft)
}

// noTorchft says why a peer is missing.
const noTorchft = "it needs PyTorch 2.7 or newer (its pyproject.toml, 49c5fea), which Debian 12 does not have"

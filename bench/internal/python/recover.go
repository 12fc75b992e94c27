package python

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// killEvery is the number of steps between two kills: time for the worker that replaces the one before.
const killEvery = 12

// recoveries compares the time to recovery of workers with Python processes, of workers in Go, and of the Python process alone.
func (b *bridge) recoveries() error {
	steps := (b.kills + 1) * killEvery
	var chaos []string
	for i := range b.kills {
		chaos = append(chaos, fmt.Sprintf("kill:%d@%d/backward", 1+i%2, (i+1)*killEvery))
	}
	flags := []string{"--workers", "3", "--stages", "1", "--respawn", "--chaos", strings.Join(chaos, ",")}
	fmt.Printf("\n%d kills of each kind, 3 workers; ms\n", b.kills)
	o, err := b.lab.Run(lab.Trial{
		Flags: append(flags, "--threads", "1"), Limit: time.Hour,
		Program: append([]string{"--steps", fmt.Sprint(steps), "--eval-every", "0"}, b.same...),
	})
	if err == nil && o.Status != 0 {
		err = fmt.Errorf("exit status %d\n%s", o.Status, o.Output)
	}
	if err != nil {
		return fmt.Errorf("workers in Go: %w", err)
	}
	ours := tell("a worker in Go", o.Sum)

	cmd, dir, err := b.start(steps, flags)
	if err == nil {
		err = finish(cmd)
	}
	var sum rundir.Summary
	if err == nil {
		sum, err = summary(dir)
	}
	if err != nil {
		return fmt.Errorf("workers with Python: %w", err)
	}
	theirs := tell("a worker with Python", sum)
	if len(ours) > 0 && len(theirs) > 0 {
		row := report.Row{
			Comparison: "bridge", Case: fmt.Sprintf("time to recovery, median of %d kills", b.kills), Workers: 3, Threads: 1,
			Ours: "workers with Python", Theirs: "workers in Go", Unit: "ms", Kind: report.Cost, Goal: 1.1,
		}
		row.Add(lab.Median(theirs), lab.Median(ours))
		b.rec.Add(row)
		fmt.Printf("  time to recovery with Python by that in Go: %.3f of the medians (0.9 to 1.1 is wanted)\n", lab.Median(theirs)/lab.Median(ours))
	}
	return b.children(steps)
}

// tell prints the recoveries of a run, and returns how long they took.
func tell(what string, sum rundir.Summary) (total []float64) {
	var stalls, detect, query, plan, edit, resume []float64
	for _, r := range sum.Recoveries {
		total, detect, query = append(total, r.TotalMS), append(detect, r.DetectMS), append(query, r.QueryMS)
		plan, edit, resume = append(plan, r.PlanMS+r.AgreeMS), append(edit, r.EditMS), append(resume, r.ResumeMS)
		if r.StallMS != nil {
			stalls = append(stalls, *r.StallMS)
		}
	}
	if len(total) == 0 || len(stalls) == 0 {
		fmt.Printf("  %-22s no recovery was recorded\n", what)
		return nil
	}
	fmt.Printf("  %-22s %d recoveries: median %.1f, max %.1f; step longer by: median %.1f, max %.1f\n", what, len(total),
		lab.Median(total), slices.Max(total), lab.Median(stalls), slices.Max(stalls))
	fmt.Printf("  %-22s medians of the phases: detect %.1f, query %.1f, plan %.1f, edit %.1f, resume %.1f\n", "",
		lab.Median(detect), lab.Median(query), lab.Median(plan), lab.Median(edit), lab.Median(resume))
	return total
}

func summary(dir string) (sum rundir.Summary, err error) {
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err == nil {
		err = json.Unmarshal(text, &sum)
	}
	return sum, err
}

// children kills the Python processes that compute. No worker is lost, so what it costs is how much longer the step is.
func (b *bridge) children(steps int) error {
	cmd, dir, err := b.start(steps, []string{"--workers", "3", "--stages", "1"})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- finish(cmd) }()
	struck, err := strikeAll(dir, ended)
	if err != nil {
		return fmt.Errorf("Python processes: %w", err)
	}
	all, err := lab.Lines[rundir.Metrics](dir, "metrics.jsonl")
	if err != nil {
		return err
	}
	sum, err := summary(dir)
	if err != nil {
		return err
	}
	var longer, plain []float64
	for i, m := range all {
		switch {
		case slices.Contains(struck, m.Step):
			before := make([]float64, 0, 10)
			for _, p := range all[max(0, i-10):i] {
				before = append(before, p.MS)
			}
			longer = append(longer, m.MS-lab.Median(before))
		default:
			plain = append(plain, m.MS)
		}
	}
	if len(longer) == 0 {
		return fmt.Errorf("Python processes: none was killed in %d steps", len(all))
	}
	fmt.Printf("  %-22s %d kills, %d workers lost; step longer by: median %.1f, max %.1f, of %.1f\n", "the Python process", len(longer), sum.WorkersLost,
		lab.Median(longer), slices.Max(longer), lab.Median(plain))
	return nil
}

// strikeAll kills a Python process of another worker at every killEvery steps, until the run has ended, and returns in which steps.
func strikeAll(dir string, ended <-chan error) (struck []int, err error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for last := 0; ; {
		select {
		case err := <-ended:
			return struck, err
		case <-tick.C:
		}
		all, _ := lab.Lines[rundir.Metrics](dir, "metrics.jsonl")
		if len(all) == 0 || all[len(all)-1].Step < last+killEvery {
			continue
		}
		last = all[len(all)-1].Step
		var now rundir.Workers
		text, err := os.ReadFile(filepath.Join(dir, "workers.json"))
		if err != nil || json.Unmarshal(text, &now) != nil || len(now.Workers) == 0 {
			continue // the run is about to end
		}
		time.Sleep(time.Duration(all[len(all)-1].MS / 3 * float64(time.Millisecond))) // into the step
		if kill(now.Workers[len(struck)%len(now.Workers)].PID) {
			struck = append(struck, last+1)
		}
	}
}

// kill kills the process that computes for a worker: the child of its child.
func kill(worker int) bool {
	for _, first := range platform.Children(worker) {
		for _, pid := range platform.Children(first) {
			return syscall.Kill(pid, syscall.SIGKILL) == nil
		}
	}
	return false
}

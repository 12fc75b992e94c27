// Package recovery measures what faults cost: recoveries, random schedules, stragglers, and versions against each other.
package recovery

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Failslow slows one worker of emulated devices, restores it, and counts the steps until
// each is found; and it lets the real GPT run undisturbed on loaded cores, where nothing may
// be found.
func Failslow(args []string) error {
	f := flag.NewFlagSet("failslow", flag.ExitOnError)
	peace := f.Duration("peace", 10*time.Minute, "how long the undisturbed run lasts")
	trials := f.Int("trials", 3, "workers that are slowed, one after the other")
	factor := f.Float64("factor", 0.5, "the speed that is left of them")
	_ = f.Parse(args)

	dir, err := os.MkdirTemp("", "soliton-failslow")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if out, err := exec.Command("go", "build", "-o", dir+"/", "./launcher", "./examples/gpt", "./examples/emulated").CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	launcher := filepath.Join(dir, "launcher")

	const quiet, hurt = 15, 25 // steps before, and with a slow worker
	for i := range *trials {
		w := (3*i + 1) % 8
		run := filepath.Join(dir, "emulated"+strconv.Itoa(i))
		spec := fmt.Sprintf("slow:%d@%d:%v,slow:%d@%d:1", w, quiet, *factor, w, quiet+hurt)
		out, err := exec.Command(launcher, "run", "--plain", "--workers", "8", "--stages", "2", "--chaos", spec, "--run-dir", run,
			filepath.Join(dir, "emulated"), "--layers", "16", "--layer-ms", "2", "--global-batch", "32", "--steps", strconv.Itoa(quiet+2*hurt)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		events, err := verdicts(run)
		if err != nil {
			return err
		}
		fmt.Printf("emulated, 8 workers in 2 stages: %s\n", spec)
		for _, e := range events {
			fmt.Printf("  %s: %s\n", e.Kind, e.Reason)
		}
		lost, step, err := lostTime(run, quiet, hurt)
		if err != nil {
			return err
		}
		fmt.Printf("  %.2f s lost in %d steps of %.2f s\n", lost, hurt, step)
		if len(events) != 2 || events[0].Worker != w || events[1].Worker != w {
			fmt.Println("  WRONG: want one verdict that the worker is slow, and one that it is not")
		}
	}

	run := filepath.Join(dir, "peace")
	cmd := exec.Command(launcher, "run", "--plain", "--workers", "4", "--stages", "2", "--run-dir", run,
		filepath.Join(dir, "gpt"), "--steps", "1000000", "--width", "64", "--context", "64", "--eval-every", "0")
	if err := cmd.Start(); err != nil {
		return err
	}
	timer := time.AfterFunc(*peace, func() { _ = cmd.Process.Signal(os.Interrupt) })
	defer timer.Stop()
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		return err
	}
	var sum rundir.Summary
	text, err := os.ReadFile(filepath.Join(run, "summary.json"))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &sum); err != nil {
		return err
	}
	events, err := verdicts(run)
	if err != nil {
		return err
	}
	fmt.Printf("GPT, 4 workers in 2 stages, undisturbed on all cores for %.0f s, %d steps: %d verdicts, %d workers lost, %d recoveries\n",
		sum.Seconds, sum.Steps, len(events), sum.WorkersLost, len(sum.Recoveries))
	for _, e := range events {
		fmt.Printf("  %s: %s\n", e.Kind, e.Reason)
	}
	return nil
}

// lostTime is by how much longer n steps of a run took than the median of those before, in seconds, and that median.
func lostTime(run string, first, n int) (lost, step float64, err error) {
	text, err := os.ReadFile(filepath.Join(run, "metrics.jsonl"))
	if err != nil {
		return 0, 0, err
	}
	var before []float64
	for line := range bytes.Lines(text) {
		var m rundir.Metrics
		if err := json.Unmarshal(line, &m); err != nil {
			return 0, 0, err
		}
		switch {
		case m.Step < first && m.Step > 2:
			before = append(before, m.MS/1000)
		case m.Step >= first && m.Step < first+n:
			if step == 0 {
				step = lab.Median(before)
			}
			lost += m.MS/1000 - step
		}
	}
	return lost, step, nil
}

// verdicts are the events of a run about slow workers and links.
func verdicts(run string) (all []rundir.Event, err error) {
	f, err := os.Open(filepath.Join(run, "events.jsonl"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e rundir.Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, err
		}
		if e.Kind == "slow" || strings.HasPrefix(e.Kind, "recovered speed") {
			all = append(all, e)
		}
	}
	return all, lines.Err()
}

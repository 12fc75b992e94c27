package recovery

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
)

// Load trains where processors are short: with spinning processes beside it, and with many more workers than processors.
// No worker has a fault, so none may be lost.
func Load(args []string) error {
	f := flag.NewFlagSet("load", flag.ExitOnError)
	duration := f.Duration("duration", 10*time.Minute, "time of each run with spinning processes; 0 leaves them out")
	spinning := f.Int("spin", 60, "spinning processes")
	workers := f.Int("workers", 8, "workers beside them")
	many := f.Int("many", 64, "workers of each run without them; 0 leaves these out")
	steps := f.Int("steps", 200, "steps of each run without them")
	detect := f.Duration("detect", time.Second, "failure-detection timeout")
	limit := f.Duration("limit", 20*time.Minute, "how long a run may take beyond its time before it counts as hung")
	_ = f.Parse(args)

	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	failed := 0
	run := func(name string, t lab.Trial) error {
		t.Flags = append(t.Flags, "--detect", detect.String(), "--threads", "1")
		o, err := l.Run(t)
		if err != nil {
			return err
		}
		longest := 0.
		for _, r := range o.Sum.Recoveries {
			longest = max(longest, r.TotalMS)
		}
		fmt.Printf("%s: %d steps in %.1f s, %d workers lost, %d recoveries, %d rollbacks, longest recovery %.0f ms\n", name,
			o.Sum.Steps, o.Sum.Seconds, o.Sum.WorkersLost, len(o.Sum.Recoveries), o.Sum.Rollbacks, longest)
		for _, e := range o.Events {
			if e.Kind == "lost" || e.Kind == "evict" || e.Kind == "note" {
				fmt.Printf("  %s %s: %s\n", e.Time.Format("15:04:05.000"), e.Kind, e.Reason)
			}
		}
		if o.Hung || o.Sum.WorkersLost > 0 || o.Sum.Rollbacks > 0 || o.Sum.Steps == 0 {
			failed++
			lines := strings.Split(strings.TrimSpace(o.Output), "\n")
			fmt.Printf("  FAIL, kept in %s; launcher: %s\n", o.Dir, strings.Join(lines[max(0, len(lines)-3):], "\n    "))
		}
		return nil
	}
	if *duration > 0 {
		end := spin(*spinning)
		err := run(fmt.Sprintf("%d workers and %d spinning processes", *workers, *spinning), lab.Trial{
			Flags:   []string{"--workers", fmt.Sprint(*workers)},
			Program: []string{"--layers", "8", "--width", "384", "--global-batch", "8", "--micro-batch", "1", "--context", "32", "--steps", "1000000"}, // 14 million parameters
			Stop:    *duration, Limit: *duration + *limit,
		})
		if end(); err != nil {
			return err
		}
	}
	for _, stages := range []int{1, 4} {
		if *many == 0 {
			break
		}
		if err := run(fmt.Sprintf("%d workers in stages: %d", *many, stages), lab.Trial{
			Flags:   []string{"--workers", fmt.Sprint(*many), "--stages", fmt.Sprint(stages)},
			Program: []string{"--global-batch", fmt.Sprint(*many), "--micro-batch", "1", "--layers", "4", "--width", "64", "--context", "32", "--steps", fmt.Sprint(*steps)},
			Limit:   *limit,
		}); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("load: %d runs lost workers that had no fault", failed)
	}
	return os.RemoveAll(l.Dir)
}

// spin starts processes that compute until they are ended, or this process is.
func spin(n int) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range n {
		cmd := exec.CommandContext(ctx, "sh", "-c", `while kill -0 "$PPID" 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done`)
		all.Go(func() { _ = cmd.Run() }) // it is killed
	}
	return func() { cancel(); all.Wait() }
}

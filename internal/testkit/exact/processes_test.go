package exact

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/trainer"
)

// launch runs a program with the launcher and returns its summary and the lines
// of metrics.jsonl without what may differ: times, workers and plan.
func launch(t *testing.T, launcher string, args ...string) (trainer.Summary, []string) {
	t.Helper()
	return launchIn(t, filepath.Join(t.TempDir(), "run"), launcher, args...)
}

// launchIn is launch with a run directory to look into.
func launchIn(t *testing.T, dir, launcher string, args ...string) (trainer.Summary, []string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), launcher, append([]string{"run", "--plain", "--threads", "1", "--run-dir", dir}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("launcher %q: %v\n%s", cmd.Args, err, out)
	}
	return results(t, dir)
}

// results reads the summary of a run directory and the lines of metrics.jsonl, as launch
// returns them.
func results(t *testing.T, dir string) (trainer.Summary, []string) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	var s trainer.Summary
	if err == nil {
		err = json.Unmarshal(raw, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	raw, err = os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for sc := bufio.NewScanner(bytes.NewReader(raw)); sc.Scan(); {
		var m map[string]json.RawMessage
		if err := json.Unmarshal(sc.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		for _, k := range []string{"ms", "time", "workers", "plan"} {
			delete(m, k)
		}
		line, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, string(line))
	}
	return s, lines
}

// However many processes and stages a job is spread over, whatever kernels
// each of them has, and whatever their links pass through, the bits are those of one process; and the workers of each
// stage together did all there was to do, and held no other stage's layers.
func TestProcessesSameBits(t *testing.T) {
	launcher, gpt := programs(t)
	flags := map[string][]string{
		"small": strings.Fields("--layers 2 --width 64 --heads 4 --context 32 --global-batch 16 --micro-batch 1 --steps 4 --eval-every 2 --data " + corpus),
		"odd":   strings.Fields("--layers 3 --width 96 --heads 3 --context 50 --global-batch 21 --micro-batch 3 --steps 2 --data " + corpus),
	}
	mixed := filepath.Join(t.TempDir(), "mixed")
	paths := kernel.Available()
	script := fmt.Sprintf("#!/bin/sh\ncase $SOLITON_WORKER in 0) k=%v;; 1) k=%v;; *) k=%v;; esac\nSOLITON_KERNEL=$k exec %s \"$@\"\n",
		paths[len(paths)-1], paths[0], paths[len(paths)/2], gpt)
	if err := os.WriteFile(mixed, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	undisturbed := make(map[string]trainer.Summary)
	for size, args := range flags {
		want, lines := launch(t, launcher, append([]string{"--workers", "1", gpt}, args...)...)
		undisturbed[size] = want
		for _, c := range []struct {
			workers, stages int
			zero            string
			program         string
			odd             bool // with odd sizes also where not all is asked for
		}{
			{2, 2, "2", gpt, false}, {4, 2, "2", gpt, false}, {4, 2, "1", gpt, true}, {3, 2, "2", gpt, true},
			{3, 1, "1", mixed, false}, {6, 3, "2", gpt, true}, {5, 2, "1", gpt, false}, {8, 4, "2", gpt, false},
		} {
			if size == "odd" && !c.odd && !require.All() {
				continue
			}
			t.Run(fmt.Sprintf("%s, %d workers, %d stages, ZeRO %s, %s", size, c.workers, c.stages, c.zero, filepath.Base(c.program)), func(t *testing.T) {
				if size == "odd" {
					t.Setenv("SOLITON_LINKS", "sockets")
				}
				s, got := launch(t, launcher, append([]string{"--workers", fmt.Sprint(c.workers), "--stages", fmt.Sprint(c.stages), "--zero", c.zero, c.program}, args...)...)
				if s.ParamsSHA256 != want.ParamsSHA256 || s.StateSHA256 != want.StateSHA256 {
					t.Errorf("params_sha256 %s, state_sha256 %s, want %s and %s", s.ParamsSHA256, s.StateSHA256, want.ParamsSHA256, want.StateSHA256)
				}
				if !slices.Equal(got, lines) {
					t.Errorf("metrics\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(lines, "\n"))
				}
				checkWork(t, s, want, c.workers, c.stages)
			})
		}
	}

	// Fast reduction is the same training but for roundings, and says so.
	args := append([]string{"--workers", "3", "--stages", "2", "--reduction", "fast", gpt}, flags["small"]...)
	s, _ := launch(t, launcher, args...)
	want := undisturbed["small"]
	if d := math.Abs(s.Loss - want.Loss); s.Reduction != "fast" || want.Reduction != "exact" || d > 1e-4*want.Loss {
		t.Errorf("reduction %s, loss %v; reduction %s, loss %v", s.Reduction, s.Loss, want.Reduction, want.Loss)
	}
	checkWork(t, s, want, 3, 2)
}

// checkWork holds what the workers did against what there was to do.
func checkWork(t *testing.T, s, one trainer.Summary, workers, stages int) {
	t.Helper()
	if len(s.Workers) != workers || s.WorkersStarted != workers {
		t.Fatalf("%d workers in the summary, %d started, want %d", len(s.Workers), s.WorkersStarted, workers)
	}
	passes := one.Workers[0].Forwards // micro-batches of the whole run
	forwards, backwards := make([]int64, stages), make([]int64, stages)
	held := make(map[int]int) // stage of each layer
	for _, w := range s.Workers {
		if len(w.Stages) != 1 {
			t.Fatalf("worker %d served stages %v", w.ID, w.Stages)
		}
		stage := w.Stages[0]
		forwards[stage] += w.Forwards
		backwards[stage] += w.Backwards
		for _, l := range w.Layers {
			if have, ok := held[l]; ok && have != stage {
				t.Errorf("layer %d was held in stages %d and %d", l, have, stage)
			}
			held[l] = stage
		}
	}
	for i := range stages {
		if forwards[i] != passes || backwards[i] != passes {
			t.Errorf("stage %d: %d forwards and %d backwards, want %d", i, forwards[i], backwards[i], passes)
		}
	}
	if len(held) != len(one.Workers[0].Layers) {
		t.Errorf("%d layers were held, want %d", len(held), len(one.Workers[0].Layers))
	}
}

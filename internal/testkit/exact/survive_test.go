package exact

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/trainer"
)

// struckRun is a run of processes that workers are killed in, from outside.
type struckRun struct {
	cmd    *exec.Cmd
	dir    string
	temp   string // its TMPDIR
	lines  *bufio.Scanner
	output bytes.Buffer
	pids   map[int]int
}

func startRun(t *testing.T, launcher string, args ...string) *struckRun {
	t.Helper()
	r := &struckRun{dir: filepath.Join(t.TempDir(), "run"), temp: t.TempDir(), pids: make(map[int]int)}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // one that hangs is ended here
	t.Cleanup(cancel)
	r.cmd = exec.CommandContext(ctx, launcher, append([]string{"run", "--plain", "--threads", "1", "--run-dir", r.dir}, args...)...)
	r.cmd.Env = append(os.Environ(), "TMPDIR="+r.temp)
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.Stderr = &r.output
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.lines = bufio.NewScanner(out)
	return r
}

// await reads what the launcher prints until a step is committed.
func (r *struckRun) await(t *testing.T, step int) {
	t.Helper()
	for r.lines.Scan() {
		fmt.Fprintln(&r.output, r.lines.Text())
		var n int
		if _, err := fmt.Sscanf(strings.Replace(r.lines.Text(), "/", " ", 1), "step %d", &n); err == nil && n >= step {
			return
		}
	}
	_ = r.cmd.Wait()
	t.Fatalf("no step %d:\n%s", step, &r.output)
}

// kill kills a worker.
func (r *struckRun) kill(t *testing.T, worker int) {
	t.Helper()
	if len(r.pids) == 0 {
		w, err := rundir.ReadWorkers(r.dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range w.Workers {
			r.pids[p.ID] = p.PID
		}
	}
	if err := syscall.Kill(r.pids[worker], syscall.SIGKILL); err != nil {
		t.Fatalf("worker %d: %v", worker, err)
	}
}

// events returns the lines of events.jsonl that are there.
func (r *struckRun) events(t *testing.T) (all []rundir.Event) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(r.dir, "events.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(raw) {
		var e rundir.Event
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // it is being written
		}
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

// end waits for the end of the run, and holds it against an undisturbed one.
func (r *struckRun) end(t *testing.T, want trainer.Summary, metrics []string, lost int) trainer.Summary {
	t.Helper()
	for r.lines.Scan() {
		fmt.Fprintln(&r.output, r.lines.Text())
	}
	if err := r.cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, &r.output)
	}
	s, got := results(t, r.dir)
	if s.ParamsSHA256 != want.ParamsSHA256 || s.StateSHA256 != want.StateSHA256 {
		t.Errorf("params_sha256 %s, state_sha256 %s, want %s and %s", s.ParamsSHA256, s.StateSHA256, want.ParamsSHA256, want.StateSHA256)
	}
	if !slices.Equal(got, metrics) {
		t.Errorf("metrics\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(metrics, "\n"))
	}
	if s.WorkersLost != lost || s.Rollbacks != 0 {
		t.Errorf("%d workers lost and %d rollbacks, want %d and none", s.WorkersLost, s.Rollbacks, lost)
	}
	for _, x := range s.Recoveries {
		if x.LinksOpened != 0 {
			t.Errorf("%d links were opened", x.LinksOpened)
		}
	}
	left, err := os.ReadDir(r.temp)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	for worker, pid := range r.pids {
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("worker %d is still there: %v", worker, err)
		}
	}
	if _, err := os.Stat(filepath.Join(r.dir, "workers.json")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("workers.json is still there: %v", err)
	}
	if t.Failed() {
		t.Log(&r.output)
	}
	return s
}

const struckFlags = "--layers 2 --width 64 --heads 4 --context 32 --global-batch 16 --micro-batch 1 --eval-every 4 --data " + corpus

// Every worker in turn is killed at a moment of a step, in one to three
// stages: the run ends as an undisturbed one does, and no worker opens a link for it. Where in
// a step a moment lies does not count, as all have to end well. Where all is asked for, each worker is killed at every moment.
func TestEveryWorkerKilled(t *testing.T) {
	launcher, gpt := programs(t)
	program := append([]string{gpt}, strings.Fields(struckFlags+" --steps 8")...)
	want, metrics := launch(t, launcher, append([]string{"--workers", "1"}, program...)...)
	for _, c := range []struct{ workers, stages, mirrors int }{{3, 1, 1}, {4, 2, 1}, {4, 3, 2}} {
		for worker := range c.workers {
			for quarter := range 4 {
				if quarter != (worker+c.stages)%4 && !require.All() {
					continue
				}
				t.Run(fmt.Sprintf("%d workers, %d stages, worker %d, after %d quarters", c.workers, c.stages, worker, quarter), func(t *testing.T) {
					r := startRun(t, launcher, append([]string{"--workers", fmt.Sprint(c.workers), "--stages", fmt.Sprint(c.stages), "--mirrors", fmt.Sprint(c.mirrors)}, program...)...)
					r.await(t, 2)
					began := time.Now()
					r.await(t, 3)
					step := time.Since(began)
					for began = time.Now(); time.Since(began) < step*time.Duration(quarter)/4; {
						time.Sleep(100 * time.Microsecond)
					}
					r.kill(t, worker)
					s := r.end(t, want, metrics, 1)
					if len(s.Recoveries) != 1 {
						t.Errorf("recoveries: %+v", s.Recoveries)
					}
				})
			}
		}
	}
}

// All workers but one are killed one after another, each when every shard has
// its mirrors again.
func TestAllButOneKilled(t *testing.T) {
	launcher, gpt := programs(t)
	program := append([]string{gpt}, strings.Fields(struckFlags+" --steps 48")...)
	want, metrics := launch(t, launcher, append([]string{"--workers", "1"}, program...)...)
	for stages := 1; stages <= 3; stages++ {
		t.Run(fmt.Sprintf("%d stages", stages), func(t *testing.T) {
			r := startRun(t, launcher, append([]string{"--workers", "4", "--stages", fmt.Sprint(stages)}, program...)...)
			for n, worker := range []int{2, 0, 3} {
				for step := 2 + 6*n; ; step++ {
					r.await(t, step)
					count := 0
					for _, e := range r.events(t) {
						if e.Kind == "protected" {
							count++
						}
					}
					if count >= n {
						break
					}
				}
				r.kill(t, worker)
			}
			r.end(t, want, metrics, 3)
		})
	}
}

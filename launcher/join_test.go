package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// joinSteps lasts many times as long as what happens in these tests.
const joinSteps = 1200

var joinArgs = []string{mlp, "--steps", strconv.Itoa(joinSteps), "--micro-batch", "4", "--eval-every", "0"}

// underWay is a real run of which the test does something.
type underWay struct {
	t   *testing.T
	cmd *exec.Cmd
	dir string
	out strings.Builder
}

func begin(t *testing.T, flags ...string) *underWay {
	t.Helper()
	return beginIn(t, "", append([]string{"--detect", "10s"}, flags...)...)
}

// beginIn is begin with a folder for temporary files, "" for the usual one.
func beginIn(t *testing.T, temp string, flags ...string) *underWay {
	t.Helper()
	return beginProgram(t, temp, mlp, flags...)
}

// beginProgram is beginIn with a program that runs the usual one.
func beginProgram(t *testing.T, temp, program string, flags ...string) *underWay {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, flags...)
	r := &underWay{t: t, cmd: launch(t, append(append(args, program), joinArgs[1:]...)...)}
	r.cmd.Env = append(os.Environ(), "LAUNCHER_TEST="+r.cmd.Dir)
	if temp != "" {
		r.cmd.Env = append(r.cmd.Env, "TMPDIR="+temp)
	}
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
	r.dir = filepath.Join(r.cmd.Dir, "run")
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.cmd.Process.Kill(); r.cmd.Wait(); logFiles(t, r.dir) })
	r.until("start", 1)
	return r
}

// events returns the events of a kind so far.
func (r *underWay) events(kind string) (all []rundir.Event) {
	text, _ := os.ReadFile(filepath.Join(r.dir, "events.jsonl"))
	for line := range strings.Lines(string(text)) {
		var e rundir.Event
		if json.Unmarshal([]byte(line), &e) == nil && e.Kind == kind {
			all = append(all, e)
		}
	}
	return all
}

// until waits until there are so many events of a kind.
func (r *underWay) until(kind string, n int) {
	r.t.Helper()
	until(r.t, func() bool { return len(r.events(kind)) >= n || len(r.events("end"))+len(r.events("failed")) > 0 })
	if len(r.events(kind)) < n {
		r.t.Fatalf("the run ended before %q came %d times", kind, n)
	}
}

func (r *underWay) kill(id int) {
	r.t.Helper()
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	i := slices.IndexFunc(run.Workers, func(p rundir.Process) bool { return p.ID == id })
	syscall.Kill(run.Workers[i].PID, syscall.SIGKILL)
}

// end stops the run some steps after what has happened to it, and compares all its steps with those of an undisturbed run.
func (r *underWay) end() (sum rundir.Summary) {
	r.t.Helper()
	newest := func() int {
		text, _ := os.ReadFile(filepath.Join(r.dir, "metrics.jsonl"))
		return bytes.Count(text, []byte("\n"))
	}
	was := newest()
	until(r.t, func() bool { return newest() >= was+20 || len(r.events("end"))+len(r.events("failed")) > 0 })
	r.cmd.Process.Signal(os.Interrupt)
	r.cmd.Wait() // the status tells
	if status := r.cmd.ProcessState.ExitCode(); status != 130 {
		r.t.Fatalf("status %d\n%s", status, &r.out)
	}
	if left := marked(r.t, "LAUNCHER_TEST="+r.cmd.Dir); len(left) > 0 {
		r.t.Errorf("left behind: %v", left)
	}
	readJSON(r.t, filepath.Join(r.dir, "summary.json"), &sum)
	want := joinPeace(r.t)
	steps := metrics(r.t, r.dir)
	if len(steps) == 0 || steps[len(steps)-1].Step != sum.Steps {
		r.t.Errorf("%d steps are told of, and the summary has %d", len(steps), sum.Steps)
	}
	for _, m := range steps {
		w := want.steps[m.Step-1]
		if m.Step != w.Step || m.Loss != w.Loss || m.GradNorm != w.GradNorm || m.LR != w.LR {
			r.t.Fatalf("step %+v, want %+v", m, w)
		}
	}
	return sum
}

// goesOn resumes a run that end has stopped, and compares the bits with those of an undisturbed run.
func (r *underWay) goesOn() {
	r.t.Helper()
	cmd := exec.Command(binary, "resume", "--plain", "--threads", "1", "--workers", "1", "run")
	cmd.Dir = r.cmd.Dir
	if status, stdout, stderr := result(r.t, cmd); status != 0 {
		r.t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	var sum rundir.Summary
	readJSON(r.t, filepath.Join(r.dir, "summary.json"), &sum)
	want := joinPeace(r.t).sum
	if len(want.ParamsSHA256) != 64 || sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss {
		r.t.Errorf("loss %v, parameters %s, want %v, %s", sum.Loss, sum.ParamsSHA256, want.Loss, want.ParamsSHA256)
	}
}

// peaceful is what an undisturbed run has told.
type peaceful struct {
	sum   rundir.Summary
	steps []rundir.Metrics
}

var alone struct {
	sync.Once
	peaceful
}

func joinPeace(t *testing.T) peaceful {
	t.Helper()
	alone.Do(func() {
		cmd := launch(t, append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "1", mlp}, joinArgs[1:]...)...)
		if status, _, stderr := result(t, cmd); status != 0 {
			t.Fatal(stderr)
		}
		readJSON(t, filepath.Join(cmd.Dir, "run", "summary.json"), &alone.sum)
		alone.steps = metrics(t, filepath.Join(cmd.Dir, "run"))
	})
	if len(alone.steps) != joinSteps {
		t.Fatal("the undisturbed run has failed")
	}
	return alone.peaceful
}

// Every worker is killed once, each after the one before was replaced.
func TestRespawn(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "3", "--respawn")
	for id := range 3 {
		r.kill(id)
		r.until("joined", id+1)
	}
	sum := r.end()
	if sum.WorkersLost != 3 || sum.WorkersJoined != 3 || sum.WorkersStarted != 6 || len(sum.Workers) != 6 {
		t.Errorf("summary: %+v", sum)
	}
	cmd := exec.Command(binary, "status", "run")
	cmd.Dir = r.cmd.Dir
	if _, text, _ := result(t, cmd); !strings.Contains(text, "worker 2.1 ") || !strings.Contains(text, "workers lost: 3") {
		t.Errorf("status:\n%s", text)
	}
	r.goesOn()
}

// Workers are added to a run in two stages, and the first ones killed after that.
func TestAdd(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "2", "--stages", "2")
	cmd := exec.Command(binary, "add", "run", "2")
	cmd.Dir = r.cmd.Dir
	if status, stdout, stderr := result(t, cmd); status != 0 || stdout != "started: worker 2, 3\n" {
		t.Fatalf("status %d: %s%s", status, stdout, stderr)
	}
	r.until("joined", 2)
	r.kill(0)
	r.until("recovered", 1)
	r.until("protected", 1)
	r.kill(1)
	r.until("recovered", 2)
	sum := r.end()
	if sum.WorkersLost != 2 || sum.WorkersJoined != 2 || sum.Rollbacks != 0 {
		t.Errorf("summary: %+v", sum)
	}
}

// A run that waits for more workers goes on when they are there.
func TestAddEndsTheHold(t *testing.T) {
	t.Parallel()
	r := begin(t, "--workers", "2", "--min-workers", "2")
	r.kill(1)
	r.until("hold", 1)
	cmd := exec.Command(binary, "add", "run")
	cmd.Dir = r.cmd.Dir
	if status, _, stderr := result(t, cmd); status != 0 {
		t.Fatal(stderr)
	}
	r.until("joined", 1)
	if sum := r.end(); sum.WorkersJoined != 1 || sum.Rollbacks != 0 {
		t.Errorf("summary: %+v", sum)
	}
}

// join@S adds a worker when step S begins, on one host and on several.
func TestChaosJoin(t *testing.T) {
	built(t)
	t.Parallel()
	for _, hosts := range []string{"1", "3"} {
		t.Run(hosts, func(t *testing.T) {
			r := begin(t, "--workers", "3", "--emulate-hosts", hosts, "--detect", "3s", "--chaos", "join@5,kill:0@9")
			r.until("joined", 1)
			r.until("recovered", 1)
			// Where the joiner has not begun when the other one dies, it joins a second time.
			again := len(r.events("evict"))
			if begun := r.events("begin"); len(begun) != 1+again || begun[0].Worker != 3 {
				t.Errorf("begun: %+v", begun)
			}
			if sum := r.end(); sum.WorkersJoined > 1+again || sum.WorkersStarted != 4+again || sum.WorkersLost != 1+again || again > 1 {
				t.Errorf("summary: %+v", sum)
			}
		})
	}
}

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// hostSteps leave time for an election.
const hostSteps = 150

// trainOnHosts runs a real job with six workers on three hosts.
func trainOnHosts(t *testing.T, flags ...string) (sum rundir.Summary, dir string) {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, flags...)
	cmd := launch(t, append(args, mlp, "--steps", strconv.Itoa(hostSteps), "--micro-batch", "4", "--eval-every", "0")...)
	mark := "LAUNCHER_TEST=" + cmd.Dir
	temp := t.TempDir()
	cmd.Env = append(os.Environ(), mark, "TMPDIR="+temp)
	status, stdout, stderr := result(t, cmd)
	if status != 0 {
		events, _ := os.ReadFile(filepath.Join(cmd.Dir, "run", "events.jsonl"))
		t.Fatalf("status %d\n%s%s%s", status, stdout, stderr, events)
	}
	if left := marked(t, mark); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	dir = filepath.Join(cmd.Dir, "run")
	readJSON(t, filepath.Join(dir, "summary.json"), &sum)
	return sum, dir
}

var hostBaseline struct {
	sync.Once
	sum rundir.Summary
}

// lines reads a line file.
func lines[T any](t *testing.T, path string) (all []T) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			t.Fatalf("%s: %v: %s", path, err, line)
		}
		all = append(all, v)
	}
	return all
}

// A run with agents on three hosts ends with the bits of an undisturbed one, whoever of them is lost: a
// worker, a host, the one that leads; by death or by frost.
func TestHosts(t *testing.T) {
	built(t)
	t.Parallel()
	cases := []string{"", "kill:1@20", "killhost:0@20", "killhost:1@20", "killhost:2@20", "freezehost:0@20", "freezehost:1@20", "kill:5@20,killhost:0@90"}
	for _, spec := range cases {
		t.Run(cmpName(spec), func(t *testing.T) {
			t.Parallel()
			hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
			sum, dir := trainOnHosts(t, "--workers", "6", "--emulate-hosts", "3", "--chaos", spec)
			if want := hostBaseline.sum; sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss || sum.Steps != hostSteps {
				t.Errorf("steps %d, loss %v, parameters %s; want those of an undisturbed run, %v, %s", sum.Steps, sum.Loss, sum.ParamsSHA256, want.Loss, want.ParamsSHA256)
			}
			next := 1
			for _, m := range lines[rundir.Metrics](t, filepath.Join(dir, "metrics.jsonl")) {
				if m.Step != next && sum.Rollbacks == 0 {
					t.Errorf("metrics.jsonl has step %d in the place of %d", m.Step, next)
				}
				next = m.Step + 1
			}
			var newest id.Version
			for i, l := range lines[rundir.Plan](t, filepath.Join(dir, "plans.jsonl")) {
				p, err := plan.Parse(l.Plan)
				if err != nil {
					t.Fatal(err)
				}
				if p.Version.Compare(newest) <= 0 {
					t.Errorf("plan %v comes after %v", p.Version, newest)
				}
				newest = p.Version
				for _, sh := range p.Shards {
					owner, _ := p.Worker(sh.Owner)
					for _, m := range sh.Mirrors {
						if mirror, _ := p.Worker(m); i == 0 && mirror.Host == owner.Host {
							t.Errorf("a shard of worker %d has its mirror on the same host, at worker %d", owner.ID, mirror.ID)
						}
					}
				}
			}
			if want := strings.Count(spec, "kill:") + 2*strings.Count(spec, "host:"); sum.WorkersLost < want {
				t.Errorf("%d workers were lost, want %d", sum.WorkersLost, want)
			}
			for _, r := range sum.Recoveries {
				t.Logf("%s: %.1f ms (detect %.1f, query %.1f, agree %.1f), died by %s", r.Cause, r.TotalMS, r.DetectMS, r.QueryMS, r.AgreeMS, r.DiedAt)
			}
		})
	}
}

func cmpName(spec string) string {
	if spec == "" {
		return "peace"
	}
	return spec
}

func TestHostsExitStatuses(t *testing.T) {
	built(t)
	t.Parallel()
	for _, c := range []struct {
		name   string
		args   []string
		status int
		stdout string
		stderr string
	}{
		{"all steps", []string{fake}, 0, "sampled text\n", ""},
		{"program's wrong usage", []string{fake, "--steps", "0"}, 2, "", "launcher: --steps 0: give at least 1\n"},
		{"panic", []string{fake, "--fail", "panic", "--who", "3"}, 1, "", "launcher: worker 3: panic in step 3: boom\n    goroutine 1 [running]:\n"},
		{"never calls trainer.Main", []string{testdata(t, "nomain")}, 1, "", "ended without calling trainer.Main (exit status 0)\n    nothing to do\n"},
		{"another seed", []string{fake, "--fail", "seed", "--who", "1"}, 1, "", "launcher: worker 1 has another seed than worker 0 (7, not 0)"},
		{"host chaos on one host", []string{"--emulate-hosts", "1", "--chaos", "killhost:0@3", fake}, 2, "", "killhost needs --emulate-hosts 2 or more"},
		{"no hosts", []string{"--emulate-hosts", "0", fake}, 2, "", "launcher: --emulate-hosts 0: give at least 1\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := launch(t, append([]string{"run", "--workers", "4", "--emulate-hosts", "3"}, c.args...)...)
			mark := "LAUNCHER_TEST=" + cmd.Dir
			cmd.Env = append(os.Environ(), mark)
			status, stdout, stderr := result(t, cmd)
			if left := marked(t, mark); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			if status != c.status || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) || (c.stderr == "") != (stderr == "") {
				t.Errorf("status %d, stdout:\n%s\nstderr:\n%s", status, stdout, stderr)
			}
			if _, err := os.Stat(filepath.Join(cmd.Dir, "runs")); (err == nil) != (c.status == 0 || c.name == "panic") {
				t.Errorf("runs: %v", err)
			}
		})
	}
}

func TestHostsSignals(t *testing.T) {
	built(t)
	t.Parallel()
	for _, c := range []struct {
		name      string
		args      []string
		signals   []syscall.Signal
		status    int
		stoppedBy string
	}{
		{"interrupt", nil, []syscall.Signal{syscall.SIGINT}, 130, "interrupt"},
		{"terminate", nil, []syscall.Signal{syscall.SIGTERM}, 75, "terminated"},
		{"interrupt twice", []string{"--stuck"}, []syscall.Signal{syscall.SIGINT, syscall.SIGINT}, 130, "interrupt"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := startHeldWith(t, []string{"--emulate-hosts", "3"}, c.args...)
			for i, s := range c.signals {
				r.Process.Signal(s)
				if i == 0 {
					r.await(t, "stopping")
				}
			}
			if status := r.end(); status != c.status {
				t.Errorf("status %d: %s", status, &r.errs)
			}
			var sum rundir.Summary
			readJSON(t, filepath.Join(r.Dir, "run", "summary.json"), &sum)
			if sum.StoppedBy != c.stoppedBy {
				t.Errorf("stopped by %q", sum.StoppedBy)
			}
			if n := r.survivors(); n > 0 {
				t.Errorf("%d workers are left", n)
			}
		})
	}
}

// What a supervisor that is killed leaves behind ends by itself, with its files.
func TestHostsEndWithTheirSupervisor(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	r := startHeldWith(t, []string{"--emulate-hosts", "3"})
	mark := "LAUNCHER_TEST=" + r.Dir
	r.Process.Kill()
	r.end()
	await(t, "nothing left behind", func() bool {
		files, _ := filepath.Glob(filepath.Join(temp, "soliton-*"))
		return len(marked(t, mark))+len(files) == 0
	})
}

// hostProcesses returns the process of a host's agent, and those of its workers.
func hostProcesses(t *testing.T, mark, host string) (pids []int) {
	t.Helper()
	for _, pid := range marked(t, mark) {
		line, _ := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
		if !bytes.HasSuffix(line, []byte("\x00agent\x00"+host+"\x00")) {
			continue
		}
		agent, _ := strconv.Atoi(pid)
		pids = append(pids, agent)
		lists, _ := filepath.Glob(filepath.Join("/proc", pid, "task/*/children"))
		for _, list := range lists {
			text, _ := os.ReadFile(list)
			for _, word := range strings.Fields(string(text)) {
				child, _ := strconv.Atoi(word)
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// await waits for a condition, which others bring about.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("not within two minutes: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// logFiles logs what the files of a run on hosts say, once the test has failed.
func logFiles(t *testing.T, dir string) {
	if !t.Failed() {
		return
	}
	files, _ := filepath.Glob(filepath.Join(dir, "log", "host-*.log"))
	for _, file := range append(files, filepath.Join(dir, "events.jsonl")) {
		text, _ := os.ReadFile(file)
		t.Logf("%s:\n%s", filepath.Base(file), text)
	}
	text, _ := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	t.Logf("%d steps", bytes.Count(text, []byte("\n")))
}

// beginRun starts a run in the directory run. It returns what the command prints, the mark of its processes, and has, which tells whether a
// file of the run has a text by now.
func beginRun(t *testing.T, cmd *exec.Cmd) (out *bytes.Buffer, mark string, has func(file, text string) func() bool) {
	t.Helper()
	out, mark = new(bytes.Buffer), "LAUNCHER_TEST="+cmd.Dir
	cmd.Env = append(os.Environ(), mark)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return out, mark, func(file, text string) func() bool {
		return func() bool {
			b, _ := os.ReadFile(filepath.Join(cmd.Dir, "run", file))
			return bytes.Contains(b, []byte(text))
		}
	}
}

// A host that was frozen, and wakes when the others have gone on without it, finds that its
// workers are fenced: they end, others join in their place, and the run ends with the bits of an
// undisturbed one.
func TestFrozenHostWakes(t *testing.T) {
	built(t)
	t.Parallel()
	for _, host := range []string{"host-0", "host-1"} { // one of them may lead
		t.Run(host, func(t *testing.T) {
			t.Parallel()
			hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
			cmd := launch(t, "run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "6", "--emulate-hosts", "3",
				"--chaos", "slow:5@1:0.05", mlp, "--steps", strconv.Itoa(hostSteps), "--micro-batch", "4", "--eval-every", "0")
			out, mark, has := beginRun(t, cmd)
			await(t, "step 5", has("metrics.jsonl", `{"step":5,`))
			frozen := hostProcesses(t, mark, host)
			if len(frozen) != 3 {
				t.Fatalf("processes %v of %s", frozen, host)
			}
			for _, pid := range frozen {
				syscall.Kill(pid, syscall.SIGSTOP)
			}
			await(t, "recovery", has("events.jsonl", `"recovered"`))
			for _, pid := range frozen {
				syscall.Kill(pid, syscall.SIGCONT)
			}
			await(t, "end of the fenced workers", func() bool {
				return !slices.ContainsFunc(frozen[1:], func(pid int) bool { return slices.Contains(hostProcesses(t, mark, host), pid) })
			})
			await(t, "workers that join", has("events.jsonl", `"joined"`))
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			var sum rundir.Summary
			readJSON(t, filepath.Join(cmd.Dir, "run", "summary.json"), &sum)
			if want := hostBaseline.sum; sum.ParamsSHA256 != want.ParamsSHA256 || sum.Steps != hostSteps || sum.WorkersLost < 2 || sum.WorkersStarted < 8 || sum.WorkersJoined == 0 {
				t.Errorf("steps %d, parameters %s, lost %d of %d, joined %d", sum.Steps, sum.ParamsSHA256, sum.WorkersLost, sum.WorkersStarted, sum.WorkersJoined)
			}
			if left := marked(t, mark); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// The host of the only worker that is left is frozen. For a while the run waits for it; then it holds, and goes on from the beginning when the
// host is back.
func TestFrozenLastHost(t *testing.T) {
	built(t)
	t.Parallel()
	for _, long := range []bool{false, true} {
		t.Run(fmt.Sprintf("long=%v", long), func(t *testing.T) {
			t.Parallel()
			hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
			// The worker that is left is slow, so that it does not end the run before it is frozen.
			cmd := launch(t, "run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "2", "--emulate-hosts", "2", "--detect", "500ms",
				"--chaos", "slow:1@1:0.2", mlp, "--steps", strconv.Itoa(hostSteps), "--micro-batch", "4", "--eval-every", "0")
			out, mark, has := beginRun(t, cmd)
			await(t, "step 5", has("metrics.jsonl", `{"step":5,`))
			frozen := hostProcesses(t, mark, "host-1")                         // looking takes a while
			syscall.Kill(hostProcesses(t, mark, "host-0")[1], syscall.SIGKILL) // the worker of the only host that votes
			await(t, "recovery", has("events.jsonl", `"recovered"`))
			for _, pid := range frozen {
				syscall.Kill(pid, syscall.SIGSTOP)
			}
			if long {
				await(t, "hold", has("events.jsonl", `"hold"`))
			} else {
				since := time.Now()
				await(t, "three times --detect", func() bool { return time.Since(since) > 1500*time.Millisecond })
			}
			for _, pid := range frozen {
				syscall.Kill(pid, syscall.SIGCONT)
			}
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			var sum rundir.Summary
			readJSON(t, filepath.Join(cmd.Dir, "run", "summary.json"), &sum)
			if want := hostBaseline.sum; sum.ParamsSHA256 != want.ParamsSHA256 || sum.Steps != hostSteps || sum.Rollbacks > 1 || long != (sum.Rollbacks == 1) {
				t.Errorf("steps %d, parameters %s, lost %d of %d, %d rollbacks\n%s", sum.Steps, sum.ParamsSHA256, sum.WorkersLost, sum.WorkersStarted, sum.Rollbacks, out)
			}
			if left := marked(t, mark); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// Two of five hosts are lost, one after the other: there still is a majority.
func TestTwoOfFiveHosts(t *testing.T) {
	built(t)
	t.Parallel()
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	sum, dir := trainOnHosts(t, "--workers", "5", "--emulate-hosts", "5", "--detect", "3s", "--chaos", "killhost:0@20,killhost:2@80")
	if want := hostBaseline.sum; sum.ParamsSHA256 != want.ParamsSHA256 || sum.WorkersLost < 2 {
		events, _ := os.ReadFile(filepath.Join(dir, "events.jsonl"))
		t.Errorf("parameters %s, want %s; %d workers lost\n%s", sum.ParamsSHA256, want.ParamsSHA256, sum.WorkersLost, events)
	}
}

// Without a majority no host continues.
func TestTwoOfThreeHosts(t *testing.T) {
	t.Parallel()
	cmd := launch(t, "run", "--plain", "--workers", "3", "--emulate-hosts", "3", fake, "--hold", "2")
	mark := "LAUNCHER_TEST=" + cmd.Dir
	cmd.Env = append(os.Environ(), mark)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	await(t, "step 2", func() bool {
		b, _ := os.ReadFile(filepath.Join(cmd.Dir, "runs", "latest", "metrics.jsonl"))
		return bytes.Contains(b, []byte(`{"step":2,`))
	})
	both := append(hostProcesses(t, mark, "host-0"), hostProcesses(t, mark, "host-2")...) // looking takes a while
	for _, pid := range both {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	cmd.Wait()
	if status := cmd.ProcessState.ExitCode(); status != 1 || !strings.Contains(out.String(), "launcher: host-1: 2 of 3 hosts that vote are gone, and the run needs 2 to continue\n") {
		t.Errorf("status %d\n%s", status, &out)
	}
	await(t, "the end of all processes", func() bool { return len(marked(t, mark)) == 0 }) // workers of a killed agent end a little later
}

// Workers are replaced on their host, or on another one when that is gone with the leader, and
// more are added.
func TestHostsRespawn(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "3", "--emulate-hosts", "3", "--respawn", "--detect", "2s")
	r.kill(1)
	r.until("joined", 1)
	for _, pid := range hostProcesses(t, "LAUNCHER_TEST="+r.cmd.Dir, "host-0") {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	r.until("joined", 2)
	var ids string
	await(t, "an agent that answers", func() bool {
		cmd := exec.Command(binary, "add", "run")
		cmd.Dir = r.cmd.Dir
		text, err := cmd.Output()
		ids = string(text)
		return err == nil
	})
	if ids != "started: worker 3\n" {
		t.Errorf("added: %s", ids)
	}
	r.until("joined", 3)
	sum := r.end()
	if sum.WorkersLost < 2 || sum.WorkersJoined != sum.WorkersStarted-3 || sum.WorkersStarted < 6 {
		t.Errorf("summary: %+v", sum)
	}
	r.goesOn()
}

// Two of three hosts are frozen: the third one holds, and says what it waits for; when they wake,
// the run goes on.
func TestHostWithoutMajority(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "3", "--emulate-hosts", "3", "--detect", "1s")
	mark := "LAUNCHER_TEST=" + r.cmd.Dir
	frozen := append(hostProcesses(t, mark, "host-0"), hostProcesses(t, mark, "host-1")...)
	for _, pid := range frozen {
		syscall.Kill(pid, syscall.SIGSTOP)
	}
	log := filepath.Join(r.dir, "log", "host-2.log")
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range []string{"events.jsonl", "log/host-0.log", "log/host-1.log", "log/host-2.log"} {
				text, _ := os.ReadFile(filepath.Join(r.dir, name))
				t.Logf("%s:\n%s", name, text)
			}
		}
	})
	await(t, "a host that says what it waits for", func() bool {
		text, _ := os.ReadFile(log)
		return bytes.Contains(text, []byte("2 of 3 hosts that vote have to be there; it waits for host-0, host-1"))
	})
	before, _ := os.ReadFile(filepath.Join(r.dir, "metrics.jsonl"))
	for _, pid := range frozen {
		syscall.Kill(pid, syscall.SIGCONT)
	}
	await(t, "steps", func() bool {
		after, _ := os.ReadFile(filepath.Join(r.dir, "metrics.jsonl"))
		return bytes.Count(after, []byte("\n")) > bytes.Count(before, []byte("\n"))+10
	})
	r.end()
}

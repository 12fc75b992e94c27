package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// awaitSteps waits until so many steps are committed, as this machine's records say.
func (m *machine) awaitSteps(t *testing.T, n int) {
	t.Helper()
	await(t, fmt.Sprintf("%d steps on %s", n, m.Dir), func() bool {
		text, _ := os.ReadFile(filepath.Join(m.Dir, "run", "metrics.jsonl"))
		return bytes.Count(text, []byte("\n")) > n
	})
}

// A machine whose launcher gets SIGTERM leaves the run, and the others continue to the bits of an undisturbed run, with nothing
// computed again; also where they had no majority without its vote, and where two leave at the same time. When all machines are to leave, the
// run stops.
func TestDrain(t *testing.T) {
	built(t)
	t.Parallel()
	for _, c := range []struct {
		name     string
		machines int
		leave    []int
		together bool
		early    bool // as soon as the agents run
	}{
		{"two of three, one after the other", 3, []int{0, 2}, false, false},
		{"two of three, at the same time", 3, []int{0, 2}, true, false},
		{"two of three, before training", 3, []int{0, 2}, true, true},
		{"three of four, at the same time", 4, []int{0, 1, 3}, true, false}, // one has no vote before
		{"one of two", 2, []int{1}, false, false},
		{"all", 2, []int{1, 0}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
			steps := hostSteps
			if len(c.leave) == c.machines {
				steps = 1e6 // on a crowded machine it must not end before the last one is to leave
			}
			// A slow worker keeps the run from its end until the last one is to leave.
			all := gatheredFor(t, c.machines, "--chaos", "slow:1@1:0.3", mlp, "--steps", strconv.Itoa(steps), "--micro-batch", "4", "--eval-every", "0", "--checkpoint-every", "100ms")
			t.Cleanup(func() {
				for i, m := range all {
					if t.Failed() {
						events, _ := os.ReadFile(filepath.Join(m.Dir, "run", "events.jsonl"))
						t.Logf("machine %d:\n%s%s%s", i, &m.out, &m.errs, events)
					}
				}
			})
			drain := func(m *machine) {
				if err := m.Process.Signal(syscall.SIGTERM); err != nil {
					t.Fatal(err)
				}
			}
			if c.together {
				for _, i := range c.leave {
					if c.early {
						await(t, "an agent", func() bool { return len(platform.Children(all[i].Process.Pid)) > 0 })
						continue
					}
					all[i].awaitSteps(t, 20)
				}
				for _, i := range c.leave {
					drain(all[i])
				}
			}
			for n, i := range c.leave {
				if !c.together {
					all[i].awaitSteps(t, 20*(n+1))
					drain(all[i])
				}
				all[i].end(t)
			}
			for n, i := range c.leave { // what is looked at takes time in which the run goes on
				status, text := all[i].end(t), "this machine has left the run after step "
				if n == c.machines-1 {
					text = "terminated after step "
				}
				if status != 75 || !strings.Contains(all[i].errs.String(), text) {
					t.Errorf("machine %d: status %d\n%s%s", i, status, &all[i].out, &all[i].errs)
				}
				if left := marked(t, all[i].mark); len(left) > 0 {
					t.Errorf("left behind on machine %d: %v", i, left)
				}
				if _, _, errs := all[i].say(t, "logs", "run"); n < c.machines-1 && !strings.Contains(errs, "the logs of other machines are not here") {
					t.Errorf("logs on machine %d: %s", i, errs)
				}
			}
			for i, m := range all {
				if slices.Contains(c.leave, i) {
					continue
				}
				m.awaitSteps(t, hostSteps/2) // each wait is bounded, and a crowded machine needs longer for all that is left
				if status := m.end(t); status != 0 {
					t.Fatalf("machine %d: status %d\n%s%s", i, status, &m.out, &m.errs)
				}
				var sum rundir.Summary
				readJSON(t, filepath.Join(m.Dir, "run", "summary.json"), &sum)
				if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.StateSHA256 != hostBaseline.sum.StateSHA256 || sum.Rollbacks > 0 || sum.WorkersLost > 0 && !c.together {
					t.Errorf("machine %d: %+v", i, sum)
				}
				for _, r := range sum.Recoveries { // the next leader may not know that a worker has left, whose machine has gone
					if r.RecomputedMicrobatches > 0 {
						t.Errorf("machine %d: %+v", i, r)
					}
				}
				if _, _, errs := m.say(t, "logs", "run"); strings.Count(errs, ": its logs are in its own run directory: it was lost, or had left, when the run ended\n") != len(c.leave) {
					t.Errorf("logs on machine %d: %s", i, errs)
				}
			}
		})
	}
}

// An emulated host whose agent gets SIGTERM leaves, and the others continue, also if that was one of two, or if the one that is left had
// no majority with a third that was lost.
func TestDrainAgent(t *testing.T) {
	built(t)
	t.Parallel()
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	for _, c := range []struct {
		name        string
		hosts, lost int
	}{
		{"one of two", 2, 0},
		{"one of three, beside a lost one", 3, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := startMachine(t, "", "run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", strconv.Itoa(2*c.hosts), "--emulate-hosts", strconv.Itoa(c.hosts),
				mlp, "--steps", strconv.Itoa(hostSteps), "--micro-batch", "4", "--eval-every", "0", "--checkpoint-every", "100ms")
			m.awaitSteps(t, 20)
			send := func(host int, sig syscall.Signal) {
				if err := syscall.Kill(hostProcesses(t, m.mark, fmt.Sprintf("host-%d", host))[0], sig); err != nil {
					t.Fatal(err)
				}
			}
			for i := range c.lost {
				send(c.hosts-1-i, syscall.SIGKILL)
			}
			send(0, syscall.SIGTERM)
			status, out := m.end(t), m.out.String()
			if left := strings.Count(out, " leaves: ") == 2 || strings.Contains(out, "workers 0, 1 leave: "); status != 0 || c.lost == 0 && !left {
				t.Fatalf("status %d\n%s%s", status, out, &m.errs)
			}
			var sum rundir.Summary
			readJSON(t, filepath.Join(m.Dir, "run", "summary.json"), &sum)
			if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.WorkersLost > 2*c.lost {
				t.Errorf("%+v", sum)
			}
		})
	}
}

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/door"
)

// say runs a command in a machine's folder.
func (m *machine) say(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	cmd := launch(t, args...)
	cmd.Dir, cmd.Env = m.Dir, m.Env
	return result(t, cmd)
}

func (m *machine) workers(t *testing.T) rundir.Workers {
	t.Helper()
	w, err := rundir.ReadWorkers(filepath.Join(m.Dir, "run"))
	if err != nil {
		t.Log(err)
	}
	return w
}

// Commands work on every machine of a run, whichever leads and wherever the worker is, and errors come back.
func TestCommandsEverywhere(t *testing.T) {
	built(t)
	t.Parallel()
	first := startMachine(t, "", "run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "1", "--detect", "5s", "--listen=127.0.0.1:0", "--wait-hosts", "3",
		mlp, "--steps", "1000000", "--micro-batch", "4", "--eval-every", "0")
	all := []*machine{first, nil, nil}
	ticket := filepath.Join(first.Dir, "run", door.File)
	await(t, "a ticket", func() bool {
		_, err := os.Stat(ticket)
		return err == nil
	})
	text, err := os.ReadFile(ticket)
	if err != nil {
		t.Fatal(err)
	}
	for i := range all[1:] {
		all[i+1] = startMachine(t, string(text), "join", "--plain", "--run-dir", "run", "-")
	}
	for _, m := range all {
		await(t, "3 workers that train", func() bool {
			text, _ := os.ReadFile(filepath.Join(m.Dir, "run", "metrics.jsonl"))
			return len(text) > 0 && len(m.workers(t).Workers) == 3
		})
	}
	events := func(m *machine, what string) func() bool {
		return func() bool {
			text, _ := os.ReadFile(filepath.Join(m.Dir, "run", "events.jsonl"))
			return strings.Contains(string(text), what)
		}
	}
	must := func(m *machine, want string, args ...string) {
		t.Helper()
		if status, out, errs := m.say(t, args...); status != 0 || !strings.Contains(out, want) {
			t.Fatalf("%v: status %d\n%s%s", args, status, out, errs)
		}
	}
	// Each machine kills a worker of the next one, and adds one.
	var killed []int
	for i, m := range all {
		next := all[(i+1)%3].workers(t).Host
		w := -1
		for _, p := range m.workers(t).Workers {
			if p.Host == next {
				w = p.ID
			}
		}
		killed = append(killed, w)
		// What a worker prints is in a log of its own machine, which any other one shows.
		log := filepath.Join(all[(i+1)%3].Dir, "run", "log", fmt.Sprintf("worker-%d.0.log", w))
		if err := os.WriteFile(log, []byte(fmt.Sprintf("hello from %d\nand more", w)), 0o600); err != nil {
			t.Fatal(err)
		}
		must(m, fmt.Sprintf("hello from %d\nand more\n", w), "logs", "run", fmt.Sprint(w))
		must(m, fmt.Sprintf("%[1]d| hello from %[1]d\n%[1]d| and more\n", w), "logs", "run")
		if status, _, errs := m.say(t, "logs", "run", "77"); status != 2 || !strings.Contains(errs, "worker 77 has no log") {
			t.Errorf("status %d: %s", status, errs)
		}
		must(m, "", "slow", "run", fmt.Sprint(w), "0.5")
		must(m, "", "slow", "run", fmt.Sprint(w), "1")
		must(m, "", "kill", "run", fmt.Sprint(w))
		await(t, "its loss", events(m, fmt.Sprintf(`"reason":"worker %d exited: signal: killed`, w)))
		status, _, errs := m.say(t, "kill", "run", fmt.Sprint(w))
		if status == 0 || !strings.Contains(errs, fmt.Sprintf("worker %d", w)) {
			t.Errorf("status %d\n%s", status, errs)
		}
		must(m, "started: worker ", "add", "run")
		await(t, "that it takes part", func() bool {
			_, text, _ := m.say(t, "status", "run")
			return strings.Contains(text, fmt.Sprintf("worker %d  stages", i+3))
		})
	}
	follow := launch(t, "logs", "run", "-f")
	var followed output
	follow.Dir, follow.Env, follow.Stdout, follow.Stderr = all[0].Dir, all[0].Env, &followed, &followed
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	whole := func(text string) bool {
		return !slices.ContainsFunc(killed, func(w int) bool {
			return strings.Count(text, fmt.Sprintf("%[1]d| hello from %[1]d\n", w)) != 1 || strings.Count(text, fmt.Sprintf("%d| and more\n", w)) != 1
		})
	}
	must(all[2], "", "stop", "run")
	for i, m := range all {
		if status := m.end(t); status != 1 {
			t.Errorf("machine %d: status %d\n%s", i, status, &m.errs)
		}
		// The logs of all machines are still there.
		if status, out, errs := m.say(t, "logs", "run"); status != 0 || !whole(out) || errs != "" {
			t.Errorf("machine %d: status %d\n%s%s", i, status, out, errs)
		}
		for _, w := range killed {
			must(m, fmt.Sprintf("hello from %d\nand more\n", w), "logs", "run", fmt.Sprint(w))
		}
		if status, _, errs := m.say(t, "logs", "run", "77"); status != 2 || !strings.Contains(errs, "worker 77 has no log") {
			t.Errorf("status %d: %s", status, errs)
		}
		if status, _, errs := m.say(t, "stop", "run"); status != 1 || errs != "launcher: run is no run that is under way\n" {
			t.Errorf("status %d: %s", status, errs)
		}
	}
	if err := follow.Wait(); err != nil || !whole(followed.String()) {
		t.Errorf("logs -f: %v\n%s", err, &followed)
	}
}

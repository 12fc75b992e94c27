package main

import (
	"bufio"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/observe/dashboard"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// attachIn attaches to the run in a machine's folder, and returns when it shows it.
func attachIn(t *testing.T, m *machine) *machine {
	t.Helper()
	a := startMachineIn(t, m.Dir, m.Env, "", "attach", "run", "--plain")
	await(t, "that it shows the run", func() bool { return strings.Contains(a.out.String(), "run directory run") })
	return a
}

// trains waits until a run has committed steps.
func (m *machine) trains(t *testing.T) {
	t.Helper()
	await(t, "steps in "+m.Dir, func() bool {
		text, _ := os.ReadFile(filepath.Join(m.Dir, "run", "metrics.jsonl"))
		return strings.Count(string(text), "\n") > 3
	})
}

// What attaches to a run shows its end as its launcher does, with the same exit status, and leaves it alone when it is interrupted.
func TestAttach(t *testing.T) {
	built(t)
	for name, flags := range map[string][]string{"alone": nil, "hosts": {"--emulate-hosts", "3"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "3", "--detect", "5s"}, flags...)
			m := startMachine(t, "", append(args, mlp, "--steps", "1000000", "--micro-batch", "4", "--eval-every", "0")...)
			m.trains(t)
			a, b := attachIn(t, m), attachIn(t, m)
			if err := b.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			if status := b.end(t); status != 130 {
				t.Errorf("interrupted: status %d\n%s", status, &b.errs)
			}
			if status, _, errs := m.say(t, "stop", "run"); status != 0 {
				t.Fatal(errs)
			}
			want, got := m.end(t), a.end(t)
			if got != want || a.errs.String() != m.errs.String() || !strings.Contains(m.errs.String(), "stopped") {
				t.Errorf("status %d, not %d\n%s%s\nnot\n%s%s", got, want, &a.out, &a.errs, &m.out, &m.errs)
			}
			if status, _, errs := m.say(t, "attach", "run"); status != 1 || errs != "launcher: run is no run that is under way\n" {
				t.Errorf("status %d: %s", status, errs)
			}
			if _, err := os.Lstat(filepath.Join(m.Dir, "run", rundir.AttachName)); err == nil {
				t.Error("the link is left behind")
			}
		})
	}
}

// A run over several machines is shown on all of them, also those whose launchers were detached, until it ends.
func TestAttachAnywhere(t *testing.T) {
	built(t)
	t.Parallel()
	all := detached(t, "1000000")
	var seen []*machine
	for _, m := range all {
		m.trains(t)
		seen = append(seen, attachIn(t, m))
	}
	if status, _, errs := all[1].say(t, "stop", "run"); status != 0 {
		t.Fatal(errs)
	}
	for i, a := range seen {
		if status := a.end(t); status != 1 || !strings.Contains(a.errs.String(), "stopped") {
			t.Errorf("machine %d: status %d\n%s%s", i, status, &a.out, &a.errs)
		}
		all[i].ends(t)
	}
}

// A page of a machine that does not lead shows the run with its timelines, and kills a worker of another machine.
func TestPageAnywhere(t *testing.T) {
	built(t)
	all := detached(t, "1000000", "--ui=127.0.0.1:0")
	for i, m := range all {
		m.trains(t)
		secret, err := os.ReadFile(filepath.Join(m.run, dashboard.TokenName))
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(m.out.String(), "dashboard ")
		url := strings.Fields(rest)[0]
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		do := func(method, path, body string) *http.Response {
			req, err := http.NewRequestWithContext(ctx, method, url+path, strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(secret)))
			answer, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			if answer.StatusCode != http.StatusOK {
				t.Fatalf("machine %d: %s: %s", i, path, answer.Status)
			}
			return answer
		}
		events := do("GET", "api/events", "")
		lines := bufio.NewReader(events.Body)
		for found := false; !found; {
			line, err := lines.ReadString('\n')
			if err != nil {
				t.Fatalf("machine %d: no timeline: %v", i, err)
			}
			found = strings.Contains(line, `"timeline":{`)
		}
		events.Body.Close()
		if i == 1 {
			do("POST", "api/act", `{"do":"kill","worker":0}`).Body.Close()
			await(t, "the loss", func() bool {
				text, _ := os.ReadFile(filepath.Join(m.run, "events.jsonl"))
				return strings.Contains(string(text), `"reason":"worker 0 exited: signal: killed`)
			})
			do("POST", "api/act", `{"do":"stop"}`).Body.Close()
		}
	}
	for _, m := range all {
		m.ends(t)
	}
}

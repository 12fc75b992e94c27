package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"

	"github.com/soliton-train/soliton/launcher/internal/door"
)

// detached begins a run of the mlp on two machines, whose launchers continue in the background.
func detached(t *testing.T, steps string, flags ...string) []*machine {
	t.Helper()
	args := append([]string{"run", "--detach", "--threads", "1", "--run-dir", "run", "--workers", "1", "--listen=127.0.0.1:0", "--wait-hosts", "2"}, flags...)
	first := startMachine(t, "", append(args, mlp, "--steps", steps, "--micro-batch", "4", "--eval-every", "0")...)
	if status := first.end(t); status != 0 {
		t.Fatalf("status %d\n%s", status, &first.errs)
	}
	text, err := os.ReadFile(filepath.Join(first.Dir, "run", door.File))
	if err != nil {
		t.Fatal(err)
	}
	second := startMachine(t, string(text), append(append([]string{"join", "--detach", "--run-dir", "run"}, flags...), "-")...)
	if status := second.end(t); status != 0 {
		t.Fatalf("status %d\n%s", status, &second.errs)
	}
	return []*machine{first, second}
}

// ends waits until all processes of a machine have ended.
func (m *machine) ends(t *testing.T) {
	t.Helper()
	await(t, "the end of what continues in "+m.Dir, func() bool { return len(marked(t, m.mark)) == 0 })
}

// A launcher that is detached returns, the run continues without it, says the rest in its log, and leaves nothing.
func TestDetach(t *testing.T) {
	built(t)
	for _, m := range detached(t, "20") {
		if !strings.Contains(m.out.String(), "launcher attach run shows it") {
			t.Errorf("%s", &m.out)
		}
		m.ends(t)
		var sum rundir.Summary
		readJSON(t, filepath.Join(m.Dir, "run", "summary.json"), &sum)
		log, err := os.ReadFile(filepath.Join(m.Dir, "run", "log", "launcher.log"))
		if err != nil || sum.Steps != 20 || !strings.Contains(string(log), "the model is in the run directory of ") {
			t.Errorf("%+v, %v\n%s", sum, err, log)
		}
	}
}

// One that cannot take part says so where it was started, and one whose first process ends before it takes part does not stay.
func TestDetachBefore(t *testing.T) {
	built(t)
	m := startMachine(t, "hello", "join", "--detach", "-")
	if status := m.end(t); status != 2 || !strings.Contains(m.errs.String(), "TICKET: ") {
		t.Errorf("status %d\n%s", status, &m.errs)
	}
	first := startMachine(t, "", "run", "--plain", "--run-dir", "run", "--workers", "1", "--wait-hosts", "3", "--listen=127.0.0.1:0", mlp)
	var text []byte
	await(t, "a ticket", func() (ok bool) {
		b, err := os.ReadFile(filepath.Join(first.Dir, "run", door.File))
		text = b
		return err == nil
	})
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		m = startMachine(t, string(text), "join", "--detach", "-")
		await(t, "that it joins", func() bool { return strings.Contains(m.out.String(), "waiting until all machines are there") })
		if err := m.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if status := m.end(t); sig == syscall.SIGINT && status != 130 {
			t.Errorf("status %d\n%s", status, &m.errs)
		}
		m.ends(t)
		if files, _ := os.ReadDir(m.Dir); len(files) > 0 {
			t.Errorf("left %v", files)
		}
	}
}

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/sysfs"
	"github.com/soliton-train/soliton/launcher/internal/door"
)

// clockRun is a run that sets clocks.
type clockRun struct {
	*underWay
	records, mark string
}

func beginClocks(t *testing.T, flags []string, program ...string) *clockRun {
	t.Helper()
	r := &clockRun{underWay: &underWay{t: t}, records: filepath.Join(t.TempDir(), "records")}
	args := append([]string{"run", "--plain", "--threads", "1", "--detect", "10s", "--run-dir", "run"}, flags...)
	r.cmd = launch(t, append(append(args, emulated), program...)...)
	r.dir, r.mark = filepath.Join(r.cmd.Dir, "run"), "LAUNCHER_TEST="+r.cmd.Dir
	r.cmd.Env = append(os.Environ(), r.mark, "SOLITON_CLOCKS_DIR="+r.records)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.cmd.Process.Kill(); r.cmd.Wait() })
	r.until("clocks", 1)
	return r
}

var shortSteps = []string{"--layers", "2", "--layer-ms", "0.5", "--global-batch", "8", "--steps", "1000000"}

// guards returns the processes of guards.
func (r *clockRun) guards() (pids []int) {
	for _, p := range marked(r.t, r.mark) {
		line, _ := os.ReadFile(filepath.Join("/proc", p, "cmdline"))
		if pid, _ := strconv.Atoi(p); bytes.Contains(line, []byte("\x00clock-guard\x00")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Clocks are put back however a run ends: by itself, killed, or killed together with the guard that
// is there for that.
func TestClocksArePutBack(t *testing.T) {
	built(t)
	t.Parallel()
	for _, end := range []string{"stopped", "killed", "killed with its guard"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			tree, limit := sysfs.Processors(t)
			r := beginClocks(t, []string{"--workers", "2", "--clocks", "auto", "--clocks-sysfs", tree}, shortSteps...)
			if e := r.events("clocks")[0]; limit() != "3000000" || len(e.Clocks) != 1 || e.Clocks[0].MHz != 3000 || e.Emulated || len(e.Clocks[0].Workers) != 2 {
				t.Errorf("%s kHz, %+v", limit(), e.Clocking)
			}
			if n := len(r.guards()); n != 1 {
				t.Errorf("%d guards", n)
			}
			record := filepath.Join(r.records, "clocks.json")
			if b, err := os.ReadFile(record); err != nil || !bytes.Contains(b, []byte(`"max":2000000`)) {
				t.Errorf("%s, %v", b, err)
			}
			switch end {
			case "stopped":
				r.cmd.Process.Signal(os.Interrupt)
			case "killed with its guard":
				for _, g := range r.guards() {
					syscall.Kill(g, syscall.SIGKILL)
				}
				fallthrough
			default:
				r.cmd.Process.Kill()
			}
			r.cmd.Wait()
			until(t, func() bool { return len(marked(t, r.mark)) == 0 })
			if end == "killed with its guard" {
				if limit() != "3000000" {
					t.Errorf("%s kHz with no process to put it back", limit())
				}
				// Another user's launcher, or one of another place, would not know.
				cmd := launch(t, "run", "--plain", "--clocks-sysfs", tree, mlp, "--steps", "1", "--eval-every", "0")
				cmd.Env = append(os.Environ(), "SOLITON_CLOCKS_DIR="+r.records)
				if _, out, _ := result(t, cmd); !strings.Contains(out, "clocks are as they were before a launcher that was killed: processors\n") {
					t.Errorf("the next launcher says\n%s", out)
				}
			}
			if limit() != "2000000" {
				t.Errorf("%s kHz is left", limit())
			}
			if _, err := os.Lstat(record); !errors.Is(err, fs.ErrNotExist) {
				t.Error("the record is still there")
			}
			events := r.events("clocks")
			if last := events[len(events)-1]; end == "stopped" && (len(events) != 2 || last.Clocks[0].MHz != 2000) {
				t.Errorf("%+v", last)
			}
		})
	}
}

// Without hardware there is one line, and training goes on.
func TestClocksWithoutHardware(t *testing.T) {
	built(t)
	t.Parallel()
	r := beginClocks(t, []string{"--workers", "2", "--clocks", "auto", "--clocks-sysfs", t.TempDir()}, shortSteps...)
	steps := func() int { return len(metricsSoFar(r.dir)) }
	was := steps()
	until(t, func() bool { return steps() > was+20 })
	r.cmd.Process.Signal(os.Interrupt)
	r.cmd.Wait()
	if e := r.events("clocks"); len(e) != 1 || !strings.HasPrefix(e[0].Reason, "clocks are left alone: ") || len(e[0].Clocks) > 0 {
		t.Errorf("%+v", e)
	}
	if strings.Count(r.out.String(), "clocks are left alone") != 1 {
		t.Errorf("%s", &r.out)
	}
}

// metricsSoFar are the whole lines of a file that is being written.
func metricsSoFar(dir string) (all []rundir.Metrics) {
	text, _ := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	for line := range bytes.Lines(text) {
		var m rundir.Metrics
		if json.Unmarshal(line, &m) == nil {
			all = append(all, m)
		}
	}
	return all
}

// Emulated clocks make workers slower who wait for others, also on a host that does not lead, and no bit another.
func TestEmulatedClocksSameBits(t *testing.T) {
	built(t)
	t.Parallel()
	// Of 13 micro-batches, the last of 4 workers has one. Of two hosts the first one leads, and the last worker is on the other.
	program := []string{"--layers", "2", "--layer-ms", "1", "--global-batch", "13", "--steps", "1000000"}
	// Of three, one is killed, which may lead.
	for hosts, device := range map[string]string{"1": "emulated device of worker 3", "2": "host-1: emulated device of worker 3", "3": "host-2: emulated device of worker 3"} {
		t.Run(hosts+" hosts", func(t *testing.T) {
			t.Parallel()
			r := beginClocks(t, []string{"--workers", "4", "--clocks", "emulated", "--reshape", "off", "--emulate-hosts", hosts}, program...)
			e := r.events("clocks")[0]
			if !e.Emulated || !slices.ContainsFunc(e.Clocks, func(c rundir.Clock) bool { return c.Device == device && c.MHz < 1400 }) {
				t.Errorf("%+v", e.Clocking)
			}
			if hosts == "3" {
				for _, pid := range hostProcesses(t, r.mark, "host-0") {
					syscall.Kill(pid, syscall.SIGKILL)
				}
				r.until("recovered", 1)
				e.AfterStep = len(metricsSoFar(r.dir))
			}
			until(t, func() bool { return len(metricsSoFar(r.dir)) > e.AfterStep+10 })
			r.cmd.Process.Signal(os.Interrupt)
			r.cmd.Wait()
			sameSteps(t, r.dir, program)
		})
	}
}

// sameSteps compares all steps of a run with those of an undisturbed one of the same program.
func sameSteps(t *testing.T, run string, program []string) {
	t.Helper()
	steps := func(dir string) (bits []string) {
		for _, m := range metricsSoFar(dir) {
			bits = append(bits, fmt.Sprint(m.Step, m.Loss, m.GradNorm))
		}
		return bits
	}
	got := steps(run)
	cmd := launch(t, append([]string{"run", "--plain", "--threads", "1", "--workers", "1", "--run-dir", "run", emulated}, append(program, "--layer-ms", "0")...)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	dir := filepath.Join(cmd.Dir, "run")
	until(t, func() bool { return len(steps(dir)) >= len(got) })
	cmd.Process.Signal(os.Interrupt)
	cmd.Wait()
	want := steps(dir)
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("%s, want %s", got[i], want[i])
		}
	}
}

// Each machine sets its own clocks as the leader says. When all of the leader's machine is killed, they are restored there by the guard,
// and the next leader sets those of the machines that are left. A machine that is left alone restores its own.
func TestClocksOfMachines(t *testing.T) {
	built(t)
	t.Parallel()
	for range 5 {
		if clocksOfMachines(t) {
			return
		}
	}
	t.Error("the leader of no run was killed")
}

// clocksOfMachines returns false where the machine that was killed first did not lead: no record says which one does before another takes over.
func clocksOfMachines(t *testing.T) (led bool) {
	var machines []*machine
	var limits []func() string
	// As much for each of 3 workers, and of 2; and so much that what else goes on in the machine changes little.
	program := []string{"--layers", "2", "--layer-ms", "8", "--global-batch", "6", "--steps", "1000000"}
	start := func(stdin string, args ...string) {
		dir, temp := t.TempDir(), t.TempDir()
		tree, limit := sysfs.Processors(t)
		if err := os.Symlink(tree, filepath.Join(dir, "sys")); err != nil {
			t.Fatal(err)
		}
		env := append(os.Environ(), "TMPDIR="+temp, "XDG_CACHE_HOME="+t.TempDir(), "SOLITON_CLOCKS_DIR="+filepath.Join(temp, "records"))
		machines, limits = append(machines, startMachineIn(t, dir, env, stdin, args...)), append(limits, limit)
	}
	start("", append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "1", "--detect", "10s", "--listen=127.0.0.1:0", "--wait-hosts", "3",
		"--reshape", "off", "--clocks", "auto", "--clocks-sysfs", "sys", emulated}, program...)...)
	await(t, "a ticket", func() bool { return strings.Contains(machines[0].out.String(), "launcher join - < ") })
	ticket, err := os.ReadFile(filepath.Join(machines[0].run, door.File))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		start(string(ticket), "join", "--plain", "--run-dir", "run", "-")
	}
	restored := func(limits ...func() string) func() bool {
		return func() bool {
			return !slices.ContainsFunc(limits, func(l func() string) bool { return l() != "2000000" })
		}
	}
	higher := func(limits ...func() string) bool {
		return !slices.ContainsFunc(limits, func(l func() string) bool { n, err := strconv.Atoi(l()); return err != nil || n <= 2000000 })
	}
	// events are those of a kind since a time, as a machine's records say.
	events := func(m *machine, kind string, since time.Time) []rundir.Event {
		r := underWay{dir: m.run}
		return slices.DeleteFunc(r.events(kind), func(e rundir.Event) bool { return e.Time.Before(since) })
	}
	raised := func(m *machine, since time.Time) map[string]bool {
		devices := make(map[string]bool)
		for _, e := range events(m, "clocks", since) {
			for _, c := range e.Clocks {
				if c.MHz > 2000 {
					devices[c.Device] = true
				}
			}
		}
		return devices
	}
	kill := func(m *machine) {
		for _, pid := range marked(t, m.mark) {
			line, _ := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
			if n, err := strconv.Atoi(pid); err == nil && !bytes.Contains(line, []byte("\x00clock-guard\x00")) {
				syscall.Kill(n, syscall.SIGKILL)
			}
		}
	}
	await(t, "higher clocks on all", func() bool { return higher(limits...) })
	for _, m := range machines {
		await(t, "that all machines' records say so", func() bool { return len(raised(m, time.Time{})) == 3 })
	}
	// Any of them may lead. The first leader has no event; its own devices come first, where the first event has some of them.
	leader, _, _ := strings.Cut(events(machines[0], "clocks", time.Time{})[0].Clocks[0].Device, ":")
	if all := events(machines[0], "lead", time.Time{}); len(all) > 0 {
		leader, _, _ = strings.Cut(all[len(all)-1].Reason, " ")
	}
	i := slices.IndexFunc(machines, func(m *machine) bool { return m.workers(t).Host == leader })
	if i < 0 {
		t.Fatalf("%q leads", leader)
	}
	machines[0], machines[i], limits[0], limits[i] = machines[i], machines[0], limits[i], limits[0]
	killed := time.Now()
	kill(machines[0])
	await(t, "clocks as they were on the leader's machine", restored(limits[0]))
	await(t, "that the others continue", func() bool { return len(events(machines[1], "recovered", killed)) > 0 })
	if led = len(events(machines[1], "lead", killed)) > 0; !led {
		t.Logf("%s did not lead", leader)
		killAll(t, machines...)
		return led
	}
	await(t, "the next leader to raise those of the others", func() bool { return len(raised(machines[1], killed)) == 2 && higher(limits[1:]...) })
	kill(machines[1])
	await(t, "clocks as they were", restored(limits...))
	machines[2].end(t) // it can never continue alone
	if n := len(marked(t, machines[2].mark)); n > 0 {
		t.Errorf("%d processes are left", n)
	}
	sameSteps(t, machines[2].run, program)
	return led
}

func TestClocksFlag(t *testing.T) {
	cmd := launch(t, "run", "--clocks", "fast", fake)
	if status, _, errs := result(t, cmd); status != 2 || !strings.Contains(errs, "--clocks fast") {
		t.Errorf("status %d, %s", status, errs)
	}
}

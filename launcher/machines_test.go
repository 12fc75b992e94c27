package main

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/door"
)

// machine is a launcher that takes part in a run over several machines, in a folder of its own.
type machine struct {
	*exec.Cmd
	out, errs output
	mark      string
	run       string // its run directory
	ticket    string // of its run, on the first one
	exited    chan struct{}
}

// output is what a process has printed so far.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func startMachine(t *testing.T, stdin string, args ...string) *machine {
	t.Helper()
	return startMachineIn(t, "", append(os.Environ(), "TMPDIR="+t.TempDir(), "XDG_CACHE_HOME="+t.TempDir()), stdin, args...)
}

// startMachineIn starts another process of a machine, in its folder; "" makes one.
func startMachineIn(t *testing.T, dir string, env []string, stdin string, args ...string) *machine {
	t.Helper()
	m := &machine{Cmd: launch(t, args...), exited: make(chan struct{})}
	if dir != "" {
		m.Dir = dir
	}
	m.mark, m.run = "LAUNCHER_TEST="+m.Dir, filepath.Join(m.Dir, "run")
	m.Env = append(env, m.mark)
	m.Stdin, m.Stdout, m.Stderr = strings.NewReader(stdin), &m.out, &m.errs
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(m.exited)
		_ = m.Wait() // ProcessState has the status
	}()
	t.Cleanup(func() {
		m.kill(t)
		<-m.exited
		if t.Failed() {
			t.Logf("%s:\n%s%s", m.Dir, &m.out, &m.errs)
			files, _ := filepath.Glob(filepath.Join(m.Dir, "run", "log", "*.log"))
			for _, file := range append(files, filepath.Join(m.Dir, "run", "events.jsonl")) {
				text, _ := os.ReadFile(file)
				t.Logf("%s:\n%s", file, text)
			}
		}
	})
	return m
}

// kill kills all processes of a machine.
func (m *machine) kill(t *testing.T) { killAll(t, m) }

// killAll kills all processes of machines, as nearly at once as can be: looking for them takes a while.
func killAll(t *testing.T, all ...*machine) {
	var pids []int
	for _, m := range all {
		for _, pid := range marked(t, m.mark) {
			if n, err := strconv.Atoi(pid); err == nil {
				pids = append(pids, n)
			}
		}
	}
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func (m *machine) end(t *testing.T) int {
	t.Helper()
	await(t, "the end of "+m.Dir, func() bool {
		select {
		case <-m.exited:
			return true
		default:
			return false
		}
	})
	return m.ProcessState.ExitCode()
}

// gathered starts a run of the mlp on so many machines, which share nothing but the loopback interface.
func gathered(t *testing.T, n int, flags ...string) []*machine {
	t.Helper()
	return gatheredFor(t, n, append(flags, mlp, "--steps", "150", "--micro-batch", "4", "--eval-every", "0", "--checkpoint-every", "100ms")...)
}

// gatheredFor is gathered for a program and its flags.
func gatheredFor(t *testing.T, n int, program ...string) []*machine {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "2", "--listen=127.0.0.1:0", "--wait-hosts", string(rune('0' + n))}, program...)
	return joined(t, n, startMachine(t, "", args...), "join", "--plain", "--run-dir", "run", "-")
}

// joined has other machines join the first with its ticket.
func joined(t *testing.T, n int, first *machine, args ...string) []*machine {
	t.Helper()
	all := []*machine{first}
	ticket := filepath.Join(first.run, door.File)
	await(t, "a ticket", func() bool { return strings.Contains(first.out.String(), "launcher join - < ") }) // there may be an old one
	text, err := os.ReadFile(ticket)
	if err != nil {
		t.Fatal(err)
	}
	all[0].ticket = string(text)
	for range n - 1 {
		all = append(all, startMachine(t, string(text), args...))
	}
	return all
}

// Machines that share no folder train one job to the bits of an undisturbed run, also if one of them dies, and each has the records.
func TestMachines(t *testing.T) {
	built(t)
	t.Parallel()
	for _, lost := range []int{-1, 0, 2} {
		t.Run([]string{"undisturbed", "first", "second", "third"}[lost+1], func(t *testing.T) {
			hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
			all := gathered(t, 3)
			names := namesOf(t, all)
			if lost >= 0 {
				await(t, "20 steps", func() bool {
					text, _ := os.ReadFile(filepath.Join(all[lost].Dir, "run", "metrics.jsonl"))
					return bytes.Count(text, []byte("\n")) > 20
				})
				all[lost].kill(t)
			}
			var records []string
			for i, m := range all {
				if i == lost {
					continue
				}
				if status := m.end(t); status != 0 {
					t.Fatalf("machine %d: status %d\n%s", i, status, &m.errs)
				}
				var sum rundir.Summary
				readJSON(t, filepath.Join(m.Dir, "run", "summary.json"), &sum)
				if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.StateSHA256 != hostBaseline.sum.StateSHA256 || sum.Rollbacks > 0 {
					t.Errorf("machine %d: %+v", i, sum)
				}
				if (sum.ModelHost == names[0]) != (lost != 0) || !slices.Contains(names, sum.ModelHost) {
					t.Errorf("%s of %q: the model is on %q", names[i], names, sum.ModelHost)
				}
				m.saysWhereTheModelIs(t, names[i], sum.ModelHost)
				text := ""
				for _, name := range []string{"job.json", "metrics.jsonl", "events.jsonl", "plans.jsonl"} {
					b, err := os.ReadFile(filepath.Join(m.Dir, "run", name))
					if err != nil {
						t.Fatal(err)
					}
					text += string(b)
				}
				records = append(records, text)
				if left := marked(t, m.mark); len(left) > 0 {
					t.Errorf("left behind on machine %d: %v", i, left)
				}
			}
			for _, text := range records[1:] {
				if text != records[0] {
					t.Error("the records of two machines differ")
				}
			}
		})
	}
}

// namesOf returns the names that machines have in their run.
func namesOf(t *testing.T, all []*machine) (names []string) {
	t.Helper()
	for _, m := range all {
		var w rundir.Workers
		await(t, "the name of "+m.Dir, func() bool {
			b, err := os.ReadFile(filepath.Join(m.run, "workers.json"))
			return err == nil && json.Unmarshal(b, &w) == nil && w.Host != ""
		})
		names = append(names, w.Host)
	}
	return names
}

// saysWhereTheModelIs checks that a machine names the one that has the model, and has it if that is its own name.
func (m *machine) saysWhereTheModelIs(t *testing.T, name, host string) {
	t.Helper()
	if !strings.Contains(m.out.String(), "the model is in the run directory of "+host+"\n") {
		t.Errorf("%s does not say that the model is on %s:\n%s", name, host, &m.out)
	}
	if _, err := os.Stat(filepath.Join(m.run, "model.safetensors")); (err == nil) != (name == host) {
		t.Errorf("%s: %v, and the model is on %s", name, err, host)
	}
}

// A machine that was frozen for a while, so that another one leads by now, gets the model all the same: the run was started there.
func TestModelComesHome(t *testing.T) {
	built(t)
	t.Parallel()
	all := gatheredFor(t, 3, append([]string{emulated, "--layer-ms", "8"}, cutJob...)...)
	names := namesOf(t, all)
	events := func(m *machine) string {
		text, _ := os.ReadFile(filepath.Join(m.run, "events.jsonl"))
		return string(text)
	}
	signal := func(sig syscall.Signal) {
		for _, pid := range marked(t, all[0].mark) {
			n, err := strconv.Atoi(pid)
			if err == nil {
				err = syscall.Kill(n, sig)
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	await(t, "a step", func() bool { return strings.Contains(events(all[1]), `"kind":"plan"`) })
	signal(syscall.SIGSTOP)
	await(t, "another leader, which has lost the workers of the first machine", func() bool { return strings.Count(events(all[1]), `"kind":"lost"`) >= 2 })
	signal(syscall.SIGCONT)
	for i, m := range all {
		if status := m.end(t); status != 0 {
			t.Fatalf("%s: status %d\n%s", names[i], status, &m.errs)
		}
		if got := strings.Count(events(m), `"kind":"joined"`); got != 2 {
			t.Fatalf("%s: %d workers have joined again", names[i], got)
		}
		var sum rundir.Summary
		m.saysWhereTheModelIs(t, names[i], names[0])
		readJSON(t, filepath.Join(m.run, "summary.json"), &sum)
		if sum.ModelHost != names[0] {
			t.Errorf("summary.json of %s: %s has the model", names[i], sum.ModelHost)
		}
	}
}

// Machines join one after the other while a run goes on, and then the first fails, which alone voted when it began. One that has
// failed returns under its name.
func TestJoinLater(t *testing.T) {
	built(t)
	t.Parallel()
	want := cutWant(t)
	all := gatheredFor(t, 1, append([]string{emulated, "--layer-ms", "10"}, cutJob...)...) // its time does not depend on how busy the machine is
	steps := func(m *machine) int {
		text, _ := os.ReadFile(filepath.Join(m.Dir, "run", "metrics.jsonl"))
		return bytes.Count(text, []byte("\n"))
	}
	joined := func(m *machine) int {
		text, _ := os.ReadFile(filepath.Join(m.Dir, "run", "events.jsonl"))
		return bytes.Count(text, []byte(`"kind":"joined"`))
	}
	await(t, "a step", func() bool { return steps(all[0]) > 0 })
	for n := 1; n <= 2; n++ {
		all = append(all, startMachine(t, all[0].ticket, "join", "--plain", "--run-dir", "run", "-"))
		await(t, "workers of a machine that joins", func() bool { return joined(all[0]) == 2*n })
	}
	await(t, "three hosts that vote", func() bool {
		text, _ := os.ReadFile(filepath.Join(all[0].Dir, "run", "events.jsonl"))
		return bytes.Count(text, []byte(` votes"`)) == 2
	})
	all[0].kill(t)
	before := steps(all[1])
	await(t, "steps without the first machine", func() bool { return steps(all[1]) > before+2 })
	text, err := os.ReadFile(filepath.Join(all[1].Dir, "run", door.File))
	if err != nil {
		t.Fatal(err)
	}
	all = append(all, startMachine(t, string(text), "join", "--plain", "--run-dir", "run", "-"))
	await(t, "workers of a machine that joins at another one", func() bool { return joined(all[2]) == 6 })
	for _, m := range all[1:] {
		if status := m.end(t); status != 0 {
			t.Fatalf("status %d\n%s", status, &m.errs)
		}
		var sum rundir.Summary
		readJSON(t, filepath.Join(m.Dir, "run", "summary.json"), &sum)
		if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Rollbacks > 0 {
			t.Errorf("%+v", sum)
		}
		if left := marked(t, m.mark); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// A machine with another run's ticket, a damaged one or none is told so, and the run waits on.
func TestJoinRefused(t *testing.T) {
	built(t)
	first := gathered(t, 1+1)[0]
	if status := first.end(t); status != 0 {
		t.Fatalf("status %d", status)
	}
	ticket := first.ticket
	for _, c := range []struct {
		name, ticket, want string
		status             int
	}{
		{"of a run that is over", ticket, "no address of the ticket leads to its run", 1},
		{"damaged", ticket[:len(ticket)-9], "TICKET: ", 2},
		{"none", "hello", "TICKET: ", 2},
		{"empty", "", "TICKET: ", 2},
	} {
		m := startMachine(t, c.ticket, "join", "--plain", "-")
		if status := m.end(t); status != c.status || !strings.Contains(m.errs.String(), c.want) {
			t.Errorf("%s: status %d\n%s", c.name, status, &m.errs)
		}
		if files, _ := os.ReadDir(m.Dir); len(files) > 0 {
			t.Errorf("%s: left %v", c.name, files)
		}
	}
}

// A run that is stopped before all machines are there leaves nothing.
func TestStopWhileGathering(t *testing.T) {
	built(t)
	m := startMachine(t, "", "run", "--plain", "--run-dir", "run", "--listen=127.0.0.1:0", "--wait-hosts", "2", mlp)
	await(t, "a ticket", func() bool {
		_, err := os.Stat(filepath.Join(m.Dir, "run", door.File))
		return err == nil
	})
	if err := m.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if status := m.end(t); status != 130 || !strings.Contains(m.errs.String(), "interrupted before training began") {
		t.Errorf("status %d\n%s", status, &m.errs)
	}
	if files, _ := os.ReadDir(m.Dir); len(files) > 0 {
		t.Errorf("left %v", files)
	}
}

func TestNameOf(t *testing.T) {
	others := []host.Addr{{Name: "a"}, {Name: "a-2"}}
	for machine, want := range map[string]string{"b": "b", "a": "a-3", "node-7.example": "node-7.example", "": "host-2", "../x": "host-2", "-x": "host-2"} {
		if got := nameOf(machine, others); got != want {
			t.Errorf("%q: %q, not %q", machine, got, want)
		}
	}
}

func TestAddrOf(t *testing.T) {
	ip := netip.MustParseAddr("10.0.0.7")
	for addr, want := range map[string]string{"[::]:5": "10.0.0.7:5", "0.0.0.0:5": "10.0.0.7:5", ":5": "10.0.0.7:5", "10.1.1.1:5": "10.1.1.1:5", "x": "", "1.2.3.4:": ""} {
		if got, err := addrOf(addr, ip); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", addr, got, err)
		}
	}
	if _, err := addrOf(":5", netip.Addr{}); err == nil {
		t.Error("no address")
	}
}

// Machines of one name that join a run in the same moment each get a name of their own, and take part.
func TestMachinesJoinAtOnce(t *testing.T) {
	built(t)
	t.Parallel()
	first := startMachine(t, "", "run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "1", "--listen=127.0.0.1:0", "--wait-hosts", "1", mlp,
		"--steps", "100000", "--micro-batch", "4", "--eval-every", "0")
	await(t, "the first step", func() bool { return strings.Contains(first.out.String(), "step ") })
	all := joined(t, 5, first, "join", "--plain", "--workers", "1", "--run-dir", "run", "-")
	await(t, "all workers to join", func() bool {
		text, _ := os.ReadFile(filepath.Join(first.run, "events.jsonl"))
		return bytes.Count(text, []byte(`"kind":"joined"`)) == 4
	})
	if status, _, errs := first.say(t, "stop", "run"); status != 0 {
		t.Error(errs)
	}
	for _, m := range all {
		if status := m.end(t); status != 1 || !strings.Contains(m.errs.String(), "stopped") {
			t.Errorf("status %d\n%s%s", status, &m.out, &m.errs)
		}
	}
}

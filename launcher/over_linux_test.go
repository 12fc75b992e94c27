package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// sshRun is a run that was started over ssh on the first of several machines.
type sshRun struct {
	*machines.Cmd
	out   output
	began time.Time
}

func overSSH(t *testing.T, first *machines.Machine, flags ...string) *sshRun {
	t.Helper()
	args := append([]string{"run", "--plain", "--run-dir", "/tmp/run", "--workers", "2", "--threads", "1"}, flags...)
	r := &sshRun{Cmd: first.Command("/root/launcher", append(args, "/root/mlp", "--steps", "150", "--micro-batch", "4", "--eval-every", "0")...)}
	r.Stdout, r.Stderr = &r.out, &r.out
	r.began = time.Now()
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", &r.out)
		}
	})
	return r
}

// steps waits until so many steps of the run are done, and returns how long that took.
func (r *sshRun) steps(t *testing.T, first *machines.Machine, n int) time.Duration {
	t.Helper()
	await(t, fmt.Sprintf("%d steps", n), func() bool {
		text, _ := os.ReadFile(first.Path("/tmp/run/metrics.jsonl"))
		return bytes.Count(text, []byte("\n")) >= n
	})
	return time.Since(r.began)
}

// trained waits until a machine has the summary of its newest run, with the bits of an undisturbed one, and no process of it.
func trained(t *testing.T, m *machines.Machine) (sum rundir.Summary) {
	t.Helper()
	file := m.Path("/root/runs/latest/summary.json")
	await(t, file, func() bool { _, err := os.Stat(file); return !errors.Is(err, fs.ErrNotExist) })
	readJSON(t, file, &sum)
	if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.StateSHA256 != hostBaseline.sum.StateSHA256 || sum.Rollbacks > 0 {
		t.Errorf("%s: %+v", m.Name, sum)
	}
	await(t, "the end of all processes on "+m.Name, func() bool { return len(processes(m)) == 0 })
	return sum
}

// processes returns the programs of a machine, without those of sshd.
func processes(m *machines.Machine) (programs []string) {
	for _, pid := range m.Processes() {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if name := strings.ReplaceAll(string(text), "\x00", " "); err == nil && name != "" && !strings.Contains(name, "sshd") {
			programs = append(programs, name)
		}
	}
	return programs
}

// One line starts a run on three machines of which two have nothing but a shell and sshd. The first one is powered off, and the others
// train on to the same bits.
func TestSSHMachines(t *testing.T) {
	built(t)
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	ms := machines.Up(t, 3)
	machines.ServeSSH(t, ms)
	ms[0].CopyIn(binary)
	ms[0].CopyIn(mlp)
	r := overSSH(t, ms[0], "--hosts", "m1,m2,root@m3:1")
	t.Logf("from nothing to the first step: %.2f s", r.steps(t, ms[0], 1).Seconds())
	r.steps(t, ms[0], 20)
	ms[0].PowerOff()
	for _, m := range ms[1:] {
		if sum := trained(t, m); sum.WorkersLost < 2 {
			t.Errorf("%s: %+v", m.Name, sum)
		}
	}
}

// Times from the command to the first step, what is said of machines that cannot be reached, and Ctrl-C: go test -args -all.
func TestSSHMachinesInFull(t *testing.T) {
	if !require.All() {
		t.Skip("with -args -all only")
	}
	built(t)
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	ms := machines.Up(t, 4)
	machines.ServeSSH(t, ms)
	ms[0].CopyIn(binary)
	ms[0].CopyIn(mlp)
	for i := range 6 {
		if i%2 == 0 { // nothing is there yet
			for _, m := range ms[1:] {
				_ = os.RemoveAll(m.Path("/root/.cache"))
			}
		}
		r := overSSH(t, ms[0], "--hosts", "m1,m2,m3")
		t.Logf("to the first step: %.2f s, %s", r.steps(t, ms[0], 1).Seconds(), []string{"from nothing", "with the launcher and the program in the caches"}[i%2])
		if err := r.Wait(); err != nil {
			t.Fatal(err)
		}
		for _, m := range ms[1:3] {
			trained(t, m)
		}
		_ = os.RemoveAll(ms[0].Path("/tmp/run"))
	}
	// Ctrl-C on the first machine ends the run on all.
	r := overSSH(t, ms[0], "--hosts", "m1,m2,m3")
	r.steps(t, ms[0], 5)
	if err := r.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := r.Wait(); r.ProcessState.ExitCode() != 130 {
		t.Errorf("%v", err)
	}
	for _, m := range ms {
		await(t, "the end of all processes on "+m.Name, func() bool { return len(processes(m)) == 0 })
	}
	_ = os.RemoveAll(ms[0].Path("/tmp/run"))
	// m2 has no route to m3, so m3 gets no answer from m2.
	if out, err := ms[1].Command("ip", "route", "add", "unreachable", ms[2].Addr().String()).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text, err := ms[0].Command("/root/launcher", "doctor", "--hosts", "m1,m2,m3,m9").CombinedOutput()
	t.Logf("%s", text)
	for _, words := range []string{"fail  m2 to m3  no route at ", "fail  m3 to m2  timeout at ", "ok    m3 to m1  10.77.0.1:", "MTU 1500", "fail  m9        ssh: Could not resolve hostname m9"} {
		if err == nil || !strings.Contains(string(text), words) {
			t.Errorf("doctor does not say %q", words)
		}
	}
	// m2 lets no one in, m3 has no sshd, m4 is off, m9 is unknown.
	_ = os.Remove(ms[1].Path("/root/.ssh/authorized_keys"))
	for _, pid := range ms[2].Processes() {
		_ = killProcess(pid)
	}
	ms[3].PowerOff()
	r = overSSH(t, ms[0], "--hosts", "m1,m2,m3,m4,m9")
	if err := r.Wait(); err == nil {
		t.Error("it ran")
	}
	t.Logf("%.1f s\n%s", time.Since(r.began).Seconds(), &r.out)
	for _, words := range []string{"launcher: m2: root@m2: Permission denied", "launcher: m3: ssh: connect to host m3 port 22: Connection refused", "launcher: m4: ssh: connect to host m4 port 22: ", "launcher: m9: ssh: Could not resolve hostname m9"} {
		if !strings.Contains(r.out.String(), words) {
			t.Errorf("%q is not said", words)
		}
	}
}

func killProcess(pid int) error {
	p, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	return p.Kill()
}

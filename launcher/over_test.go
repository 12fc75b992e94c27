package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/ssh"
)

// fakeSSH stands in for ssh: each machine that it knows is a folder, the home of its user.
const fakeSSH = `#!/bin/sh
while [ "$1" != -- ]; do shift; done
home=$FAKE_SSH/$2
echo "$2: $3" >>"$FAKE_SSH/asked"
[ -d "$home" ] || { echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255; }
[ ! -e "$home/denied" ] || { echo "$2: Permission denied (publickey)." >&2; exit 255; }
echo 'Welcome!' ; cd "$home"; unset XDG_CACHE_HOME
HOME=$home TMPDIR=$home exec sh -c "$3"
`

// overFake starts a run on this machine and others, which fakeSSH knows.
func overFake(t *testing.T, homes []string, flags ...string) (m *machine, root string) {
	t.Helper()
	root = fakeMachines(t, homes)
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "2", "--listen=127.0.0.1:0"}, flags...)
	return startMachine(t, "", append(args, mlp, "--steps", "150", "--micro-batch", "4", "--eval-every", "0")...), root
}

// fakeMachines puts fakeSSH into PATH, and makes the machines that it knows.
func fakeMachines(t *testing.T, homes []string) (root string) {
	t.Helper()
	root = t.TempDir()
	for _, h := range homes {
		if err := os.MkdirAll(filepath.Join(root, h), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "ssh"), []byte(fakeSSH), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("FAKE_SSH", root)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	return root
}

func (m *machine) steps() int {
	text, _ := os.ReadFile(filepath.Join(m.Dir, "run", "metrics.jsonl"))
	return bytes.Count(text, []byte("\n"))
}

// One line starts a run on three machines, two of which have nothing but a shell. They continue when all of the first one is killed.
func TestOverSSH(t *testing.T) {
	built(t)
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	m, root := overFake(t, []string{"b", "me@c"}, "--hosts", "localhost, b,me@c:1")
	await(t, "20 steps", func() bool { return m.steps() > 20 })
	m.Process.Kill() // its agent and workers end with it
	<-m.exited
	ended := []string{"b", "me@c"}
	for _, h := range ended {
		home := filepath.Join(root, h)
		defer func() {
			if t.Failed() {
				text, _ := os.ReadFile(filepath.Join(home, "runs", "latest", "log", "launcher.log"))
				all, _ := filepath.Glob(filepath.Join(home, "*", "*", "*"))
				t.Logf("%s: %q\n%s", h, all, text)
			}
		}()
		file := filepath.Join(home, "runs", "latest", "summary.json")
		await(t, file, func() bool { _, err := os.Stat(file); return err == nil })
		var sum rundir.Summary
		readJSON(t, file, &sum)
		if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.WorkersStarted != 5 || sum.WorkersLost != 2 {
			t.Errorf("%s: %+v", h, sum)
		}
	}
	await(t, "the end of all processes", func() bool { return len(marked(t, m.mark)) == 0 })
	asked, _ := os.ReadFile(filepath.Join(root, "asked"))
	if n := strings.Count(string(asked), "\n"); n != 6 || strings.Contains(string(asked), "soliton-1-") {
		t.Errorf("ssh was asked %d times:\n%s", n, asked)
	}
	if text := m.out.String(); strings.Contains(text, "soliton-1-") || strings.Contains(text, "Welcome") {
		t.Errorf("shown:\n%s", text)
	}
}

// A machine that cannot be reached is named with ssh's own words. The others begin without it if --min-hosts allows that.
func TestOverSSHWithout(t *testing.T) {
	built(t)
	const words = "away: ssh: connect to host away port 22: No route to host"
	m, root := overFake(t, []string{"b", "c"}, "--hosts", "localhost,away,b,c")
	denied := filepath.Join(root, "c", "denied")
	if err := os.WriteFile(denied, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if status := m.end(t); status != 1 || !strings.Contains(m.errs.String(), "launcher: "+words+"\n") || strings.Count(m.errs.String(), "\n") > 2 {
		t.Errorf("status %d\n%s", status, &m.errs)
	}
	await(t, "the end of all processes", func() bool { return len(marked(t, m.mark)) == 0 })
	if files, _ := os.ReadDir(m.Dir); len(files) > 0 {
		t.Errorf("left %v", files)
	}
	m, _ = overFake(t, []string{"b"}, "--hosts", "localhost,away,b", "--min-hosts", "2")
	if status := m.end(t); status != 0 || !strings.Contains(m.out.String(), words+"; the run begins without it") {
		t.Errorf("status %d\n%s%s", status, &m.out, &m.errs)
	}
	await(t, "the end of all processes", func() bool { return len(marked(t, m.mark)) == 0 })
}

// Ctrl-C on any machine stops the run on all, whichever leads.
func TestInterruptAnywhere(t *testing.T) {
	built(t)
	for i := range 2 {
		all := gathered(t, 3)
		all[i].awaitSteps(t, 5)
		if err := all[i].Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		for j, m := range all {
			if status := m.end(t); status != 130 || !strings.Contains(m.errs.String(), "interrupted after step ") {
				t.Errorf("machine %d, Ctrl-C on %d: status %d\n%s", j, i, status, &m.errs)
			}
		}
	}
}

// doctor --hosts has each machine reach each other, and leaves nothing.
func TestDoctorHosts(t *testing.T) {
	built(t)
	root := fakeMachines(t, []string{"b", "c"})
	m := startMachine(t, "", "doctor", "--hosts", "localhost,b,away,c", "--json")
	var report ssh.Report
	if status := m.end(t); status != 1 || json.Unmarshal([]byte(m.out.String()), &report) != nil {
		t.Fatalf("status %d\n%s%s", status, &m.out, &m.errs)
	}
	if want := "ssh: connect to host away port 22: No route to host"; len(report.Machines) != 4 || report.Machines[2].Error != want || !strings.HasPrefix(report.Machines[3].Version, "launcher ") {
		t.Errorf("%+v", report.Machines)
	}
	for _, p := range report.Pairs {
		if !p.OK || p.MTU == 0 || p.Addr == "" || p.MS <= 0 {
			t.Errorf("%+v", p)
		}
	}
	if len(report.Pairs) != 6 {
		t.Errorf("%d pairs", len(report.Pairs))
	}
	if err := os.Mkdir(filepath.Join(root, "away"), 0o700); err != nil {
		t.Fatal(err)
	}
	m = startMachine(t, "", "doctor", "--hosts", "away,b")
	if status := m.end(t); status != 0 || !strings.Contains(m.out.String(), "b to away") || strings.Count(m.out.String(), "ok") != 4 {
		t.Errorf("status %d\n%s%s", status, &m.out, &m.errs)
	}
	if left := marked(t, m.mark); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A machine that takes no part starts a run on three others, shows it until its end, also when the first of them is lost, and has none of
// its files. Ctrl-C stops the run.
func TestAway(t *testing.T) {
	built(t)
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	hosts := []string{"a", "me@b", "c"}
	root := fakeMachines(t, hosts)
	steps := func(host string) int {
		text, _ := os.ReadFile(filepath.Join(root, host, "runs", "latest", "metrics.jsonl"))
		return bytes.Count(text, []byte("\n"))
	}
	total := "150"
	start := func(flags ...string) *machine {
		args := append([]string{"run", "--plain", "--threads", "1", "--workers", "2", "--listen=127.0.0.1:0"}, flags...)
		return startMachine(t, "", append(args, mlp, "--steps", total, "--micro-batch", "4", "--eval-every", "0")...)
	}
	alone := func(m *machine) {
		t.Helper()
		if files, _ := os.ReadDir(m.Dir); len(files) > 0 {
			t.Errorf("files here: %v", files)
		}
		await(t, "the end of all processes", func() bool { return len(marked(t, m.mark)) == 0 })
	}
	m := start("--hosts", "a,me@b:1,gone,c", "--min-hosts", "3")
	await(t, "20 steps", func() bool { return steps("a") > 20 })
	for _, pid := range marked(t, "HOME="+filepath.Join(root, "a")) {
		if n, err := strconv.Atoi(pid); err == nil {
			_ = syscall.Kill(n, syscall.SIGKILL)
		}
	}
	if status := m.end(t); status != 0 {
		t.Fatalf("status %d\n%s%s", status, &m.out, &m.errs)
	}
	for _, words := range []string{"No route to host; the run begins without it", "run directories: a:runs/mlp-", "the run is shown from me@b"} {
		if !strings.Contains(m.out.String(), words) {
			t.Errorf("%q is not said:\n%s%s", words, &m.out, &m.errs)
		}
	}
	// On a slow machine the run may end before the second one is asked to show it.
	if text := m.out.String(); !strings.Contains(text, "the model is in the run directory of ") && !strings.Contains(text, "all steps are done: ") {
		t.Errorf("the end is not shown:\n%s%s", text, &m.errs)
	}
	var sum rundir.Summary
	readJSON(t, filepath.Join(root, "c", "runs", "latest", "summary.json"), &sum)
	if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.WorkersStarted != 5 || sum.WorkersLost != 2 || sum.Rollbacks > 0 {
		t.Errorf("%+v", sum)
	}
	alone(m)
	asked, err := os.ReadFile(filepath.Join(root, "asked"))
	if err != nil || bytes.Contains(asked, []byte("soliton-1-")) {
		t.Errorf("a ticket in the arguments of ssh, or %v:\n%s", err, asked)
	}

	total = "100000" // it does not end before it is stopped
	m = start("--hosts", "a,c")
	await(t, "a step", func() bool { return strings.Contains(m.out.String(), "/100000  loss ") })
	if err := m.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if status := m.end(t); status != 130 || !strings.Contains(m.errs.String(), "stopped after step ") {
		t.Errorf("status %d\n%s%s", status, &m.out, &m.errs)
	}
	alone(m)

	total = "150"
	if err := os.WriteFile(filepath.Join(root, "c", "denied"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	m = start("--hosts", "a,c")
	if status := m.end(t); status != 1 || !strings.Contains(m.errs.String(), "launcher: c: c: Permission denied (publickey).") {
		t.Errorf("status %d\n%s%s", status, &m.out, &m.errs)
	}
	alone(m)
}

func TestOverSSHUsage(t *testing.T) {
	built(t)
	for args, want := range map[string]string{
		"--hosts localhost,b:0":                 "the number after the colon is that of workers",
		"--hosts localhost,-oProxyCommand=x":    "is no host",
		"--hosts localhost,b,b:2":               "b stands there twice",
		"--hosts localhost":                     "this is the only machine; give at least two",
		"--hosts b.invalid,c.invalid --ui":      "--ui is of no use on a machine that takes no part: add this one to --hosts",
		"--hosts localhost,b --hosts-file f":    "give one of them",
		"--hosts-file /nonexistent":             "no such file",
		"--hosts-file /dev/zero":                "has more than 65536 bytes",
		"--hosts-file=":                         "--hosts-file: open",
		"--hosts=":                              "--hosts: no host is named",
		"--hosts localhost,b --min-hosts 3":     "--min-hosts 3: give at most 2",
		"--hosts localhost,b --wait-hosts 2":    "--min-hosts N begins without some of them",
		"--hosts localhost,b --emulate-hosts 2": "give one of them",
		"--min-hosts 2":                         "--min-hosts is for machines that --hosts",
	} {
		var out, errs bytes.Buffer
		status := execute(append(append([]string{"run"}, strings.Fields(args)...), binary), &out, &errs)
		if status != 2 || !strings.Contains(errs.String(), want) {
			t.Errorf("%s: status %d\n%s", args, status, &errs)
		}
	}
}

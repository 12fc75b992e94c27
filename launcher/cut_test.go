package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree/raftlog"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// cutJob is a job whose steps wait more than they compute, so that several runs have room on a
// small machine, and a cut is over long before the end.
var cutJob = []string{"--layers", "2", "--global-batch", "12", "--steps", "80"}

var cutBaseline struct {
	sync.Once
	sum rundir.Summary
}

// cutCommand is a run of the job; each layer takes so many milliseconds.
func cutCommand(t *testing.T, ms string, flags ...string) (cmd *exec.Cmd, mark string) {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, flags...)
	cmd = launch(t, append(append(args, emulated, "--layer-ms", ms), cutJob...)...)
	mark = "LAUNCHER_TEST=" + cmd.Dir
	cmd.Env = append(os.Environ(), mark)
	return cmd, mark
}

// cutTrain runs the job to its end.
func cutTrain(t *testing.T, ms string, flags ...string) (sum rundir.Summary, dir string) {
	t.Helper()
	cmd, mark := cutCommand(t, ms, flags...)
	status, stdout, stderr := result(t, cmd)
	require.Tool(t, "cut", !strings.Contains(stderr, "chaos: cut: "), stderr)
	if status != 0 {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	if left := marked(t, mark); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	dir = filepath.Join(cmd.Dir, "run")
	readJSON(t, filepath.Join(dir, "summary.json"), &sum)
	return sum, dir
}

// cutWant is what an undisturbed run ends with.
func cutWant(t *testing.T) rundir.Summary {
	t.Helper()
	cutBaseline.Do(func() { cutBaseline.sum, _ = cutTrain(t, "0", "--workers", "1") })
	if len(cutBaseline.sum.ParamsSHA256) != 64 {
		t.Fatal("the undisturbed run has failed")
	}
	return cutBaseline.sum
}

// oneHistory checks that no two plans have one version: neither in the records of the run, nor in
// what the hosts have agreed, each in its own log.
func oneHistory(t *testing.T, dir string) {
	t.Helper()
	var newest id.Version
	for _, l := range lines[rundir.Plan](t, filepath.Join(dir, "plans.jsonl")) {
		p, err := plan.Parse(l.Plan)
		if err != nil {
			t.Fatal(err)
		}
		if p.Version.Compare(newest) <= 0 {
			t.Errorf("plan %v comes after %v", p.Version, newest)
		}
		newest = p.Version
	}
	logs, _ := filepath.Glob(filepath.Join(dir, "agreement", "*"))
	agreed, at := map[id.Version][]byte{}, map[id.Version]string{}
	for _, log := range logs {
		host := filepath.Base(log)
		state, err := raftlog.Read(log)
		if err != nil {
			t.Fatal(err)
		}
		plans := state.Plans
		if len(plans) == 0 {
			t.Errorf("%s has agreed to no plan", host)
		}
		for _, p := range plans {
			if other, twice := agreed[p.Version]; twice && !bytes.Equal(other, p.Data) {
				t.Errorf("%s and %s have other plans %v", at[p.Version], host, p.Version)
			}
			agreed[p.Version], at[p.Version] = p.Data, host
		}
	}
	if len(logs) == 0 {
		t.Error("there are no logs of the agreement")
	}
}

// saysItHolds reports whether a host has said that its workers hold.
func saysItHolds(t *testing.T, dir, host string) bool {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(dir, "log", host+".log"))
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Contains(log, []byte(host+" hears of no leader, and its workers hold: 2 of 3 hosts that vote have to be there"))
}

// One of three hosts is cut off, whichever it is, and so the one that leads, too. The others go on without it; it
// holds, and says so. When it is back, its workers end and others join in their place.
func TestCut(t *testing.T) {
	built(t)
	for host := range 3 {
		t.Run(fmt.Sprintf("host-%d", host), func(t *testing.T) {
			t.Parallel()
			want := cutWant(t)
			sum, dir := cutTrain(t, "5", "--workers", "6", "--emulate-hosts", "3", "--detect", "1s", "--chaos", fmt.Sprintf("cut:%d@5:3", host))
			if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss {
				t.Errorf("loss %v, parameters %s; want those of an undisturbed run, %v, %s", sum.Loss, sum.ParamsSHA256, want.Loss, want.ParamsSHA256)
			}
			if sum.ModelHost != "host-0" {
				t.Errorf("the model is on %s", sum.ModelHost)
			}
			oneHistory(t, dir)
			name := fmt.Sprintf("host-%d", host)
			if !saysItHolds(t, dir, name) {
				t.Errorf("%s did not hold", name)
			}
			var lost, joined []int
			for _, e := range lines[rundir.Event](t, filepath.Join(dir, "events.jsonl")) {
				switch {
				case e.Kind == "lost" && e.Host == name:
					lost = append(lost, e.Worker)
				case e.Kind == "joined" && slices.Contains(lost, e.Worker):
					joined = append(joined, e.Worker)
				}
			}
			slices.Sort(joined)
			if want := []int{2 * host, 2*host + 1}; !slices.Equal(slices.Compact(joined), want) {
				t.Errorf("workers %v were lost with %s, and %v joined in their place; want %v", lost, name, joined, want)
			}
			for _, r := range sum.Recoveries {
				t.Logf("%s: %.0f ms", r.Cause, r.TotalMS)
			}
		})
	}
}

// Of four hosts three vote. One of them is cut off, and the fourth takes over its vote; when it is back, its log has been
// taken out, and it finds the leader by asking.
func TestCutVoterIsReplaced(t *testing.T) {
	built(t)
	t.Parallel()
	want := cutWant(t)
	sum, dir := cutTrain(t, "8", "--workers", "8", "--emulate-hosts", "4", "--detect", "1s", "--chaos", "cut:1@5:3")
	if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss {
		t.Errorf("loss %v, parameters %s; want those of an undisturbed run, %v, %s", sum.Loss, sum.ParamsSHA256, want.Loss, want.ParamsSHA256)
	}
	oneHistory(t, dir)
	next := []string{"host-3 votes", "host-1 is no longer awaited by those that vote", "host-1 gets what the hosts agree on"}
	joined := 0
	for _, e := range lines[rundir.Event](t, filepath.Join(dir, "events.jsonl")) {
		if len(next) > 0 && e.Reason == next[0] {
			next = next[1:]
		}
		if e.Kind == "joined" && (e.Worker == 2 || e.Worker == 3) {
			joined++
		}
	}
	if len(next) > 0 || joined != 2 {
		t.Errorf("missing %q; %d workers of host-1 joined again, want 2", next, joined)
	}
}

// A host is frozen for ten seconds. Then its workers wake, and some steps later its agent: no peer
// accepts messages of the workers, so they change nothing until they are killed.
func TestFrozenForTenSeconds(t *testing.T) {
	built(t)
	t.Parallel()
	want := cutWant(t)
	cmd, mark := cutCommand(t, "11", "--workers", "6", "--emulate-hosts", "3", "--detect", "1s")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	dir := filepath.Join(cmd.Dir, "run")
	steps := func() int {
		text, _ := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
		return bytes.Count(text, []byte("\n"))
	}
	await(t, "step 3", func() bool { return steps() >= 3 })
	processes := hostProcesses(t, mark, "host-1")
	if len(processes) != 3 {
		t.Fatalf("processes %v of host-1", processes)
	}
	send := func(sig syscall.Signal, processes ...int) {
		for _, pid := range processes {
			syscall.Kill(pid, sig)
		}
	}
	send(syscall.SIGSTOP, processes...)
	frozen := time.Now()
	await(t, "ten seconds", func() bool { return time.Since(frozen) > 10*time.Second })
	before := steps()
	if before < 10 {
		t.Errorf("%d steps by then: the others did not go on", before)
	}
	send(syscall.SIGCONT, processes[1:]...)
	await(t, "steps while they are awake", func() bool { return steps() >= before+5 })
	for _, pid := range processes[1:] {
		if err := syscall.Kill(pid, 0); err != nil {
			t.Errorf("process %d has ended before its agent woke: %v", pid, err)
		}
	}
	send(syscall.SIGCONT, processes[0])
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	if left := marked(t, mark); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	var sum rundir.Summary
	readJSON(t, filepath.Join(dir, "summary.json"), &sum)
	if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss {
		t.Errorf("loss %v, parameters %s; want those of an undisturbed run, %v, %s", sum.Loss, sum.ParamsSHA256, want.Loss, want.ParamsSHA256)
	}
	if sum.WorkersLost < 2 || sum.WorkersJoined < 2 {
		t.Errorf("%d workers were lost, and %d joined; want 2", sum.WorkersLost, sum.WorkersJoined)
	}
	oneHistory(t, dir)
}

func TestHostCuts(t *testing.T) {
	at := func(seconds int) time.Time { return time.Unix(int64(seconds), 0) }
	c := hostCuts{until: make([]time.Time, 3)}
	check := func(pass bool, want ...string) {
		t.Helper()
		var got []string
		for h := range c.until {
			for _, from := range c.unheard(h) {
				got = append(got, fmt.Sprintf("%d-%d", h, from))
			}
		}
		if !slices.Equal(got, want) || c.pass() != pass {
			t.Errorf("nothing passes %v, want %v and %v", got, want, pass)
		}
	}
	check(false)
	c.begin(1, at(10))
	c.begin(1, at(5)) // it ends later all the same
	both := []string{"0-1", "1-0", "1-2", "2-1"}
	if healed := c.end(at(9)); len(healed) > 0 {
		t.Errorf("%v came back early", healed)
	}
	check(true, both...)
	c.begin(0, at(20))
	if healed := c.end(at(10)); !slices.Equal(healed, []int{1}) {
		t.Errorf("%v came back, want 1", healed)
	}
	check(true, "0-1", "0-2", "1-0", "2-0")
	if healed := c.end(at(20)); !slices.Equal(healed, []int{0}) {
		t.Errorf("%v came back, want 0", healed)
	}
	for range healing {
		check(true)
	}
	check(false)
}

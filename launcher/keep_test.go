package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// saved returns the newest checkpoint of which a machine has the manifest, 0 for none.
func (m *machine) saved() int {
	all, _ := checkpoint.List(m.run)
	for _, e := range all {
		if e.Err == nil {
			return e.Step
		}
	}
	return 0
}

// A run over several machines that loses a shard goes back to its newest checkpoint, whose shards were on two machines each.
func TestMachinesRollBack(t *testing.T) {
	built(t)
	t.Parallel()
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	all := gathered(t, 3, "--mirrors", "0", "--chaos", "slow:1@1:0.3") // so that it is not over before a machine is killed
	await(t, "a checkpoint", func() bool { return all[0].saved() > 10 })
	all[0].kill(t) // it leads
	for i, m := range all[1:] {
		if status := m.end(t); status != 0 {
			t.Fatalf("machine %d: status %d\n%s", i+1, status, &m.errs)
		}
		var sum rundir.Summary
		readJSON(t, filepath.Join(m.run, "summary.json"), &sum)
		if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.StateSHA256 != hostBaseline.sum.StateSHA256 {
			t.Errorf("machine %d: %+v", i+1, sum)
		}
		events, _ := os.ReadFile(filepath.Join(m.run, "events.jsonl"))
		if sum.Rollbacks != 1 || !bytes.Contains(events, []byte("resume from the checkpoint of step ")) {
			t.Errorf("machine %d: %d rollbacks; events:\n%s", i+1, sum.Rollbacks, events)
		}
	}
}

// A run whose machines are all killed is resumed by two of them, which have all of its newest checkpoint together. One alone does not, and
// is told what is missing.
func TestMachinesResume(t *testing.T) {
	built(t)
	t.Parallel()
	hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
	was := gathered(t, 3, "--chaos", "slow:1@1:0.3") // the same
	await(t, "a checkpoint", func() bool { return was[1].saved() > 10 && was[2].saved() > 10 })
	killAll(t, was...)
	for _, m := range was {
		m.end(t)
	}
	resume := func(second string) []*machine {
		first := startMachine(t, "", "resume", "--plain", "--threads", "1", "--listen=127.0.0.1:0", "--wait-hosts", "2", was[1].run)
		first.run = was[1].run
		all := joined(t, 2, first, "join", "--plain", "--run-dir", second, "-")
		all[1].run = second
		return all
	}
	for _, m := range resume(filepath.Join(t.TempDir(), "run")) {
		status := m.end(t)
		missing := regexp.MustCompile(`(?m)^launcher: nothing to resume from: these machines have no whole checkpoint together: the checkpoint of step \d+ is not used: missing are plan-[0-9.]+-worker-\d\.safetensors \(on [a-z0-9-]+ and [a-z0-9-]+\)`)
		if status != 1 || !missing.MatchString(m.errs.String()) {
			t.Fatalf("with one of three: status %d\n%s%s", status, &m.out, &m.errs)
		}
	}
	for i, m := range resume(was[2].run) {
		if status := m.end(t); status != 0 {
			t.Fatalf("machine %d: status %d\n%s%s", i, status, &m.out, &m.errs)
		}
		var sum rundir.Summary
		readJSON(t, filepath.Join(m.run, "summary.json"), &sum)
		if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.StateSHA256 != hostBaseline.sum.StateSHA256 || sum.Steps != hostSteps {
			t.Errorf("machine %d: %+v", i, sum)
		}
		steps := make(map[int]bool)
		for _, l := range lines[rundir.Metrics](t, filepath.Join(m.run, "metrics.jsonl")) {
			steps[l.Step] = true
		}
		if len(steps) != hostSteps {
			t.Errorf("machine %d: metrics of %d steps", i, len(steps))
		}
	}
}

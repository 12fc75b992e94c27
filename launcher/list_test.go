package main

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// runIn makes a run directory with some steps and returns it still open.
func runIn(t *testing.T, path string, job rundir.Job, steps int) *rundir.Dir {
	t.Helper()
	d, err := rundir.Create(path, job.Program, time.Now())
	if err == nil {
		err = d.WriteJob(job, nil)
	}
	for i := range steps {
		err = errors.Join(err, d.AddMetrics(rundir.Metrics{Step: i + 1, Loss: 2.5}))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func TestList(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	now := time.Now()
	runIn(t, filepath.Join(dir, "going"), rundir.Job{Program: "gpt", Steps: 9, Started: now.Add(-90 * time.Minute)}, 3)
	ended := runIn(t, filepath.Join(dir, "ended"), rundir.Job{Program: "mlp\x1b[2J", Steps: 2, Started: now.Add(-72 * time.Hour)}, 2)
	if err := errors.Join(ended.WriteSummary(rundir.Summary{Steps: 2, Workers: []rundir.Worker{{ID: 0}, {ID: 1}}}), ended.Close()); err != nil {
		t.Fatal(err)
	}
	broken := runIn(t, filepath.Join(dir, "broken"), rundir.Job{Program: "x"}, 0)
	if err := errors.Join(broken.AddPlan(rundir.Plan{Plan: []byte(`"none"`)}), broken.Close()); err != nil {
		t.Fatal(err)
	}

	var out, errs strings.Builder
	if code := execute([]string{"ls", dir}, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	for _, want := range []string{
		`(?m)^RUN +PROGRAM +STATE +STEP +LOSS +WORKERS +AGE$`, `going +gpt +running +3/9 +2\.5000 +0 +1h`,
		`ended +mlp\\u001b\[2J +done +2/2 +2\.5000 +2 +3d`, `broken +x +unreadable: .*plans\.jsonl`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %s in\n%s", want, &out)
		}
	}
	if strings.Index(out.String(), "going") > strings.Index(out.String(), "ended") {
		t.Errorf("the newest is not the first:\n%s", &out)
	}

	out.Reset()
	if code := execute([]string{"ls", dir, "--json"}, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	var runs []inspect.Listed
	if err := json.Unmarshal([]byte(out.String()), &runs); err != nil || len(runs) != 3 || runs[0].State != "running" || runs[0].Step != 3 ||
		runs[0].AgeS < 5400 || runs[1].Program != "mlp\x1b[2J" || runs[1].Workers != 2 || runs[2].Error == "" {
		t.Errorf("%v\n%s", err, &out)
	}

	out.Reset()
	if code := execute([]string{"ls", t.TempDir()}, &out, &errs); code != 0 || !strings.HasPrefix(out.String(), "no runs in ") {
		t.Errorf("exit %d: %s%s", code, &out, &errs)
	}
	if code := execute([]string{"ls", filepath.Join(dir, "absent")}, &out, &errs); code != 2 || !strings.Contains(errs.String(), "give a directory with runs") {
		t.Errorf("exit %d: %s", code, &errs)
	}
}

func TestVersion(t *testing.T) {
	var out, errs strings.Builder
	if code := execute([]string{"version"}, &out, &errs); code != 0 || !regexp.MustCompile(`^launcher .*, go1\..*, \w+/\w+, protocol \d+\n$`).MatchString(out.String()) {
		t.Errorf("exit %d: %q%s", code, &out, &errs)
	}
}

// The help and the errors name every command, and none that users cannot use.
func TestCommandsAreListed(t *testing.T) {
	var help, errs strings.Builder
	if code := execute([]string{"--help"}, &help, &errs); code != 0 {
		t.Fatal(code, &errs)
	}
	execute([]string{"fly"}, &help, &errs)
	for _, name := range []string{"ls", "version", "completion", "run", "status", "stop", "resume", "demo"} {
		if !strings.Contains(help.String(), "\n  "+name+" ") || !regexp.MustCompile(`the commands are .*\b`+name+`\b`).MatchString(errs.String()) {
			t.Errorf("no %s in\n%s%s", name, &help, &errs)
		}
	}
	if strings.Contains(help.String()+errs.String(), "agent, ") {
		t.Errorf("hidden commands are listed:\n%s%s", &help, &errs)
	}
}

package rundir

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestResume(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	if _, _, err := Resume(path); !errors.Is(err, ErrNoRun) {
		t.Errorf("of nothing: %v", err)
	}
	d, err := Create(path, "gpt", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	job := Job{Program: "gpt", Steps: 9, ModelConfig: json.RawMessage(`{"a":{"b":1}}`), Command: "./gpt"}
	if err := errors.Join(d.WriteJob(job, []DataFile{{Path: "x"}}), d.AddMetrics(Metrics{Step: 1, Plan: 3}), d.AddEvent(Event{Kind: "start"}), d.WriteSummary(Summary{Steps: 1})); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Resume(path); !errors.Is(err, ErrInUse) {
		t.Errorf("of a run that is under way: %v", err)
	}
	log, err := d.LogFile(0, 0)
	if err == nil {
		_, err = log.WriteString("before\n")
		err = errors.Join(err, log.Close(), d.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	// What a run leaves that is killed.
	metrics, err := os.OpenFile(filepath.Join(path, "metrics.jsonl"), os.O_WRONLY|os.O_APPEND, 0)
	if err == nil {
		_, err = metrics.WriteString(`{"step":2,"lo`)
		err = errors.Join(err, metrics.Close(), os.MkdirAll(filepath.Join(path, "bin", "old"), 0o700))
	}
	if err != nil {
		t.Fatal(err)
	}

	d, was, err := Resume(path)
	if err != nil {
		t.Fatal(err)
	}
	if was.Job.Command != "./gpt" || was.Job.ID() != job.ID() || was.Last == nil || was.Last.Plan != 3 || was.Summary.Steps != 1 {
		t.Errorf("%+v", was)
	}
	if data, err := d.ReadData(); err != nil || len(data) != 1 || data[0].Path != "x" {
		t.Errorf("data %v, %v", data, err)
	}
	if bin, err := d.MakeBin(); err != nil {
		t.Error(bin, err)
	}
	same := job
	same.Program, same.Workers = "other", 9
	log, err = d.LogFile(0, 0)
	if err == nil {
		_, err = log.WriteString("after\n")
		err = errors.Join(err, log.Close(), d.WriteJob(same, []DataFile{{Path: "x"}}), d.AddMetrics(Metrics{Step: 2, Plan: 4}), d.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"job.json": `"program": "gpt"`, "log/worker-0.0.log": "before\nafter\n"} {
		if text, err := os.ReadFile(filepath.Join(path, name)); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %s, %v", name, text, err)
		}
	}
	text, err := os.ReadFile(filepath.Join(path, "metrics.jsonl"))
	if lines := strings.Split(strings.TrimSpace(string(text)), "\n"); err != nil || len(lines) != 2 || !strings.HasPrefix(lines[1], `{"step":2,`) {
		t.Errorf("metrics.jsonl: %s, %v", text, err)
	}
	for _, name := range []string{"summary.json", "bin"} {
		if _, err := os.Stat(filepath.Join(path, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there: %v", name, err)
		}
	}

	// Resumed as another job, the files are its.
	longer := job
	longer.Steps, longer.Lineage = 20, []Ancestor{{ID: job.ID(), Until: 2, Job: json.RawMessage(`{}`)}}
	if d, _, err = Resume(path); err == nil {
		err = errors.Join(d.WriteJob(longer, []DataFile{{Path: "y"}}), d.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	d, was, err = Resume(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if data, err := d.ReadData(); was.Job.ID() != longer.Plain().ID() || was.Job.Floor() != 2 || !was.Job.Started.Equal(job.Started) || err != nil || data[0].Path != "y" {
		t.Errorf("%+v, %v, %v", was.Job, data, err)
	}
}

// The folder of logs is made again where it is gone, and what has taken its place is kept.
func TestResumeWithoutLogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	d, err := Create(path, "gpt", time.Now())
	if err == nil {
		err = errors.Join(d.WriteJob(Job{Program: "gpt", Steps: 9}, nil), d.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(path, "log")
	for _, harm := range []func() error{
		func() error { return os.RemoveAll(log) },
		func() error { return errors.Join(os.RemoveAll(log), os.WriteFile(log, []byte("mine"), 0o600)) },
	} {
		if err := harm(); err != nil {
			t.Fatal(err)
		}
		d, _, err := Resume(path)
		if err != nil {
			t.Fatal(err)
		}
		f, err := d.LogFile(0, 0)
		if err == nil {
			err = errors.Join(f.Close(), d.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(log + badSuffix); string(text) != "mine" {
		t.Errorf("%q, %v", text, err)
	}
}

func TestJobID(t *testing.T) {
	job := Job{Model: "gpt", ModelConfig: json.RawMessage(`{"a":1}`), Seed: 1, Steps: 5}
	same, other := job, job
	same.ModelConfig, same.Workers, same.Threads, same.Args = json.RawMessage("{\n \"a\": 1 }"), 7, 3, []string{"--x"}
	other.Seed = 2
	if job.ID() != same.ID() || job.ID() == other.ID() || len(job.ID()) != 64 {
		t.Error(job.ID(), same.ID(), other.ID())
	}
}

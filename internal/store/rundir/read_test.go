package rundir

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestReadFollowsARun(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	if _, err := Read(d.Path()); !errors.Is(err, ErrNoRun) {
		t.Errorf("before the run: %v", err)
	}
	if err := d.WriteJob(Job{Program: "gpt", Steps: 9}, nil); err != nil {
		t.Fatal(err)
	}
	r, err := Read(d.Path())
	if err != nil || !r.Running || r.Last != nil || r.Plan != nil || r.Event != nil || r.Summary != nil || r.Job.Steps != 9 {
		t.Errorf("at the start: %+v, %v", r, err)
	}

	val := 2.5
	err = errors.Join(
		d.AddPlan(Plan{Time: Time{noon}, Event: "start", Reason: "first", Plan: []byte(`{"a":1}`)}),
		d.AddPlan(Plan{Time: Time{noon}, Event: "loss", Reason: "second", Plan: []byte(`{"a":2}`)}),
		d.AddEvent(Event{Time: Time{noon}, Kind: "start", Worker: -1}),
		d.AddMetrics(Metrics{Step: 1, Loss: 4, ValLoss: &val}),
		d.AddMetrics(Metrics{Step: 2, Loss: 3}),
	)
	if err != nil {
		t.Fatal(err)
	}
	// What is being written does not count yet.
	f, err := os.OpenFile(d.File("metrics.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteString(`{"step":3,`)
	f.Close()
	r, err = Read(d.Path())
	if err != nil || r.Last.Step != 2 || *r.ValLoss != 2.5 || r.Plan.Reason != "second" || string(r.Plan.Plan) != `{"a":2}` || r.Event.Kind != "start" || !r.Event.Time.Equal(Time{noon}.Truncate(1e6)) {
		t.Errorf("in the middle: %+v, %v", r, err)
	}

	if err := errors.Join(d.WriteSummary(Summary{Steps: 2}), d.Close()); err != nil {
		t.Fatal(err)
	}
	r, err = Read(d.Path())
	if err != nil || r.Running || r.Summary == nil || r.Summary.Steps != 2 || r.ValLoss != nil {
		t.Errorf("at the end: %+v, %v", r, err)
	}
}

func TestReadRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := Read(filepath.Join(dir, "absent")); !errors.Is(err, ErrNoRun) {
		t.Errorf("absent: %v", err)
	}
	for name, text := range map[string]string{"job.json": "{", "summary.json": "[]"} {
		d := mustCreate(t, filepath.Join(dir, name))
		if err := errors.Join(d.WriteJob(Job{}, nil), os.WriteFile(d.File(name), []byte(text), 0o666)); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(d.Path()); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A file that is much longer than any description of a run is refused before it is read.
func TestReadRefusesLongFiles(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "r"))
	if err := errors.Join(d.WriteJob(Job{}, nil), os.Truncate(d.File("job.json"), 1<<40)); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(d.Path()); err == nil || !strings.HasSuffix(err.Error(), "job.json: has more than 256 MiB") {
		t.Error(err)
	}
}

// Of a long file only the end is read, from its first whole line.
func TestReadLongLines(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	if err := d.WriteJob(Job{}, nil); err != nil {
		t.Fatal(err)
	}
	long := `{"step":1,"x":"` + strings.Repeat("x", tailSize) + "\"}\n"
	if err := os.WriteFile(d.File("metrics.jsonl"), []byte(long+"{\"step\":2}\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if r, err := Read(d.Path()); err != nil || r.Last == nil || r.Last.Step != 2 {
		t.Errorf("got %+v, %v", r.Last, err)
	}
}

func TestLogs(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	for _, id := range [][2]int{{10, 0}, {2, 1}, {2, 0}} {
		f, err := d.LogFile(id[0], id[1])
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if err := os.WriteFile(d.File("log/notes.txt"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	got, err := Logs(d.Path())
	want := []Log{{2, 0, d.File("log/worker-2.0.log")}, {2, 1, d.File("log/worker-2.1.log")}, {10, 0, d.File("log/worker-10.0.log")}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	if logs, err := Logs(t.TempDir()); err != nil || len(logs) != 0 {
		t.Errorf("without logs: %v, %v", logs, err)
	}
}

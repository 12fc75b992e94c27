package rundir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A process that resumes a run reads its history; lines that its predecessor still writes do not count.
func TestHistory(t *testing.T) {
	owner := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	first := Attach(owner.Path(), "run", false)
	val := 2.5
	if err := errors.Join(
		first.WriteJob(Job{Program: "gpt", Steps: 9}, nil),
		first.AddPlan(Plan{Time: Time{noon}, Event: "start", Plan: []byte(`{}`)}),
		first.AddMetrics(Metrics{Step: 1, Tokens: 10, MS: 2, ValLoss: &val}),
		first.AddMetrics(Metrics{Step: 2, Tokens: 10, MS: 3}),
		first.AddEvent(Event{Kind: "lost", Worker: 1}),
		first.AddEvent(Event{Kind: "recovered", Worker: -1, Recovery: &Recovery{Step: 2}}),
		first.AddEvent(Event{Kind: "recovered", Worker: -1, Recovery: &Recovery{Step: 3}}),
		first.AddEvent(Event{Kind: "rollback", Worker: -1}),
		first.AddEvent(Event{Kind: "lost", Worker: 2}),
		first.AddEvent(Event{Kind: "lost", Worker: 0}),
		first.WriteWorkers(Workers{}),
	); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(first.File("metrics.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteString(`{"step":3,`) // it died here
	f.Close()

	second := Attach(owner.Path(), "run", false)
	if err := errors.Join(second.Resume(Leader{1, 2}), first.AddMetrics(Metrics{Step: 77}), second.AddMetrics(Metrics{Step: 3})); err != nil {
		t.Fatal(err)
	}
	h, err := ReadHistory(owner.Path())
	if err != nil {
		t.Fatal(err)
	}
	if h.Job.Steps != 9 || h.Last == nil || h.Last.Step != 3 || h.ValLoss == nil || *h.ValLoss != val || h.Plan == nil || h.Summary != nil ||
		h.Lost != 3 || len(h.Unrecovered) != 2 || h.Unrecovered[0].Worker != 2 || h.Rollbacks != 1 || len(h.Recoveries) != 2 || h.Recoveries[0].Step != 2 || h.Tokens != 20 || h.MS != 5 {
		t.Errorf("history %+v", h)
	}
	if err := errors.Join(first.Close(), second.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(owner.File("workers.json")); err != nil {
		t.Errorf("who is attached has removed a file of the run: %v", err)
	}
	owner.Adopt()
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(owner.File("job.json")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(owner.File("workers.json")); err == nil {
		t.Error("workers.json is left")
	}
}

func TestReadHistoryOfNothing(t *testing.T) {
	if _, err := ReadHistory(t.TempDir()); !errors.Is(err, ErrNoRun) {
		t.Errorf("%v", err)
	}
}

// How far the run was is known after it has gone back, but not of what it was before something was changed.
func TestCommitted(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	defer d.Close()
	is := func(want int) {
		t.Helper()
		if step, err := Committed(d.Path()); err != nil || step != want {
			t.Errorf("step %d, want %d: %v", step, want, err)
		}
	}
	is(0)
	add := func(plan uint64, steps ...int) {
		t.Helper()
		for _, step := range steps {
			if err := d.AddMetrics(Metrics{Step: step, Plan: plan}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := d.WriteJob(Job{Program: "gpt", Steps: 9}, nil); err != nil {
		t.Fatal(err)
	}
	is(0)
	add(1, 1, 2, 3, 4, 5)
	is(5)
	add(2, 3, 4) // after a rollback
	is(5)
	if err := d.AddEvent(Event{Kind: "changed", Worker: -1, Plan: 3}); err != nil {
		t.Fatal(err)
	}
	is(0)
	add(3, 3)
	is(3)
	add(5, 2)
	is(3)
}

// A leader that sleeps while it takes the records over, and wakes when another one has led since, changes nothing.
func TestLateLeader(t *testing.T) {
	owner := mustCreate(t, filepath.Join(t.TempDir(), "run[1"))
	first := Attach(owner.Path(), "run", false)
	if err := errors.Join(first.WriteJob(Job{Steps: 9}, nil), first.AddMetrics(Metrics{Step: 1})); err != nil {
		t.Fatal(err)
	}
	late, next := Attach(owner.Path(), "run", false), Attach(owner.Path(), "run", false)
	// It has copied the metrics, and sleeps before they get their name.
	slept := false
	_, err := late.takeOver(Leader{1, 5}, metrics, func(line []byte) bool {
		if !slept {
			slept = true
			if err := errors.Join(next.Resume(Leader{1, 6}), next.AddMetrics(Metrics{Step: 2}), next.AddMetrics(Metrics{Step: 3})); err != nil {
				t.Error(err)
			}
		}
		return isRecord[Metrics](line)
	})
	if !errors.Is(err, ErrReplaced) {
		t.Errorf("it takes the records over: %v", err)
	}
	if err := Attach(owner.Path(), "run", false).Resume(Leader{1, 5}); !errors.Is(err, ErrReplaced) {
		t.Errorf("it takes the records over later: %v", err)
	}
	if err := errors.Join(next.AddMetrics(Metrics{Step: 4}), next.Close()); err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile(owner.File(metrics))
	if err != nil || strings.Count(string(text), "\n") != 4 || !strings.Contains(string(text), `"step":4`) {
		t.Errorf("%v: %s", err, text)
	}
	// A later generation has terms of its own, and the end of the run leaves no mark.
	last := Attach(owner.Path(), "run", false)
	if err := errors.Join(last.Resume(Leader{2, 1}), last.Close(), first.Close(), owner.Close()); err != nil {
		t.Error(err)
	}
	left := func() (names []string) {
		entries, err := os.ReadDir(owner.Path())
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".") {
				names = append(names, e.Name())
			}
		}
		return names
	}
	if names := left(); len(names) > 0 {
		t.Errorf("left: %q", names)
	}
	// Nor does one that was killed, once the run is resumed.
	if err := last.begin(Leader{9, 9}); err != nil || len(left()) != 1 {
		t.Fatal(err, left())
	}
	again := &Dir{path: owner.Path()}
	if _, err := again.clean(); err != nil || len(left()) > 0 {
		t.Error(err, left())
	}
}

package rundir

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// removable returns a run directory in a folder of its own, with three steps.
func removable(t *testing.T) (d *Dir, parent string) {
	t.Helper()
	parent = filepath.Join(t.TempDir(), "all")
	d, err := Create(filepath.Join(parent, "run"), "gpt", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	bin, err := d.MakeBin()
	if err == nil {
		err = os.WriteFile(filepath.Join(bin, "program"), []byte("#!"), 0o700)
	}
	if err = errors.Join(err, d.WriteJob(Job{Program: "gpt", Steps: 9}, []DataFile{{Path: "x"}}), d.WriteWorkers(Workers{Agent: "a"})); err != nil {
		t.Fatal(err)
	}
	for step := 1; step <= 3; step++ {
		if err := d.AddMetrics(Metrics{Step: step}); err != nil {
			t.Fatal(err)
		}
	}
	return d, parent
}

func lineCount(t *testing.T, path string) int {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), "\n")
}

// A directory that was removed is made again with all that the run had written.
func TestRemovedDirectory(t *testing.T) {
	d, parent := removable(t)
	if err := os.RemoveAll(parent); err != nil {
		t.Fatal(err)
	}
	var removed *RemovedError
	if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &removed) || removed.Err != nil || !removed.Checkpoints {
		t.Fatalf("%v", err)
	}
	if err := errors.Join(d.AddMetrics(Metrics{Step: 5}), d.AddEvent(Event{Kind: "removed"})); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if r, err := Read(d.Path()); err != nil || r.Last.Step != 5 || r.Job.Steps != 9 || !r.Running {
		t.Errorf("%+v, %v", r, err)
	}
	if n := lineCount(t, d.File("metrics.jsonl")); n != 5 {
		t.Errorf("%d lines of 5 steps", n)
	}
	if info, err := os.Stat(d.File("bin/program")); err != nil || info.Mode().Perm() != 0o700 || info.Size() != 2 {
		t.Errorf("%v, %v", info, err)
	}
	if w, err := ReadWorkers(d.Path()); err != nil || w.Agent != "a" {
		t.Errorf("%+v, %v", w, err)
	}
	if _, err := Create(d.Path(), "gpt", time.Now()); !errors.Is(err, ErrInUse) {
		t.Errorf("another run takes it: %v", err)
	}
	if err := errors.Join(d.WriteSummary(Summary{Steps: 5}), salvaged(d, t.TempDir(), Summary{}), d.Close()); err != nil {
		t.Error(err)
	}
}

// What removes a directory may remove files of it that were made again already: the next line makes them once more.
func TestRemovedWhileMadeAgain(t *testing.T) {
	for _, name := range []string{"job.json", "events.jsonl"} {
		d, _ := removable(t)
		if err := os.Remove(d.File(name)); err != nil {
			t.Fatal(err)
		}
		var removed *RemovedError
		if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &removed) || removed.Err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(d.File(name)); err != nil {
			t.Error(err)
		}
		if r, err := Read(d.Path()); err != nil || r.Last.Step != 4 || r.Job.Steps != 9 {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

func salvaged(d *Dir, folder string, s Summary) error {
	_, err := d.Salvage(folder, s)
	return err
}

// One that cannot be made again is told of once, and all goes elsewhere at the end.
func TestRemovedForGood(t *testing.T) {
	d, parent := removable(t)
	if err := errors.Join(os.RemoveAll(parent), os.WriteFile(parent, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	var removed *RemovedError
	if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &removed) || removed.Err == nil {
		t.Fatalf("%v", err)
	}
	elsewhere := t.TempDir()
	for _, err := range []error{d.AddMetrics(Metrics{Step: 5}), d.WriteWorkers(Workers{}), d.WriteSummary(Summary{Steps: 5}), salvaged(d, elsewhere, Summary{Steps: 5})} {
		if err != nil {
			t.Error(err)
		}
	}
	if n := lineCount(t, filepath.Join(elsewhere, "metrics.jsonl")); n != 5 {
		t.Errorf("%d lines of 5 steps", n)
	}
	t.Setenv("TMPDIR", t.TempDir())
	made, err := d.Salvage("", Summary{Steps: 5}) // the model is elsewhere
	if err != nil || lineCount(t, filepath.Join(made, "metrics.jsonl")) != 5 {
		t.Errorf("%q, %v", made, err)
	}
	for _, folder := range []string{elsewhere, made} {
		if r, err := Read(folder); err != nil || r.Summary == nil || r.Summary.Steps != 5 || r.Job.Steps != 9 {
			t.Errorf("%s: %+v, %v", folder, r, err)
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// Another run that took the name meanwhile is left alone.
func TestRemovedAndTaken(t *testing.T) {
	d, _ := removable(t)
	if err := os.RemoveAll(d.Path()); err != nil {
		t.Fatal(err)
	}
	other, err := Create(d.Path(), "gpt", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := d.AddMetrics(Metrics{Step: 4}); !errors.Is(err, ErrInUse) {
		t.Errorf("%v", err)
	}
	if err := d.WriteSummary(Summary{Steps: 4}); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"metrics.jsonl", "summary.json"} {
		if _, err := os.Lstat(d.File(name)); err == nil {
			t.Errorf("the other run got %s", name)
		}
	}
}

// What a run writes by the name of its directory goes into no other run's.
func TestOwn(t *testing.T) {
	d, _ := removable(t)
	r, err := Read(d.Path())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(Only(r.Job.ID()).Own(d.Path()), Only("x").Own(t.TempDir())); err != nil {
		t.Error(err)
	}
	if err := Only("x").Own(d.Path()); !errors.Is(err, ErrInUse) {
		t.Errorf("%v", err)
	}
}

// refusing is a line file that takes no writes.
type refusing struct {
	lineFile
	err error
}

func (f refusing) Write([]byte) (int, error) {
	return 0, &fs.PathError{Op: "write", Path: metrics, Err: f.err}
}

// What may pass is waited for like a full disk, and costs neither the traces nor the reserve; nothing is written out of its order.
func TestWritesThatWait(t *testing.T) {
	for _, c := range []struct {
		err  error
		says string
	}{
		{unix.EROFS, "is read-only (metrics.jsonl: read-only file system)"},
		{unix.EPERM, "takes no writes (metrics.jsonl: operation not permitted)"},
		{unix.EACCES, "takes no writes (metrics.jsonl: permission denied)"},
		{unix.EMFILE, "takes no writes (metrics.jsonl: too many open files)"},
		{unix.EFBIG, "takes no writes (metrics.jsonl: file too large)"},
	} {
		d, _ := removable(t)
		if err := d.AddTrace([]byte("{}")); err != nil {
			t.Fatal(err)
		}
		was := d.lines[metrics]
		d.lines[metrics] = refusing{was, c.err}
		for range 2 {
			var waits *WaitError
			if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &waits) || waits.Full() || !strings.HasSuffix(err.Error(), c.says) {
				t.Fatalf("%v, want %s", err, c.says)
			}
			if err := d.Flush(); !errors.As(err, &waits) || waits.Full() {
				t.Errorf("%v", err)
			}
		}
		d.lines[metrics] = was
		if err := d.Flush(); err != nil || lineCount(t, d.File("metrics.jsonl")) != 5 || lineCount(t, d.File(traces)) != 1 {
			t.Errorf("%v", err)
		}
	}
	d, _ := removable(t)
	d.lines[metrics] = refusing{d.lines[metrics], unix.EIO}
	var waits *WaitError
	if err := d.AddMetrics(Metrics{Step: 4}); err == nil || errors.As(err, &waits) {
		t.Errorf("a disk with a fault is waited for: %v", err)
	}
}

// What waits when the run ends is written as far as files take it, and the rest is elsewhere.
func TestWaitingLinesAtTheEnd(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	d, _ := removable(t)
	d.lines[metrics] = refusing{d.lines[metrics], unix.EPERM}
	for step := 4; step <= 5; step++ {
		_ = d.AddMetrics(Metrics{Step: step})
	}
	_ = d.AddEvent(Event{Kind: "end"}) // waits for its turn
	_ = d.WriteWorkers(Workers{})
	_ = d.WriteSummary(Summary{})
	err := d.Close()
	if err == nil {
		t.Fatal("nothing is said")
	}
	_, folder, found := strings.Cut(err.Error(), "what it lacks is in ")
	if !found || lineCount(t, filepath.Join(folder, "metrics.jsonl")) != 2 {
		t.Errorf("%v", err)
	}
	left, _ := filepath.Glob(filepath.Join(folder, "*"))
	if len(left) != 1 || lineCount(t, d.File("metrics.jsonl")) != 3 || lineCount(t, d.File("events.jsonl")) != 1 || isMissing(d.File("summary.json")) {
		t.Errorf("elsewhere: %v", left)
	}
}

// A host that leads a run whose directory another process has locked knows that lock again, where the directory comes back. One that
// another run has taken meanwhile is left alone: all records are elsewhere in the end.
func TestAttachedDirectoryComesBack(t *testing.T) {
	for _, taken := range []bool{false, true} {
		owner, parent := removable(t)
		d := Attach(owner.Path(), "run", false)
		defer d.Close()
		if err := d.Resume(Leader{Generation: 1, Term: 2}); err != nil {
			t.Fatal(err)
		}
		away := filepath.Join(parent, "away")
		if err := os.Rename(d.Path(), away); err != nil {
			t.Fatal(err)
		}
		var removed *RemovedError
		if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &removed) || removed.Err != nil {
			t.Fatalf("%v", err)
		}
		if err := errors.Join(os.RemoveAll(d.Path()), os.Rename(away, d.Path())); err != nil {
			t.Fatal(err)
		}
		if taken {
			if err := os.Remove(d.File("lock")); err != nil {
				t.Fatal(err)
			}
			f, err := os.Create(d.File("lock"))
			if err == nil {
				defer f.Close()
				err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		err := d.AddMetrics(Metrics{Step: 5})
		if !errors.As(err, &removed) || (removed.Err == nil) == taken {
			t.Fatalf("taken: %v: %v", taken, err)
		}
		elsewhere, where := t.TempDir(), d.Path()
		if err := errors.Join(d.WriteWorkers(Workers{}), salvaged(d, elsewhere, Summary{})); err != nil {
			t.Error(err)
		}
		if taken {
			where = elsewhere
		}
		if lineCount(t, filepath.Join(where, "metrics.jsonl")) != 5 {
			t.Errorf("taken: %v: lines are lost", taken)
		}
	}
}

// A host that takes over a directory that is away for a moment is not replaced by another one, and can once it is back.
func TestTakeOverOfAMovedDirectory(t *testing.T) {
	owner, parent := removable(t)
	d := Attach(owner.Path(), "run", false)
	defer d.Close()
	away, by := filepath.Join(parent, "away"), Leader{Generation: 1, Term: 2}
	if err := os.Rename(d.Path(), away); err != nil {
		t.Fatal(err)
	}
	if err := d.replaced(by); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if err := d.Resume(by); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if err := os.Rename(away, d.Path()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.Resume(by), d.AddMetrics(Metrics{Step: 4})); err != nil || lineCount(t, d.File("metrics.jsonl")) != 4 {
		t.Errorf("%v", err)
	}
}

// A directory that was moved away, and comes back when another one has its place, gets the lines that were written meanwhile.
func TestMovedDirectory(t *testing.T) {
	d, parent := removable(t)
	away := filepath.Join(parent, "away")
	var removed *RemovedError
	if err := os.Rename(d.Path(), away); err != nil {
		t.Fatal(err)
	}
	if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &removed) || removed.Err != nil {
		t.Fatalf("%v", err)
	}
	if err := errors.Join(os.Rename(d.Path(), filepath.Join(parent, "second")), os.Rename(away, d.Path())); err != nil {
		t.Fatal(err)
	}
	if err := d.AddMetrics(Metrics{Step: 5}); !errors.As(err, &removed) || removed.Err != nil {
		t.Fatalf("%v", err)
	}
	if err := d.AddMetrics(Metrics{Step: 6}); err != nil {
		t.Error(err)
	}
	if n := lineCount(t, d.File("metrics.jsonl")); n != 6 {
		t.Errorf("%d lines of 6 steps", n)
	}
	if _, err := Create(d.Path(), "gpt", time.Now()); !errors.Is(err, ErrInUse) {
		t.Errorf("another run takes it: %v", err)
	}
}

// What another run has left in its place stays as it is, and so does what a later leader of this one has made of it.
func TestMovedAndTaken(t *testing.T) {
	d, parent := removable(t)
	if err := os.Rename(d.Path(), filepath.Join(parent, "away")); err != nil {
		t.Fatal(err)
	}
	other, err := Create(d.Path(), "gpt", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(other.WriteJob(Job{Program: "mlp", Steps: 7}, nil), other.AddMetrics(Metrics{Step: 1}), other.Close()); err != nil {
		t.Fatal(err)
	}
	if err := d.AddMetrics(Metrics{Step: 4}); !errors.Is(err, ErrInUse) {
		t.Errorf("%v", err)
	}
	if n := lineCount(t, d.File("metrics.jsonl")); n != 1 {
		t.Errorf("the other run has %d lines", n)
	}

	shared, _ := removable(t)
	next := Attach(shared.Path(), shared.Path(), false)
	if err := errors.Join(next.Resume(Leader{1, 2}), next.AddMetrics(Metrics{Step: 4})); err != nil {
		t.Fatal(err)
	}
	if err := shared.AddMetrics(Metrics{Step: 4, Loss: 9}); err != nil { // it slept
		t.Error(err)
	}
	if err := errors.Join(next.AddMetrics(Metrics{Step: 5}), next.Close()); err != nil {
		t.Error(err)
	}
	if n := lineCount(t, next.File("metrics.jsonl")); n != 5 {
		t.Errorf("%d lines of 5 steps", n)
	}
}

// A folder that has taken the place of a file is moved aside with what is in it.
func TestFolderInPlaceOfFile(t *testing.T) {
	d, _ := removable(t)
	for _, name := range []string{"metrics.jsonl", "events.jsonl", "summary.json", "workers.json"} {
		_ = os.Remove(d.File(name))
		if err := os.MkdirAll(filepath.Join(d.File(name), "mine"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	var removed *RemovedError
	if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &removed) || removed.Err != nil {
		t.Fatalf("%v", err)
	}
	if err := errors.Join(d.AddMetrics(Metrics{Step: 5}), d.AddEvent(Event{Kind: "removed"}), d.WriteWorkers(Workers{Agent: "a"}), d.WriteSummary(Summary{Steps: 5})); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if m, e := lineCount(t, d.File("metrics.jsonl")), lineCount(t, d.File("events.jsonl")); m != 5 || e != 1 {
		t.Errorf("%d lines of 5 steps, %d of an event", m, e)
	}
	if s, err := readOptional[Summary](d.File("summary.json")); err != nil || s == nil || s.Steps != 5 {
		t.Errorf("%+v, %v", s, err)
	}
	if kept, _ := filepath.Glob(filepath.Join(d.Path(), "*"+badSuffix+"-*", "mine")); len(kept) != 4 {
		t.Errorf("kept: %v", kept)
	}
}

// A cause that is the same is said once, whatever temporary name its text has.
func TestCauseHasNoNames(t *testing.T) {
	if err := cause(&os.LinkError{Op: "rename", Old: "a-1", New: "b", Err: unix.EEXIST}); !errors.Is(err, unix.EEXIST) || strings.Contains(err.Error(), "a-1") {
		t.Error(err)
	}
}

// The folder of logs comes back for a worker that is started later.
func TestRemovedLogs(t *testing.T) {
	d, _ := removable(t)
	if err := os.RemoveAll(d.File("log")); err != nil {
		t.Fatal(err)
	}
	f, err := d.LogFile(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// Other hosts' copies are of the run's own files, whatever has the place of its directory.
func TestCopiesOfACoveredDirectory(t *testing.T) {
	for name, cover := range map[string]func(path string) error{
		"a file": func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"another run": func(path string) error {
			return errors.Join(os.Mkdir(path, 0o700), os.WriteFile(filepath.Join(path, "job.json"), []byte("{}"), 0o600),
				os.WriteFile(filepath.Join(path, metrics), []byte("{}\n"), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, parent := removable(t)
			to := t.TempDir()
			c := d.Copier(nil)
			copyAll(t, c, to, 10)
			if err := errors.Join(os.Rename(d.Path(), filepath.Join(parent, "away")), cover(d.Path())); err != nil {
				t.Fatal(err)
			}
			job, err := os.ReadFile(filepath.Join(parent, "away", "job.json"))
			if err != nil {
				t.Fatal(err)
			}
			var removed *RemovedError
			if err := d.AddMetrics(Metrics{Step: 4}); !errors.As(err, &removed) || removed.Err == nil {
				t.Fatalf("%v", err)
			}
			for again := range 2 {
				parts, _ := c.Next(1 << 20)
				for _, p := range parts {
					if err := Keep(to, p); err != nil {
						t.Fatal(err)
					}
				}
				if text, err := os.ReadFile(filepath.Join(to, "job.json")); err != nil || !bytes.Equal(text, job) || lineCount(t, filepath.Join(to, metrics)) != 4 {
					t.Errorf("%d: %v, job %s, %d lines of metrics", again, err, text, lineCount(t, filepath.Join(to, metrics)))
				}
				c = d.Copier(nil) // for a host that links later
			}
			_ = d.Close() // it has no directory
		})
	}
}

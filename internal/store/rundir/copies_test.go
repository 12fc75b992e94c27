package rundir

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// copyAll brings copies up to date, in parts of at most limit bytes.
func copyAll(t *testing.T, c *Copier, to string, limit int) {
	t.Helper()
	for {
		parts, err := c.Next(limit)
		if err != nil {
			t.Fatal(err)
		}
		if len(parts) == 0 {
			return
		}
		for _, p := range parts {
			if err := Keep(to, p); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Copies become equal to the records, whatever was there before, and follow them.
func TestCopies(t *testing.T) {
	for name, before := range map[string]map[string]string{
		"nothing":              {},
		"a part":               {metrics: "1\n2\n", "job.json": "{}"},
		"lines of another one": {metrics: "1\n9\n9\n9\n9\n9\n", events: "other\n", "job.json": "{1}"},
		"more":                 {metrics: "1\n2\n3\n4\n5\n6\n"},
	} {
		t.Run(name, func(t *testing.T) {
			from, to := t.TempDir(), t.TempDir()
			for file, text := range before {
				write(t, to, file, text)
			}
			write(t, from, metrics, "1\n2\n3\n4\n")
			write(t, from, events, "e\n")
			write(t, from, plans, "")
			write(t, from, "job.json", "{}")
			marks, err := Marks(to)
			if err != nil {
				t.Fatal(err)
			}
			c := NewCopier(from, marks)
			equal := func() {
				t.Helper()
				for _, file := range []string{metrics, events, plans, "job.json"} {
					want, _ := os.ReadFile(filepath.Join(from, file))
					if got, err := os.ReadFile(filepath.Join(to, file)); err != nil || string(got) != string(want) {
						t.Errorf("%s: %q, %v, not %q", file, got, err, want)
					}
				}
			}
			copyAll(t, c, to, 3)
			equal()
			write(t, from, metrics, "1\n2\n3\n4\n5\n")
			copyAll(t, c, to, 100)
			equal()
			write(t, from, metrics, "new\n") // emptied
			if err := WriteFile(filepath.Join(from, "job.json"), []byte("{2}")); err != nil {
				t.Fatal(err)
			}
			copyAll(t, c, to, 100)
			equal()
		})
	}
}

// No part leads out of the directory, or leaves a gap.
func TestKeepRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, p := range []Part{
		{Name: "../x"}, {Name: ""}, {Name: "lock"}, {Name: "model.safetensors"}, {Name: metrics, At: 1}, {Name: metrics, At: -1}, {Name: "job.json", At: 1},
	} {
		if err := Keep(dir, p); !errors.Is(err, ErrNoRecord) {
			t.Errorf("%+v: %v", p, err)
		}
	}
}

// A host whose copies have not arrived yet continues the run by what was agreed.
func TestInherit(t *testing.T) {
	dir := t.TempDir()
	if err := Inherit(dir, []byte(`{"program":"p"}`)); err != nil {
		t.Fatal(err)
	}
	d := Attach(dir, dir, false)
	if err := d.Resume(Leader{}); err != nil {
		t.Fatal(err)
	}
	if err := d.AddMetrics(Metrics{Step: 1}); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Inherit(dir, []byte(`{"program":"q"}`)); err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(filepath.Join(dir, "job.json")); string(text) != `{"program":"p"}` {
		t.Errorf("job.json: %s", text)
	}
}

// What is removed or damaged while no process has it open is made again from what was agreed, and another run's directory is left alone.
func TestRemake(t *testing.T) {
	job := []byte(`{"program":"p","steps":9}`)
	for _, c := range []struct{ name, text string }{{"job.json", ""}, {events, ""}, {"job.json", "{"}} {
		name, text := c.name, c.text
		dir := t.TempDir()
		if err := Inherit(dir, job); err != nil {
			t.Fatal(err)
		}
		write(t, dir, metrics, `{"step":1}`+"\n")
		if text == "" { // removed
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		} else {
			write(t, dir, name, text)
		}
		if err := Remake(dir, job); err != nil {
			t.Fatal(err)
		}
		d := Attach(dir, dir, false)
		if err := errors.Join(d.Resume(Leader{}), d.AddMetrics(Metrics{Step: 2}), d.Close()); err != nil {
			t.Fatal(err)
		}
		if h, err := ReadHistory(dir); err != nil || h.Job.Steps != 9 {
			t.Errorf("%s: %+v, %v", name, h.Job, err)
		}
		if n := lineCount(t, filepath.Join(dir, metrics)); n != 2 {
			t.Errorf("%s: %d lines of 2 steps", name, n)
		}
	}
	other := t.TempDir()
	write(t, other, "job.json", `{"program":"q"}`)
	if err := Remake(other, job); !errors.Is(err, ErrInUse) {
		t.Errorf("another run's: %v", err)
	}
	if err := Remake(t.TempDir(), nil); !errors.Is(err, ErrNoRun) {
		t.Errorf("nothing is agreed: %v", err)
	}
}

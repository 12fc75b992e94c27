package rundir

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ended leaves the directory of a run that was killed after two steps, with a text at the end of a line file.
func ended(t *testing.T, name, garbage string) string {
	t.Helper()
	d, err := Create(filepath.Join(t.TempDir(), "run"), "gpt", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		d.WriteJob(Job{Program: "gpt", Steps: 9, Command: "./gpt"}, nil),
		d.AddPlan(Plan{Event: "start", Reason: "first", Plan: []byte(`{"a":1}`)}), d.AddEvent(Event{Kind: "start", Worker: -1}),
		d.AddMetrics(Metrics{Step: 1, Plan: 1}), d.AddMetrics(Metrics{Step: 2, Plan: 1}), d.Close(),
	)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(d.File(name), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o666)
	if err == nil {
		_, err = f.WriteString(garbage)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return d.Path()
}

// Whatever stands in the line files of a run that has ended, it is resumed with the records among it.
func TestResumeSetsGarbageAside(t *testing.T) {
	long := strings.Repeat("x", maxLine)
	for _, garbage := range []string{
		"garbage\n", "{}\n", "null\n", "7\n", "\n\n", "\x00\xff\xfe\n", "{\"step\":\"two\",\"kind\":3,\"plan\":\n", strings.Repeat("[", 1<<16) + "\n", long + "\n{\n" + long + "\n",
	} {
		for _, name := range []string{metrics, events, plans} {
			if len(garbage) > maxLine && name != events {
				continue
			}
			path := ended(t, name, garbage)
			if r, err := Read(path); err != nil || r.Last == nil && name != metrics {
				t.Errorf("%s: read %+v, %v", name, r.Last, err)
			}
			d, r, err := Resume(path)
			if err != nil {
				t.Fatalf("%s, %.20q: %v", name, garbage, err)
			}
			if r.Last == nil || r.Last.Step != 2 || r.Plan == nil || r.Plan.Reason != "first" || r.Event == nil || r.Event.Kind != "start" {
				t.Errorf("%s, %.20q: %+v", name, garbage, r)
			}
			bad, err := os.ReadFile(d.File(name + ".bad"))
			if err != nil || string(bad) != garbage {
				t.Errorf("%s, %.20q: %d bytes are set aside, of %d; %v", name, garbage, len(bad), len(garbage), err)
			}
			if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], name+".bad") {
				t.Errorf("%s, %.20q: notes %q", name, garbage, r.Notes)
			}
			if err := errors.Join(d.WriteJob(Job{}, nil), d.AddMetrics(Metrics{Step: 3}), d.Close()); err != nil {
				t.Error(err)
			}
			if r, err := Read(path); err != nil || r.Last == nil || r.Last.Step != 3 {
				t.Errorf("%s, %.20q: after it %+v, %v", name, garbage, r.Last, err)
			}
		}
	}
}

// A run that was killed leaves a line without its end, and a list of processes, whose numbers other processes may have by now.
func TestResumeAfterAKill(t *testing.T) {
	path := ended(t, metrics, `{"step":3,"lo`)
	if err := errors.Join(os.WriteFile(filepath.Join(path, workersName), []byte(`{"agent":"x"}`), 0o600), os.WriteFile(filepath.Join(path, "summary.json"), []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	d, r, err := Resume(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := os.Stat(d.File(workersName)); err == nil {
		t.Error("workers.json is there")
	}
	if _, err := ReadWorkers(path); !errors.Is(err, ErrNotRunning) {
		t.Errorf("%v", err)
	}
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "summary.json.bad") || r.Last.Step != 2 {
		t.Errorf("%q, %+v", r.Notes, r.Last)
	}
}

// A command that looks at a run that was killed removes what only a live run has.
func TestReadAfterAKill(t *testing.T) {
	path := ended(t, metrics, "")
	stale := filepath.Join(path, workersName)
	if err := os.WriteFile(stale, []byte(`{"agent":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if r, err := Read(path); err != nil || r.Running {
		t.Fatalf("%+v, %v", r, err)
	}
	if _, err := os.Stat(stale); err == nil {
		t.Error("workers.json is there")
	}
}

func TestResumeRefusesAPipe(t *testing.T) {
	for _, name := range []string{metrics, "traces.jsonl"} {
		path := ended(t, metrics, "")
		pipe := filepath.Join(path, name)
		_ = os.Remove(pipe)
		if err := unix.Mkfifo(pipe, 0o600); err != nil {
			t.Fatal(err)
		}
		dir, _, err := Resume(path)
		if err == nil {
			err = dir.WriteJob(Job{}, nil)
		}
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// A line of any length takes the memory of one record.
func TestLongLinesTakeLittleMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	dropped, err := sift(io.LimitReader(zeros{}, 1<<30), isRecord[Metrics], io.Discard, io.Discard)
	runtime.ReadMemStats(&after)
	if err != nil || dropped != 1 {
		t.Errorf("dropped %d, %v", dropped, err)
	}
	if got := after.TotalAlloc - before.TotalAlloc; got > 8*maxLine {
		t.Errorf("it takes %d MB", got>>20)
	}
}

func TestDropPart(t *testing.T) {
	for _, text := range []string{"", "\n", "a", "a\n", "a\nb", strings.Repeat("x", 1<<17), "a\n" + strings.Repeat("x", 1<<17)} {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		if err := dropPart(f); err != nil {
			t.Error(err)
		}
		got, err := os.ReadFile(f.Name())
		if want := text[:strings.LastIndexByte(text, '\n')+1]; err != nil || string(got) != want {
			t.Errorf("%.20q: %.20q, %v", text, got, err)
		}
	}
}

func FuzzSift(f *testing.F) {
	for _, seed := range []string{"", "\n", "{\"step\":1}\n{\"step\":2}\nx\n{\"st", "{\"kind\":\"start\"}\n", "{\"plan\":{}}\n\x00\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for name, is := range records {
			var good, bad bytes.Buffer
			dropped, err := sift(bytes.NewReader(text), is, &good, &bad)
			whole := text[:bytes.LastIndexByte(text, '\n')+1]
			if err != nil || good.Len()+bad.Len() != len(whole) || bytes.Count(bad.Bytes(), []byte("\n")) != dropped {
				t.Fatalf("%s: %d and %d bytes of %d, %d dropped, %v", name, good.Len(), bad.Len(), len(whole), dropped, err)
			}
			for line := range bytes.Lines(good.Bytes()) {
				if !is(line) {
					t.Fatalf("%s: %q is no record", name, line)
				}
			}
		}
	})
}

// What continues from a record adds to its step and its plan, and both travel as 31 bits.
func TestNumbersOfRecords(t *testing.T) {
	for text, want := range map[string]bool{
		`{"step":30,"loss":1,"plan":70000}`:                true,
		`{"step":30,"loss":1,"plan":4294967296}`:           false,
		`{"step":30,"loss":1,"plan":18446744073709551615}`: false,
		`{"step":9223372036854775807,"loss":1,"plan":1}`:   false,
	} {
		if isRecord[Metrics]([]byte(text)) != want {
			t.Error(text)
		}
	}
}

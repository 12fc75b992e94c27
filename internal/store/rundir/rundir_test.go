package rundir

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var noon = time.Date(2026, 1, 2, 12, 0, 5, 678_900_000, time.UTC)

func read(t *testing.T, d *Dir, name string) string {
	t.Helper()
	b, err := os.ReadFile(d.File(name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func mustCreate(t *testing.T, path string) *Dir {
	t.Helper()
	d, err := Create(path, "gpt", noon)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func TestDefaultNameAndLatest(t *testing.T) {
	t.Chdir(t.TempDir())
	first := mustCreate(t, "")
	if first.String() != "runs/gpt-20260102-120005" {
		t.Errorf("name is %s", first)
	}
	second := mustCreate(t, "")
	if second.String() != "runs/gpt-20260102-120005-2" {
		t.Errorf("second name is %s", second)
	}
	for _, d := range []*Dir{first, second} {
		if err := d.WriteJob(Job{}, nil); err != nil {
			t.Fatal(err)
		}
		if to, _ := os.Readlink("runs/latest"); to != filepath.Base(d.Path()) {
			t.Errorf("runs/latest points to %q after %s", to, d)
		}
	}
}

// A directory that was named is the newest run where its parent is runs.
func TestLatestOfNamedDirectories(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, c := range []struct{ path, latest string }{{"elsewhere/mine", ""}, {"runs/mine", "mine"}, {"deep/runs/other", "mine"}} {
		d := mustCreate(t, c.path)
		if err := d.WriteJob(Job{}, nil); err != nil {
			t.Fatal(err)
		}
		if to, _ := os.Readlink("runs/latest"); to != c.latest {
			t.Errorf("after %s runs/latest points to %q, want %q", c.path, to, c.latest)
		}
	}
	if to, _ := os.Readlink("deep/runs/latest"); to != "other" {
		t.Errorf("deep/runs/latest points to %q", to)
	}
	// What is no link is not replaced.
	if err := errors.Join(os.Remove("runs/latest"), os.WriteFile("runs/latest", []byte("mine"), 0o666)); err != nil {
		t.Fatal(err)
	}
	if err := mustCreate(t, "runs/more").WriteJob(Job{}, nil); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile("runs/latest"); string(b) != "mine" {
		t.Errorf("runs/latest holds %q", b)
	}
}

// Nothing that was in a directory is overwritten or removed, whether it is
// refused, given back or used.
func TestWhatWasThereStays(t *testing.T) {
	for _, name := range append([]string{"lock", "notes.txt"}, files...) {
		dir := t.TempDir()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("mine"), 0o666); err != nil {
			t.Fatal(err)
		}
		d, err := Create(dir, "gpt", noon)
		if name == "notes.txt" {
			if err != nil {
				t.Fatal(err)
			}
			d.Close()
		} else if !errors.Is(err, ErrHasRun) || !strings.Contains(err.Error(), name+" is there") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v", name, err)
		}
		if b, _ := os.ReadFile(path); string(b) != "mine" {
			t.Errorf("%s holds %q", name, b)
		}
		if names, _ := os.ReadDir(dir); len(names) != 1 {
			t.Errorf("%s: left behind: %v", name, names)
		}
	}

	dir := t.TempDir()
	for _, name := range []string{"lock", "worker-0.0.log"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	d := mustCreate(t, dir)
	if f, err := d.LogFile(0, 0); err != nil {
		t.Fatal(err)
	} else {
		f.Close()
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if names, _ := os.ReadDir(dir); len(names) != 2 {
		t.Errorf("of an empty lock and a log elsewhere there are left %v", names)
	}
}

// filling is a file on a disk that has room for 10 bytes.
type filling struct{ lineFile }

func (f filling) Write(b []byte) (int, error) {
	n, err := f.lineFile.Write(b[:min(len(b), 10)])
	return n, errors.Join(err, unix.ENOSPC)
}

// A disk that is full in the middle of a line leaves whole lines.
func TestLinesAreWholeAfterAShortWrite(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	if err := errors.Join(d.WriteJob(Job{}, nil), d.AddEvent(Event{Time: Time{noon}, Kind: "start"})); err != nil {
		t.Fatal(err)
	}
	before := read(t, d, "events.jsonl")
	d.lines[events] = filling{d.lines[events]}
	err := d.writeLine(events, []byte(`{"kind":"end"}`))
	if err == nil {
		t.Error("a line was written to a full disk")
	}
	if got := read(t, d, "events.jsonl"); got != before {
		t.Errorf("left %q", got)
	}
}

func TestCreateRefuses(t *testing.T) {
	t.Chdir(t.TempDir())
	used := mustCreate(t, "used")
	if err := used.WriteJob(Job{}, nil); err != nil {
		t.Fatal(err)
	}
	mustCreate(t, "locked")
	old := mustCreate(t, "old")
	if err := errors.Join(old.WriteJob(Job{}, nil), old.Close()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("file", nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		want error
	}{{"used", ErrInUse}, {"locked", ErrInUse}, {"old", ErrHasRun}, {"file", ErrCreate}, {"file/below", ErrCreate}, {"/proc/run", ErrCreate}} {
		d, err := Create(c.path, "gpt", noon)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, %v", c.path, d, err)
			continue
		}
		line := err.Error()
		if !strings.HasPrefix(line, "--run-dir "+c.path+": ") || !strings.Contains(line, "give a") || strings.Contains(line, "\n") {
			t.Errorf("%s: message %q", c.path, line)
		}
	}
}

func TestUnwritableDefault(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("runs", nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := Create("", "gpt", noon); !errors.Is(err, ErrCreate) || !strings.Contains(err.Error(), "--run-dir DIR") {
		t.Errorf("got %v", err)
	}
}

// A directory that never became a run leaves nothing behind.
func TestCloseWithoutRun(t *testing.T) {
	t.Chdir(t.TempDir())
	d := mustCreate(t, "")
	f, err := d.LogFile(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat("runs"); err == nil {
		t.Error("runs is left behind")
	}

	d = mustCreate(t, "built")
	bin, err := d.MakeBin()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(bin, "gpt"), nil, 0o777), d.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat("built"); err == nil {
		t.Error("a built program is left behind")
	}
}

func TestFiles(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	if err := d.WriteJob(Job{Program: "gpt", ModelConfig: json.RawMessage(`{"layers":2}`), Seed: math.MaxUint64}, []DataFile{{"a<b", 3, "00"}, {"c", 4, "01"}}); err != nil {
		t.Fatal(err)
	}
	val := 2.5
	for _, m := range []Metrics{
		{Step: 1, Loss: float64(float32(0.1)), LR: 1e-7, GradNorm: 0.1, Tokens: 4096, MS: 12.5, Time: Time{noon}, Workers: 1, Plan: 1},
		{Step: 2, Loss: 1.0 / 3, LR: 1e21, GradNorm: 2, Tokens: 4096, MS: 12, Time: Time{noon}, Workers: 1, Plan: 1, ValLoss: &val},
	} {
		if err := d.AddMetrics(m); err != nil {
			t.Fatal(err)
		}
	}
	want := `{"step":1,"loss":0.10000000149011612,"lr":1e-7,"grad_norm":0.1,"tokens":4096,"ms":12.5,"time":"2026-01-02T12:00:05.678Z","workers":1,"plan":1}
{"step":2,"loss":0.3333333333333333,"lr":1e+21,"grad_norm":2,"tokens":4096,"ms":12,"time":"2026-01-02T12:00:05.678Z","workers":1,"plan":1,"val_loss":2.5}
`
	if got := read(t, d, "metrics.jsonl"); got != want {
		t.Errorf("metrics.jsonl:\n%s\nwant\n%s", got, want)
	}
	if err := d.AddMetrics(Metrics{Loss: math.NaN()}); err == nil {
		t.Error("NaN was written")
	}
	if err := d.AddEvent(Event{Time: Time{noon}, Kind: "stop", Plan: 1, Reason: "interrupt"}); err != nil {
		t.Fatal(err)
	}
	if got := read(t, d, "events.jsonl"); got != `{"time":"2026-01-02T12:00:05.678Z","kind":"stop","worker":0,"plan":1,"reason":"interrupt"}`+"\n" {
		t.Errorf("events.jsonl: %s", got)
	}
	if err := d.WriteSummary(Summary{Steps: 60, Loss: 3.1, Workers: []Worker{{}}}); err != nil {
		t.Fatal(err)
	}
	want = `{
  "steps": 60,
  "loss": 3.1,
  "val_loss": null,
  "params_sha256": "",
  "state_sha256": "",
  "data_sha256": "",
  "seconds": 0,
  "tokens_per_second": 0,
  "workers_started": 0,
  "workers_lost": 0,
  "workers_joined": 0,
  "reduction": "",
  "rollbacks": 0,
  "stopped_by": "",
  "workers": [
    {
      "id": 0,
      "stages": [],
      "layers": [],
      "forwards": 0,
      "backwards": 0,
      "bytes_sent": 0,
      "param_bytes": 0,
      "state_bytes": 0
    }
  ],
  "recoveries": []
}
`
	if got := read(t, d, "summary.json"); got != want {
		t.Errorf("summary.json: %s", got)
	}
	if got := read(t, d, "data.json"); got != `[
{"path":"a<b","size":3,"sha256":"00"},
{"path":"c","size":4,"sha256":"01"}
]
` {
		t.Errorf("data.json: %s", got)
	}
	var job Job
	if err := json.Unmarshal([]byte(read(t, d, "job.json")), &job); err != nil || job.Seed != math.MaxUint64 {
		t.Errorf("job.json: %+v, %v", job, err)
	}
	if temps, _ := filepath.Glob(d.File(".*")); temps != nil {
		t.Errorf("temporary files are left: %v", temps)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(d.File("summary.json")); err != nil {
		t.Error(err)
	}
	if err := d.AddMetrics(Metrics{}); err == nil {
		t.Error("a line was written after Close")
	}
}

func TestIsRecord(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	link := dir + "-link"
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Symlink(dir, link)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{
		filepath.Join(dir, "traces.jsonl"): true, filepath.Join(link, "lock"): true, filepath.Join(dir, "checkpoints", "x"): true,
		filepath.Join(dir, "traces.json"): false, dir + ".json": false, filepath.Join(dir, "..", "traces.jsonl"): false,
	} {
		if got := IsRecord(link, path); got != want {
			t.Errorf("%s: %v", path, got)
		}
	}
}

// A list of no files is one, too.
func TestNoData(t *testing.T) {
	d := mustCreate(t, filepath.Join(t.TempDir(), "run"))
	defer d.Close()
	if err := d.WriteJob(Job{}, nil); err != nil {
		t.Fatal(err)
	}
	if data, err := d.ReadData(); err != nil || len(data) != 0 {
		t.Errorf("%v, %v", data, err)
	}
}

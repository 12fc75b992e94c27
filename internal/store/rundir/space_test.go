package rundir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/platform"
)

// smallDisk is a line file on a disk with room for so many bytes, and as many more as the reserve has once that is open.
type smallDisk struct {
	*os.File
	room    *int
	reserve string
}

func (d smallDisk) Write(b []byte) (int, error) {
	room := *d.room
	if _, err := os.Stat(d.reserve); errors.Is(err, fs.ErrNotExist) {
		room += reserveLines
	}
	n := max(0, min(len(b), room))
	*d.room -= n
	if n, err := d.File.Write(b[:n]); n < len(b) || err != nil {
		return n, &fs.PathError{Op: "write", Path: d.Name(), Err: unix.ENOSPC}
	}
	return n, nil
}

func (d smallDisk) Truncate(size int64) error {
	info, err := d.Stat()
	if err != nil {
		return err
	}
	*d.room += int(info.Size() - size)
	return d.File.Truncate(size)
}

// onSmallDisk returns a run directory on a disk with so much room.
func onSmallDisk(t *testing.T, room int) (*Dir, *int) {
	t.Helper()
	d, err := Create(filepath.Join(t.TempDir(), "run"), "gpt", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	if err := d.WriteJob(Job{}, nil); err != nil {
		t.Fatal(err)
	}
	if !d.space.reserved {
		t.Skip("the file system of the temporary directory reserves nothing")
	}
	for name, f := range d.lines {
		d.lines[name] = smallDisk{f.(*os.File), &room, d.File(reserveName)}
	}
	return d, &room
}

// Traces make room for what the run must write, then it lives on the reserve and is told, and in the end its lines wait.
func TestFullDisk(t *testing.T) {
	d, room := onSmallDisk(t, 1000)
	if err := d.AddTrace([]byte(`"` + strings.Repeat("x", 600) + `"`)); err != nil {
		t.Fatal(err)
	}
	steps := 0
	step := func() error { steps++; return d.AddMetrics(Metrics{Step: steps}) }
	for *room > 200 {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(step(), step()); err != nil {
		t.Fatalf("although traces.jsonl could be emptied: %v", err)
	}
	if info, err := os.Stat(d.File(traces)); err != nil || info.Size() > 0 {
		t.Errorf("traces.jsonl: %+v, %v", info, err)
	}
	if err := d.AddTrace([]byte(`1`)); err == nil || !strings.Contains(err.Error(), "emptied") {
		t.Errorf("a trace after that: %v", err)
	}
	var full *WaitError
	for full == nil {
		if err := step(); err != nil && !errors.As(err, &full) {
			t.Fatal(err)
		}
	}
	if !full.Full() || !strings.Contains(full.Error(), "metrics.jsonl") {
		t.Errorf("%v", full)
	}
	if _, err := os.Stat(d.File(reserveName)); err == nil || d.space.late != nil {
		t.Error("the reserve is not used")
	}
	if err := d.AddEvent(Event{Kind: "full"}); err != nil {
		t.Errorf("the reserve has no room for the event: %v", err)
	}
	*room = -reserveLines // now nothing is left
	for _, err := range []error{step(), d.AddEvent(Event{Kind: "note"}), step(), d.Flush()} {
		if !errors.As(err, &full) {
			t.Errorf("%v", err)
		}
	}
	*room = 1 << 20
	if err := d.Flush(); err != nil || !d.space.reserved {
		t.Errorf("%v, reserved %v", err, d.space.reserved)
	}
	if err := step(); err != nil {
		t.Error(err)
	}
	if err := errors.Join(d.WriteSummary(Summary{}), d.Close()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(d.File(reserveName)); err == nil {
		t.Error("the reserve is left")
	}
	r, err := Read(d.Path())
	if err != nil || r.Last.Step != steps || r.Event.Kind != "note" {
		t.Errorf("%+v, %v", r, err)
	}
	text, _ := os.ReadFile(d.File(metrics))
	if n := strings.Count(string(text), "\n"); n != steps {
		t.Errorf("%d lines of %d steps", n, steps)
	}
}

// What waits for room is bounded.
func TestLateWritesAreBounded(t *testing.T) {
	d, _ := onSmallDisk(t, -1<<40)
	for n := 0; ; n++ {
		err := d.AddEvent(Event{Kind: "note", Reason: strings.Repeat("x", 1<<20)})
		var full *WaitError
		if !errors.As(err, &full) {
			if err == nil || n > maxLate>>20 {
				t.Errorf("after %d MB: %v", n, err)
			}
			break
		}
	}
	d.space.late = nil
}

func TestCheckSpace(t *testing.T) {
	dir := t.TempDir()
	if err := CheckSpace(dir, 1<<60, SpareCheckpoints); !platform.IsFull(err) {
		t.Errorf("%v", err)
	}
	if err := CheckSpace(dir, 1, 0); err != nil {
		t.Errorf("%v", err)
	}
}

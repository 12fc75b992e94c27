package inspect

import (
	"bytes"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Status says why training holds and since when there is no checkpoint, from the events of the run, until there is room and a checkpoint.
func TestStatusOfAFullDisk(t *testing.T) {
	d, err := rundir.Create(filepath.Join(t.TempDir(), "run"), "gpt", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	began := time.Date(2026, 1, 2, 15, 4, 5, 0, time.Local)
	if err := d.WriteJob(rundir.Job{Program: "gpt", Steps: 9}, nil); err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		kind                   string
		full, unsaved, starved int // minutes since the beginning; -1: it is not said
	}{
		{"start", -1, -1, -1},
		{"unsaved", -1, 0, -1},
		{"checkpoint", -1, -1, -1},
		{"unsaved", -1, 2, -1},
		{"full", 4, 2, -1},
		{"plan", 4, 2, -1},
		{"room", -1, 2, -1},
		{"checkpoint", -1, -1, -1},
		{"starved", -1, -1, 8},
		{"full", 9, -1, 8},
		{"fed", 9, -1, -1},
		{"starved", 9, -1, 11},
		{"resume", -1, -1, -1},
	} {
		e := rundir.Event{Time: rundir.Time{Time: began.Add(time.Duration(i) * time.Minute)}, Kind: c.kind, Worker: -1, Reason: "because of " + c.kind}
		if err := d.AddEvent(e); err != nil {
			t.Fatal(err)
		}
		r, err := rundir.Read(d.Path())
		s, err2 := StatusOf(r)
		var text bytes.Buffer
		if err := errors.Join(err, err2, s.print(&text)); err != nil {
			t.Fatal(err)
		}
		for _, said := range []struct {
			kind, why string
			since     *time.Time
			minutes   int
		}{{"full", s.DiskFull, s.DiskFullSince, c.full}, {"unsaved", s.Unsaved, s.UnsavedSince, c.unsaved}, {"starved", s.DataBound, s.DataBoundSince, c.starved}} {
			why := "because of " + said.kind
			if want := said.minutes >= 0; (said.why == why) != want || strings.Contains(text.String(), why) != want || (said.since != nil) != want {
				t.Errorf("after event %d, %s: %q, %v\n%s", i, c.kind, said.why, said.since, &text)
			} else if want && !said.since.Equal(began.Add(time.Duration(said.minutes)*time.Minute)) {
				t.Errorf("after event %d, %s: since %v", i, c.kind, said.since)
			}
		}
		if _, err := json.Marshal(s); err != nil {
			t.Error(err)
		}
	}
}

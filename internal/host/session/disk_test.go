package session

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

var errNoSpace = &rundir.WaitError{Dir: "runs/a", File: "metrics.jsonl", Err: unix.ENOSPC}

// holds returns what workers 0 and 1 are told of whether they may commit.
func holds(r *ran) (all []bool) {
	for _, m := range sent[control.Hold](r) {
		all = append(all, m.On)
	}
	return all
}

// Training holds while what must be written has no room, and continues when it has.
func TestTrainingHoldsOnAFullDisk(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.feed(DiskFull{errNoSpace})
	if got, notes := holds(r), r.notes("full"); !slices.Equal(got, []bool{true, true}) || len(notes) != 1 || notes[0] != "training holds until there is room: "+errNoSpace.Error() {
		t.Fatalf("%v, %q", got, notes)
	}
	for range 3 {
		if at := r.s.Alarm(); at.Sub(r.now) != timing.Disk {
			t.Fatalf("looks again after %v", at.Sub(r.now))
		}
		r.now, r.effects = r.s.Alarm(), nil
		if r.feed(AlarmDue{}); len(pick[RetryFiles](r.effects)) != 1 {
			t.Fatal("no attempt is made")
		}
		if r.feed(DiskFull{errNoSpace}); len(r.notes("full")) > 0 {
			t.Error("it is said again")
		}
	}
	r.effects = nil
	r.feed(DiskRoom{})
	if got, notes := holds(r), r.notes("room"); !slices.Equal(got, []bool{false, false}) || len(notes) != 1 {
		t.Errorf("%v, %q", got, notes)
	}
	r.feed(commit(2, 2)...)
	r.feed(commit(2, 3)...)
	r.feed(Received{0, doneAfter(3, "")}, Received{1, doneAfter(3, "")})
	r.feed(leave(0, 1)...)
	if out := r.s.Outcome(); out.Err != nil || !r.s.Over() {
		t.Errorf("%+v", out)
	}
}

// What takes no writes is no full disk, and said so.
func TestTrainingHoldsWhereNothingCanBeWritten(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	err := &rundir.WaitError{Dir: "runs/a", File: "workers.json", Err: unix.EMFILE}
	r.feed(DiskFull{err})
	if notes := r.notes("full"); len(notes) != 1 || notes[0] != "training holds until it can be written: "+err.Error() {
		t.Errorf("%q", notes)
	}
	r.effects = nil
	r.feed(DiskRoom{})
	if notes := r.notes("room"); len(notes) != 1 || !strings.HasPrefix(notes[0], "the run directory can be written again") {
		t.Errorf("%q", notes)
	}
}

// A run that holds stops as it is asked to: at the next commit, and then at once.
func TestStopOnAFullDisk(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.feed(DiskFull{errNoSpace}, StopAsked{Interrupt})
	if got := holds(r); !slices.Equal(got[len(got)-2:], []bool{false, false}) {
		t.Errorf("%v", got)
	}
	if r.feed(DiskFull{errNoSpace}); slices.Contains(holds(r), true) {
		t.Error("the last step cannot be committed")
	}
	r.feed(StopAsked{Interrupt})
	r.feed(leave(0, 1)...)
	var stopped *StoppedError
	if out := r.s.Outcome(); !errors.As(out.Err, &stopped) || !r.s.Over() {
		t.Errorf("%+v", out)
	}
}

// A run directory that was removed is an event, and the next checkpoint is due where there is none any more.
func TestRemovedRunDirectory(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.feed(DirRemoved{Err: errors.New("the run directory runs/a was removed: it is made again"), Checkpoints: true})
	if notes := r.notes("removed"); len(notes) != 1 || notes[0] != "the run directory runs/a was removed: it is made again" {
		t.Errorf("%q", notes)
	}
	if c := &r.s.checkpoints; c.newest != 0 || !c.due.IsZero() && c.due.After(r.now) {
		t.Errorf("the newest checkpoint is of step %d, and the next is due %v", c.newest, c.due.Sub(r.now))
	}
	r.feed(commit(2, 2)...)
	r.feed(commit(2, 3)...)
	last := doneAfter(3, "")
	last.Collector, last.ModelDir = 1, "/tmp/soliton-a"
	first := last
	first.ModelDir = ""
	r.feed(Received{0, first}, Received{1, last})
	r.feed(leave(0, 1)...)
	if out := r.s.Outcome(); out.Err != nil || !strings.Contains(out.Warning, "are in /tmp/soliton-a") {
		t.Errorf("%+v", out)
	}
	if all := pick[WriteSummary](r.effects); len(all) != 1 || all[0].Elsewhere != "/tmp/soliton-a" {
		t.Errorf("%+v", all)
	}
}

// A run that was asked to stop does not wait for its summary to be written.
func TestTheEndOfAStoppedRunDoesNotWait(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.feed(DiskFull{errNoSpace}, StopAsked{Interrupt})
	r.feed(commit(2, 2)...)
	r.feed(Received{0, doneAfter(2, "interrupt")}, Received{1, doneAfter(2, "interrupt")}, DiskFull{errNoSpace})
	r.feed(leave(0, 1)...)
	var stopped *StoppedError
	if out := r.s.Outcome(); !errors.As(out.Err, &stopped) || !r.s.Over() {
		t.Errorf("%+v, over: %v", out, r.s.Over())
	}
}

// A run whose summary has no room is not over.
func TestTheEndWaitsForRoom(t *testing.T) {
	r := savingOf(t, Config{}, 2)
	r.feed(commit(2, 2)...)
	r.feed(commit(2, 3)...)
	r.feed(Received{0, doneAfter(3, "")}, Received{1, doneAfter(3, "")}, DiskFull{errNoSpace})
	r.feed(leave(0, 1)...)
	if r.s.Over() {
		t.Fatal("it is over")
	}
	r.now = r.now.Add(time.Minute)
	if r.feed(AlarmDue{}); len(pick[RetryFiles](r.effects)) != 1 {
		t.Error("no attempt is made")
	}
	if r.feed(DiskRoom{}); !r.s.Over() || r.s.Outcome().Err != nil {
		t.Errorf("%+v", r.s.Outcome())
	}
}

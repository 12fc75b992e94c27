package skips

import (
	"fmt"
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

var a, b, c = plan.Worker{ID: 0, Incarnation: 1}, plan.Worker{ID: 1, Incarnation: 1}, plan.Worker{ID: 2, Incarnation: 1}

func unread(text string) control.Unread {
	return control.Unread{Sample: 17, Index: 5, Step: 3, Text: text}
}

func texts(send []Send) (all []string) {
	for _, m := range send {
		all = append(all, fmt.Sprintf("%s %d.%d to %d", m.Do, m.Sample, m.Skips, m.To.ID))
	}
	return all
}

func check(t *testing.T, got []Send, want ...string) {
	t.Helper()
	if !slices.Equal(texts(got), want) {
		t.Errorf("sent %q, want %q", texts(got), want)
	}
}

func say(t *testing.T, r *Register, from plan.Worker, m control.Unread, committed int) []Send {
	t.Helper()
	send, fault := r.Unread(from, m, committed)
	if fault != "" {
		t.Fatal(fault)
	}
	return send
}

// A sample that no worker can read is skipped once that is agreed.
func TestSkipped(t *testing.T) {
	r := New(nil)
	check(t, say(t, &r, a, unread("bad sector"), 2))
	send, skip := r.Weigh([]plan.Worker{a, b, c}, 2)
	if check(t, send, "try 17.0 to 1", "try 17.0 to 2"); len(skip) > 0 {
		t.Errorf("at once: %v", skip)
	}
	check(t, say(t, &r, a, unread("bad sector"), 2)) // it comes again
	check(t, say(t, &r, b, unread("bad sector"), 2))
	if send, skip = r.Weigh([]plan.Worker{a, b, c}, 2); len(send)+len(skip) > 0 {
		t.Errorf("before worker 2 has answered: %v, %v", send, skip)
	}
	// Worker 2 is lost.
	if send, skip = r.Weigh([]plan.Worker{a, b}, 2); len(send) > 0 || len(skip) != 1 || skip[0].Index != 5 || skip[0].Why != "bad sector" {
		t.Fatalf("%v, %+v", send, skip)
	}
	if send, again := r.Weigh([]plan.Worker{a, b}, 2); len(send)+len(again) > 0 {
		t.Errorf("it is proposed twice: %v", again)
	}
	send, ok := r.Agreed(skip[0].Spot, []plan.Worker{a, b, c})
	if check(t, send, "skip 17.0 to 0", "skip 17.0 to 1", "skip 17.0 to 2"); !ok || r.Open() || !slices.Equal(r.Ledger(), []uint64{17}) {
		t.Errorf("%v, %v", ok, r.Ledger())
	}
	if _, ok := r.Agreed(skip[0].Spot, nil); ok {
		t.Error("it is skipped twice")
	}
	check(t, r.Verdicts(c), "skip 17.0 to 2")
	// A worker that has not heard asks again, and then for the next sample.
	check(t, say(t, &r, c, unread("bad sector"), 2), "skip 17.0 to 2")
	next := unread("bad sector")
	next.Skips = 1
	check(t, say(t, &r, c, next, 2))
	if send, _ = r.Weigh([]plan.Worker{c}, 2); len(send) > 0 || !r.Open() {
		t.Errorf("%v", send)
	}
}

// A sample that one worker can read is not skipped, and those fail that cannot.
func TestReadable(t *testing.T) {
	r := New(nil)
	say(t, &r, b, unread("bad sector"), 2)
	say(t, &r, a, unread("bad sector"), 2)
	r.Weigh([]plan.Worker{a, b, c}, 2)
	check(t, say(t, &r, c, unread(""), 2), "fail 17.0 to 0", "fail 17.0 to 1")
	if r.Open() || len(r.Ledger()) > 0 {
		t.Error("it is not settled")
	}
	check(t, say(t, &r, c, unread(""), 2)) // too late
}

// A step that was committed before is computed again with the same samples.
func TestCommittedBefore(t *testing.T) {
	r := New([]uint64{17, 17})
	m := unread("bad sector")
	check(t, say(t, &r, a, m, 3), "skip 17.0 to 0")
	if m.Skips = 2; true {
		check(t, say(t, &r, a, m, 3), "fail 17.2 to 0")
	}
	// Others commit the step while it is not known yet whether the sample can be read.
	r = New(nil)
	check(t, say(t, &r, a, unread("bad sector"), 2))
	send, skip := r.Weigh([]plan.Worker{a}, 3)
	if check(t, send, "fail 17.0 to 0"); len(skip) > 0 || r.Open() {
		t.Errorf("skipped: %v", skip)
	}
	for _, bad := range []control.Unread{{Sample: 17, Skips: 3, Step: 1, Text: "x"}, {Skips: -1, Step: 1}, {Index: -1, Step: 1}, {}} {
		if _, fault := r.Unread(a, bad, 0); fault == "" {
			t.Errorf("%+v is taken", bad)
		}
	}
}

// What is kept is bounded.
func TestBounds(t *testing.T) {
	r := New(nil)
	for i := range maxOpen + 1 {
		m := unread("x")
		m.Sample = uint64(i)
		if send := say(t, &r, a, m, 2); (len(send) > 0) != (i == maxOpen) {
			t.Fatalf("question %d: %v", i, send)
		}
	}
}

package delivery

import (
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// caller is a worker as package process has it.
type caller struct {
	told int
}

// Whatever happens, each committed step is delivered in order, and again only after its caller's process ended in the call.
func TestQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := New(rundir.Delivery{}, nil)
		record := q.Record()
		var committed, newest, calls int // newest is the newest step that a call has begun for
		workers := map[plan.Worker]*caller{}
		var all []plan.Worker
		start := func() {
			w := plan.Worker{ID: id.WorkerID(len(workers))}
			workers[w] = &caller{}
			all = append(all, w)
		}
		gone := func(i int) plan.Worker {
			w := all[i]
			all = append(all[:i:i], all[i+1:]...)
			return w
		}
		start()
		inCall := false // the last call of a process that has ended did not return
		next := func() {
			to, m, appointed, ok := q.Next(all)
			if appointed {
				record = q.Record()
			}
			if !ok {
				return
			}
			takeOver := func() {
				var steps []control.Step
				for s := record.Step + 1; s <= committed; s++ {
					steps = append(steps, control.Step{Step: s})
				}
				q = Inherit(record, steps)
			}
			if rapid.IntRange(0, 5).Draw(t, "lost") == 0 {
				takeOver()
				return
			}
			w := workers[to]
			w.told = max(w.told, m.After)
			if m.Step == nil {
				return
			}
			step := m.Step.Step
			if step > w.told {
				calls++
				switch {
				case step == newest+1 && !m.Again:
				case step == newest && m.Again && inCall:
				default:
					t.Fatalf("called for step %d, again %v, after step %d", step, m.Again, newest)
				}
				newest = step
				if rapid.IntRange(0, 3).Draw(t, "dies") == 0 {
					inCall = true
					gone(indexOf(all, to))
					q.Lost(to)
					return
				}
				inCall = false
				w.told = step
			}
			if rapid.IntRange(0, 5).Draw(t, "leader") == 0 {
				takeOver() // before the answer comes
			}
			if changed, err := q.Confirm(to, control.Delivered{Step: w.told}); err != nil {
				t.Fatal(err)
			} else if changed {
				record = q.Record()
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			switch rapid.IntRange(0, 5).Draw(t, "event") {
			case 0, 1:
				committed++
				q.Commit(control.Step{Step: committed})
			case 2:
				q.Commit(control.Step{Step: rapid.IntRange(1, committed+1).Draw(t, "repeated")})
				committed = max(committed, q.Record().Step+len(q.steps))
			case 3:
				start()
			case 4:
				if len(all) > 0 {
					i := rapid.IntRange(0, len(all)-1).Draw(t, "leaves")
					w := gone(i)
					if _, err := q.Confirm(w, control.Delivered{Step: workers[w].told, Left: true}); err != nil {
						t.Fatal(err)
					}
				}
			}
			next()
		}
		start()
		for range 2 * committed {
			if len(all) == 0 {
				start()
			}
			next()
		}
		for len(all) == 0 || !q.Done() {
			start()
			next()
		}
		if record.Step != committed || newest != committed {
			t.Errorf("%d calls, the record says %d and %d were committed", calls, record.Step, committed)
		}
	})
}

func indexOf(all []plan.Worker, w plan.Worker) int {
	for i, x := range all {
		if x == w {
			return i
		}
	}
	return -1
}

// A worker that was sent a step, but lives, keeps it.
func TestQueueWaits(t *testing.T) {
	q := New(rundir.Delivery{Step: 3, Files: []rundir.LineFile{{Path: "a", Size: 5}}}, nil)
	a, b := plan.Worker{ID: 0}, plan.Worker{ID: 1}
	to, m, appointed, ok := q.Next([]plan.Worker{a, b})
	if want := (control.Deliver{After: 3, Files: []rundir.LineFile{{Path: "a", Size: 5}}}); to != a || !appointed || !ok || !reflect.DeepEqual(m, want) {
		t.Fatalf("%v is told %+v, %v, %v", to, m, appointed, ok)
	}
	q.Commit(control.Step{Step: 4})
	q.Commit(control.Step{Step: 5})
	if to, m, appointed, ok := q.Next([]plan.Worker{b}); to != a || appointed || !ok || m.Step.Step != 4 || m.Again {
		t.Fatalf("%v is told %+v, %v, %v", to, m, appointed, ok)
	}
	if _, _, _, ok := q.Next([]plan.Worker{b}); ok {
		t.Error("a second step is sent before the first is confirmed")
	}
	if changed, _ := q.Confirm(b, control.Delivered{Step: 4}); changed {
		t.Error("another worker confirmed it")
	}
	q.Lost(a)
	if to, m, appointed, ok := q.Next([]plan.Worker{b}); to != b || !appointed || !ok || m.Step.Step != 4 || !m.Again {
		t.Fatalf("%v is told %+v, %v, %v", to, m, appointed, ok)
	}
	if changed, _ := q.Confirm(b, control.Delivered{Step: 4}); !changed || q.Record().Step != 4 || q.Record().Worker != 1 || q.Done() {
		t.Errorf("the record is %+v", q.Record())
	}
	if _, err := q.Confirm(b, control.Delivered{Step: 5, Files: make([]rundir.LineFile, MaxFiles+1)}); err == nil {
		t.Error("any number of files is taken")
	}
	var off Queue
	if off.Commit(control.Step{Step: 1}); !off.Done() {
		t.Error("a program without OnStep waits for it")
	}
}

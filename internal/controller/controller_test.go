package controller

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

func TestCompleteNeedsTheWholeShard(t *testing.T) {
	c := storyJob(t, 2, 1, 6, 1, 1)
	at := id.Point{Step: 3}
	m, s := c.members[1], c.plan.Shards[1]
	mid := s.Lo + 4096
	for _, x := range []struct {
		passed id.Point
		ranges []id.Range
		want   int
	}{
		{at, []id.Range{{Layer: s.Layer, Lo: mid, Hi: s.Hi}, {Layer: s.Layer, Lo: s.Lo, Hi: mid}}, 1},
		{id.Point{Step: 2}, []id.Range{{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}}, 0},            // of another step
		{id.Point{Step: 3, Repair: 1}, []id.Range{{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}}, 0}, // done again
		{at, []id.Range{{Layer: s.Layer, Lo: mid, Hi: s.Hi}}, 0},
		{at, []id.Range{{Layer: s.Layer + 9, Lo: s.Lo, Hi: s.Hi}}, 0},
		{at, nil, 0},
	} {
		m.report = &control.Report{Passed: x.passed, Complete: x.ranges}
		got := complete(&c.plan, []*member{m}, at)
		if len(got) != x.want || x.want > 0 && got[0] != (plan.Complete{Shard: 1, Worker: 1}) {
			t.Errorf("%v: %v", x, got)
		}
	}
}

// Who has repaired and who has not are one point apart, like who has passed a
// point and who has not.
func TestPointsFollow(t *testing.T) {
	for _, c := range []struct {
		p, latest id.Point
		want      bool
	}{
		{id.Point{Step: 3}, id.Point{Step: 3}, true},
		{id.Point{Step: 3}, id.Point{Step: 3, Repair: 1}, true},
		{id.Point{Step: 3}, id.Point{Step: 3, Repair: 2}, false},
		{id.Point{Step: 2}, id.Point{Step: 3, Repair: 1}, false},
		{id.Point{Step: 3, Repair: 2}, id.Point{Step: 4}, true},
		{id.Point{Step: 3, Gate: id.Evaluated, Repair: 1}, id.Point{Step: 4}, true},
		{id.Point{Step: 3, Repair: 1}, id.Point{Step: 3, Gate: id.Evaluated}, true},
		{id.Point{Step: 3, Repair: 1}, id.Point{Step: 3, Gate: id.Evaluated, Repair: 1}, false},
		{id.Point{Step: 4, Repair: 1}, id.Point{Step: 4}, false},
	} {
		if got := follows(c.p, c.latest); got != c.want || c.p != c.latest && got && c.p.Compare(c.latest) >= 0 {
			t.Errorf("%v before %v: %v, compare %d", c.p, c.latest, got, c.p.Compare(c.latest))
		}
	}
}

// TestFillsAreOrdered holds that every fill is newer than all before it, whoever leads: a worker drops older
// ones, and a boundary plan that waits for a dropped fill never comes.
func TestFillsAreOrdered(t *testing.T) {
	c := storyJob(t, 3, 1, 6, 1, 1)
	now := time.Unix(0, 0)
	fills := func(c *Controller, n int) (all []id.Fill) {
		for i := range n {
			w := plan.Worker{ID: 3, Incarnation: i}
			for _, e := range []Event{Joined{w, "addr"}, Dead{Worker: w, Cause: "killed"}} {
				for _, e := range c.Step(now, e) {
					if e, ok := e.(Copy); ok && (len(all) == 0 || all[len(all)-1] != e.Fill.ID) {
						all = append(all, e.Fill.ID)
					}
				}
			}
		}
		return all
	}
	all := fills(c, 1500)
	if len(all) < 1500 {
		t.Fatalf("%d fills", len(all))
	}
	restart := c.cfg // the leader of the term starts over
	restart.Attempt, restart.Fills = c.Last()
	c = New(restart)
	all = append(all, fills(c, 2)...)
	takeover := c.cfg
	takeover.Term, takeover.Attempt, takeover.Fills = 2, 0, 0
	all = append(all, fills(New(takeover), 2)...)
	for i := range all[1:] {
		if all[i].Compare(all[i+1]) >= 0 {
			t.Fatalf("fill %v after %v", all[i+1], all[i])
		}
	}
}

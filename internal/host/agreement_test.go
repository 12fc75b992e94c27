package host

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
)

// What was ordered is in the log, which another process can open after the end.
func TestAgreement(t *testing.T) {
	ws, dir := startWorkers(t, 3, "die-1", "5")
	a := newHost(t, Config{Settings: session.Settings{Program: "./fake", Detect: time.Second}, RunDir: dir})
	if o := runWith(t.Context(), a, ws...); o.Err != nil {
		t.Fatal(o.Err)
	}
	node, err := agree.OpenLocal(dir.File("agreement"), "host-0", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	s := node.State()
	if s.Generation != 2 || len(s.Job.Data) == 0 || s.Newest != (id.Version{Generation: 1, N: 2}) || len(s.Plans) != 2 || !strings.HasPrefix(s.Plans[1].Reason, "worker 1 exited") {
		t.Errorf("%+v", s)
	}
	o, err := control.ParseOrder(s.Plans[1].Data)
	if err != nil || len(o.Plan.Workers) != 2 || o.Plan.FromStep < 2 || o.Plan.FromStep > 3 { // it died in step 2, which the others may not have begun, or may have committed
		t.Errorf("%+v, %v", o, err)
	}
}

// A later leadership is told what the user asked for: the first two stops, and whether timelines are on.
func TestAskedIsKept(t *testing.T) {
	s := &seat{}
	for _, e := range []session.Event{
		session.WatchAsked{On: true}, session.StopAsked{Reason: session.Interrupt}, session.WatchAsked{On: false},
		session.StopAsked{Reason: session.Terminated}, session.WatchAsked{On: true}, session.StopAsked{Reason: session.Cancelled},
	} {
		s.ask(e)
	}
	expect(t, "asked", s.asked, fmt.Sprint([]session.Event{
		session.StopAsked{Reason: session.Interrupt}, session.StopAsked{Reason: session.Terminated}, session.WatchAsked{On: true},
	}))
}

package session

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A session looks at clocks only under a plan that is live, has its mirrors and measured times, and tells the detector
// and emulated devices what was set.
func TestSessionClocks(t *testing.T) {
	now := time.Unix(0, 0)
	s := begin(Config{Clocks: EmulatedClocks}, 2)
	for id := range 2 {
		agreeing(s, now, Received{id, control.Hello{Protocol: control.Protocol, WorkerID: id, PID: 100 + id}})
	}
	r := ready
	r.Job.Layers, r.Layers, r.Job.Steps = 2, []control.Layer{{Name: "0", Tensors: []int{4}}, {Name: "1", Tensors: []int{4}}}, 1000
	for id := range 2 {
		r.Addr = fmt.Sprint(id)
		agreeing(s, now, Received{id, r})
	}
	if s.phase != training {
		t.Fatalf("state %d", s.phase)
	}
	asked := 0
	step := 0
	run := func(n int) (sent []Effect) {
		for range n {
			step++
			m := control.Step{Step: step, Loss: 1, Tokens: 1, MS: 10, Plan: 1, Compute: int64(4 * time.Millisecond)}
			for id := range 2 {
				beat := control.Beat{Step: step}
				for l := range 2 {
					beat.Layers = append(beat.Layers, control.LayerTime{Layer: l, Forward: int64(time.Millisecond), Backward: int64(2 * time.Millisecond)})
				}
				sent = append(sent, agreeing(s, now, Received{id, m})...)
				sent = append(sent, agreeing(s, now, Received{id, beat})...)
			}
		}
		asked = len(pick[ObserveStep](sent))
		return sent
	}
	run(3)
	if asked != 0 {
		t.Errorf("asked %d times before times are measured", asked)
	}
	run(10)
	if asked == 0 {
		t.Error("did not ask")
	}
	s.thin = true
	run(3)
	if asked != 0 {
		t.Errorf("asked %d times without mirrors", asked)
	}
	s.thin = false
	effects := run(2)
	if asked != 2 || len(pick[DeviceUsed](effects)) != 4 {
		t.Errorf("asked %d times of 2 steps; %+v", asked, effects)
	}
	o := pick[ObserveStep](effects)[0]
	if o.Processes[1] != 101 || o.Seconds != 0.01 || o.Under[1] != 1 || o.Profile.Layers[0].Forward != time.Millisecond {
		t.Errorf("%+v", o)
	}

	effects = s.Step(now, ClocksSet{
		Reason: "why", Settings: []rundir.Clock{{Device: "x", MHz: 700, Workers: []int{1}}}, Joules: 5,
		Lowered: map[id.WorkerID]float64{1: 2}, Shares: map[id.WorkerID]float64{1: 0.5},
	})
	written := pick[WriteEvent](effects)
	if len(written) != 1 || written[0].Event.Kind != "clocks" || written[0].Event.Joules != 5 || written[0].Event.AfterStep != step || written[0].Event.Clocks[0].MHz != 700 {
		t.Errorf("%+v", written)
	}
	if sent := pick[Send](effects); len(sent) != 1 || sent[0].Worker != 1 || sent[0].Message != (control.Clock{Share: 0.5}) {
		t.Errorf("%+v", sent)
	}
	if s.paces.detector.Under(1) != 2 {
		t.Error("the detector does not know")
	}
	s.adopt(controller.Adopt{Order: control.Order{Plan: s.plan}})
	if e := s.out.take(); len(pick[ReleaseClocks](e)) != 1 {
		t.Errorf("%+v", e)
	}
	s.Step(now, ClocksSet{Reason: "clocks are left alone: " + errors.New("why").Error()})
	run(2)
	if asked != 0 {
		t.Errorf("asked %d times after that", asked)
	}
}

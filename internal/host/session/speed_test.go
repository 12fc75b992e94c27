package session

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

func TestChangedTimes(t *testing.T) {
	times := func(a, b time.Duration, links ...plan.LinkTime) plan.Times {
		return plan.Times{Layers: []plan.LayerTime{{Layer: 2, Forward: a}, {Layer: 3, Backward: b}}, Links: links}
	}
	for _, c := range []struct {
		a, b plan.Times
		want bool
	}{
		{times(100, 200), times(105, 190), false},
		{times(100, 200), times(100, 230), true},
		{times(100, 200), plan.Times{}, true},
		{times(100, 200), times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10}), true},
		{times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10}), times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10.5}), false},
		{times(100, 200, plan.LinkTime{To: 1, Bandwidth: 10}), times(100, 200, plan.LinkTime{To: 1, Bandwidth: 20}), true},
	} {
		if got := changed(c.a, c.b); got != c.want {
			t.Errorf("%+v to %+v: %v", c.a, c.b, got)
		}
	}
}

// What a worker says of layers and links that there are not is dropped, and a session that
// does not train yet hears nothing.
func TestPacedBounds(t *testing.T) {
	s := begin(Config{}, 1)
	beat := control.Beat{
		Step: 1, Over: 1,
		Layers: []control.LayerTime{{Layer: -1, Forward: 1}, {Layer: 1 << 40, Forward: 1}, {Forward: -5}, {Backward: 1 << 62}},
		Links:  []control.LinkTime{{To: 77, Bytes: 1, Busy: 1}},
	}
	s.measured(s.workers[0], beat)
	if e := s.out.take(); len(e) != 0 {
		t.Errorf("before training: %v", e)
	}
	s.phase, s.workers[0].state = training, working
	for step := range 20 {
		beat.Step = step + 1
		s.measured(s.workers[0], beat)
		if e := s.out.take(); len(e) != 0 {
			t.Errorf("effects %v", e)
		}
	}
	if _, ok := s.paces.detector.Times(0); ok {
		t.Error("layers that there are not have times")
	}
}

// What a machine has to spare changes all the time; a plan hears of it when it is wrong by a third.
func TestRoom(t *testing.T) {
	var p pacing
	for _, c := range []struct{ bytes, want int64 }{{1000, 1000}, {1300, 1000}, {760, 1000}, {1400, 1400}, {1000, 1000}, {700, 700}} {
		if p.measure(3, c.bytes); p.room[3] != c.want {
			t.Errorf("%d bytes: %d, want %d", c.bytes, p.room[3], c.want)
		}
	}
	if p.forget(3); p.room[3] != 700 {
		t.Errorf("a worker that is measured again has %d: its machine is the same", p.room[3])
	}
	if !changed(plan.Times{Memory: 1}, plan.Times{Memory: 2}) {
		t.Error("a change of the memory is none")
	}
}

// BenchmarkMeasured is what the measurements of a step of 64 workers cost the leading host, with links that are busy.
func BenchmarkMeasured(b *testing.B) {
	const n = 64
	s := begin(Config{}, n)
	for _, e := range prepare(n) {
		agreeing(s, time.Unix(0, 0), e)
	}
	if s.phase != training {
		b.Fatal(s.phase)
	}
	step := 0
	for b.Loop() {
		step++
		for place := range n {
			m := control.Beat{Step: step, Over: 1e9}
			for l := range s.plan.Layers() {
				m.Layers = append(m.Layers, control.LayerTime{Layer: l, Forward: 1e6, Backward: 2e6})
			}
			for to := range n {
				if to != place {
					m.Links = append(m.Links, control.LinkTime{To: to, Bytes: 1 << 20, Busy: 3e8})
				}
			}
			s.Step(time.Unix(0, 0), Received{place, m})
		}
	}
}

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

// A worker that others wait for is relieved once in a step, and only by evidence that is new and can be.
func TestLateWorkers(t *testing.T) {
	r := trainingOf(t, Config{Settings: Settings{Detect: time.Second}}, 3)
	for place := range 3 {
		r.s.workers[place].heard = timing.History{Heard: r.now}
	}
	ms := func(n int64) int64 { return n * int64(time.Millisecond) }
	told := func(w int, p *control.Pace) (asked int) {
		r.now = r.now.Add(10 * time.Millisecond)
		for _, e := range pick[Send](r.s.Step(r.now, Received{Worker: w, Message: control.Beat{Pace: p}})) {
			if _, ok := e.Message.(control.Query); ok {
				asked++
			}
		}
		return asked
	}
	late := &control.Pace{Step: 4, Left: 4, Ready: 3, Each: ms(200)}
	done := &control.Pace{Step: 4, Each: ms(20)}
	for _, p := range []*control.Pace{nil, late, {Step: 4, Left: -1, Ready: 3, Each: ms(200)}, late} {
		if n := told(2, p); n != 0 {
			t.Fatalf("%d workers are asked before others have nothing left to do", n)
		}
	}
	r.now = r.now.Add(time.Second)
	if n := told(0, done); n != 0 {
		t.Errorf("%d workers are asked because of what was so a second ago", n)
	}
	told(2, &control.Pace{Step: 4, Left: 1, Ready: 1, Each: ms(60)})
	if n := told(0, done); n != 0 {
		t.Errorf("%d workers are asked for a gain of 40 ms", n)
	}
	if n := told(2, late); n != 3 {
		t.Errorf("%d of 3 workers are asked", n)
	}
	if n := told(1, done); n != 0 {
		t.Errorf("%d workers are asked again", n)
	}
}

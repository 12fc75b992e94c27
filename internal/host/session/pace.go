package session

import (
	"fmt"
	"math"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/straggler"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// pacing is what a session knows of the speed of its workers.
type pacing struct {
	detector straggler.Detector
	told     map[id.WorkerID]plan.Times // to the controller
	room     map[id.WorkerID]int64      // bytes for parameters and optimizer state
}

func (p *pacing) forget(w id.WorkerID) {
	p.detector.Forget(w)
	delete(p.told, w)
}

// measure takes in how much room a worker has. What machines have to spare changes all the time, and plans are not to follow
// that, so what is known stays until it is wrong by a third.
func (p *pacing) measure(w id.WorkerID, bytes int64) {
	const off = 4. / 3
	if was, is := float64(p.room[w]), float64(bytes); was == 0 || is > off*was || is < was/off {
		if p.room == nil {
			p.room = make(map[id.WorkerID]int64)
		}
		p.room[w] = bytes
	}
}

// measured takes in what a worker has measured: verdicts become events, and the controller gets times that differ from what it knows.
func (s *Session) measured(place int, m control.Beat) {
	w := &s.workers[place]
	if m.Step < 1 || len(m.Layers) == 0 || s.phase != training || w.state != working || w.joins {
		return
	}
	sample := straggler.Sample{Worker: w.who.ID, Step: m.Step}
	for _, l := range m.Layers[:min(len(m.Layers), control.MaxMeasured)] {
		t := plan.LayerTime{Layer: l.Layer, Forward: time.Duration(l.Forward), Backward: time.Duration(l.Backward)}
		if t.Layer >= 0 && t.Layer < s.plan.Layers() && min(t.Forward, t.Backward) >= 0 && max(t.Forward, t.Backward) < time.Hour {
			sample.Layers = append(sample.Layers, t)
		}
	}
	for _, l := range m.Links[:min(len(m.Links), control.MaxMeasured)] {
		if _, known := s.plan.Worker(id.WorkerID(l.To)); known && l.Busy > 0 && m.Over > 0 {
			sample.Links = append(sample.Links, straggler.Sent{
				To: id.WorkerID(l.To), Bytes: l.Bytes, Took: time.Duration(l.Busy), Busy: float64(l.Busy) / float64(m.Over),
			})
		}
	}
	if m.Available > 0 && m.Available < 1<<60 {
		// All workers share the machine.
		s.paces.measure(w.who.ID, s.plan.Holds(w.who.ID, s.ctl.Profile().Layers)+m.Available/int64(len(s.plan.Workers)))
	}
	for _, v := range s.paces.detector.Observe(sample) {
		kind := eventNormal
		if v.Slow() {
			kind = eventSlow
		}
		s.then(s.about(place, kind, fmt.Sprintf("step %d: %s", m.Step, v.Reason)), Show{view.Note(v.Reason)})
	}
	s.feed()
}

// feed tells the controller of times that have changed, once those of all workers of the
// plan are known.
func (s *Session) feed() {
	all, news := make([]plan.Times, len(s.plan.Workers)), false
	for i, w := range s.plan.Workers {
		times, ok := s.paces.detector.Times(w.ID)
		if !ok {
			return
		}
		times.Memory = s.paces.room[w.ID]
		all[i] = times
		was, told := s.paces.told[w.ID]
		news = news || !told || changed(was, times)
	}
	if !news {
		return
	}
	// All of one moment: times of several would differ by what the machine did meanwhile.
	s.paces.told = make(map[id.WorkerID]plan.Times)
	s.clocks.made = false
	for i, w := range s.plan.Workers {
		s.paces.told[w.ID] = all[i]
		s.tell(controller.Measured{Worker: w, Times: all[i]})
	}
}

// times is what is known of a worker, for the records; nil if that is not enough.
func (p *pacing) times(w id.WorkerID) (all []rundir.LayerTime) {
	if t, ok := p.detector.Times(w); ok {
		for _, l := range t.Layers {
			all = append(all, rundir.LayerTime{Layer: l.Layer, ForwardMS: 1e3 * l.Forward.Seconds(), BackwardMS: 1e3 * l.Backward.Seconds()})
		}
	}
	return all
}

// changed reports whether times differ by so much that a plan may.
func changed(a, b plan.Times) bool {
	if len(a.Layers) != len(b.Layers) || len(a.Links) != len(b.Links) || a.Memory != b.Memory {
		return true
	}
	const part = 0.1
	for i, x := range a.Layers {
		y := b.Layers[i]
		was, is := float64(x.Forward+x.Backward), float64(y.Forward+y.Backward)
		if x.Layer != y.Layer || math.Abs(is-was) > part*was {
			return true
		}
	}
	for i, x := range a.Links {
		if y := b.Links[i]; x.To != y.To || math.Abs(y.Bandwidth-x.Bandwidth) > part*x.Bandwidth {
			return true
		}
	}
	return false
}

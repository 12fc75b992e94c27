package devices

import (
	"math"
	"time"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// maxSimulated bounds the passes of a step times the devices, to which all simulations of an allocation are in proportion; beyond, the
// closed form predicts, which knows less of waiting.
const maxSimulated = 1 << 12

// Model predicts a step of the plan from the speeds of workers, beside those that were measured at the clocks of the moment. Nothing
// takes long any more where it is stale.
func Model(e session.ObserveStep, stale func() bool) dvfs.Model {
	p := e.Plan
	now := make([]float64, len(p.Workers)) // speed by the profile, at the clock of the moment
	m := dvfs.Model{Workers: len(p.Workers), Busy: make([]float64, len(p.Workers))}
	place := make(map[id.WorkerID]int)
	for i, w := range p.Workers {
		place[w.ID], now[i] = i, 1
		if v := e.Profile.Speed[w.ID]; v > 0 {
			now[i] = v
		}
		if u := e.Under[w.ID]; u > 1 {
			now[i] /= u
		}
	}
	passes := 0
	for s, st := range p.Stages {
		var pass time.Duration
		for _, l := range e.Profile.Layers[st.Lo:st.Hi] {
			pass += l.Forward + l.Backward
		}
		for _, w := range p.Route[s] {
			m.Busy[place[w]] += pass.Seconds() / now[place[w]]
			passes += 2
		}
	}
	simulated := passes*len(p.Workers) <= maxSimulated
	m.Step = func(speeds []float64) float64 {
		if stale() {
			return math.Inf(1)
		}
		prof := e.Profile
		prof.Speed = make(map[id.WorkerID]float64, len(now))
		for i, w := range p.Workers {
			prof.Speed[w.ID] = now[i] * speeds[i]
		}
		if !simulated {
			return simulate.Estimate(&p, prof).Seconds()
		}
		t, err := simulate.Typical(&p, prof)
		if err != nil {
			return math.Inf(1) // which is an error of the allocation
		}
		return t.Seconds()
	}
	return m
}

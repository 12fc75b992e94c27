package simulate

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// newGraph lays out a step under the plan, with the times of the profile.
func newGraph(p *plan.Plan, prof plan.Profile) (*graph.Graph, error) {
	prof = prof.WithDefaults()
	step := layOut(p, &prof)
	shareCards(p, &prof, &step)
	return graph.New(step)
}

// shareCards lets transfers between stages wait for network cards: one for each host, or for each
// worker whose host is not known. Transfers inside a host need none, and neither do
// those of an unknown bandwidth.
func shareCards(p *plan.Plan, prof *plan.Profile, step *graph.Step) {
	hosts := make(map[string]int)
	card := make([]int, len(p.Workers))
	for i, w := range p.Workers {
		name := cmp.Or(w.Host, fmt.Sprint("\x00", w.ID))
		if _, ok := hosts[name]; !ok {
			hosts[name] = len(hosts)
		}
		card[i] = hosts[name]
	}
	bytes := func(t graph.Task) int64 {
		if t.Kind == graph.Forward {
			return prof.Layers[p.Stages[t.Stage].Hi-1].Output
		}
		return prof.Layers[p.Stages[t.Stage].Lo-1].Output
	}
	step.Card = func(t graph.Task, from, to int) (int, time.Duration) {
		if card[from] == card[to] {
			return -1, 0
		}
		return card[from], prof.LinkBetween(p.Workers[from].ID, p.Workers[to].ID).Stream(bytes(t))
	}
	delay := step.Delay
	step.Delay = func(t graph.Task, from, to int) time.Duration {
		if card[from] == card[to] || t.Kind != graph.SendActivation && t.Kind != graph.SendGradient {
			return delay(t, from, to)
		}
		return prof.LinkBetween(p.Workers[from].ID, p.Workers[to].ID).Latency
	}
}

// Run executes a step under the plan, with the times of the profile. For
// worker i of the schedule see Workers[i]. The plan must be valid.
func Run(p *plan.Plan, prof plan.Profile) (graph.Schedule, error) {
	g, err := newGraph(p, prof)
	if err != nil {
		return graph.Schedule{}, err
	}
	return g.Simulate()
}

// typicalRuns and typicalSpread are of Typical.
const (
	typicalRuns   = 5
	typicalSpread = 0.01
)

// Typical returns about how long a step takes where workers are not exactly as fast as the profile says: the mean of a few
// simulations in which each is up to 1 % faster or slower, the same ones each time. One simulation may be several percent longer or shorter than
// others whose times hardly differ, since tasks that come at the same time are taken in another order; no run is like it.
func Typical(p *plan.Plan, prof plan.Profile) (time.Duration, error) {
	speed := prof.Speed
	r := rand.New(rand.NewPCG(1, 1))
	var sum time.Duration
	for range typicalRuns {
		prof.Speed = make(map[id.WorkerID]float64, len(p.Workers))
		for _, w := range p.Workers {
			v := speed[w.ID]
			if v <= 0 {
				v = 1
			}
			prof.Speed[w.ID] = v * (1 + typicalSpread*(2*r.Float64()-1))
		}
		s, err := Run(p, prof)
		if err != nil {
			return 0, err
		}
		sum += s.Makespan
	}
	return sum / typicalRuns, nil
}

// layOut describes the plan to the graph. prof is measured.
func layOut(p *plan.Plan, prof *plan.Profile) graph.Step {
	costs := StageCosts(prof, p.Stages)
	index := make(map[id.WorkerID]int, len(p.Workers))
	for i, w := range p.Workers {
		index[w.ID] = i
	}
	step := graph.Step{Workers: len(p.Workers), Micros: p.Micros()}
	for i, s := range p.Stages {
		st := graph.Stage{Lo: s.Lo, Hi: s.Hi}
		for _, w := range s.Workers {
			st.Workers = append(st.Workers, index[w])
			st.Limits, st.Leads = append(st.Limits, p.Limit(i, w).Forwards), append(st.Leads, p.Limit(i, w).Lead)
		}
		for _, w := range p.Route[i] {
			st.Route = append(st.Route, index[w])
		}
		step.Stages = append(step.Stages, st)
	}
	for _, s := range p.Shards {
		sh := graph.Shard{Layer: s.Layer, Owner: index[s.Owner]}
		for _, m := range s.Mirrors {
			sh.Mirrors = append(sh.Mirrors, index[m])
		}
		step.Shards = append(step.Shards, sh)
	}
	speed := func(worker int) float64 { return prof.SpeedOf(p.Workers[worker].ID) }
	at := func(d time.Duration, worker int) time.Duration { return time.Duration(float64(d) / speed(worker)) }

	// What is counted once: nodes that come to an owner from others, and what
	// a worker of a stage owns of a layer.
	stageOf := make([]int, len(prof.Layers))
	into := make([]time.Duration, len(prof.Layers)) // forward time of the layers before, in the stage
	counts := make([]map[id.WorkerID]int, len(p.Stages))
	totals := make([]int, len(p.Stages))
	for i, s := range p.Stages {
		var sum time.Duration
		for l := s.Lo; l < s.Hi; l++ {
			stageOf[l], into[l] = i, sum
			sum += prof.Layers[l].Forward
		}
		counts[i] = plan.NodeCounts(p.Route[i])
		for _, n := range counts[i] {
			totals[i] += n
		}
	}
	type part struct {
		layer  int
		worker id.WorkerID
	}
	owns := make(map[part]int)
	for _, s := range p.Shards {
		owns[part{s.Layer, s.Owner}] += s.Hi - s.Lo
	}
	step.Time = func(t graph.Task, worker int) time.Duration {
		switch t.Kind {
		case graph.Forward:
			return at(costs[t.Stage].Forward, worker)
		case graph.Backward:
			return at(costs[t.Stage].backward, worker)
		case graph.Reduce:
			s := p.Shards[t.Shard]
			remote := totals[stageOf[s.Layer]] - counts[stageOf[s.Layer]][s.Owner]
			return prof.Stream(int64(s.Hi-s.Lo) * plan.BytesPerParameter * int64(remote))
		case graph.Commit:
			return prof.Commit
		case graph.Update:
			if s := p.Shards[t.Shard]; prof.Updates > 0 {
				return at(time.Duration(float64(s.Hi-s.Lo)/prof.Updates*float64(time.Second)), worker)
			}
		case graph.Gather:
			foreign := prof.Layers[t.Layer].Size() - owns[part{t.Layer, p.Workers[worker].ID}]
			return prof.Stream(int64(foreign) * plan.BytesPerParameter)
		}
		return 0
	}
	step.Into = func(layer, worker int) time.Duration { return at(into[layer], worker) }
	step.Delay = func(t graph.Task, from, to int) time.Duration {
		pace := prof.LinkBetween(p.Workers[from].ID, p.Workers[to].ID)
		switch t.Kind {
		case graph.Forward:
			return pace.Transfer(prof.Layers[p.Stages[t.Stage].Hi-1].Output)
		case graph.Backward:
			if t.Stage == 0 {
				break // to the owner of a shard: the reduction has the bytes
			}
			return pace.Transfer(prof.Layers[p.Stages[t.Stage].Lo-1].Output)
		}
		return pace.Latency
	}
	return step
}

package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Graph lays out a step under the plan, with the times of the profile.
func (p *Plan) Graph(prof Profile) (*graph.Graph, error) {
	prof = prof.measured()
	step := p.step(&prof, true)
	p.cards(&prof, &step)
	return graph.New(step)
}

// cards lets transfers between stages wait for network cards: one for each host, or for each
// worker whose host is not known. Inside a host none is needed, and what nobody has measured the
// bandwidth of takes none.
func (p *Plan) cards(prof *Profile, step *graph.Step) {
	hosts := make(map[string]int)
	card := make([]int, len(p.Workers))
	for i, w := range p.Workers {
		name := w.Host
		if name == "" {
			name = fmt.Sprint("\x00", w.ID)
		}
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
		return card[from], prof.pace(p.Workers[from].ID, p.Workers[to].ID).stream(bytes(t))
	}
	delay := step.Delay
	step.Delay = func(t graph.Task, from, to int) time.Duration {
		if card[from] == card[to] || t.Kind != graph.SendActivation && t.Kind != graph.SendGradient {
			return delay(t, from, to)
		}
		return prof.pace(p.Workers[from].ID, p.Workers[to].ID).Latency
	}
}

// pace returns what is known of the link of two workers.
func (p *Profile) pace(a, b id.WorkerID) Pace {
	l, ok := p.Links[link(a, b)]
	if !ok {
		l.Latency = p.Latency
	}
	if l.Bandwidth == 0 {
		l.Bandwidth = p.Bandwidth
	}
	return l
}

// transfer returns how long it takes to send bytes.
func (p Pace) transfer(bytes int64) time.Duration { return p.Latency + p.stream(bytes) }

// stream returns how long the link is busy with bytes.
func (p Pace) stream(bytes int64) time.Duration {
	if p.Bandwidth <= 0 {
		return 0
	}
	return time.Duration(float64(bytes) / p.Bandwidth * float64(time.Second))
}

// Simulate executes a step under the plan, with the times of the profile. For
// worker i of the schedule see Workers[i]. The plan must be valid.
func (p *Plan) Simulate(prof Profile) (graph.Schedule, error) {
	g, err := p.Graph(prof)
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
func (p *Plan) Typical(prof Profile) (time.Duration, error) {
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
		s, err := p.Simulate(prof)
		if err != nil {
			return 0, err
		}
		sum += s.Makespan
	}
	return sum / typicalRuns, nil
}

// Estimate returns about how long a step takes, in closed form: the way of
// one micro-batch through all stages and back, then the slowest worker's
// others, and the reduction of gradients.
func (p *Plan) Estimate(prof Profile) time.Duration {
	prof = prof.measured()
	costs := stageCosts(&prof, p.Stages)
	var way, slowest float64
	for s := range costs {
		c := &costs[s]
		counts := make(map[id.WorkerID]int)
		for _, w := range p.Route[s] {
			counts[w]++
		}
		for i, w := range c.workers {
			slowest = max(slowest, float64(counts[w]-1)*c.work()/c.speeds[i])
		}
		way += c.work() / slices.Max(c.speeds)
		if s > 0 {
			way += 2 * float64(prof.transfer(prof.Layers[p.Stages[s].Lo-1].Output))
		}
	}
	return time.Duration(way+slowest) + p.reduceTime(&prof, p.nodes)
}

// transfer returns how long it takes to send bytes to another worker.
func (p *Profile) transfer(bytes int64) time.Duration { return p.Latency + p.stream(bytes) }

// stream returns how long a link is busy with bytes.
func (p *Profile) stream(bytes int64) time.Duration {
	return Pace{Bandwidth: p.Bandwidth}.stream(bytes)
}

// bytesPerParameter is the size of a float32.
const bytesPerParameter = 4

// reduceTime returns how long the owners' links are busy with gradients,
// those of the slowest stage.
func (p *Plan) reduceTime(prof *Profile, nodes func(stage int) int) (slowest time.Duration) {
	if prof.Bandwidth <= 0 {
		return 0
	}
	for s, st := range p.Stages {
		var params int64
		for _, l := range prof.Layers[st.Lo:st.Hi] {
			params += int64(l.Size())
		}
		ranks := int64(len(st.Workers))
		// Of every node an owner gets its share, unless it made it itself.
		remote := int64(nodes(s)) * (ranks - 1) / ranks
		slowest = max(slowest, prof.stream(bytesPerParameter*params/ranks*remote))
	}
	return slowest
}

// nodes returns how many nodes of the gradient tree the workers of a stage have.
func (p *Plan) nodes(stage int) (total int) {
	for _, n := range nodeCounts(p.Route[stage]) {
		total += n
	}
	return total
}

// step describes the plan to the graph. prof is measured.
func (p *Plan) step(prof *Profile, shards bool) graph.Step {
	costs := stageCosts(prof, p.Stages)
	index := make(map[id.WorkerID]int, len(p.Workers))
	for i, w := range p.Workers {
		index[w.ID] = i
	}
	step := graph.Step{Workers: len(p.Workers), Micros: p.Micros()}
	for i, s := range p.Stages {
		st := graph.Stage{Lo: s.Lo, Hi: s.Hi}
		for _, w := range s.Workers {
			st.Workers = append(st.Workers, index[w])
			st.Limits, st.Leads = append(st.Limits, p.Limit(i, w)), append(st.Leads, p.Lead(i, w))
		}
		for _, w := range p.Route[i] {
			st.Route = append(st.Route, index[w])
		}
		step.Stages = append(step.Stages, st)
	}
	if shards {
		for _, s := range p.Shards {
			sh := graph.Shard{Layer: s.Layer, Owner: index[s.Owner]}
			for _, m := range s.Mirrors {
				sh.Mirrors = append(sh.Mirrors, index[m])
			}
			step.Shards = append(step.Shards, sh)
		}
	}
	speed := func(worker int) float64 { return prof.speed(p.Workers[worker].ID) }
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
		if shards {
			counts[i] = nodeCounts(p.Route[i])
			for _, n := range counts[i] {
				totals[i] += n
			}
		}
	}
	type part struct {
		layer  int
		worker id.WorkerID
	}
	owns := make(map[part]int)
	if shards {
		for _, s := range p.Shards {
			owns[part{s.Layer, s.Owner}] += s.Hi - s.Lo
		}
	}
	step.Time = func(t graph.Task, worker int) time.Duration {
		switch t.Kind {
		case graph.Forward:
			return at(costs[t.Stage].forward, worker)
		case graph.Backward:
			return at(costs[t.Stage].backward, worker)
		case graph.Reduce:
			s := p.Shards[t.Shard]
			remote := totals[stageOf[s.Layer]] - counts[stageOf[s.Layer]][s.Owner]
			return prof.stream(int64(s.Hi-s.Lo) * bytesPerParameter * int64(remote))
		case graph.Commit:
			return prof.Commit
		case graph.Update:
			if s := p.Shards[t.Shard]; prof.Updates > 0 {
				return at(time.Duration(float64(s.Hi-s.Lo)/prof.Updates*float64(time.Second)), worker)
			}
		case graph.Gather:
			foreign := prof.Layers[t.Layer].Size() - owns[part{t.Layer, p.Workers[worker].ID}]
			return prof.stream(int64(foreign) * bytesPerParameter)
		}
		return 0
	}
	step.Into = func(layer, worker int) time.Duration { return at(into[layer], worker) }
	step.Delay = func(t graph.Task, from, to int) time.Duration {
		pace := prof.pace(p.Workers[from].ID, p.Workers[to].ID)
		switch t.Kind {
		case graph.Forward:
			return pace.transfer(prof.Layers[p.Stages[t.Stage].Hi-1].Output)
		case graph.Backward:
			if t.Stage == 0 {
				break // to the owner of a shard: the reduction has the bytes
			}
			return pace.transfer(prof.Layers[p.Stages[t.Stage].Lo-1].Output)
		}
		return pace.Latency
	}
	return step
}

package simulate

import (
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

// Estimate returns about how long a step takes, in closed form: the way of
// one micro-batch through all stages and back, then the slowest worker's
// others, and the reduction of gradients.
func Estimate(p *plan.Plan, prof plan.Profile) time.Duration {
	prof = prof.WithDefaults()
	costs := StageCosts(&prof, p.Stages)
	var way, slowest float64
	for s := range costs {
		c := &costs[s]
		counts := make(map[id.WorkerID]int)
		for _, w := range p.Route[s] {
			counts[w]++
		}
		for i, w := range c.Workers {
			slowest = max(slowest, float64(counts[w]-1)*c.Work()/c.Speeds[i])
		}
		way += c.Work() / slices.Max(c.Speeds)
		if s > 0 {
			way += 2 * float64(prof.Transfer(prof.Layers[p.Stages[s].Lo-1].Output))
		}
	}
	return time.Duration(way+slowest) + ReduceTime(p, &prof, func(s int) int { return TreeNodes(p, s) })
}

// ReduceTime returns how long the owners' links are busy with gradients,
// those of the slowest stage.
func ReduceTime(p *plan.Plan, prof *plan.Profile, nodes func(stage int) int) (slowest time.Duration) {
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
		slowest = max(slowest, prof.Stream(plan.BytesPerParameter*params/ranks*remote))
	}
	return slowest
}

// TreeNodes returns how many nodes of the gradient tree the workers of a stage have.
func TreeNodes(p *plan.Plan, stage int) (total int) {
	for _, n := range plan.NodeCounts(p.Route[stage]) {
		total += n
	}
	return total
}

// StageCost is what routing needs to know of a stage.
type StageCost struct {
	Workers           []id.WorkerID
	Speeds            []float64
	Forward, backward time.Duration // of a micro-batch at speed 1
}

// Work returns the time of a micro-batch at speed 1.
func (c *StageCost) Work() float64 { return float64(c.Forward + c.backward) }

// StageCosts returns the costs of stages.
func StageCosts(p *plan.Profile, stages []plan.Stage) []StageCost {
	costs := make([]StageCost, len(stages))
	for i, s := range stages {
		c := &costs[i]
		c.Workers = s.Workers
		for _, w := range s.Workers {
			c.Speeds = append(c.Speeds, p.SpeedOf(w))
		}
		for _, l := range p.Layers[s.Lo:s.Hi] {
			c.Forward += l.Forward
			c.backward += l.Backward
		}
	}
	return costs
}

// Alike reports whether rank i of one stage can have what rank i of the other
// has.
func (c *StageCost) Alike(o *StageCost) bool { return slices.Equal(c.Speeds, o.Speeds) }

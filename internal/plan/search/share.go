package search

import (
	"cmp"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/simulate"
)

// shareRounds bounds how often share goes over the stages.
const shareRounds = 8

// shared returns the costs of stages. Workers that serve several have a part of their speed in each.
func shared(prof *plan.Profile, stages []plan.Stage) []simulate.StageCost {
	costs := simulate.StageCosts(prof, stages)
	share(costs)
	return costs
}

// share lowers the speeds of workers that serve several stages to what each
// stage gets of them, so that all workers are done at about the same time.
//
// The work of a stage is poured over its workers like water: those that have
// most to do in other stages get least of it. That is done for one stage after
// the other, several times, which makes the squares of all loads ever less.
func share(costs []simulate.StageCost) {
	index := make(map[id.WorkerID]int)
	places := 0
	for _, c := range costs {
		places += len(c.Workers)
		for _, w := range c.Workers {
			if _, ok := index[w]; !ok {
				index[w] = len(index)
			}
		}
	}
	if places == len(index) {
		return
	}
	serves := make([]int, len(index))
	load := make([]float64, len(index)) // in time
	parts := make([][]float64, len(costs))
	for s, c := range costs {
		parts[s] = make([]float64, len(c.Workers))
		for _, w := range c.Workers {
			serves[index[w]]++
		}
	}
	for range shareRounds {
		for s := range costs {
			c := &costs[s]
			others := make([]float64, len(c.Workers))
			for r, w := range c.Workers {
				load[index[w]] -= parts[s][r]
				others[r] = load[index[w]]
			}
			level := pour(max(c.Work(), 1), others, c.Speeds)
			for r, w := range c.Workers {
				parts[s][r] = max(0, level-others[r])
				load[index[w]] += parts[s][r]
			}
		}
	}
	const none = 1e-6 // of a worker: too little for a micro-batch
	for s := range costs {
		for r, w := range costs[s].Workers {
			if i := index[w]; serves[i] > 1 {
				costs[s].Speeds[r] *= max(parts[s][r]/load[i], none)
			}
		}
	}
}

// pour returns the time at which all work is done by workers that have loads
// to do before.
func pour(work float64, loads, speeds []float64) (level float64) {
	order := make([]int, len(loads))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(loads[a], loads[b]) })
	sum, speed := work, 0.0
	for k, i := range order {
		sum += loads[i] * speeds[i]
		speed += speeds[i]
		level = sum / speed
		if k+1 == len(order) || level <= loads[order[k+1]] {
			break
		}
	}
	return level
}

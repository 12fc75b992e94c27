package plantest

import (
	"slices"
	"time"
)

// IntegerBound returns a time that no plan is faster than which has one stage for every one of
// equally fast workers and at most a number of the equal layers in a stage, whose forward passes
// take 1 ms and backward passes 2 ms: the least of stagesBound over all numbers of layers and
// workers of stages, but no more than upTo.
func IntegerBound(layers, stages, workers, micros, most int, upTo time.Duration) time.Duration {
	best := int(upTo / time.Millisecond)
	l, w := make([]int, stages), make([]int, stages)
	var deal func(i, layersLeft, workersLeft, before int)
	deal = func(i, layersLeft, workersLeft, before int) {
		if i == stages {
			best = min(best, StagesBound(l, w, micros))
			return
		}
		later := stages - 1 - i
		for l[i] = 1; l[i] <= min(most, layersLeft-later); l[i]++ {
			for w[i] = 1; w[i] <= workersLeft-later; w[i]++ {
				if later == 0 && (l[i] < layersLeft || w[i] < workersLeft) {
					continue
				}
				if 3*(before+l[i]*((micros+w[i]-1)/w[i])) < best { // see stagesBound; else it is no better
					deal(i+1, layersLeft-l[i], workersLeft-w[i], before+l[i])
				}
			}
		}
	}
	deal(0, layers, workers, 0)
	return time.Duration(best) * time.Millisecond
}

// StagesBound returns, in milliseconds, the least time in which every stage by itself could be
// done, whatever the routes and limits. Its k-th micro-batch comes no earlier than the
// stages before can have run k forward passes, and after its k-th last backward pass there
// are k more to be run in each of those. In between its workers run whole micro-batches:
// the number of workers that can run n or more is at most that of the pairs of a begin and
// an end that leave the time for n.
func StagesBound(layers, workers []int, micros int) (t int) {
	most := slices.Max(workers)
	begin, end := make([]int, most), make([]int, most)
	for i, l := range layers {
		room := func() bool {
			total := 0
			for n := 1; total < micros; n++ {
				pairs, k := 0, workers[i]-1
				for _, b := range begin[:workers[i]] {
					for k >= 0 && b+end[k]+3*l*n > t {
						k--
					}
					if k < 0 {
						break
					}
					k--
					pairs++
				}
				if pairs == 0 {
					return false
				}
				total += pairs
			}
			return true
		}
		t = max(t, begin[0]+end[0]+3*l*((micros+workers[i]-1)/workers[i])) // some worker runs as many
		for !room() {
			t++
		}
		nextBegin, nextEnd := make([]int, most), make([]int, most)
		for k := range most {
			b, e := begin[k], end[k]
			if k >= workers[i] {
				b, e = max(b, nextBegin[k-workers[i]]), max(e, nextEnd[k-workers[i]])
			}
			nextBegin[k], nextEnd[k] = b+l, e+2*l
		}
		begin, end = nextBegin, nextEnd
	}
	return t
}

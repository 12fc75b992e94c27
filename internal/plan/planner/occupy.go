package planner

import (
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// occupy gives live workers something to do right after a loss. A worker that would wait for the output of a
// lost worker, or for a gradient, gets room for one more forward pass. If it has no input for one, it gets a
// pair whose input is available from another worker of its stage, in exchange for one that waits.
//
// Only pairs that have not begun move, and only if the living worker before them still
// has what they need. spare returns the forward passes beyond the limits.
func (l *loss) occupy() (spare map[place]int) {
	spare = make(map[place]int)
	last := len(l.Stages) - 1
	// fed: the forward pass of the pair can begin anywhere.
	fed := func(pair graph.Pair) bool {
		if pair.Stage == 0 {
			return true
		}
		before := graph.Pair{Stage: pair.Stage - 1, Micro: pair.Micro}
		return !l.again[before] && l.alive[l.current.Route[before.Stage][before.Micro]] && l.said[before.Stage][before.Micro].Begun()
	}
	desks := make(map[place]*desk)
	busy := make(map[id.WorkerID]int) // tasks it could do one after the other, without waiting
	for s, route := range l.Route {
		for _, w := range l.Stages[s].Workers {
			desks[place{s, w}] = &desk{}
		}
		for m, w := range route {
			pair := graph.Pair{Stage: s, Micro: m}
			if !l.Runs(pair, l.view.Step) {
				continue
			}
			d, was := desks[place{s, w}], l.said[s][m]
			if l.again[pair] {
				was = graph.Status{}
			}
			switch {
			case was.Phase == graph.Finished:
			case was.Phase == graph.Backing:
				d.inFlight++
				busy[w]++
			case was.Phase == graph.Forwarded:
				d.inFlight++
				if was.Gradient || s == last {
					busy[w]++
				}
			case was.Gradient: // it goes past the limit, and stays where its gradient is
				if was.Input || fed(pair) {
					busy[w]++
				}
			case fed(pair):
				d.open = append(d.open, m)
			case was.Input: // its maker is lost and does not make it again, so no other worker can get it
				busy[w]++
			default:
				d.closed = append(d.closed, m)
			}
		}
	}
	room := func(s int, w id.WorkerID) int {
		return max(0, max(l.current.Limit(s, w).Forwards, len(l.Stages)-s)-desks[place{s, w}].inFlight)
	}
	for s, st := range l.Stages {
		for _, w := range st.Workers {
			busy[w] += min(len(desks[place{s, w}].open), room(s, w))
		}
	}
	for s, st := range l.Stages {
		open := 0 // that can be given
		for _, w := range st.Workers {
			open += len(desks[place{s, w}].open)
		}
		for _, w := range st.Workers {
			d := desks[place{s, w}]
			if busy[w] > 0 || open == 0 {
				continue
			}
			if len(d.open) == 0 {
				giver := slices.MaxFunc(st.Workers, func(a, b id.WorkerID) int { return len(desks[place{s, a}].open) - len(desks[place{s, b}].open) })
				g := desks[place{s, giver}]
				if len(g.open) == 0 || len(d.closed) == 0 && d.inFlight == 0 || busy[giver] < 2 && len(g.open) <= room(s, giver) {
					continue // no worker can give one away, or nothing is left for this one
				}
				m := pop(&g.open)
				l.Route[s][m] = w
				d.open = append(d.open, m)
				if len(g.open) < room(s, giver) {
					busy[giver]--
				}
				if len(d.closed) > 0 {
					back := pop(&d.closed)
					l.Route[s][back] = giver
					g.closed = append(g.closed, back)
				}
			}
			if room(s, w) == 0 {
				spare[place{s, w}]++
			}
			busy[w]++
		}
	}
	return spare
}

// desk is what a worker of a stage has before it: micro-batches in flight, those whose
// forward pass can begin, and those whose input is not there, in their order.
type desk struct {
	inFlight     int
	open, closed []int
}

func pop(list *[]int) int {
	m := (*list)[len(*list)-1]
	*list = (*list)[:len(*list)-1]
	return m
}

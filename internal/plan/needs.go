package plan

import (
	"cmp"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
)

// Transfer is a range whose state a worker needs.
type Transfer struct {
	id.Range
	From id.WorkerID // a worker that holds it, -1 if none does
	To   id.WorkerID
}

// Needs returns the transfers that must be done before the boundary plan next may go live after current: the ranges that a
// worker will own or mirror, and whose parameters and optimizer state it does not hold yet. They are sorted.
//
// The sender is the owner if it lives, else a mirror that does; it may be about to leave.
func Needs(current, next *Plan, v View) (state []Transfer) {
	same := func(w Worker) bool {
		was, ok := current.Worker(w.ID)
		return ok && was.Incarnation == w.Incarnation
	}
	lives := make(map[id.WorkerID]bool)
	for _, w := range v.Workers {
		lives[w.ID] = same(w)
	}
	type place struct {
		layer  int
		worker id.WorkerID
	}
	holds := make(map[place][]id.Range)
	first := make([]int, current.Layers()+1) // shard, by layer
	for i, s := range slices.Backward(current.Shards) {
		first[s.Layer] = i
		for _, h := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			if w, ok := next.Worker(h); ok && same(w) {
				holds[place{s.Layer, h}] = append(holds[place{s.Layer, h}], id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi})
			}
		}
	}
	for _, s := range next.Shards {
		for _, to := range append([]id.WorkerID{s.Owner}, s.Mirrors...) {
			for _, lack := range without(id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi}, holds[place{s.Layer, to}]) {
				for _, was := range current.Shards[first[s.Layer]:] {
					if was.Layer != s.Layer || was.Lo >= lack.Hi {
						break
					}
					if lo, hi := max(was.Lo, lack.Lo), min(was.Hi, lack.Hi); lo < hi {
						state = append(state, Transfer{id.Range{Layer: s.Layer, Lo: lo, Hi: hi}, source(&was, lives), to})
					}
				}
			}
		}
	}
	slices.SortFunc(state, func(a, b Transfer) int { return cmp.Or(a.Range.Compare(b.Range), cmp.Compare(a.To, b.To)) })
	return state
}

// source returns a living holder of a shard, -1 if there is none.
func source(s *Shard, lives map[id.WorkerID]bool) id.WorkerID {
	if lives[s.Owner] {
		return s.Owner
	}
	if i := slices.IndexFunc(s.Mirrors, func(m id.WorkerID) bool { return lives[m] }); i >= 0 {
		return s.Mirrors[i]
	}
	return -1
}

// without returns what is left of a range without others of its layer, in order.
func without(r id.Range, others []id.Range) []id.Range {
	left := []id.Range{r}
	for _, o := range others {
		var next []id.Range
		for _, l := range left {
			for _, part := range [2]id.Range{{Layer: r.Layer, Lo: l.Lo, Hi: min(l.Hi, o.Lo)}, {Layer: r.Layer, Lo: max(l.Lo, o.Hi), Hi: l.Hi}} {
				if part.Lo < part.Hi {
					next = append(next, part)
				}
			}
		}
		left = next
	}
	return left
}

// Holds returns the bytes that a worker has for parameters and optimizer state under the plan.
func (p *Plan) Holds(w id.WorkerID, layers []Layer) (bytes int64) {
	for _, s := range p.Stages {
		if slices.Contains(s.Workers, w) {
			for _, l := range layers[s.Lo:s.Hi] {
				bytes += BytesPerParameter * int64(l.Size())
			}
		}
	}
	for _, s := range p.Shards {
		if s.Holds(w) {
			bytes += StateParts * BytesPerParameter * int64(s.Hi-s.Lo)
		}
	}
	return bytes
}

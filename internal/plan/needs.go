package plan

import (
	"cmp"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
)

// Needs returns what has to be level before the boundary plan next may go live
// after current: state are ranges whose parameters and optimizer state a
// worker does not hold and will own or mirror; parameters are ranges of the
// layers of a stage that a worker will newly serve, whose parameters alone it
// does not have and does not get with the state.
//
// From is a living holder, which may be one that leaves: the owner if it
// lives; -1 if there is none. What View.Held lists is not needed any more. Both
// lists are in the order of layers.
func Needs(current, next *Plan, v View) (state, parameters []Transfer) {
	same, lives := make(map[id.WorkerID]bool), make(map[id.WorkerID]bool)
	for _, w := range v.Workers {
		was, ok := current.Worker(w.ID)
		lives[w.ID] = ok && was.Incarnation == w.Incarnation
	}
	for _, w := range next.Workers {
		was, ok := current.Worker(w.ID)
		same[w.ID] = ok && was.Incarnation == w.Incarnation
	}
	held := make(map[id.WorkerID][]id.Range)
	for _, h := range v.Held {
		if _, ok := lives[h.Worker]; ok {
			held[h.Worker] = append(held[h.Worker], h.Range)
		}
	}
	first := make([]int, current.Layers()+1) // shard of the current plan, by layer
	for i := len(current.Shards) - 1; i >= 0; i-- {
		first[current.Shards[i].Layer] = i
	}
	// need adds what of r the worker lacks, beside what have lists.
	need := func(list []Transfer, r id.Range, to id.WorkerID, have []id.Range) []Transfer {
		for _, lack := range without(r, have) {
			for i := first[r.Layer]; i < len(current.Shards); i++ {
				s := &current.Shards[i]
				lo, hi := max(s.Lo, lack.Lo), min(s.Hi, lack.Hi)
				if s.Layer != r.Layer || s.Lo >= lack.Hi {
					break
				}
				if lo < hi {
					list = append(list, Transfer{id.Range{Layer: r.Layer, Lo: lo, Hi: hi}, source(s, lives, held, id.Range{Layer: r.Layer, Lo: lo, Hi: hi}), to})
				}
			}
		}
		return list
	}
	var c Change
	c.diffShards(current, next, same)
	gets := make(map[id.WorkerID][]id.Range)
	for _, list := range [][]Transfer{c.Move, c.Mirror} {
		for _, t := range list {
			state = need(state, t.Range, t.To, held[t.To])
			gets[t.To] = append(gets[t.To], t.Range)
		}
	}
	had := make(map[Gather]bool)
	for _, g := range current.parameters() {
		had[g] = same[g.Worker]
	}
	for _, g := range next.parameters() {
		if had[g] {
			continue
		}
		have := slices.Concat(held[g.Worker], gets[g.Worker])
		hi := 0
		for i := first[g.Layer]; i < len(current.Shards) && current.Shards[i].Layer == g.Layer; i++ {
			s := &current.Shards[i]
			if same[g.Worker] && s.Holds(g.Worker) {
				have = append(have, id.Range{Layer: s.Layer, Lo: s.Lo, Hi: s.Hi})
			}
			hi = s.Hi
		}
		parameters = need(parameters, id.Range{Layer: g.Layer, Lo: 0, Hi: hi}, g.Worker, have)
	}
	for _, list := range [][]Transfer{state, parameters} {
		slices.SortFunc(list, func(a, b Transfer) int {
			return cmp.Or(cmp.Compare(a.Layer, b.Layer), cmp.Compare(a.Lo, b.Lo), cmp.Compare(a.To, b.To))
		})
	}
	return state, parameters
}

// source returns a living holder of a range of a shard.
func source(s *Shard, lives map[id.WorkerID]bool, held map[id.WorkerID][]id.Range, r id.Range) id.WorkerID {
	if lives[s.Owner] {
		return s.Owner
	}
	for _, m := range s.Mirrors {
		if lives[m] {
			return m
		}
	}
	best := id.WorkerID(-1)
	for w, list := range held {
		if (best < 0 || w < best) && slices.ContainsFunc(list, func(h id.Range) bool { return h.Layer == r.Layer && h.Lo <= r.Lo && r.Hi <= h.Hi }) {
			best = w
		}
	}
	return best
}

// without returns what is left of a range without others, in order.
func without(r id.Range, others []id.Range) []id.Range {
	left := []id.Range{r}
	for _, o := range others {
		if o.Layer != r.Layer || o.Hi <= r.Lo || r.Hi <= o.Lo {
			continue
		}
		var next []id.Range
		for _, l := range left {
			if lo, hi := l.Lo, min(l.Hi, o.Lo); lo < hi {
				next = append(next, id.Range{Layer: r.Layer, Lo: lo, Hi: hi})
			}
			if lo, hi := max(l.Lo, o.Hi), l.Hi; lo < hi {
				next = append(next, id.Range{Layer: r.Layer, Lo: lo, Hi: hi})
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
		if s.Owner == w || slices.Contains(s.Mirrors, w) {
			bytes += StateParts * BytesPerParameter * int64(s.Hi-s.Lo)
		}
	}
	return bytes
}

// TransferBytes returns the bytes of transfers.
func TransferBytes(state, parameters []Transfer) (bytes int64) {
	for _, t := range state {
		bytes += StateParts * BytesPerParameter * int64(t.Hi-t.Lo)
	}
	for _, t := range parameters {
		bytes += BytesPerParameter * int64(t.Hi-t.Lo)
	}
	return bytes
}

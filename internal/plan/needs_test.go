package plan

import "testing"

// What workers hold in all: the parameters of a stage on each of its workers, and each shard's state on its owner
// and mirrors.
func TestHolds(t *testing.T) {
	prof := Profile{Layers: model(4)}
	p := first(t, workers(5, 2), prof, 2, 8, 1)
	var got, want int64
	for _, w := range p.Workers {
		got += p.Holds(w.ID, prof.Layers)
	}
	for _, s := range p.Stages {
		for _, l := range prof.Layers[s.Lo:s.Hi] {
			want += 4 * int64(l.Size()) * int64(len(s.Workers)+3*2)
		}
	}
	if got != want {
		t.Errorf("%d bytes, want %d", got, want)
	}
}

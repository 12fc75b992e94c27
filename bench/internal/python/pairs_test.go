package python

import "testing"

// The runs are few, and each two settings meet in one of them.
func TestPairwise(t *testing.T) {
	chosen, have := pairwise(), map[string]bool{}
	for _, c := range chosen {
		if !c.valid() {
			t.Errorf("%v is not valid", c)
		}
		if w, s := c.after(); s > w || w == c.workers && s == c.stages {
			t.Errorf("%v is resumed with %d workers and %d stages", c, w, s)
		}
		for _, p := range c.pairs() {
			have[p] = true
		}
	}
	if len(chosen) > 12 {
		t.Errorf("%d runs, want at most 12", len(chosen))
	}
	for _, c := range every() {
		for _, p := range c.pairs() {
			if !have[p] {
				t.Fatalf("%s do not meet", p)
			}
		}
	}
}

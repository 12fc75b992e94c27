package sim

import "testing"

func TestUndisturbed(t *testing.T) {
	c := New(Config{Seed: 1, Workers: 3, Stages: 1, Micros: 8, Mirrors: 1, Steps: 8, Zero: 2, MinWorkers: 1, Layers: layers(), Detect: 300 * ms, Digests: true, Trace: true})
	if err := run(c); err != nil {
		t.Fatal(err)
	}
}

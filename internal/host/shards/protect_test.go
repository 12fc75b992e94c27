package shards

import (
	"slices"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// protect protects the newest checkpoint up to a step, and returns its step and how many files were copied.
func (c *cluster) protect(limit int) (step, copied int) {
	c.t.Helper()
	p, send := NewProtect(9<<20, rundir.Only(job), limit, c.living(), 2)
	c.deliver(send, func(host int, name string, m control.Message) []Send {
		if s, ok := m.(control.Surveyed); ok {
			return p.Surveyed(host, name, s)
		}
		return p.Kept(host, name, m.(control.Kept))
	})
	if over, err := p.Over(); !over || err != nil {
		c.t.Fatalf("over %v, %v", over, err)
	}
	return p.Copied()
}

// After a host is lost, the files that it had are copied again, so that any other host may be lost, too, and so on.
func TestProtect(t *testing.T) {
	c := newCluster(t, 4)
	if err := c.save(3, 2); err != nil {
		t.Fatal(err)
	}
	if step, copied := c.protect(3); step != 3 || copied != 0 {
		t.Errorf("of a checkpoint of which all files have two copies, %d of step %d were copied", copied, step)
	}
	for lost := range 3 {
		c.gone[lost] = true
		if _, refused := c.gather(0); refused != nil { // nothing of it counts
			t.Errorf("%q", refused)
		}
		want := []int{2, 3, 0}[lost] // those with one copy left; in the end there is no other host
		if step, copied := c.protect(3); step != 3 || copied != want {
			t.Errorf("after the loss of %d hosts, %d files of step %d were copied, want %d", lost+1, copied, step, want)
		}
		for _, h := range c.living() {
			found := c.stores[h.Place].Survey(control.Survey{Of: rundir.Only(job)}).Found
			if len(found) != 1 {
				t.Fatalf("%s has %d checkpoints", h.Name, len(found))
			}
			m, err := checkpoint.ParseManifest(found[0].Manifest)
			if err != nil {
				t.Fatal(err)
			}
			for i, f := range m.Files {
				if has := slices.Contains(f.Hosts, h.Name); lost < 2 && has != found[0].Has[i] || len(f.Hosts) < min(2, len(c.living())) {
					t.Errorf("%s: %s is on %v, and %v here", h.Name, f.Name, f.Hosts, found[0].Has[i])
				}
			}
		}
	}
	if step, refused := c.gather(3); step != 3 || refused != nil {
		t.Errorf("the last host finds %d, %q", step, refused)
	}
}

// A host that joins after a checkpoint gets its manifest, so that it finds the checkpoint when it leads.
func TestProtectTellsOfACheckpoint(t *testing.T) {
	c := newCluster(t, 3)
	if err := c.save(3, 2); err != nil {
		t.Fatal(err)
	}
	c.enter()
	if step, copied := c.protect(3); step != 3 || copied != 0 || c.dials != 3 {
		t.Errorf("%d files of step %d were copied, with %d connections", copied, step, c.dials)
	}
	list, err := checkpoint.List(c.stores[3].Dir)
	if err != nil || len(list) != 1 || list[0].Err != nil || list[0].Step != 3 {
		t.Errorf("it finds %+v, %v", list, err)
	}
}

// A host that returns with the checkpoints of another job, and with files of its own job that others do not have any more, offers only
// what belongs to the newest whole checkpoint.
func TestProtectOfAHostThatReturns(t *testing.T) {
	c := newCluster(t, 3)
	if err := c.save(3, 2); err != nil {
		t.Fatal(err)
	}
	c.gone[2] = true
	if _, copied := c.protect(3); copied == 0 {
		t.Error("nothing is copied after a loss")
	}
	write := func(job string, step int, plan id.Version) {
		m := checkpoint.Manifest{Job: job, Step: step, Plan: plan, Rule: "sgd", Layers: []int{2}}
		for w := range 2 {
			file, err := checkpoint.Write(t.Context(), c.stores[2].Dir, checkpoint.Part{Job: job, Step: step, Plan: plan, Worker: w, Rule: "sgd",
				Shards: []checkpoint.Shard{{Range: id.Range{Layer: 0, Lo: w, Hi: w + 1}, Params: []float32{1}, Moments: [][]float32{{1}}}}})
			if err != nil {
				t.Fatal(err)
			}
			file.Hosts = []string{"c", "x"}
			m.Files = append(m.Files, file)
		}
		if err := checkpoint.Commit(c.stores[2].Dir, m); err != nil {
			t.Fatal(err)
		}
	}
	write("job-2", 4, id.Version{Generation: 1, N: 1})
	write(job, 5, id.Version{Generation: 1, N: 1}) // of a step after the newest that the run has a checkpoint of
	c.gone[2] = false
	if step, copied := c.protect(3); step != 3 || copied != 0 {
		t.Errorf("%d files of step %d were copied", copied, step)
	}
	c.gone[0] = true // with the copies that the others made, and those that it has kept
	if step, refused := c.gather(3); step != 3 || refused != nil {
		t.Errorf("found %d, %q", step, refused)
	}
	for _, step := range []int{4, 5} {
		if c.has(1, step) != nil {
			t.Errorf("b has got %v", c.has(1, step))
		}
	}
}

// A host that goes meanwhile ends it, and what comes late changes nothing.
func TestProtectGivenUp(t *testing.T) {
	c := newCluster(t, 3)
	if err := c.save(3, 2); err != nil {
		t.Fatal(err)
	}
	p, send := NewProtect(1, rundir.Only(job), 3, c.hosts, 3)
	for _, s := range send {
		send = p.Surveyed(s.Host, c.hosts[s.Host].Name, c.stores[s.Host].Survey(s.Message.(control.Survey)))
	}
	if len(send) != 3 {
		t.Fatalf("asks for %v", send)
	}
	p.Lost(7, "h")
	if over, _ := p.Over(); over {
		t.Error("over with a host that has no part")
	}
	p.Lost(1, "b")
	if over, err := p.Over(); !over || err == nil || p.Kept(0, "a", control.Kept{ID: send[0].Message.(control.Keep).ID}) != nil {
		t.Errorf("over %v, %v", over, err)
	}
}

package shards

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const job = "job-1"

// cluster are hosts, each with a directory of its own, and the leader on the first one.
type cluster struct {
	t      *testing.T
	hosts  []Host
	stores []*Store
	gone   map[int]bool
	dials  int

	serving sync.WaitGroup
}

func newCluster(t *testing.T, n int) *cluster {
	c := &cluster{t: t, gone: make(map[int]bool)}
	t.Cleanup(c.serving.Wait)
	for range n {
		c.enter()
	}
	return c
}

// enter adds a host.
func (c *cluster) enter() {
	i := len(c.hosts)
	c.hosts = append(c.hosts, Host{i, string(rune('a' + i))})
	c.stores = append(c.stores, &Store{Dir: c.t.TempDir(), Self: c.hosts[i].Name, Dial: func(ctx context.Context, host string) (*control.Conn, error) {
		at := int(host[0] - 'a')
		if c.gone[at] {
			return nil, errors.New("connection refused")
		}
		c.dials++
		ours, theirs := net.Pipe()
		c.serving.Go(func() {
			conn := control.New(theirs)
			defer conn.Close()
			if m, err := conn.Receive(c.t.Context()); err == nil {
				c.stores[at].Serve(c.t.Context(), conn, m.(control.Fetch))
			}
		})
		return control.New(ours), nil
	}})
}

// write writes the part of each host's worker, and returns the manifest.
func (c *cluster) write(step int) (m checkpoint.Manifest, writers []int) {
	const size = 140_000 // more than one Part
	m = checkpoint.Manifest{Job: job, Step: step, Plan: id.Version{Generation: 1, N: step}, Rule: "sgd", Layers: []int{size * len(c.hosts)}}
	for i, s := range c.stores {
		r := id.Range{Layer: 0, Lo: i * size, Hi: (i + 1) * size}
		values := make([]float32, size)
		for k := range values {
			values[k] = float32(step*7 + i + k)
		}
		file, err := checkpoint.Write(c.t.Context(), s.Dir, checkpoint.Part{Job: job, Step: step, Plan: m.Plan, Worker: i, Rule: "sgd", Shards: []checkpoint.Shard{{Range: r, Params: values, Moments: [][]float32{values}}}})
		if err != nil {
			c.t.Fatal(err)
		}
		m.Files, writers = append(m.Files, file), append(writers, i)
	}
	return m, writers
}

// deliver has the living hosts do what they are asked.
func (c *cluster) deliver(send []Send, answered func(host int, name string, m control.Message) []Send) {
	for len(send) > 0 {
		next := send[0]
		send = send[1:]
		if c.gone[next.Host] {
			continue
		}
		var answer control.Message
		switch m := next.Message.(type) {
		case control.Survey:
			answer = c.stores[next.Host].Survey(m)
		case control.Keep:
			answer = c.stores[next.Host].Keep(c.t.Context(), m)
		}
		send = append(send, answered(next.Host, c.hosts[next.Host].Name, answer)...)
	}
}

func (c *cluster) save(step, copies int) error {
	m, writers := c.write(step)
	s, send := NewSave(uint64(step)<<20, m, writers, c.hosts, 0, copies)
	c.deliver(send, func(host int, name string, m control.Message) []Send { return s.Kept(host, name, m.(control.Kept)) })
	for h := range c.gone {
		s.Lost(h, c.hosts[h].Name)
	}
	over, err := s.Over()
	if !over {
		c.t.Error("a checkpoint is neither made nor given up")
	}
	return err
}

func (c *cluster) living() (all []Host) {
	for _, h := range c.hosts {
		if !c.gone[h.Place] {
			all = append(all, h)
		}
	}
	return all
}

func (c *cluster) gather(limit int) (int, []string) {
	g, send := NewGather(7<<20, rundir.Only(job), limit, c.living())
	c.deliver(send, func(host int, name string, m control.Message) []Send {
		if s, ok := m.(control.Surveyed); ok {
			return g.Surveyed(host, name, s)
		}
		return g.Kept(host, name, m.(control.Kept))
	})
	if !g.Over() {
		c.t.Fatal("the search has no end")
	}
	return g.Found()
}

func (c *cluster) path(host, step int) string {
	return filepath.Join(c.stores[host].Dir, "checkpoints", fmt.Sprintf("step-%08d", step))
}

// has returns the files of a checkpoint on a host.
func (c *cluster) has(host, step int) (names []string) {
	entries, _ := os.ReadDir(c.path(host, step))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Each file of a checkpoint is on as many hosts as wanted; with all but as many lost, the others still have all of it.
func TestSaveAndGather(t *testing.T) {
	for _, copies := range []int{2, 3} {
		c := newCluster(t, 4)
		for step := 1; step <= 5; step++ {
			if err := c.save(step, copies); err != nil {
				t.Fatal(err)
			}
		}
		for h := range c.hosts {
			if got := c.has(h, 5); len(got) != copies+1 || c.has(h, 2) != nil || c.has(h, 3) == nil {
				t.Errorf("host %d has %v, and of step 2 %v", h, got, c.has(h, 2))
			}
		}
		c.gone[0] = true
		if copies == 3 {
			c.gone[2] = true
		}
		if step, refused := c.gather(5); step != 5 || refused != nil {
			t.Fatalf("found %d, %q", step, refused)
		}
		for h, s := range c.stores {
			r, _, err := checkpoint.Newest(t.Context(), s.Dir, rundir.Only(job))
			if c.gone[h] {
				continue
			}
			if err != nil || r.Manifest().Step != 5 {
				t.Errorf("host %d: %v", h, err)
				continue
			}
			r.Close()
		}
		if step, _ := c.gather(4); step != 4 {
			t.Errorf("found %d, which is no checkpoint of step 4 or before", step)
		}
	}
}

// What is missing is named, with the hosts that had it, and an older checkpoint is used; a damaged copy is replaced.
func TestGatherNamesWhatIsMissing(t *testing.T) {
	c := newCluster(t, 3)
	if err := errors.Join(c.save(1, 3), c.save(2, 2)); err != nil {
		t.Fatal(err)
	}
	c.gone[1], c.gone[2] = true, true
	step, refused := c.gather(9)
	want := []string{"the checkpoint of step 2 is not used: missing are plan-1.2-worker-1.safetensors (on b and c)"}
	if step != 1 || !slices.Equal(refused, want) {
		t.Errorf("found %d, %q", step, refused)
	}

	c = newCluster(t, 3)
	if err := errors.Join(c.save(1, 2), c.save(2, 2)); err != nil {
		t.Fatal(err)
	}
	damage := func(host int, name string) {
		path := filepath.Join(c.path(host, 2), name)
		b, err := os.ReadFile(path)
		if err == nil {
			b[len(b)-1]++
			err = os.WriteFile(path, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	damage(0, "plan-1.2-worker-0.safetensors")
	if step, refused := c.gather(9); step != 2 || refused != nil {
		t.Errorf("found %d, %q", step, refused)
	}
	for h := range c.hosts {
		damage(h, "plan-1.2-worker-0.safetensors")
	}
	step, refused = c.gather(9)
	if step != 1 || len(refused) != 1 || !strings.HasPrefix(refused[0], "the checkpoint of step 2 is not used: a: plan-1.2-worker-0.safetensors from ") || !strings.Contains(refused[0], "altered") {
		t.Errorf("found %d, %q", step, refused)
	}
}

// A checkpoint is given up with a host that has a part in it, and no host takes it for whole.
func TestSaveGivenUp(t *testing.T) {
	c := newCluster(t, 3)
	c.gone[2] = true
	if err := c.save(1, 2); err == nil {
		t.Error("made without a host that writes")
	}
	for h := range c.hosts {
		if slices.Contains(c.has(h, 1), "manifest.json") {
			t.Errorf("host %d has the manifest", h)
		}
	}
	c.stores[0].Drop(t.Context(), control.Drop{Step: 0})
	if c.has(0, 1) == nil {
		t.Error("a checkpoint is dropped that may be under way")
	}
	if c.stores[0].Drop(t.Context(), control.Drop{Step: 1}); c.has(0, 1) != nil {
		t.Errorf("left: %v", c.has(0, 1))
	}
}

// What comes from hosts is not trusted.
func TestHostile(t *testing.T) {
	c := newCluster(t, 2)
	if err := c.save(1, 1); err != nil {
		t.Fatal(err)
	}
	found := c.stores[0].Survey(control.Survey{Of: rundir.Only(job)}).Found
	for name, k := range map[string]control.Keep{
		"no manifest":   {Manifest: []byte("{}")},
		"no such file":  {Manifest: found[0].Manifest, Files: []control.Wanted{{File: 2}}},
		"negative file": {Manifest: found[0].Manifest, Files: []control.Wanted{{File: -1}}},
		"no host":       {Manifest: found[0].Manifest, Files: []control.Wanted{{File: 1}}},
	} {
		if got := c.stores[0].Keep(t.Context(), k); got.Err == "" {
			t.Errorf("%s: accepted", name)
		}
	}
	for _, f := range []control.Fetch{{Step: 1, File: "manifest.json"}, {Step: 1, File: "../../x.safetensors"}, {Step: -1, File: "x.safetensors"}, {Step: 1, File: "plan-1.1-worker-0.safetensors", At: -1}} {
		ours, theirs := net.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.stores[0].Serve(t.Context(), control.New(theirs), f)
		}()
		conn := control.New(ours)
		m, err := conn.Receive(t.Context())
		if p, ok := m.(control.Part); err != nil || !ok || p.Err == "" || len(p.Data) > 0 {
			t.Errorf("%+v: %+v, %v", f, m, err)
		}
		conn.Close()
		<-done
	}
	g, _ := NewGather(1, rundir.Only(job), 9, c.hosts)
	g.Surveyed(0, "a", control.Surveyed{ID: 1, Found: []control.Holding{{Manifest: found[0].Manifest, Has: []bool{true}}, {Manifest: []byte("x"), Has: make([]bool, 1<<18)}}})
	g.Surveyed(1, "b", control.Surveyed{ID: 1})
	if step, _ := g.Found(); !g.Over() || step != 0 {
		t.Errorf("found %d", step)
	}
}

package archive

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
)

// counted counts the bytes that are put by each machine.
type counted struct {
	Bucket
	mu   *sync.Mutex
	puts map[string][]string
	name string
}

func (c counted) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	c.mu.Lock()
	c.puts[c.name] = append(c.puts[c.name], filepath.Base(name))
	c.mu.Unlock()
	return c.Bucket.Put(ctx, name, content, size)
}

// apart makes a checkpoint of four files, of which each of three machines has those that the manifest says.
func apart(t *testing.T, step int, hosts ...[]string) map[string]string {
	t.Helper()
	dirs := map[string]string{"a": t.TempDir(), "b": t.TempDir(), "c": t.TempDir()}
	m := checkpoint.Manifest{Job: job.ID(), Step: step, Plan: id.Version{Generation: 1, N: 1}, Rule: "sgd", Layers: []int{100}}
	for w, on := range hosts {
		s := checkpoint.Shard{Range: id.Range{Lo: 25 * w, Hi: 25 * (w + 1)}, Moments: [][]float32{make([]float32, 25)}}
		for i := s.Lo; i < s.Hi; i++ {
			s.Params = append(s.Params, valueOf(step, i))
		}
		var f checkpoint.File
		for _, h := range on {
			var err error
			if f, err = checkpoint.Write(t.Context(), dirs[h], checkpoint.Part{Job: m.Job, Step: step, Plan: m.Plan, Worker: w, Rule: m.Rule, Shards: []checkpoint.Shard{s}}); err != nil {
				t.Fatal(err)
			}
		}
		f.Hosts = on
		m.Files = append(m.Files, f)
	}
	for _, dir := range dirs {
		if err := checkpoint.Commit(dir, m); err != nil {
			t.Fatal(err)
		}
	}
	return dirs
}

// Every machine copies its share; what one cannot copy comes to this machine first.
func TestOthers(t *testing.T) {
	for _, c := range []struct {
		name  string
		fails func(machine, file string) bool
		gone  []string // files that this machine has lost
		want  map[string]int
		fetch int
	}{
		{"all", func(string, string) bool { return false }, nil, map[string]int{"a": 1, "b": 2, "c": 1}, 0},
		{"one fails", func(m, _ string) bool { return m == "b" }, nil, map[string]int{"a": 3, "c": 1}, 2},
		{"in the middle", func(m, f string) bool { return m == "b" && strings.Contains(f, "3") }, nil, map[string]int{"a": 2, "b": 1, "c": 1}, 1},
		{"all fail", func(string, string) bool { return true }, nil, map[string]int{"a": 4}, 3},
		{"lost here", func(string, string) bool { return false }, []string{"0"}, map[string]int{"a": 1, "b": 2, "c": 1}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			dirs := apart(t, 5, []string{"a", "b"}, []string{"b", "c"}, []string{"c", "a"}, []string{"b", "a"})
			b := Folder{Path: t.TempDir()}
			puts, mu := make(map[string][]string), new(sync.Mutex)
			bucket := func(name string) Bucket { return counted{b, mu, puts, name} }
			fetched := 0
			a := New(bucket("a"), claimOf("x", 0))
			a.Others = &Others{Self: "a",
				Put: func(ctx context.Context, machine, prefix string, m *checkpoint.Manifest, files []int) (there []int) {
					r, err := checkpoint.Open(dirs[machine], m.Step)
					if err != nil {
						t.Error(err)
						return nil
					}
					defer r.Close()
					for _, i := range files {
						if c.fails(machine, m.Files[i].Name) {
							return there
						}
						if err := PutFile(ctx, bucket(machine), r, prefix, i); err != nil {
							t.Error(err)
						}
						there = append(there, i)
					}
					return there
				},
				Fetch: func(ctx context.Context, m *checkpoint.Manifest, files []int) error {
					for _, i := range files {
						fetched++
						f, err := os.Open(filepath.Join(dirs[m.Files[i].Hosts[0]], "checkpoints", fmt.Sprintf("step-%08d", m.Step), m.Files[i].Name))
						if os.IsNotExist(err) {
							f, err = os.Open(filepath.Join(dirs[m.Files[i].Hosts[1]], "checkpoints", fmt.Sprintf("step-%08d", m.Step), m.Files[i].Name))
						}
						if err == nil {
							err = checkpoint.Receive(ctx, dirs["a"], m, i, f)
							f.Close()
						}
						if err != nil {
							return err
						}
					}
					return nil
				},
			}
			for _, w := range c.gone {
				names, err := filepath.Glob(filepath.Join(dirs["a"], "checkpoints", "*", "*"+w+".safetensors"))
				if err != nil || len(names) != 1 || os.Remove(names[0]) != nil {
					t.Fatal(names, err)
				}
			}
			if err := a.Save(t.Context(), dirs["a"], 5, checkpoint.Keep{Newest: 1}); err != nil {
				t.Fatal(err)
			}
			got := make(map[string]int)
			for m, files := range puts {
				got[m] = len(slices.DeleteFunc(files, func(f string) bool { return !strings.HasSuffix(f, ".safetensors") }))
			}
			maps.DeleteFunc(got, func(_ string, n int) bool { return n == 0 })
			if !maps.Equal(got, c.want) || fetched < c.fetch {
				t.Errorf("%v, %d fetched; want %v, %d", puts, fetched, c.want, c.fetch)
			}
			wantStep(t, b, 5)
		})
	}
}

// The prefix comes from another machine.
func TestPutFileChecksThePlace(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 3)
	r, err := checkpoint.Open(dir, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b := Folder{Path: t.TempDir()}
	good := prefixOf(3, 1)
	for _, prefix := range []string{"", "/", "claims/", "manifests/", "shards/../claims/", good + "../", strings.TrimSuffix(good, "/"), "x" + good, strings.Replace(good, "step", "stop", 1)} {
		if PutFile(t.Context(), b, r, prefix, 0) == nil {
			t.Errorf("%q is taken", prefix)
		}
	}
	if err := PutFile(t.Context(), b, r, good, 0); err != nil {
		t.Error(err)
	}
}

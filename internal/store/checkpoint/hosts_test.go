package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// spread writes a checkpoint of n owners whose files are on another host each, but for those that stay here.
func spread(t *testing.T, dir string, step, n int, here ...int) Manifest {
	t.Helper()
	m := writeParts(t, dir, step, n, "adamw")
	for i := range m.Files {
		m.Files[i].Hosts = []string{"a", "b"}
		if !slices.Contains(here, i) {
			if err := os.Remove(filepath.Join(dir, stepDir(step), m.Files[i].Name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := Commit(dir, m); err != nil {
		t.Fatal(err)
	}
	return m
}

// A host that has a part of a checkpoint keeps it, and can use it once the rest has come.
func TestPartOnThisHost(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	for step := 1; step <= 5; step++ {
		spread(t, dir, step, 3, step%3)
	}
	writeParts(t, other, 5, 3, "adamw")
	if err := Prune(t.Context(), dir, Keep{}, 6); err != nil {
		t.Fatal(err)
	}
	held, err := Holdings(dir, rundir.Only(job), 8)
	if err != nil || len(held) != 3 || held[0].Manifest.Step != 5 || held[2].Manifest.Step != 3 || !slices.Equal(held[0].Has, []bool{false, false, true}) {
		t.Fatalf("%+v, %v", held, err)
	}
	if held, _ := Holdings(dir, rundir.Only("job-2"), 8); len(held) != 0 {
		t.Errorf("of another job: %+v", held)
	}
	wantNewest(t, dir, -1, // at the first file that is missing
		"step-00000005/plan-2.5-worker-0.safetensors: missing", "step-00000004/plan-2.4-worker-0.safetensors: missing", "step-00000003/plan-2.3-worker-1.safetensors: missing")
	m := held[0].Manifest
	for i := range 2 {
		f, err := OpenFile(other, 5, m.Files[i].Name)
		if err == nil {
			err = errors.Join(Receive(t.Context(), dir, &m, i, f), f.Close())
		}
		if has, err2 := Has(t.Context(), dir, &m, i, true); err != nil || err2 != nil || !has {
			t.Fatalf("file %d: %v, %v", i, err, err2)
		}
	}
	wantNewest(t, dir, 5)
	for _, e := range files(t, dir) {
		if strings.HasSuffix(e, tempSuffix) {
			t.Errorf("left behind: %s", e)
		}
	}
}

// What another host sends is used only if it is the file of the manifest.
func TestReceiveRefuses(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	m := spread(t, dir, 1, 2)
	writeParts(t, other, 1, 2, "adamw")
	good, err := os.ReadFile(filepath.Join(other, stepDir(1), m.Files[0].Name))
	if err != nil {
		t.Fatal(err)
	}
	altered := slices.Clone(good)
	altered[len(altered)/2]++
	broken := errors.New("the link has gone")
	for name, c := range map[string]struct {
		from io.Reader
		want error
	}{
		"short":   {bytes.NewReader(good[:len(good)-1]), ErrAltered},
		"altered": {bytes.NewReader(altered), ErrAltered},
		"nothing": {strings.NewReader(""), ErrAltered},
		"broken":  {io.MultiReader(bytes.NewReader(good[:9]), &failing{broken}), broken},
	} {
		if err := Receive(t.Context(), dir, &m, 0, c.from); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if has, _ := Has(t.Context(), dir, &m, 0, false); has {
			t.Errorf("%s: the file is there", name)
		}
	}
	endless := &counting{r: io.MultiReader(bytes.NewReader(good), zeros{})}
	if err := Receive(t.Context(), dir, &m, 0, endless); err != nil || endless.n > m.Files[0].Size {
		t.Errorf("%v; %d bytes were read of a file of %d", err, endless.n, m.Files[0].Size)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Receive(ctx, dir, &m, 1, zeros{}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, stepDir(1), "x.safetensors")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"x.safetensors", "manifest.json", "../x.safetensors", "no.safetensors", ""} {
		if f, err := OpenFile(dir, 1, name); err == nil {
			f.Close()
			t.Errorf("%q was opened", name)
		}
	}
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

type counting struct {
	r io.Reader
	n int64
}

func (c *counting) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}

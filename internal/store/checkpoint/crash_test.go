package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

var errFault = errors.New("injected fault")

// A trouble fails one operation of a disk, by its number, and all later ones if the machine goes down with it.
type trouble struct {
	at, n int
	down  bool // from then on
	power bool // and what was not synced is gone
	was   bool
	undo  map[string]func() // by name: what a loss of power undoes
	what  string            // the operation that failed
}

func (x *trouble) op(what, name string) error {
	if x.n++; x.n != x.at && !(x.was && x.down) {
		return nil
	}
	if !x.was {
		x.was, x.what = true, what+" "+name
	}
	return fmt.Errorf("%s %s: %w", what, name, errFault)
}

// cut takes the power away.
func (x *trouble) cut() {
	if x.power {
		for _, undo := range x.undo {
			undo()
		}
	}
}

// faulty is a disk with a trouble. It does not really sync.
type faulty struct {
	disk
	dir string
	x   *trouble
}

func (d faulty) at(name string) string { return filepath.Join(d.dir, name) }

func (d faulty) MkdirAll(name string, perm fs.FileMode) error {
	if err := d.x.op("mkdir", name); err != nil {
		return err
	}
	return d.disk.MkdirAll(name, perm)
}

func (d faulty) Create(name string, size int64) (file, error) {
	if err := d.x.op("create", name); err != nil {
		return nil, err
	}
	f, err := d.disk.Create(name, size)
	path := d.at(name)
	d.x.undo[path] = func() { os.Truncate(path, 0) }
	return &faultyFile{f, path, d.x}, err
}

func (d faulty) Rename(from, to string) error {
	if err := d.x.op("rename", to); err != nil {
		return err
	}
	from, to = d.at(from), d.at(to)
	if undo := d.x.undo[from]; undo != nil {
		return errors.New("the file was not synced before it got its name")
	}
	d.x.undo[to] = func() { os.Rename(to, from) }
	return os.Rename(from, to)
}

func (d faulty) Remove(name string) error {
	if err := d.x.op("remove", name); err != nil {
		return err
	}
	return d.disk.Remove(name)
}

func (d faulty) Sync(name string) error {
	if err := d.x.op("sync", name); err != nil {
		return err
	}
	clear(d.x.undo)
	return nil
}

func (d faulty) Enter(name string) (disk, error) {
	inner, err := d.disk.Enter(name)
	return faulty{inner, d.at(name), d.x}, err
}

type faultyFile struct {
	file
	path string
	x    *trouble
}

func (f *faultyFile) Write(b []byte) (int, error) {
	if err := f.x.op("write", filepath.Base(f.path)); err != nil {
		n, _ := f.file.Write(b[:len(b)/2])
		return n, err
	}
	return f.file.Write(b)
}

func (f *faultyFile) Sync() error {
	if err := f.x.op("fsync", filepath.Base(f.path)); err != nil {
		return err
	}
	delete(f.x.undo, f.path)
	return nil
}

func (f *faultyFile) Close() error {
	err := f.x.op("close", filepath.Base(f.path))
	return errors.Join(err, f.file.Close())
}

// A checkpoint of which any write, sync or rename fails, or in the middle of which the machine goes down, is whole or is none, and the
// older one stays whole. The next attempt succeeds.
func TestEveryFaultOfWriting(t *testing.T) {
	base := t.TempDir()
	save(t, base, 10, 2)
	write := func(dir string, x *trouble, n int) error {
		open := func(dir string) (disk, error) {
			d, err := openDisk(dir)
			return faulty{d, dir, x}, err
		}
		m := Manifest{Job: job, Step: 20, Plan: id.Version{Generation: 2, N: n}, Rule: "sgd", Layers: layers}
		for w, ranges := range deal(2) {
			f, err := writePart(context.Background(), open, dir, part(20, w, m.Plan, m.Rule, ranges))
			if err != nil {
				return err
			}
			m.Files = append(m.Files, f)
		}
		return commit(open, dir, m)
	}
	newest := func(dir string) int {
		r, _, err := Newest(t.Context(), dir, rundir.Only(job))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		compareAll(t, r, 2)
		return r.Manifest().Step
	}
	for _, power := range []trouble{{}, {down: true}, {down: true, power: true}} {
		for at, whole := 1, false; !whole; at++ {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(base)); err != nil {
				t.Fatal(err)
			}
			x := power
			x.at, x.undo = at, make(map[string]func())
			err := write(dir, &x, 20)
			x.cut()
			step := newest(dir)
			whole = !x.was
			switch {
			case whole && (err != nil || step != 20):
				t.Fatalf("without a fault: step %d, %v", step, err)
			case !whole && !errors.Is(err, errFault) && step != 20:
				t.Errorf("%s: the error is %v, and the newest is of step %d", x.what, err, step)
			case step != 10 && step != 20:
				t.Errorf("%s: the newest is of step %d", x.what, step)
			}
			if err := write(dir, &trouble{undo: make(map[string]func())}, 21); err != nil {
				t.Fatalf("after %s: %v", x.what, err)
			}
			if step := newest(dir); step != 20 {
				t.Errorf("after %s and another attempt, the newest is of step %d", x.what, step)
			}
			if at > 400 {
				t.Fatal("there is no end of it")
			}
		}
	}
}

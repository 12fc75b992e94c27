package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A trouble fails one operation of a disk, by its number, and all later ones if the machine goes down with it.
type trouble struct {
	at, n int
	cause error
	down  bool // from then on
	power bool // and what was not synced is gone
	was   bool
	undo  []undo // what a loss of power undoes, the oldest first
	trash string
	what  string // the operation that failed
}

// undo takes back what is not on the disk yet: the content of a file, or what has happened to a name in a directory.
type undo struct {
	file, dir string
	back      func()
}

func (x *trouble) op(what, name string) error {
	if x.n++; x.n != x.at && !(x.was && x.down) {
		return nil
	}
	if !x.was {
		x.was, x.what = true, fmt.Sprintf("%s %s: %v (operation %d)", what, name, x.cause, x.n)
	}
	return fmt.Errorf("%s %s: %w", what, name, x.cause)
}

// named says that something has happened to a name, which is undone unless its directory is synced.
func (x *trouble) named(path string, back func()) {
	x.undo = append(x.undo, undo{dir: filepath.Dir(path), back: back})
}

// synced says that a file or directory is on the disk.
func (x *trouble) synced(path string) {
	x.undo = slices.DeleteFunc(x.undo, func(u undo) bool { return u.file == path || u.dir == path })
}

// cut takes the power away.
func (x *trouble) cut() {
	if x.power {
		for _, u := range slices.Backward(x.undo) {
			u.back()
		}
	}
}

// drop moves away what is removed, until the directory is synced.
func (x *trouble) drop(path string) error {
	away := filepath.Join(x.trash, strconv.Itoa(x.n)+filepath.Base(path))
	err := os.Rename(path, away)
	if err == nil {
		x.named(path, func() { os.Rename(away, path) })
	}
	return err
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
	for _, path := range []string{filepath.Dir(d.at(name)), d.at(name)} {
		if _, err := os.Lstat(path); err != nil {
			d.x.named(path, func() { os.RemoveAll(path) })
		}
	}
	return d.disk.MkdirAll(name, perm)
}

func (d faulty) Create(name string, size int64) (file, error) {
	if err := d.x.op("create", name); err != nil {
		return nil, err
	}
	f, err := d.disk.Create(name, size)
	path := d.at(name)
	if err == nil {
		d.x.named(path, func() { os.Remove(path) })
		d.x.undo = append(d.x.undo, undo{file: path, back: func() { os.Truncate(path, 0) }})
	}
	return &faultyFile{f, path, d.x}, err
}

func (d faulty) Rename(from, to string) error {
	if err := d.x.op("rename", to); err != nil {
		return err
	}
	from, to = d.at(from), d.at(to)
	if slices.ContainsFunc(d.x.undo, func(u undo) bool { return u.file == from }) {
		return errors.New("the file was not synced before it got its name")
	}
	if err := d.x.drop(to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	d.x.named(to, func() { os.Rename(to, from) })
	return os.Rename(from, to)
}

func (d faulty) Remove(name string) error {
	if err := d.x.op("remove", name); err != nil {
		return err
	}
	return d.x.drop(d.at(name))
}

func (d faulty) RemoveAll(name string) error {
	path := d.at(name)
	if err := d.x.op("remove all of", name); err != nil {
		inside, _ := os.ReadDir(path)
		for _, e := range inside[:len(inside)/2] {
			err = errors.Join(err, os.RemoveAll(filepath.Join(path, e.Name()))) // these come to the disk before what was not synced
		}
		return err
	}
	if err := d.x.drop(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (d faulty) Sync(name string) error {
	if err := d.x.op("sync", name); err != nil {
		return err
	}
	d.x.synced(d.at(name))
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
	f.x.synced(f.path)
	return nil
}

func (f *faultyFile) Close() error {
	err := f.x.op("close", filepath.Base(f.path))
	return errors.Join(err, f.file.Close())
}

// A checkpoint is written and older ones are pruned, and any write, sync, rename or removal fails, or the machine goes down in the middle
// of it. The new checkpoint is whole or is none, and whole where its commit has returned; the one before it stays whole; and none looks
// whole that is not. The next attempt succeeds.
func TestEveryFaultOfWriting(t *testing.T) {
	base := t.TempDir()
	save(t, base, 10, 2)
	writeParts(t, base, 12, 2, "adamw") // never finished
	save(t, base, 15, 2)
	if err := os.WriteFile(filepath.Join(base, filepath.FromSlash(stepDir(15)), "stray"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(dir string, x *trouble, n int) (committed bool, err error) {
		x.trash = t.TempDir()
		open := func(dir string) (disk, error) {
			d, err := openDisk(dir)
			return faulty{d, dir, x}, err
		}
		m := Manifest{Job: job, Step: 20, Plan: id.Version{Generation: 2, N: n}, Rule: "sgd", Layers: layers}
		for w, ranges := range deal(2) {
			f, err := writePart(context.Background(), open, dir, part(20, w, m.Plan, m.Rule, ranges), nil)
			if err != nil {
				return false, err
			}
			m.Files = append(m.Files, f)
		}
		if err := commit(open, dir, m); err != nil {
			return false, err
		}
		return true, prune(t.Context(), open, dir, Keep{Newest: 2}, 21)
	}
	newest := func(dir, after string) int {
		r, _, err := Newest(t.Context(), dir, rundir.Only(job))
		if err != nil {
			t.Fatalf("%s: %v", after, err)
		}
		defer r.Close()
		compareAll(t, r, 2)
		steps, err := listSteps(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range steps {
			_, looks := examine(t.Context(), dir, step, false)
			if _, is := examine(t.Context(), dir, step, true); (looks == nil) != (is == nil) || step == 15 && is != nil {
				t.Errorf("%s: the checkpoint of step %d looks whole (%v), and is (%v)", after, step, looks, is)
			}
		}
		return r.Manifest().Step
	}
	for _, kind := range []trouble{
		{cause: unix.ENOSPC}, {cause: unix.EIO}, {cause: unix.EROFS}, {cause: unix.EIO, down: true}, {cause: unix.EIO, down: true, power: true},
	} {
		for at, whole := 1, false; !whole; at++ {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(base)); err != nil {
				t.Fatal(err)
			}
			x := kind
			x.at = at
			committed, err := write(dir, &x, 20)
			x.cut()
			step := newest(dir, x.what)
			whole = !x.was
			switch {
			case whole && (err != nil || step != 20):
				t.Fatalf("without a fault: step %d, %v", step, err)
			case !whole && !errors.Is(err, x.cause) && step != 20:
				t.Errorf("%s: the error is %v, and the newest is of step %d", x.what, err, step)
			case committed && step != 20, step != 15 && step != 20:
				t.Errorf("%s: the newest is of step %d, committed: %v", x.what, step, committed)
			}
			if _, err := write(dir, new(trouble), 21); err != nil {
				t.Fatalf("after %s: %v", x.what, err)
			}
			if step := newest(dir, x.what); step != 20 {
				t.Errorf("after %s and another attempt, the newest is of step %d", x.what, step)
			}
			if left := files(t, dir); len(left) != 6 {
				t.Errorf("after %s and another attempt, these files are left: %q", x.what, left)
			}
			if at > 600 {
				t.Fatal("there is no end of it")
			}
		}
	}
}

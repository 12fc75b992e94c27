package rundir

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Resume takes over a run directory whose run has ended, however it did, and
// returns what it says of it. Whole files are replaced as new ones come, line files grow on. The
// error is one of [ErrNoRun] and [ErrInUse], wrapped, or about a file.
func Resume(path string) (*Dir, Record, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, Record{}, err
	}
	if target, err := filepath.EvalSymlinks(abs); err == nil {
		abs = target // such as runs/latest, which may come to point elsewhere
	}
	d := &Dir{path: abs, shown: filepath.Clean(path), again: true}
	d.setParent()
	if d.lock, err = os.OpenFile(d.File("lock"), os.O_RDWR, 0); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, Record{}, fmt.Errorf("%s %w: give the directory of a run, such as %s", path, ErrNoRun, filepath.Join(Parent, Latest))
	} else if err != nil {
		return nil, Record{}, fmt.Errorf("%s: %w", path, cause(err))
	}
	if err := unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = d.lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, Record{}, fmt.Errorf("%s %w, or by this one, which is still under way", path, ErrInUse)
		}
		return nil, Record{}, fmt.Errorf("%s: lock: %w", path, err)
	}
	if err := tighten(abs); err != nil {
		return nil, Record{}, errors.Join(fmt.Errorf("%s: %w", path, cause(err)), d.lock.Close())
	}
	r, err := Read(abs)
	r.Path, r.Running, r.Job = d.shown, false, r.Job.Plain()
	if err != nil {
		return nil, r, errors.Join(err, d.Close())
	}
	return d, r, nil
}

// ReadData reads data.json.
func (d *Dir) ReadData() (files []DataFile, err error) {
	found, err := readJSON(d.File("data.json"), &files)
	if err == nil && !found {
		err = fmt.Errorf("%s: %w", d.File("data.json"), fs.ErrNotExist)
	}
	return files, err
}

// continueRun is WriteJob of a resumed run: job.json stays as it is.
func (d *Dir) continueRun() error {
	if err := d.openLines(d.continueLines); err != nil {
		return err
	}
	if err := os.Remove(d.File("summary.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	d.isRun = true
	return d.link()
}

// continueLines opens a line file to write to its end.
func (d *Dir) continueLines(name string) (*os.File, error) {
	f, err := os.OpenFile(d.File(name), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if err := dropPart(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// dropPart cuts off a line that was not written to its end.
func dropPart(f *os.File) error {
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return err
	}
	last := []byte{0}
	if _, err := f.ReadAt(last, info.Size()-1); err != nil || last[0] == '\n' {
		return err
	}
	tail, from, err := readTail(f)
	if err != nil {
		return err
	}
	end := bytes.LastIndexByte(tail, '\n') + 1
	switch {
	case end == len(tail):
		return nil
	case end == 0 && from > 0:
		return fmt.Errorf("%s: a line of more than %d bytes", f.Name(), tailSize)
	}
	return f.Truncate(from + int64(end))
}

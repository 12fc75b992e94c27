package rundir

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// A run directory that is removed, moved away or covered by a mount while its run trains is made again: the files that the run holds open
// still have what was written to them. Where it cannot be made again, lines go on into the open files, and the end of the run puts all of it into another folder.

// RemovedError means that a run directory, or a line file of it, was removed while its run trains. What was to be written is written.
type RemovedError struct {
	Dir         string // as the user knows it
	Checkpoints bool   // they are gone as well
	Err         error  // why it cannot be made again; nil if it was
}

func (e *RemovedError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("the run directory %s was removed, and cannot be made again: %v", e.Dir, e.Err)
	}
	return fmt.Sprintf("the run directory %s was removed: it is made again", e.Dir)
}

func (e *RemovedError) Unwrap() error { return e.Err }

// Elsewhere makes a folder for what a run directory does not take any more, where the system keeps temporary files.
func Elsewhere(dir string) (string, error) {
	return os.MkdirTemp("", "soliton-"+filepath.Base(dir)+"-")
}

// maxHeld bounds the files that are held open.
const maxHeld = 256

// hold keeps the files open that are written once, so that they can be made again.
func (d *Dir) hold() error {
	names := []string{"job.json", "data.json"}
	if d.bin {
		programs, err := filepath.Glob(d.File("bin/*"))
		if err != nil {
			return err
		}
		for _, path := range programs {
			names = append(names, filepath.Join("bin", filepath.Base(path)))
		}
	}
	first := d.File("first") // what a Python program begins with, and is
	err := filepath.WalkDir(first, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || len(names) == maxHeld {
			return err
		}
		name, err := filepath.Rel(d.path, path)
		names = append(names, name)
		return err
	})
	if err != nil && !IsMissing(err) {
		return err
	}
	d.held = make(map[string]*os.File)
	for _, name := range names {
		f, err := Open(d.File(name))
		if errors.Is(err, fs.ErrNotExist) { // the copy of a host that took over
			continue
		}
		if err != nil {
			return err
		}
		d.held[name] = f
	}
	return nil
}

// restore makes the directory again if the file that is to be written, or the directory, was removed, or another one has its place. It returns a [RemovedError] once
// for each cause. d.mu is held.
func (d *Dir) restore(name string) error {
	if d.lines == nil || !d.isDisplaced(name) {
		d.gone = nil
		return nil
	}
	fault := &RemovedError{Dir: d.shown, Checkpoints: isMissing(d.File("checkpoints"))}
	if fault.Err = cause(d.make()); fault.Err == nil {
		d.gone = nil
		return fault
	}
	was := d.gone
	if d.gone = fault; was != nil && was.Error() == fault.Error() {
		return nil
	}
	return fault
}

// isDisplaced reports whether the file that is to be written, or one that the next leader needs, is not at its name, or another one is. A
// program that removes the directory may be at it while it is made again, and then leaves some files. Of traces, which are many, only
// their own file counts.
func (d *Dir) isDisplaced(name string) bool {
	if d.lines[name] == nil && isMissing(d.path) {
		return true
	}
	for line := range d.lines {
		if (line == name || line != traces && name != traces) && (isMissing(d.File(line)) || d.isOther(line)) {
			return true
		}
	}
	for _, held := range []string{"job.json", "data.json"} {
		if name != traces && d.held[held] != nil && isMissing(d.File(held)) {
			return true
		}
	}
	return false
}

func isMissing(path string) bool {
	_, err := os.Lstat(path)
	return IsMissing(err)
}

// IsMissing reports whether an error says that a file, or a folder on the way to it, is not there.
func IsMissing(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) }

// isOther reports whether the name of a line file belongs to another file than the one that is open, and not because another host leads.
func (d *Dir) isOther(name string) bool {
	f := d.lines[name]
	if f == nil {
		return false
	}
	was, err := f.Stat()
	if err != nil {
		return false
	}
	is, err := os.Lstat(d.File(name))
	return err == nil && !os.SameFile(was, is) && d.leads(d.by)
}

// IsAnother reports whether the directory has another run by now.
func (d *Dir) IsAnother() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.isAnother()
}

// isAnother is IsAnother; d.mu is held.
func (d *Dir) isAnother() bool {
	was := d.held["job.json"]
	if was == nil {
		return false
	}
	info, err := was.Stat()
	if err != nil {
		return true
	}
	own, err := io.ReadAll(io.NewSectionReader(was, 0, info.Size()))
	if err != nil {
		return true
	}
	is, err := readAtMost(d.File("job.json"), info.Size()+1)
	return !errors.Is(err, fs.ErrNotExist) && (err != nil || !bytes.Equal(is, own))
}

// make makes what is missing of the directory.
func (d *Dir) make() error {
	if d.isAnother() {
		return ErrInUse
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(d.path), 0o777), os.MkdirAll(d.File("log"), 0o700), tighten(d.path)); err != nil {
		return err
	}
	if err := d.lockAgain(); err != nil {
		return err
	}
	if err := d.copyTo(d.path); err != nil {
		return err
	}
	for name, f := range d.lines {
		again, err := openFile(d.File(name), os.O_RDWR|os.O_APPEND)
		if err != nil {
			return err
		}
		d.lines[name] = again
		_ = f.Close() // it has no name any more
	}
	if d.workers && d.reached != nil {
		if err := d.writeReached(); err != nil {
			return err
		}
	}
	if s := &d.space; s.reserve > 0 && isMissing(d.File(reserveName)) {
		s.reserved = d.makeReserve(s.reserve) == nil
	}
	return d.link()
}

// lockAgain locks the directory if its lock was removed, unless another run has taken it since.
func (d *Dir) lockAgain() error {
	lock, err := os.OpenFile(d.File("lock"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if d.lock == nil {
			return nil
		}
		was, err := d.lock.Stat()
		if err != nil {
			return err
		}
		is, err := os.Lstat(d.File("lock"))
		if err != nil || os.SameFile(was, is) {
			return err
		}
		for i, former := range d.locks { // the directory has come back, and no other run could take it
			if was, err := former.Stat(); err == nil && os.SameFile(was, is) {
				d.locks[i], d.lock = d.lock, former
				return nil
			}
		}
		if lock, err = openFile(d.File("lock"), os.O_RDWR); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if err := lockFile(lock); err != nil {
		_ = lock.Close()
		return ErrInUse
	}
	if d.lock != nil {
		d.locks = append(d.locks, d.lock)
	}
	d.lock = lock
	// Of a directory that was removed, the lock has no name any more.
	d.locks = slices.DeleteFunc(d.locks, func(f *os.File) bool {
		var info unix.Stat_t
		gone := unix.Fstat(int(f.Fd()), &info) != nil || info.Nlink == 0
		if gone {
			_ = f.Close()
		}
		return gone
	})
	return nil
}

// copyTo writes the files that are held open to a folder, as far as they are not there.
func (d *Dir) copyTo(folder string) error {
	copyFile := func(name string, from io.ReaderAt, info fs.FileInfo, err error) error {
		path := filepath.Join(folder, name)
		other := folder == d.path && d.isOther(name)
		if err != nil || !isMissing(path) && !other {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return err
		}
		f, err := NewFile(path)
		if err != nil {
			return err
		}
		if _, err = io.Copy(f, io.NewSectionReader(from, 0, info.Size())); err == nil {
			err = f.Chmod(info.Mode().Perm())
		}
		if err == nil && other && !d.leads(d.by) {
			err = ErrReplaced
		}
		if err != nil {
			f.Discard()
			return err
		}
		return f.Commit()
	}
	for name, f := range d.held {
		info, err := f.Stat()
		if err := copyFile(name, f, info, err); err != nil {
			return err
		}
	}
	for name, f := range d.lines {
		info, err := f.Stat()
		if err := copyFile(name, f, info, err); err != nil {
			return err
		}
	}
	return nil
}

// Salvage writes the summary and the records to a folder if the directory was removed and cannot be made again. It makes a folder if that
// is "", because the model is elsewhere, and returns it.
func (d *Dir) Salvage(folder string, s Summary) (made string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone == nil {
		return "", nil
	}
	text, err := encodeJSON("summary.json", s.complete())
	if err != nil {
		return "", err
	}
	if folder == "" {
		if folder, err = Elsewhere(d.path); err != nil {
			return "", err
		}
		made = folder
	}
	return made, errors.Join(WriteFile(filepath.Join(folder, "summary.json"), text), d.copyTo(folder))
}

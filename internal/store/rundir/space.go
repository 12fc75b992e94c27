package rundir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/platform"
)

// What a disk must have left, in bytes, so that a write goes ahead that the run can do without. The file reserveName is kept for
// the writes that it cannot do without. So traces are the first that a filling disk stops, then checkpoints, then training.
const (
	SpareTraces      = 512 << 10
	SpareCheckpoints = 256 << 10

	reserveName  = ".reserve"
	reserveLines = 256 << 10 // for the lines of a run that holds, and its summary
)

// maxLate bounds the bytes of writes that wait.
const maxLate = 16 << 20

// WaitError means that the run directory does not take what the run must write, for a cause that may pass ([platform.MayPass]). What
// was to be written is not lost: it is written, or waits for [Dir.Flush].
type WaitError struct {
	Dir  string // the run directory, as the user knows it
	File string // that was to be written
	Err  error
}

func (e *WaitError) Error() string {
	switch {
	case e.Full():
		return fmt.Sprintf("the disk of %s is full (%s: %v)", e.Dir, e.File, e.Err)
	case errors.Is(e.Err, unix.EROFS):
		return fmt.Sprintf("the disk of %s is read-only (%s: %v)", e.Dir, e.File, e.Err)
	default:
		return fmt.Sprintf("%s takes no writes (%s: %v)", e.Dir, e.File, e.Err)
	}
}

// Full reports whether the disk has no room.
func (e *WaitError) Full() bool { return platform.IsFull(e.Err) }

func (e *WaitError) Unwrap() error { return e.Err }

// CheckSpace returns an error that [platform.IsFull] if a file of size bytes would leave less than spare bytes on the disk of dir.
func CheckSpace(dir string, size, spare int64) error {
	free, ok := platform.FreeSpace(dir)
	if !ok || free >= size+spare {
		return nil
	}
	return fmt.Errorf("%.1f MB are needed and %.1f MB are free: %w", float64(size+spare)/1e6, float64(free)/1e6, unix.ENOSPC)
}

// FreeReserve gives the reserve of a run directory to the files that end the run, and reports whether there was one.
func FreeReserve(dir string) bool { return os.Remove(filepath.Join(dir, reserveName)) == nil }

// space is what a run directory knows of its disk.
type space struct {
	reserve  int64 // bytes to be reserved; 0: the file system cannot, or had no room for them
	reserved bool
	late     []late // writes that wait, in their order
	lateSize int
	cause    error // why they wait
	lost     bool  // traces.jsonl was emptied, and AddTrace has yet to say so
}

// late is a write that may have to wait.
type late struct {
	name    string // of the file
	content []byte
	write   func() error
}

// setReserve reserves room for the lines and the model of a job, or for the lines alone.
func (d *Dir) setReserve(job Job) {
	model := 4 * max(0, min(job.Parameters, 1<<48))
	for _, size := range []int64{model + reserveLines, reserveLines} {
		if err := d.makeReserve(size); err == nil {
			d.space.reserve, d.space.reserved = size, true
			return
		}
	}
}

// makeReserve makes the reserve if it leaves half as much as it takes.
func (d *Dir) makeReserve(size int64) error {
	if err := CheckSpace(d.path, size, size/2); err != nil {
		return err
	}
	f, err := openFile(d.File(reserveName), os.O_CREATE|os.O_WRONLY)
	if err != nil {
		return err
	}
	if err := errors.Join(platform.Allocate(f, size), f.Close()); err != nil {
		FreeReserve(d.path)
		return err
	}
	return nil
}

// must writes what the run cannot do without. Where the directory was removed, it is made again first, and the error is a [RemovedError]
// although the write has succeeded. d.mu is held, and content is what write appends to the file, or makes it.
func (d *Dir) must(name string, content []byte, write func() error) error {
	removed := d.restore(name)
	err := d.mustFit(late{name, content, write})
	for tries := 1; d.gone == nil && IsMissing(err) && tries < maxRestores; tries++ { // it was removed meanwhile
		removed = errors.Join(removed, d.restore(name))
		err = d.mustFit(late{name, content, write})
	}
	if d.gone != nil && IsMissing(err) {
		err = nil // removed says it, or has said it
	}
	return errors.Join(removed, err)
}

// maxRestores is how often a directory is made again for one write.
const maxRestores = 10

// mustFit is must for a directory that is there. Where the disk is full, traces.jsonl is emptied first. Then the reserve is opened, and
// the error is a [WaitError] although the write has succeeded; after that, writes wait for Flush, as they do at once where the cause is
// another one.
func (d *Dir) mustFit(w late) error {
	s := &d.space
	var err error
	if len(s.late) == 0 {
		if err = w.write(); platform.IsFull(err) && d.emptyTraces() {
			err = w.write()
		}
		if !platform.MayPass(err) {
			return err
		}
		s.cause = cause(err)
	}
	fault := &WaitError{Dir: d.shown, File: w.name, Err: s.cause}
	if s.reserved && fault.Full() {
		s.reserved = false
		if FreeReserve(d.path) && len(s.late) == 0 {
			if err = w.write(); !platform.MayPass(err) {
				return errors.Join(err, fault)
			}
		}
	}
	if s.lateSize += len(w.content); s.lateSize > maxLate {
		return fmt.Errorf("%s, and %d MB wait to be written", fault.Error(), maxLate>>20)
	}
	s.late = append(s.late, w)
	return fault
}

// emptyTraces gives the room of traces.jsonl back, and reports whether it had any.
func (d *Dir) emptyTraces() bool {
	f := d.lines[traces]
	if f == nil {
		return false
	}
	info, err := f.Stat()
	if err != nil || info.Size() == 0 || f.Truncate(0) != nil {
		return false
	}
	d.space.lost = true
	return true
}

// Flush does the writes that have waited, and reserves room again. The error is a [WaitError] as long as they have to wait.
func (d *Dir) Flush() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.flush()
}

func (d *Dir) flush() error {
	s := &d.space
	for len(s.late) > 0 {
		err := s.late[0].write()
		if platform.MayPass(err) {
			s.cause = cause(err)
			return &WaitError{Dir: d.shown, File: "lines of the run", Err: s.cause}
		}
		if s.late = s.late[1:]; err != nil {
			return err
		}
	}
	s.lateSize = 0
	if s.reserve > 0 && !s.reserved && !d.closed {
		if err := d.makeReserve(s.reserve); err != nil {
			return &WaitError{Dir: d.shown, File: "the reserve", Err: cause(err)}
		}
		s.reserved = true
	}
	return nil
}

// putElsewhere ends waiting: what a file still does not take goes into one of its name in another folder, which the error names. It is
// called with the error of a flush.
func (d *Dir) putElsewhere(cause error) error {
	refused := make(map[string]bool)
	var rest []late
	for _, w := range d.space.late {
		if !refused[w.name] && w.write() == nil {
			continue
		}
		if refused[w.name] = true; w.name != workersName { // which is of no use any more
			rest = append(rest, w)
		}
	}
	if d.space.late = nil; len(rest) == 0 {
		return nil
	}
	folder, err := Elsewhere(d.path)
	for _, w := range rest {
		if err != nil {
			break
		}
		var f *os.File
		if f, err = openFile(filepath.Join(folder, w.name), os.O_CREATE|os.O_WRONLY|os.O_APPEND); err == nil {
			_, err = f.Write(w.content)
			err = errors.Join(err, f.Close())
		}
	}
	if err != nil {
		return fmt.Errorf("%w; what it lacks is lost: %w", cause, err)
	}
	return fmt.Errorf("%w; what it lacks is in %s", cause, folder)
}

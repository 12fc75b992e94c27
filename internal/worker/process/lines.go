package process

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Lines are the files that a program's line writers write in OnStep. Each ends where the newest call that has returned left it: what
// is behind that is of a call whose process ended, and is cut off before this process writes.
//
// Bytes are written at their offset, so a process that was taken for dead can only write once more what its successor writes, too.
type Lines struct {
	ends []rundir.LineFile // by path
	open map[string]*os.File
	err  error // of the call under way
}

// resume continues where another process was.
func (l *Lines) resume(ends []rundir.LineFile) {
	l.close()
	l.ends = slices.Clone(ends)
	slices.SortFunc(l.ends, func(a, b rundir.LineFile) int { return strings.Compare(a.Path, b.Path) })
}

// files returns how far the files go.
func (l *Lines) files() []rundir.LineFile { return slices.Clone(l.ends) }

// Write appends to the file at path; header is its beginning. The error is that of the call of OnStep, too.
func (l *Lines) Write(path, header, text string) error {
	err := l.write(path, header, text)
	l.err = errors.Join(l.err, err)
	return err
}

func (l *Lines) write(path, header, text string) error {
	i, ok := slices.BinarySearchFunc(l.ends, path, func(f rundir.LineFile, path string) int { return strings.Compare(f.Path, path) })
	if !ok {
		l.ends = slices.Insert(l.ends, i, rundir.LineFile{Path: path})
	}
	end := &l.ends[i]
	f := l.open[path]
	if f == nil {
		var err error
		if f, err = openLines(path, end.Size); err != nil {
			return err
		}
		if l.open == nil {
			l.open = make(map[string]*os.File)
		}
		l.open[path] = f
	}
	if end.Size == 0 {
		text = header + text
	}
	n, err := f.WriteAt([]byte(text), end.Size)
	if err != nil {
		return err
	}
	end.Size += int64(n)
	return nil
}

// openLines opens a file and cuts it off at its end.
func openLines(path string, end int64) (*os.File, error) {
	if st, err := os.Stat(path); err == nil && !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: is not a regular file, so it cannot be cut where the last call ended", path)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o666)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() < end {
		err = fmt.Errorf("%s: has %d bytes, and the run has written %d; put the file back, or give another one", path, st.Size(), end)
	}
	if err == nil {
		err = f.Truncate(end)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// close closes the files. What was written is with the operating system.
func (l *Lines) close() {
	for _, f := range l.open {
		_ = f.Close()
	}
	l.open = nil
}

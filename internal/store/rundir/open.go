package rundir

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

var errIrregular = errors.New("not a regular file")

// Open opens a file of a run directory to read it. It refuses what is no regular file, and does not wait for the writer of a FIFO.
func Open(path string) (*os.File, error) { return openFile(path, os.O_RDONLY) }

// openFile is [os.OpenFile] for the files of a run directory, which only their owner may use. It refuses what is no regular file,
// and does not wait for the other end of a FIFO.
func openFile(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|unix.O_NONBLOCK, 0o600)
	if errors.Is(err, unix.ENXIO) { // a FIFO without a reader, or a socket
		return nil, &fs.PathError{Op: "open", Path: path, Err: errIrregular}
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: path, Err: errIrregular}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// lockFile takes the lock of a run directory for this process. The error is EWOULDBLOCK where a run has it. A process that looks whether
// there is a run has the lock together with others, for a moment ([Running]), and is waited for.
func lockFile(f *os.File) error {
	fd := int(f.Fd())
	for end := time.Now().Add(lookers); ; time.Sleep(time.Millisecond) {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
		if err := unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB); err != nil {
			return err
		}
		if err := unix.Flock(fd, unix.LOCK_UN); err != nil {
			return err
		}
	}
}

// lookers bounds how long [lockFile] waits, as a process that looks may have been stopped.
const lookers = 2 * time.Second

// OpenRoot is [os.OpenRoot] for directories that another program may have replaced: it does not wait for the writer of a FIFO.
func OpenRoot(path string) (*os.Root, error) {
	if err := isDirectory(os.Stat(path)); err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.OpenRoot(path)
}

// EnterRoot does so within a root.
func EnterRoot(root *os.Root, name string) (*os.Root, error) {
	if err := isDirectory(root.Stat(name)); err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return root.OpenRoot(name)
}

// ReadRoot lists a directory within a root.
func ReadRoot(root *os.Root, name string) ([]fs.DirEntry, error) {
	if err := isDirectory(root.Stat(name)); err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return fs.ReadDir(root.FS(), name)
}

// readDir is [os.ReadDir] likewise.
func readDir(path string) ([]fs.DirEntry, error) {
	if err := isDirectory(os.Stat(path)); err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.ReadDir(path)
}

func isDirectory(info fs.FileInfo, err error) error {
	switch path := new(fs.PathError); {
	case errors.As(err, &path):
		return path.Err
	case err == nil && !info.IsDir():
		return unix.ENOTDIR
	}
	return err
}

// WithContext returns a reader that ends with the error of a context when that is done.
func WithContext(ctx context.Context, r io.Reader) io.Reader { return &contextReader{ctx, r} }

type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}

// WriteFile writes a file that appears under its name complete and synced.
func WriteFile(path string, content []byte) error {
	f, err := NewFile(path)
	if err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		f.Discard()
		return err
	}
	return f.Commit()
}

// File is a file that appears under its name with Commit, complete and synced.
type File struct {
	*os.File
	path string
}

// NewFile makes the file without its name.
func NewFile(path string) (*File, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	return &File{f, path}, err
}

// Commit gives the file its name; a folder of that name is moved aside. After an error the file is removed.
func (f *File) Commit() error {
	err := errors.Join(f.Sync(), f.Close())
	if err == nil {
		err = rename(f.Name(), f.path)
	}
	if err != nil {
		f.Discard()
		return err
	}
	return syncDir(filepath.Dir(f.path))
}

// rename gives a file its name. What cannot be replaced by a file, a folder, is moved aside.
func rename(from, to string) error {
	err := os.Rename(from, to)
	if info, e := os.Lstat(to); err == nil || e != nil || !info.IsDir() {
		return err
	}
	aside, err := os.MkdirTemp(filepath.Dir(to), filepath.Base(to)+badSuffix+"-")
	if err == nil {
		err = unix.Rename(to, aside) // that is empty; os.Rename replaces no folder
	}
	if err != nil {
		return fmt.Errorf("%s is a folder: %w", to, err)
	}
	return os.Rename(from, to)
}

// Discard removes a file that was not committed.
func (f *File) Discard() {
	_ = f.Close()
	_ = os.Remove(f.Name())
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	err = d.Sync()
	return errors.Join(err, d.Close())
}

package rundir

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

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

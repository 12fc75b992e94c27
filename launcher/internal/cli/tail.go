package cli

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Tail reads a file that grows, by whole lines.
type Tail struct {
	Path string

	f    *os.File
	rest []byte // of a line whose end is still to come
}

// maxLine bounds what is kept of a line; a longer one comes in parts.
const maxLine = 1 << 20

// Lines calls each with every line since the last call. A file that is not there yet has none; a last line without its end comes,
// with one, only if the file grows no more.
func (t *Tail) Lines(last bool, each func(line []byte) error) (err error) {
	if t.f == nil {
		if t.f, err = rundir.Open(t.Path); errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := t.f.Read(buf)
		t.rest = append(t.rest, buf[:n]...)
		for {
			end := bytes.IndexByte(t.rest, '\n') + 1
			if end == 0 && len(t.rest) < maxLine {
				break
			}
			if end == 0 {
				end = len(t.rest)
			}
			if err := each(t.rest[:end]); err != nil {
				return err
			}
			t.rest = t.rest[end:]
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	if last && len(t.rest) > 0 {
		return each(append(t.rest, '\n'))
	}
	return nil
}

// Close closes the file.
func (t *Tail) Close() {
	if t.f != nil {
		_ = t.f.Close()
	}
}

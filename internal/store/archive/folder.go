package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Folder is a [Bucket] in a folder, which is made when something is written.
type Folder struct{ Path string }

func (f Folder) String() string { return f.Path }

// Put implements [Bucket].
func (f Folder) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	return f.write(name, func(w io.Writer) error {
		n, err := io.Copy(w, rundir.WithContext(ctx, content))
		if err == nil && n != size {
			err = fmt.Errorf("%d bytes came, of %d", n, size)
		}
		return err
	}, os.Rename)
}

// Create implements [Bucket].
func (f Folder) Create(_ context.Context, name string, content []byte) error {
	return f.write(name, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	}, func(temp, path string) error {
		err := os.Link(temp, path) // fails if there is one, other than a rename
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("%s: %w", name, ErrExists)
		}
		return errors.Join(err, os.Remove(temp))
	})
}

// write writes a file that gets its name when it is complete and on the disk.
func (f Folder) write(name string, content func(io.Writer) error, give func(temp, path string) error) error {
	at, err := f.path(name)
	if err != nil {
		return err
	}
	dir := filepath.Dir(at)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	temp, err := os.CreateTemp(dir, ".*"+tempSuffix)
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name()) // if it has not got its name
	if err := errors.Join(content(temp), temp.Sync(), temp.Close()); err != nil {
		return err
	}
	if err := give(temp.Name(), at); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

const tempSuffix = ".tmp"

// Try returns an error if no object can be put into the folder, which it makes.
func (f Folder) Try() error {
	if err := os.MkdirAll(f.Path, 0o700); err != nil {
		return err
	}
	temp, err := os.CreateTemp(f.Path, ".*"+tempSuffix)
	if err != nil {
		return err
	}
	return errors.Join(temp.Close(), os.Remove(temp.Name()))
}

// Get implements [Bucket].
func (f Folder) Get(_ context.Context, name string) (io.ReadCloser, error) {
	at, err := f.path(name)
	if err != nil {
		return nil, err
	}
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", name, ErrMissing)
	}
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: no regular file", name)
	}
	if err != nil {
		return nil, err
	}
	return os.Open(at)
}

// List implements [Bucket].
func (f Folder) List(ctx context.Context, folder string) (names []string, err error) {
	at, err := f.path(path.Clean(folder))
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(at, func(p string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case len(names) >= maxNames:
			return fmt.Errorf("%s has more than %d files", folder, maxNames)
		case !d.IsDir() && !strings.HasSuffix(p, tempSuffix): // what is no regular file as well: Get says so
			rel, err := filepath.Rel(f.Path, p)
			names = append(names, filepath.ToSlash(rel))
			return err
		}
		return nil
	})
	return names, err
}

// Delete implements [Bucket].
func (f Folder) Delete(_ context.Context, name string) error {
	at, err := f.path(name)
	if err != nil {
		return err
	}
	if err := os.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for dir := filepath.Dir(at); dir != f.Path && os.Remove(dir) == nil; dir = filepath.Dir(dir) { // those that are empty now
	}
	return nil
}

// path returns where an object is.
func (f Folder) path(name string) (string, error) {
	if !filepath.IsLocal(filepath.FromSlash(name)) {
		return "", fmt.Errorf("%q is no name of an object", name)
	}
	return filepath.Join(f.Path, filepath.FromSlash(name)), nil
}

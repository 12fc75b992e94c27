// Package find finds the files that a user names: files, folders and patterns. It looks at names and sizes only. In a worker of a run
// over several machines, it asks for what this machine lacks; see [Ask].
package find

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
)

// File is a file with its size in bytes.
type File struct {
	Path string // as people name it
	Size int64
	Copy string // where this machine has the content of a file that is on another one; "" for Path
}

// At returns where this machine has the content.
func (f File) At() string { return cmp.Or(f.Copy, f.Path) }

// Error describes unusable data in one line.
type Error struct {
	Path   string // file, folder or pattern; "" if it is about all data
	Reason string
}

func (e *Error) Error() string {
	if e.Path == "" {
		return e.Reason
	}
	return e.Path + ": " + e.Reason
}

// absent is an error that says that a file is not there. Another one that cannot be used is not asked for elsewhere.
type absent struct{ why *Error }

func (a absent) Error() string { return a.why.Error() }

// Elsewhere gets files that are not on this machine.
type Elsewhere interface {
	// Found hears of patterns that match files of this machine.
	Found(patterns []string) error
	// Get returns the files that a pattern matches on another machine, with their copies here. none is its error if there is none.
	Get(pattern string, none *Error) ([]File, error)
}

// Programs name their data without a context, so this is one of the process.
var elsewhere atomic.Pointer[Elsewhere]

// Ask has [Files] and [List] ask e for what this machine lacks, until the returned function is called.
func Ask(e Elsewhere) (restore func()) {
	old := elsewhere.Swap(&e)
	return func() { elsewhere.Store(old) }
}

// each finds the files of patterns by a function, and those elsewhere that are not here.
func each(patterns []string, find func(pattern string) ([]File, error)) ([]File, error) {
	far := elsewhere.Load()
	var files []File
	var here []string
	for _, pattern := range patterns {
		found, err := find(pattern)
		missing, lacks := err.(absent) //nolint:errorlint // find does not wrap it
		switch {
		case lacks && far != nil:
			found, err = (*far).Get(pattern, missing.why)
		case lacks:
			err = missing.why
		case err == nil:
			here = append(here, pattern)
		}
		if err != nil {
			return nil, err
		}
		files = append(files, found...)
	}
	if far != nil && len(here) > 0 {
		if err := (*far).Found(here); err != nil {
			return nil, err
		}
	}
	return sorted(files), nil
}

// Files returns the files that match any of the patterns, each once, in path order. A pattern is a file, a folder, which stands for
// all files in it and below whose names do not begin with a dot, or a pattern of [filepath.Match]. Errors are of type [*Error].
func Files(patterns ...string) ([]File, error) {
	if len(patterns) == 0 {
		return nil, &Error{Reason: "no data: name at least one file, folder or pattern"}
	}
	return each(patterns, expand)
}

// List returns the named files, each once, in path order. Errors are of type [*Error].
func List(paths []string) ([]File, error) { return each(paths, one) }

func one(path string) ([]File, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, unusable(filepath.Clean(path), err)
	}
	if !st.Mode().IsRegular() {
		return nil, &Error{filepath.Clean(path), "is not a file"}
	}
	return []File{{Path: path, Size: st.Size()}}, nil
}

// Local returns where this machine has the content of the file at path, or of the one called name in the folder there. Whether it can be
// used, its opening shows. What this machine lacks is a folder, as far as another one has to be asked, unless the path ends as name does.
func Local(path, name string) (string, error) {
	st, err := os.Stat(path)
	if err == nil && st.IsDir() {
		path = filepath.Join(path, name)
		_, err = os.Stat(path)
	}
	if elsewhere.Load() == nil || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return path, nil
	}
	if err != nil && filepath.Ext(path) != filepath.Ext(name) {
		if files, err := List([]string{filepath.Join(path, name)}); err == nil {
			return files[0].At(), nil
		}
	}
	files, err := List([]string{path})
	if err != nil {
		return "", err
	}
	return files[0].At(), nil
}

// unusable returns the error for a file that the system does not open.
func unusable(path string, err error) error {
	e := &Error{path, Cause(err)}
	if errors.Is(err, fs.ErrNotExist) {
		return absent{e}
	}
	return e
}

func sorted(files []File) []File {
	for i := range files {
		files[i].Path = filepath.Clean(files[i].Path)
	}
	slices.SortFunc(files, func(a, b File) int { return cmp.Compare(a.Path, b.Path) })
	return slices.CompactFunc(files, func(a, b File) bool { return a.Path == b.Path })
}

func expand(pattern string) ([]File, error) {
	names := []string{pattern}
	if _, err := os.Lstat(pattern); err != nil && strings.ContainsAny(pattern, `*?[`) {
		var err error
		if names, err = filepath.Glob(pattern); err != nil {
			return nil, &Error{pattern, "is not a valid pattern"}
		}
		if len(names) == 0 {
			return nil, absent{&Error{pattern, "no file matches"}}
		}
	}
	var files []File
	for _, name := range names {
		st, err := os.Stat(name)
		if err != nil {
			return nil, unusable(name, err)
		}
		if !st.IsDir() {
			file, err := one(name)
			if err != nil {
				return nil, err
			}
			files = append(files, file...)
			continue
		}
		if files, err = walk(files, name); err != nil {
			return nil, err
		}
	}
	if len(files) == 0 {
		return nil, absent{&Error{pattern, "holds no files"}}
	}
	return files, nil
}

// walk appends the files of a folder.
func walk(files []File, folder string) ([]File, error) {
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return &Error{path, Cause(err)}
		}
		hidden := path != folder && strings.HasPrefix(d.Name(), ".")
		switch {
		case hidden && d.IsDir():
			return fs.SkipDir
		case !hidden && d.Type().IsRegular():
			st, err := d.Info()
			if err != nil {
				return &Error{path, Cause(err)}
			}
			files = append(files, File{Path: path, Size: st.Size()})
		}
		return nil
	})
	return files, err
}

// Cause returns the message of an error about a file without the path.
func Cause(err error) string {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return err.Error()
}

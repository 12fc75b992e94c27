// Package find finds the files that a user names: files, folders and patterns. It looks at names and sizes only.
package find

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// File is a file with its size in bytes.
type File struct {
	Path string
	Size int64
}

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

// Files returns the files that match any of the patterns, each once, in path order. A pattern is a file, a folder, which stands for
// all files in it and below whose names do not begin with a dot, or a pattern of [filepath.Match]. Errors are of type [*Error].
func Files(patterns ...string) ([]File, error) {
	if len(patterns) == 0 {
		return nil, &Error{Reason: "no data: name at least one file, folder or pattern"}
	}
	var files []File
	for _, pattern := range patterns {
		found, err := expand(pattern)
		if err != nil {
			return nil, err
		}
		files = append(files, found...)
	}
	return sorted(files), nil
}

// List returns the named files, each once, in path order. Errors are of type [*Error].
func List(paths []string) ([]File, error) {
	files := make([]File, len(paths))
	for i, path := range paths {
		st, err := os.Stat(path)
		if err != nil {
			return nil, &Error{filepath.Clean(path), Cause(err)}
		}
		if !st.Mode().IsRegular() {
			return nil, &Error{filepath.Clean(path), "is not a file"}
		}
		files[i] = File{path, st.Size()}
	}
	return sorted(files), nil
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
			return nil, &Error{pattern, "no file matches"}
		}
	}
	var files []File
	for _, name := range names {
		st, err := os.Stat(name)
		if err != nil {
			return nil, &Error{name, Cause(err)}
		}
		if !st.IsDir() {
			one, err := List([]string{name})
			if err != nil {
				return nil, err
			}
			files = append(files, one...)
			continue
		}
		if files, err = walk(files, name); err != nil {
			return nil, err
		}
	}
	if len(files) == 0 {
		return nil, &Error{pattern, "holds no files"}
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
			files = append(files, File{path, st.Size()})
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

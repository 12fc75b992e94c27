package data

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// Object is a file in a bucket.
type Object struct {
	Name    string // its URL
	Size    int64  // in bytes
	Version string // changes with the content, such as an ETag

	// Content reads it. Any goroutine may call it at any time.
	Content io.ReaderAt
}

var buckets struct {
	sync.Mutex
	list map[string]func(pattern string) ([]Object, error)
}

// Register has list find the objects of URLs with a scheme, such as s3. Package data/bucket calls it.
func Register(scheme string, list func(pattern string) ([]Object, error)) {
	buckets.Lock()
	defer buckets.Unlock()
	if buckets.list == nil {
		buckets.list = make(map[string]func(string) ([]Object, error))
	}
	buckets.list[scheme] = list
}

// objects returns the objects that match any of the patterns which are URLs, each once, in the order of their names, and the other
// patterns.
func objects(patterns []string) (all []Object, local []string, err error) {
	for _, pattern := range patterns {
		scheme, _, isURL := strings.Cut(pattern, "://")
		if !isURL {
			local = append(local, pattern)
			continue
		}
		buckets.Lock()
		list := buckets.list[scheme]
		buckets.Unlock()
		if list == nil {
			return nil, nil, &trainer.DataError{Path: pattern, Reason: fmt.Sprintf("nothing reads %s:// here: import github.com/soliton-train/soliton/data/bucket for s3", scheme)}
		}
		found, err := list(pattern)
		if err != nil {
			return nil, nil, &trainer.DataError{Path: pattern, Reason: err.Error()}
		}
		if len(found) == 0 {
			return nil, nil, &trainer.DataError{Path: pattern, Reason: "no object matches"}
		}
		all = append(all, found...)
	}
	slices.SortFunc(all, func(a, b Object) int { return cmp.Compare(a.Name, b.Name) })
	return slices.CompactFunc(all, func(a, b Object) bool { return a.Name == b.Name }), local, nil
}

// filesOf finds files. Objects of buckets are copied into prepared files.
func filesOf(patterns []string) ([]find.File, error) {
	remote, local, err := objects(patterns)
	if err != nil {
		return nil, err
	}
	var files []find.File
	if len(local) > 0 || len(remote) == 0 {
		if files, err = find.Files(local...); err != nil {
			return nil, err
		}
	}
	for _, o := range remote {
		f, err := fetched(o)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

// fetchPart is how much of an object is asked for at once.
const fetchPart = 8 << 20

// fetched returns the prepared copy of an object.
func fetched(o Object) (find.File, error) {
	name := "content" + compression(o.Name)
	folder, err := prepared(fmt.Sprintf("fetch %q %d %q", o.Name, o.Size, o.Version), func(folder string) error {
		_, err := writeFile(filepath.Join(folder, name), func(w io.Writer) error {
			buf := make([]byte, min(fetchPart, o.Size))
			for at := int64(0); at < o.Size; at += int64(len(buf)) {
				buf = buf[:min(int64(len(buf)), o.Size-at)]
				if err := readAt(o.Content, buf, at); err != nil {
					return &trainer.DataError{Path: o.Name, Reason: fmt.Sprintf("byte %d: %v", at, err)}
				}
				if _, err := w.Write(buf); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return asDataError(folder, err)
		}
		return nil
	})
	if err != nil {
		return find.File{}, err
	}
	p, err := existing(folder, name, o.Size)
	return find.File{Path: o.Name, Size: o.Size, Copy: p.path}, err
}

// readAt fills p.
func readAt(r io.ReaderAt, p []byte, at int64) error {
	if n, err := r.ReadAt(p, at); n < len(p) {
		return cmp.Or(err, io.ErrUnexpectedEOF)
	}
	return nil
}

// streamed is the content of files and objects. Objects that are not compressed are read by position; they are not mixed with others.
func streamed(patterns []string) (*content, error) {
	remote, local, err := objects(patterns)
	switch {
	case err != nil:
		return nil, err
	case len(remote) == 0 || slices.ContainsFunc(remote, func(o Object) bool { return compression(o.Name) != "" }):
		return contentOf(patterns)
	case len(local) > 0:
		return nil, &trainer.DataError{Path: local[0], Reason: fmt.Sprintf("lies with %s in one data set: give files and objects a data set each, and mix them", remote[0].Name)}
	}
	var parts []part
	for _, o := range remote {
		parts = append(parts, part{path: o.Name, size: o.Size, remote: o.Content, version: o.Version})
	}
	return newContent(parts), nil
}

// Bounds of what is kept of objects: blocks, so that samples that lie together are one request.
const (
	blockSize = 256 << 10
	maxBlocks = 64
)

// blocks are those of objects that were read last.
type blocks struct {
	kept  map[block][]byte
	order []block // of reading
}

type block struct {
	file   int
	number int64
}

// read fills p with the bytes of an object from position at on.
func (b *blocks) read(i int, of part, p []byte, at int64) error {
	for len(p) > 0 {
		k := block{i, at / blockSize}
		text := b.kept[k]
		if text == nil {
			text = make([]byte, min(blockSize, of.size-k.number*blockSize))
			if err := readAt(of.remote, text, k.number*blockSize); err != nil {
				return &trainer.DataError{Path: of.path, Reason: fmt.Sprintf("byte %d: %v", k.number*blockSize, err)}
			}
			if len(b.order) == maxBlocks {
				delete(b.kept, b.order[0])
				b.order = slices.Delete(b.order, 0, 1)
			}
			if b.kept == nil {
				b.kept = make(map[block][]byte)
			}
			b.kept[k], b.order = text, append(b.order, k)
		}
		n := copy(p, text[at%blockSize:])
		p, at = p[n:], at+int64(n)
	}
	return nil
}

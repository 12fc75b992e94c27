// Package s3 serves the files of a folder as an S3 server does its objects, for tests and comparisons of what reads them: it lists and reads,
// and nothing else. Each answer can be delayed, as where the server is far away.
package s3

import (
	"crypto/md5" // of an ETag, by custom
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Server has a bucket for each folder in Dir.
type Server struct {
	Dir   string
	Delay time.Duration // of each answer

	// Requests counts the answers.
	Requests atomic.Int64
	// Down has all requests refused.
	Down atomic.Bool
}

type listing struct {
	XMLName     xml.Name `xml:"ListBucketResult"`
	Name        string
	Prefix      string
	KeyCount    int
	IsTruncated bool
	Contents    []entry
}

type entry struct {
	Key          string
	Size         int64
	ETag         string
	LastModified string
}

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.Requests.Add(1)
	select {
	case <-time.After(s.Delay):
	case <-r.Context().Done():
		return
	}
	bucket, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch query := r.URL.Query(); {
	case s.Down.Load():
		http.Error(w, "down", http.StatusServiceUnavailable)
	case r.Method != http.MethodGet && r.Method != http.MethodHead || !filepath.IsLocal(filepath.Join(bucket, key)):
		http.Error(w, "this server only reads", http.StatusMethodNotAllowed)
	case query.Has("location"):
		fmt.Fprint(w, `<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></LocationConstraint>`)
	case key == "":
		s.list(w, bucket, query.Get("prefix"))
	default:
		s.read(w, r, filepath.Join(s.Dir, bucket, filepath.FromSlash(key)))
	}
}

func (s *Server) list(w http.ResponseWriter, bucket, prefix string) {
	all := listing{Name: bucket, Prefix: prefix}
	root := filepath.Join(s.Dir, bucket)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if name = filepath.ToSlash(name); !strings.HasPrefix(name, prefix) {
			return nil
		}
		content, tag, err := open(path)
		if err != nil {
			return err
		}
		defer content.Close()
		st, err := content.Stat()
		if err != nil {
			return err
		}
		all.Contents = append(all.Contents, entry{name, st.Size(), tag, st.ModTime().UTC().Format("2006-01-02T15:04:05.000Z")})
		return nil
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	slices.SortFunc(all.Contents, func(a, b entry) int { return strings.Compare(a.Key, b.Key) })
	all.KeyCount = len(all.Contents)
	w.Header().Set("Content-Type", "application/xml")
	_ = xml.NewEncoder(w).Encode(all) // a client that is gone needs no answer
}

// open opens a file, and returns its ETag: that of its name, size and time.
func open(path string) (f *os.File, tag string, err error) {
	if f, err = os.Open(path); err != nil {
		return nil, "", err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, "", err
	}
	sum := md5.Sum(fmt.Appendf(nil, "%s %d %d", path, st.Size(), st.ModTime().UnixNano()))
	return f, `"` + hex.EncodeToString(sum[:]) + `"`, nil
}

func (s *Server) read(w http.ResponseWriter, r *http.Request, path string) {
	f, tag, err := open(path)
	if err != nil {
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `<Error><Code>NoSuchKey</Code></Error>`)
		return
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("ETag", tag)
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", st.ModTime(), f) // ranges, and If-Match
}

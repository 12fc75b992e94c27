// Package supply gets data files that a machine lacks from other machines of the run, and lets those have what the workers of this one
// read.
//
// A worker tells its agent by which patterns it has found files, and asks for those that match none. The agent asks the others' agents,
// which list the files of such a pattern, with sizes and SHA-256, if a worker of theirs has named it: no other file can be listed or
// fetched. Files are copied into the cache of the user, checked, and kept there for later runs.
package supply

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/parts"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// Bounds of what a host keeps in memory and does at a time.
const (
	maxSources = 1 << 17 // patterns
	maxFiles   = 1 << 16 // of a pattern
	maxServed  = 8       // connections of other hosts
	maxGets    = 2       // patterns whose files are fetched
)

// Config says how a host supplies others and itself.
type Config struct {
	Self  string          // name of the host
	Hosts func() []string // names of the hosts of the run
	// Dial connects to another host, which calls Serve there.
	Dial func(ctx context.Context, host string) (*control.Conn, error)
	// Opened reports whether all workers of this host have opened their data, or there are none.
	Opened func() bool
	// Folder is that of the cache; "" is the folder soliton/files of the user's cache. Limit bounds its bytes; 0 means 256 GiB.
	Folder string
	Limit  int64
}

// Store is what a host has, and gets, of data files. Its methods may be called from any goroutine.
type Store struct {
	c      Config
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	served chan struct{} // a place for each connection
	gotten chan struct{} // a place for each pattern whose files are fetched
	cache  *cache

	mu      sync.Mutex
	sources map[string]*source // by pattern
	gets    map[string]*get    // the same
	lacked  map[string]bool    // patterns of which nothing was found anywhere, so far
	held    map[string]string  // paths of listed files by SHA-256
}

// source is what a pattern stands for on this host.
type source struct {
	folder string // in which a relative pattern counts

	mu      sync.Mutex
	reading bool // or read
	files   []control.DataFile
	whole   bool
	err     error
	more    chan struct{} // closed when there is more
}

// New returns the store of a host.
func New(c Config) *Store {
	ctx, cancel := context.WithCancel(context.Background())
	return &Store{
		c: c, ctx: ctx, cancel: cancel, served: make(chan struct{}, maxServed), gotten: make(chan struct{}, maxGets), cache: newCache(c.Folder, c.Limit),
		sources: make(map[string]*source), gets: make(map[string]*get), lacked: make(map[string]bool), held: make(map[string]string),
	}
}

// Close ends all that goes on, and returns when it has ended.
func (s *Store) Close() {
	s.mu.Lock()
	s.cancel() // no task begins from now on
	s.mu.Unlock()
	s.tasks.Wait()
	s.cache.close()
}

// Named takes in by which patterns a worker of this host has found files, from a folder.
func (s *Store) Named(folder string, patterns []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range patterns {
		if _, known := s.sources[p]; !known && len(s.sources) < maxSources {
			s.sources[p] = &source{folder: folder, more: make(chan struct{})}
		}
	}
}

// Serve answers another host that lists or fetches files, until it asks for no more.
func (s *Store) Serve(ctx context.Context, conn *control.Conn, m control.Message) {
	select {
	case s.served <- struct{}{}:
		defer func() { <-s.served }()
	default:
		const busy = "it supplies enough others"
		if _, fetch := m.(control.Fetch); fetch {
			parts.Answer(conn, control.Part{Err: busy})
		} else {
			parts.Answer(conn, control.Listed{Has: control.Opening})
		}
		return
	}
	for {
		switch q := m.(type) {
		case control.Fetch:
			parts.Serve(ctx, conn, q, s.open)
			return
		case control.List:
			if !parts.Answer(conn, s.list(ctx, q)) {
				return
			}
		default:
			return
		}
		var err error
		if m, err = parts.Next(ctx, conn); err != nil {
			return
		}
	}
}

// open opens a file that was listed.
func (s *Store) open(m control.Fetch) (*os.File, error) {
	s.mu.Lock()
	path, ok := s.held[m.SHA256]
	s.mu.Unlock()
	if !ok {
		return nil, errors.New("this file was not listed")
	}
	return rundir.Open(path)
}

// list answers a host that wants to know what there is.
func (s *Store) list(ctx context.Context, m control.List) control.Listed {
	s.mu.Lock()
	from, known := s.sources[m.Pattern]
	lacks := s.gets[m.Pattern] != nil || s.lacked[m.Pattern]
	stranded := false
	for _, g := range s.gets {
		stranded = stranded || g.waits.Load()
	}
	s.mu.Unlock()
	switch {
	case known:
		return s.page(ctx, m, from)
	case lacks || s.c.Opened():
		return control.Listed{Has: control.Lacking}
	case stranded:
		return control.Listed{Has: control.Stranded}
	}
	return control.Listed{Has: control.Opening}
}

// page returns the next files of a source. It waits for them, but not for so long that the other host loses patience.
func (s *Store) page(ctx context.Context, m control.List, from *source) control.Listed {
	late := time.NewTimer(timing.Handshake / 4)
	defer late.Stop()
	for {
		from.mu.Lock()
		if !from.reading {
			from.reading = true
			s.mu.Lock()
			if s.ctx.Err() == nil {
				s.tasks.Go(func() { s.read(m.Pattern, from) })
			}
			s.mu.Unlock()
		}
		files := from.files[min(m.From, len(from.files)):]
		whole, err, more := from.whole, from.err, from.more
		from.mu.Unlock()
		answer := control.Listed{Has: control.Having}
		if err != nil {
			answer.Err = err.Error()
			return answer
		}
		full := len(files) >= control.MaxListed
		if full || whole {
			n := min(len(files), control.MaxListed)
			answer.Files, answer.More = files[:n], n < len(files) || !whole
			return answer
		}
		select {
		case <-more:
		case <-late.C:
			answer.Files, answer.More = files, true
			return answer
		case <-ctx.Done():
			answer.More = true
			return answer
		}
	}
}

// read finds and hashes the files of a source.
func (s *Store) read(pattern string, of *source) {
	err := s.readAll(pattern, of)
	of.mu.Lock()
	defer of.mu.Unlock()
	of.whole, of.err = true, err
	close(of.more)
}

func (s *Store) readAll(pattern string, of *source) error {
	files, err := filesOf(pattern, of.folder)
	if err != nil {
		return err
	}
	if len(files) > maxFiles {
		return fmt.Errorf("%s: has %d files; %d can be sent to other machines", pattern, len(files), maxFiles)
	}
	for _, f := range files {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		sum, err := sumOf(s.ctx, f.At(), f.Size)
		if err != nil {
			return fmt.Errorf("%s: %s", f.Path, find.Cause(err))
		}
		s.hold(of, control.DataFile{Path: f.Path, Size: f.Size, SHA256: sum}, f.At())
	}
	return nil
}

// hold lets other hosts have a file.
func (s *Store) hold(of *source, f control.DataFile, path string) {
	s.mu.Lock()
	s.held[f.SHA256] = path
	s.mu.Unlock()
	of.mu.Lock()
	defer of.mu.Unlock()
	of.files = append(of.files, f)
	if len(of.files)%control.MaxListed == 0 {
		close(of.more)
		of.more = make(chan struct{})
	}
}

// filesOf returns the files of a pattern that counts in a folder, each with the name that the pattern gives it.
func filesOf(pattern, folder string) ([]find.File, error) {
	if filepath.IsAbs(pattern) {
		return find.Files(pattern)
	}
	full := filepath.Join(folder, pattern)
	if _, err := os.Lstat(full); err != nil && strings.ContainsAny(pattern, `*?[`) {
		full = filepath.Join(literal.Replace(folder), pattern)
	}
	files, err := find.Files(full)
	if err != nil {
		return nil, err
	}
	for i, f := range files {
		name, err := filepath.Rel(folder, f.Path)
		if err != nil {
			return nil, err
		}
		files[i] = find.File{Path: name, Size: f.Size, Copy: f.Path}
	}
	return files, nil
}

// literal makes a pattern that matches a folder's name.
var literal = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)

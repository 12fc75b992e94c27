package supply

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/host/parts"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// get is what a worker of this host asked for.
type get struct {
	waits atomic.Bool // for other hosts to open their data
	done  chan struct{}
	files []find.File
	none  bool
	err   error
}

const (
	maxTries = 10                   // to fetch the files of a pattern
	settle   = 3 * timing.Handshake // until a host that cannot be asked has none
)

// Answer answers a worker that lacks the files of a pattern, once they are here or are nowhere. Workers that ask for the same share them.
func (s *Store) Answer(m control.Lacks, say func(control.Message)) {
	s.mu.Lock()
	g := s.gets[m.Pattern]
	if s.ctx.Err() != nil {
		s.mu.Unlock()
		return // the run ends here
	}
	if g == nil {
		g = &get{done: make(chan struct{})}
		s.gets[m.Pattern] = g
		s.tasks.Go(func() {
			defer close(g.done)
			g.files, g.none, g.err = s.get(m.Pattern, g)
		})
	}
	s.mu.Unlock()
	<-g.done
	if g.err != nil {
		s.mu.Lock()
		if s.gets[m.Pattern] == g {
			delete(s.gets, m.Pattern) // the next worker tries again
		}
		if g.none && len(s.lacked) < maxSources { // others need not wait until this host has opened its data
			s.lacked[m.Pattern] = true
		}
		s.mu.Unlock()
		say(control.Got{ID: m.ID, None: g.none, Err: g.err.Error()})
		return
	}
	answer := control.Got{ID: m.ID}
	for i, f := range g.files {
		answer.Files = append(answer.Files, control.GotFile(f))
		if answer.More = i < len(g.files)-1; len(answer.Files) == control.MaxListed || !answer.More {
			say(answer)
			answer.Files = nil
		}
	}
}

// get has the files of a pattern here. none says that they are nowhere.
func (s *Store) get(pattern string, g *get) (files []find.File, none bool, err error) {
	if len(pattern) > control.MaxPattern {
		return nil, true, errors.New("its name is too long for other machines")
	}
	var doubted time.Time // since no host has them for certain, or will
	var failed error
	pause := time.NewTimer(0)
	defer pause.Stop()
	for tries := 0; tries < maxTries; {
		select {
		case <-pause.C:
		case <-s.ctx.Done():
			return nil, false, s.ctx.Err()
		}
		pause.Reset(2 * timing.Heartbeat)
		found := s.ask(pattern)
		g.waits.Store(len(found.having) == 0)
		switch {
		case len(found.having) > 0:
			files, err := s.bring(pattern, found.having)
			if err == nil {
				return files, false, nil
			}
			tries, failed = tries+1, err
		case len(found.opening) > 0:
			doubted = time.Time{}
		case len(found.doubtful) > 0 && doubted.IsZero():
			doubted = time.Now()
		case len(found.doubtful) == 0 || time.Since(doubted) > settle:
			return nil, true, found.nowhere()
		}
	}
	return nil, false, failed
}

// findings are what the other hosts have.
type findings struct {
	having, opening, lacking []string
	doubtful                 []string // with why
}

// nowhere says who was asked.
func (f findings) nowhere() error {
	text := "nor on another machine of the run"
	if len(f.lacking) > 0 {
		text = "nor on " + strings.Join(f.lacking, ", ")
	}
	if len(f.doubtful) > 0 {
		text += "; " + strings.Join(f.doubtful, "; ")
	}
	return errors.New(text)
}

// ask asks all other hosts for what they have of a pattern.
func (s *Store) ask(pattern string) (all findings) {
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, host := range s.c.Hosts() {
		if host == s.c.Self {
			continue
		}
		asked.Go(func() {
			l, err := s.first(host, pattern)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				all.doubtful = append(all.doubtful, fmt.Sprintf("%s cannot be asked: %s", host, line(err)))
			case l.Has == control.Having:
				all.having = append(all.having, host)
			case l.Has == control.Opening:
				all.opening = append(all.opening, host)
			case l.Has == control.Stranded:
				all.doubtful = append(all.doubtful, host+" itself waits for other data")
			default:
				all.lacking = append(all.lacking, host)
			}
		})
	}
	asked.Wait()
	for _, names := range [][]string{all.having, all.lacking, all.doubtful} {
		slices.Sort(names)
	}
	if n := len(all.having); n > 0 { // so that one host does not serve all others
		k := len(s.c.Self) % n
		all.having = append(all.having[k:n:n], all.having[:k]...)
	}
	return all
}

// first asks a host for the beginning of a listing.
func (s *Store) first(host, pattern string) (control.Listed, error) {
	ctx, cancel := context.WithTimeout(s.ctx, timing.Handshake)
	defer cancel()
	conn, err := s.c.Dial(ctx, host)
	if err != nil {
		return control.Listed{}, err
	}
	defer conn.Close()
	return listing(ctx, conn, control.List{Pattern: pattern})
}

// listing asks for a part of a listing.
func listing(ctx context.Context, conn *control.Conn, m control.List) (control.Listed, error) {
	m.Protocol = control.Protocol
	answer, err := parts.Ask(ctx, conn, m)
	if err != nil {
		return control.Listed{}, err
	}
	l, ok := answer.(control.Listed)
	if !ok || len(l.Files) > control.MaxListed || l.Has < control.Lacking || l.Has > control.Stranded {
		return l, fmt.Errorf("it answers with %T", answer)
	}
	if l.Err != "" {
		return l, errors.New(l.Err)
	}
	return l, nil
}

// bring copies the files of a pattern, as the first of some hosts lists them.
func (s *Store) bring(pattern string, hosts []string) ([]find.File, error) {
	select {
	case s.gotten <- struct{}{}:
		defer func() { <-s.gotten }()
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
	listed, err := s.listAll(pattern, hosts[0])
	if err != nil {
		return nil, fmt.Errorf("%s: %s", hosts[0], line(err))
	}
	if err := s.cache.reserve(s.ctx, listed); err != nil {
		return nil, err
	}
	of := &source{reading: true, whole: true, more: make(chan struct{})}
	files := make([]find.File, len(listed))
	for i, f := range listed {
		path, err := s.cache.keep(s.ctx, f, func(to *rundir.File) error { return s.fetch(f, hosts, to) })
		if err != nil {
			return nil, fmt.Errorf("%s: %s", f.Path, line(err))
		}
		files[i] = find.File{Path: f.Path, Size: f.Size, Copy: path}
		s.hold(of, f, path)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sources[pattern] = of
	return files, nil
}

// listAll returns the files of a pattern on a host.
func (s *Store) listAll(pattern, host string) (all []control.DataFile, err error) {
	conn, err := s.c.Dial(s.ctx, host)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	for {
		l, err := listing(s.ctx, conn, control.List{Pattern: pattern, From: len(all)})
		if err != nil {
			return nil, err
		}
		if l.Has != control.Having {
			return nil, errors.New("it has these files no more")
		}
		for _, f := range l.Files {
			if !sound(f) || len(all) == maxFiles {
				return nil, errors.New("its list of files makes no sense")
			}
			all = append(all, f)
		}
		if !l.More {
			break
		}
	}
	if len(all) == 0 {
		return nil, errors.New("it lists no files")
	}
	return all, nil
}

// sound reports whether a file can be one.
func sound(f control.DataFile) bool {
	base := filepath.Base(f.Path)
	return isSum(f.SHA256) && f.Size >= 0 && f.Path != "" && len(f.Path) <= control.MaxPattern && !strings.ContainsRune(f.Path, 0) &&
		base != "." && base != ".." && base != string(filepath.Separator)
}

// fetch gets a file from the first host that has it, the rest from others if that one fails.
func (s *Store) fetch(f control.DataFile, hosts []string, to io.Writer) error {
	var at int64
	err := errors.New("no machine has it any more")
	for _, host := range hosts {
		var n int64
		if n, err = s.fetchFrom(host, f, at, to); err == nil {
			return nil
		}
		at += n
		err = fmt.Errorf("from %s: %w", host, err)
	}
	return err
}

func (s *Store) fetchFrom(host string, f control.DataFile, at int64, to io.Writer) (n int64, err error) {
	conn, err := s.c.Dial(s.ctx, host)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	r := parts.NewReader(s.ctx, conn, control.Fetch{SHA256: f.SHA256, At: at})
	if n, err = io.Copy(to, io.LimitReader(r, f.Size-at)); err == nil && n < f.Size-at {
		err = fmt.Errorf("it ends at byte %d of %d", at+n, f.Size)
	}
	return n, err
}

// line returns an error on one line.
func line(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

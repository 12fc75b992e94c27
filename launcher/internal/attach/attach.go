// Package attach lets other processes of this user see what a launcher shows of a run: on a stage, to which they find the way by a
// link in the run directory.
package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

const (
	maxViewers = 16
	maxUnread  = 1 << 12 // lines to a viewer
	writeTime  = 5 * time.Second
	closeTime  = time.Second // for all viewers to get the last
)

// Stage is where a run is shown, in lines, each of a value. Its methods may be called from any goroutine, and none but Close waits.
type Stage struct {
	listener *socket.Listener
	link     string
	encode   func(any) ([]byte, error)
	ctx      context.Context
	leave    context.CancelFunc
	served   sync.WaitGroup

	mu      sync.Mutex
	kept    []*kept
	viewers map[*viewer]bool
}

// kept are the newest values of a name, for viewers that come later.
type kept struct {
	name   string
	values []any
}

type viewer struct {
	conn  net.Conn
	lines chan []byte
}

// Open opens the stage of a run directory. encode returns the line of a value, without its end; where it fails, the value is not shown.
func Open(runDir string, encode func(any) ([]byte, error)) (*Stage, error) {
	l, err := socket.Listen()
	if err != nil {
		return nil, err
	}
	s := &Stage{listener: l, link: filepath.Join(runDir, rundir.AttachName), encode: encode, viewers: make(map[*viewer]bool)}
	if err := os.Remove(s.link); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a launcher that was killed
		l.Remove()
		return nil, err
	}
	if err := os.Symlink(l.Path(), s.link); err != nil {
		l.Remove()
		return nil, err
	}
	s.ctx, s.leave = context.WithCancel(context.Background())
	s.served.Go(s.serve)
	return s, nil
}

func (s *Stage) serve() {
	for {
		conn, err := auth.Accept(s.ctx, s.listener)
		if err != nil {
			return
		}
		s.served.Go(func() {
			defer conn.Close()
			if s.listener.Admit(conn) != nil {
				return
			}
			if v := s.enter(conn); v != nil {
				s.show(v)
			}
		})
	}
}

// enter takes a viewer in, which gets what is kept first; nil if there are enough.
func (s *Stage) enter(conn net.Conn) *viewer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.viewers) >= maxViewers || s.viewers == nil {
		return nil
	}
	n := 0
	for _, k := range s.kept {
		n += len(k.values)
	}
	v := &viewer{conn, make(chan []byte, n+maxUnread)}
	for _, k := range s.kept {
		for _, value := range k.values {
			if line := s.line(value); line != nil {
				v.lines <- line
			}
		}
	}
	s.viewers[v] = true
	return v
}

// show writes to a viewer until it goes, or is to go.
func (s *Stage) show(v *viewer) {
	gone := make(chan struct{})
	s.served.Go(func() { // it ends with the connection
		defer close(gone)
		_, _ = io.Copy(io.Discard, v.conn)
	})
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.viewers, v)
	}()
	for {
		select {
		case line, ok := <-v.lines:
			if !ok {
				return
			}
			_ = v.conn.SetWriteDeadline(time.Now().Add(writeTime))
			if _, err := v.conn.Write(line); err != nil {
				return
			}
		case <-gone:
			return
		}
	}
}

// line returns a value as viewers get it; nil if it cannot be shown.
func (s *Stage) line(value any) []byte {
	line, err := s.encode(value)
	if err != nil {
		return nil
	}
	return append(line, '\n')
}

// Tell shows a value to all viewers; one that has too much to read yet does not get it. With a name, the newest most values of that
// name are shown to viewers that come later, too.
func (s *Stage) Tell(name string, most int, value any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name != "" {
		s.keep(name, most, value)
	}
	if len(s.viewers) == 0 {
		return
	}
	line := s.line(value)
	if line == nil {
		return
	}
	for v := range s.viewers {
		select {
		case v.lines <- line:
		default:
		}
	}
}

// keep keeps a value; s.mu is held.
func (s *Stage) keep(name string, most int, value any) {
	for _, k := range s.kept {
		if k.name == name {
			k.values = append(k.values[max(0, len(k.values)+1-most):], value)
			return
		}
	}
	s.kept = append(s.kept, &kept{name, []any{value}})
}

// Close closes the stage, once all viewers have read the last line or a second has passed.
func (s *Stage) Close() {
	_ = os.Remove(s.link)
	s.mu.Lock()
	for v := range s.viewers {
		close(v.lines)
	}
	left := make([]*viewer, 0, len(s.viewers))
	for v := range s.viewers {
		left = append(left, v)
	}
	s.viewers = nil
	s.mu.Unlock()
	late := time.AfterFunc(closeTime, func() {
		for _, v := range left {
			_ = v.conn.Close()
		}
	})
	defer late.Stop()
	s.leave()
	_ = s.listener.Close()
	s.served.Wait()
	s.listener.Remove()
}

// Dial connects to the stage of the run in a directory. The error of a run that is not under way is [rundir.ErrNotRunning].
func Dial(ctx context.Context, runDir string) (net.Conn, error) {
	if !rundir.Running(runDir) {
		return nil, fmt.Errorf("%s %w", runDir, rundir.ErrNotRunning)
	}
	path, err := os.Readlink(filepath.Join(runDir, rundir.AttachName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s %w", runDir, rundir.ErrNotRunning) // not yet, or not any more
	}
	var conn net.Conn
	if err == nil {
		conn, err = socket.Dial(ctx, path)
	}
	if err != nil {
		return nil, fmt.Errorf("the run's launcher does not answer: %w", err)
	}
	return conn, nil
}

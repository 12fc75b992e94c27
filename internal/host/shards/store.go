package shards

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/timing"
)

const (
	maxPart  = 1 << 20 // bytes of a Part
	maxFound = 8       // checkpoints that a host tells of
)

// Store is what a host has of checkpoints.
type Store struct {
	Dir  string          // run directory
	Self string          // name of the host
	Rule checkpoint.Keep // which checkpoints stay
	// Dial connects to another host, which calls Serve there.
	Dial func(ctx context.Context, host string) (*control.Conn, error)

	mu sync.Mutex // held while files are fetched or pruned
}

// Survey says what there is of the newest checkpoints of a run.
func (s *Store) Survey(m control.Survey) control.Surveyed {
	answer := control.Surveyed{ID: m.ID}
	found, err := checkpoint.Holdings(s.Dir, m.Of, maxFound)
	if err != nil {
		answer.Err = err.Error()
	}
	room := maxManifest
	for _, h := range found {
		text, err := h.Manifest.Encode()
		if room -= len(text); err == nil && room >= 0 {
			answer.Found = append(answer.Found, control.Holding{Manifest: text, Has: h.Has})
		}
	}
	return answer
}

// Keep gets files of a checkpoint that are not there, and writes the manifest if that is wanted.
func (s *Store) Keep(ctx context.Context, k control.Keep) control.Kept {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := control.Kept{ID: k.ID}
	if err := s.keep(ctx, k); err != nil {
		answer.Err = strings.Join(strings.Fields(err.Error()), " ")
	}
	return answer
}

func (s *Store) keep(ctx context.Context, k control.Keep) error {
	m, err := checkpoint.ParseManifest(k.Manifest)
	if err != nil {
		return err
	}
	for _, w := range k.Files {
		if w.File < 0 || w.File >= len(m.Files) {
			return fmt.Errorf("file %d of a checkpoint of %d", w.File, len(m.Files))
		}
		has, err := checkpoint.Has(ctx, s.Dir, m, w.File, k.Verify)
		if err == nil && !has {
			err = s.fetch(ctx, m, w)
		}
		if err != nil {
			return err
		}
	}
	if k.Commit {
		if err := checkpoint.Commit(s.Dir, *m); err != nil {
			return err
		}
	}
	if k.Prune {
		return checkpoint.Prune(ctx, s.Dir, s.Rule, m.Step+1)
	}
	return nil
}

// Drop removes what was written of checkpoints up to a step that were never finished.
func (s *Store) Drop(ctx context.Context, d control.Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = checkpoint.Prune(ctx, s.Dir, s.Rule, d.Step+1) // else the next one
}

// fetch gets a file from the first host that has it as it should be.
func (s *Store) fetch(ctx context.Context, m *checkpoint.Manifest, w control.Wanted) error {
	from := slices.DeleteFunc(slices.Clone(w.From), func(h string) bool { return h == s.Self })
	err := fmt.Errorf("no host has %s as it was written", m.Files[w.File].Name)
	for i := range from {
		// Hosts begin with different ones, so that none of them serves all others.
		e := s.fetchFrom(ctx, m, w.File, from[(i+len(s.Self)+w.File)%len(from)])
		if e == nil || ctx.Err() != nil {
			return e
		}
		err = e
	}
	return err
}

func (s *Store) fetchFrom(ctx context.Context, m *checkpoint.Manifest, file int, host string) error {
	conn, err := s.Dial(ctx, host)
	if err != nil {
		return fmt.Errorf("%s: %w", host, err)
	}
	defer conn.Close()
	name := m.Files[file].Name
	r := &remote{ctx: ctx, conn: conn, next: control.Fetch{Protocol: control.Protocol, Step: m.Step, File: name}}
	if err := checkpoint.Receive(ctx, s.Dir, m, file, r); err != nil {
		return fmt.Errorf("%s from %s: %w", name, host, err)
	}
	return nil
}

// remote reads a file of another host.
type remote struct {
	ctx  context.Context
	conn *control.Conn
	next control.Fetch
	rest []byte
}

func (r *remote) Read(b []byte) (int, error) {
	if len(r.rest) == 0 {
		if err := r.conn.Send(r.next); err != nil {
			return 0, err
		}
		ctx, cancel := context.WithTimeout(r.ctx, timing.Handshake)
		defer cancel()
		m, err := r.conn.Receive(ctx)
		if err != nil {
			return 0, err
		}
		switch p, ok := m.(control.Part); {
		case !ok || len(p.Data) > maxPart:
			return 0, fmt.Errorf("it answers with %T", m)
		case p.Err != "":
			return 0, errors.New(strings.Join(strings.Fields(p.Err), " "))
		case len(p.Data) == 0:
			return 0, io.EOF
		default:
			r.rest = p.Data
			r.next.At += int64(len(p.Data))
		}
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Serve answers a host that asks for files, until it asks for no more.
func (s *Store) Serve(ctx context.Context, conn *control.Conn, m control.Fetch) {
	var f *os.File
	var open control.Fetch
	defer func() {
		if f != nil {
			_ = f.Close()
		}
	}()
	for {
		var p control.Part
		var err error
		if f == nil || m.Step != open.Step || m.File != open.File {
			if f != nil {
				_ = f.Close()
			}
			f, err = checkpoint.OpenFile(s.Dir, m.Step, m.File)
			open = m
		}
		if err == nil && m.At < 0 {
			err = errors.New("a file begins at 0")
		}
		if err == nil {
			p.Data = make([]byte, maxPart)
			var n int
			if n, err = f.ReadAt(p.Data, m.At); errors.Is(err, io.EOF) {
				err = nil
			}
			p.Data = p.Data[:n]
		}
		if err != nil {
			p = control.Part{Err: err.Error()}
		}
		late := time.AfterFunc(timing.Handshake, func() { _ = conn.Close() })
		sent := conn.Send(p)
		late.Stop()
		if sent != nil || err != nil {
			return
		}
		next, cancel := context.WithTimeout(ctx, timing.Handshake)
		again, heard := conn.Receive(next)
		cancel()
		var ok bool
		if m, ok = again.(control.Fetch); heard != nil || !ok {
			return
		}
	}
}

package shards

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/soliton-train/soliton/internal/host/parts"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
)

const maxFound = 8 // checkpoints that a host tells of

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
	r := parts.NewReader(ctx, conn, control.Fetch{Step: m.Step, File: name})
	if err := checkpoint.Receive(ctx, s.Dir, m, file, r); err != nil {
		return fmt.Errorf("%s from %s: %w", name, host, err)
	}
	return nil
}

// Serve answers a host that asks for files, until it asks for no more.
func (s *Store) Serve(ctx context.Context, conn *control.Conn, m control.Fetch) {
	parts.Serve(ctx, conn, m, func(m control.Fetch) (*os.File, error) { return checkpoint.OpenFile(s.Dir, m.Step, m.File) })
}

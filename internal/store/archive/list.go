package archive

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Entry is a checkpoint at a place.
type Entry struct {
	Step     int
	Manifest *checkpoint.Manifest // nil where it cannot be read
	Here     int                  // files that are there
	Err      error                // why the checkpoint cannot be used; nil if it can
}

// List returns the checkpoints of a place, the newest first. With check, all files are read, and compared with their digests.
func List(ctx context.Context, b Bucket, check bool) ([]Entry, error) {
	entries, err := list(ctx, b, check)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", b, err)
	}
	return entries, nil
}

func list(ctx context.Context, b Bucket, check bool) (entries []Entry, err error) {
	claims, err := generations(ctx, b)
	if err != nil {
		return nil, err
	}
	if len(claims) == 0 {
		return nil, ErrNoRun
	}
	all, by, refused, err := manifests(ctx, b, claims)
	if err != nil {
		return nil, err
	}
	names, err := b.List(ctx, "shards/")
	if err != nil {
		return nil, err
	}
	there := make(map[string]bool)
	for _, name := range names {
		there[name] = true
	}
	eras := by[claims[len(claims)-1]].Job.Eras()
	for _, p := range all {
		e := Entry{Step: p.manifest.Step, Manifest: p.manifest}
		if !eras.Has(p.manifest.Job, e.Step) {
			e.Err = errForeign
		}
		for _, f := range p.manifest.Files {
			if !there[p.Prefix+f.Name] {
				e.Err = errors.Join(e.Err, fmt.Errorf("%s: %w", f.Name, ErrMissing))
				continue
			}
			e.Here++
			if !check || e.Err != nil {
				continue
			}
			if e.Err, err = verify(ctx, b, p.Prefix, f); err != nil {
				return nil, err
			}
		}
		if check && e.Err == nil {
			if _, err := p.skips(ctx, b); errors.Is(err, errDigest) || errors.Is(err, ErrMissing) {
				e.Err = err
			} else if err != nil {
				return nil, err
			}
		}
		entries = append(entries, e)
	}
	for _, text := range refused {
		e := Entry{Err: errors.New(text)}
		if _, err := fmt.Sscanf(text, "manifests/step-%d.", &e.Step); err == nil {
			entries = append(entries, e)
		}
	}
	slices.SortStableFunc(entries, func(a, b Entry) int { return b.Step - a.Step })
	return entries, nil
}

// verify reads a file and returns what is wrong with it; err says that it could not be read.
func verify(ctx context.Context, b Bucket, prefix string, f checkpoint.File) (wrong, err error) {
	from, err := b.Get(ctx, prefix+f.Name)
	if errors.Is(err, ErrMissing) {
		return fmt.Errorf("%s: %w", f.Name, ErrMissing), nil
	}
	if err != nil {
		return nil, err
	}
	defer from.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, rundir.WithContext(ctx, io.LimitReader(from, f.Size+1)))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name, err)
	}
	if n != f.Size || hex.EncodeToString(sum.Sum(nil)) != f.SHA256 {
		return fmt.Errorf("%s: %w", f.Name, errDigest), nil
	}
	return nil, nil
}

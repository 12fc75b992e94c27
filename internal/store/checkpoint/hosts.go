package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Hosts that share no file system have the manifest of a checkpoint each, and some of its files.

// Holding is what a run directory has of a checkpoint.
type Holding struct {
	Manifest Manifest
	Has      []bool // by Manifest.Files: the file is there with its size
}

// Holdings returns what the run directory dir has of the newest checkpoints of a run, at most limit of them, newest first. What cannot be
// read is left out.
func Holdings(dir string, of rundir.Eras, limit int) ([]Holding, error) {
	steps, err := listSteps(dir)
	if err != nil {
		return nil, err
	}
	var all []Holding
	for _, step := range steps {
		root, err := openStep(dir, step)
		if err != nil || len(all) == limit {
			break
		}
		if m, err := readManifest(root, step); err == nil && of.Has(m.Job, m.Step) {
			h := Holding{*m, make([]bool, len(m.Files))}
			for i, f := range m.Files {
				h.Has[i] = checkSize(root, step, f) == nil
			}
			all = append(all, h)
		}
		root.Close()
	}
	return all, nil
}

// Has reports whether the run directory dir has file i of a manifest, with its size and, if deep, its content.
func Has(ctx context.Context, dir string, m *Manifest, i int, deep bool) (bool, error) {
	root, err := openStep(dir, m.Step)
	if err != nil {
		return false, nil
	}
	defer root.Close()
	f := m.Files[i]
	if checkSize(root, m.Step, f) != nil {
		return false, nil
	}
	if !deep {
		return true, nil
	}
	s := &source{file: f, dir: root, path: path.Join(stepDir(m.Step), f.Name), rule: m.Rule}
	open, err := s.get(ctx)
	if err == nil {
		open.Close()
	}
	return err == nil, ctx.Err()
}

// Receive writes file i of a manifest, which another host has, from what that sends, and returns once it is on disk. If the content is not
// that of the manifest, the error is an [*Error], and nothing is left under the file's name.
func Receive(ctx context.Context, dir string, m *Manifest, i int, from io.Reader) error {
	f := m.Files[i]
	if err := rundir.CheckSpace(dir, f.Size, rundir.SpareCheckpoints); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	step, err := createStep(openDisk, dir, m.Step)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	defer step.Close()
	return replace(step, f.Name, f.Size, func(w io.Writer) error {
		sum := sha256.New()
		n, err := io.Copy(io.MultiWriter(sum, w), rundir.WithContext(ctx, io.LimitReader(from, f.Size)))
		if err != nil {
			return err
		}
		if found := hex.EncodeToString(sum.Sum(nil)); n != f.Size || found != f.SHA256 {
			return &Error{Path: path.Join(stepDir(m.Step), f.Name), Kind: ErrAltered, Reason: fmt.Sprintf("%d bytes with SHA-256 %.12s… came, and the manifest says %d and %.12s…", n, found, f.Size, f.SHA256)}
		}
		return nil
	})
}

// OpenFile opens a file of shards of a step's checkpoint, for a host that asks for it.
func OpenFile(dir string, step int, name string) (*os.File, error) {
	if step < 0 || len(name) > maxName || !fileName.MatchString(name) {
		return nil, errors.New("checkpoint: no file of a checkpoint")
	}
	root, err := openStep(dir, step)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	info, err := root.Lstat(name)
	if err != nil {
		return nil, unreadable(path.Join(stepDir(step), name), err)
	}
	if !info.Mode().IsRegular() {
		return nil, &Error{Path: path.Join(stepDir(step), name), Kind: ErrMalformed, Reason: "no regular file"}
	}
	return root.Open(name)
}

package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Entry is one directory of a checkpoint.
type Entry struct {
	Step     int
	Manifest *Manifest // nil where it could not be used
	Err      *Error    // why the checkpoint cannot be used, as far as its files' sizes tell; nil if it can
}

// List returns the checkpoints of the run directory dir, newest first. It does not read the files of shards.
func List(dir string) ([]Entry, error) {
	run, steps, err := openSteps(dir)
	if err != nil {
		return nil, err
	}
	defer run.Close()
	var entries []Entry
	for _, step := range steps {
		r, err := openOf(run, step)
		e := Entry{Step: step}
		if err == nil {
			m := r.Manifest()
			e.Manifest = &m
			r.Close()
		} else if !errors.As(err, &e.Err) {
			return nil, err
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// Newest returns the newest checkpoint of the run directory dir that is whole and of the given run, with all its files
// verified; and what was wrong with those newer than it, newest first. Those that were never finished are among
// these, as [ErrUnfinished]. Without one the error is [ErrNone].
func Newest(ctx context.Context, dir string, of rundir.Eras) (*Reader, []*Error, error) {
	run, steps, err := openSteps(dir)
	if err != nil {
		return nil, nil, err
	}
	defer run.Close()
	var refused []*Error
	for _, step := range steps {
		r, err := openOf(run, step)
		if err == nil {
			if err = r.of(of); err == nil {
				err = r.Verify(ctx)
			}
			if err == nil {
				return r, refused, nil
			}
			r.Close()
		}
		var fault *Error
		if !errors.As(err, &fault) {
			return nil, refused, err
		}
		refused = append(refused, fault)
	}
	return nil, refused, ErrNone
}

// At opens the checkpoint of a step, which must be of the given run, as [Open] does. The error is an *Error if there is none, or
// if it cannot be used.
func At(dir string, of rundir.Eras, step int) (*Reader, error) {
	r, err := Open(dir, step)
	if err != nil {
		return nil, err
	}
	if err := r.of(of); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// of reports whose checkpoint it is, if it is not the run's.
func (r *Reader) of(of rundir.Eras) error {
	if of.Has(r.manifest.Job, r.manifest.Step) {
		return nil
	}
	return &Error{
		Path:   path.Join(stepDir(r.manifest.Step), manifestName),
		Kind:   ErrForeign,
		Reason: fmt.Sprintf("it is of job %q, not %q", r.manifest.Job, of.Now()),
	}
}

// Prune removes what the run directory dir no longer needs of checkpoints of steps before writing: whole ones that keep does not choose,
// broken and unfinished ones, and files in whole ones that are not theirs. Steps from
// writing on, to which owners may be writing now, are left alone. The newest checkpoint that is kept was read and
// verified in this call; where there is none, only unfinished ones are removed, and what cannot be read never is.
func Prune(ctx context.Context, dir string, keep Keep, writing int) error {
	return prune(ctx, openDisk, dir, keep, writing)
}

func prune(ctx context.Context, open opener, dir string, keep Keep, writing int) error {
	steps, err := listSteps(dir)
	if err != nil {
		return err
	}
	var whole, kept []Manifest
	var unfinished, useless []int
	for _, step := range steps {
		if step >= writing {
			continue
		}
		m, err := examine(ctx, dir, step, len(whole) == 0)
		var fault *Error
		switch {
		case err == nil:
			whole = append(whole, m)
		case errors.Is(err, ErrUnreadable):
		case errors.Is(err, ErrUnfinished):
			unfinished = append(unfinished, step)
		case errors.As(err, &fault):
			useless = append(useless, step)
		default:
			return err
		}
	}
	for i, ok := range keep.Choose(whole) {
		if ok {
			kept = append(kept, whole[i])
		} else {
			useless = append(useless, whole[i].Step)
		}
	}
	if len(whole) > 0 {
		unfinished = append(unfinished, useless...)
	}
	for _, step := range unfinished {
		if err := remove(open, dir, step); err != nil {
			return fmt.Errorf("checkpoint: %w", err)
		}
	}
	for _, m := range kept {
		if err := tidy(open, dir, m); err != nil {
			return fmt.Errorf("checkpoint: %w", err)
		}
	}
	return nil
}

// examine returns the manifest of a checkpoint if it is whole; deep is whether that takes the content of its files.
func examine(ctx context.Context, dir string, step int, deep bool) (Manifest, error) {
	r, err := Open(dir, step)
	if err != nil {
		return Manifest{}, err
	}
	defer r.Close()
	if deep {
		if err := r.VerifyHere(ctx); err != nil {
			return Manifest{}, err
		}
	}
	return r.Manifest(), nil
}

// IsRemoved reports whether a checkpoint that was whole has been removed since: its manifest goes first.
func IsRemoved(dir string, step int) bool {
	_, err := os.Lstat(filepath.Join(dir, filepath.FromSlash(stepDir(step)), manifestName))
	return rundir.IsMissing(err)
}

// listSteps returns the steps that have a directory, newest first.
func listSteps(dir string) ([]int, error) {
	run, steps, err := openSteps(dir)
	if err != nil {
		return nil, err
	}
	return steps, run.Close()
}

// openSteps opens a run directory, and returns the steps that have a directory in it, newest first.
func openSteps(dir string) (run *os.Root, steps []int, err error) {
	if run, err = rundir.OpenRoot(dir); err != nil {
		return nil, nil, fmt.Errorf("checkpoint: %w", err)
	}
	entries, err := rundir.ReadRoot(run, folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		_ = run.Close()
		return nil, nil, fmt.Errorf("checkpoint: %w", err)
	}
	for _, e := range entries {
		if step, ok := parseStep(e.Name()); ok && e.IsDir() {
			steps = append(steps, step)
		}
	}
	slices.SortFunc(steps, func(a, b int) int { return b - a })
	return run, steps, nil
}

// remove removes a checkpoint, its manifest first: half of one must not look whole.
func remove(open opener, dir string, step int) error {
	run, err := open(dir)
	if err != nil {
		return err
	}
	defer run.Close()
	name := stepDir(step)
	if err := run.RemoveAll(path.Join(name, manifestName)); err != nil {
		return err
	}
	if err := run.Sync(name); err != nil {
		return err
	}
	if err := run.RemoveAll(name); err != nil {
		return err
	}
	return run.Sync(folder)
}

// tidy removes from a whole checkpoint's directory what is not of it.
func tidy(open opener, dir string, m Manifest) error {
	run, err := open(dir)
	if err != nil {
		return err
	}
	defer run.Close()
	step, err := run.Enter(stepDir(m.Step))
	if err != nil {
		return err
	}
	defer step.Close()
	own := map[string]bool{manifestName: true}
	for _, f := range m.Files {
		own[f.Name] = true
	}
	entries, err := step.ReadDir(".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !own[e.Name()] {
			if err := step.RemoveAll(e.Name()); err != nil {
				return err
			}
		}
	}
	return step.Sync(".")
}

package bucket

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// answer is how long a target may take to say whether it holds a run, before the run begins.
const answer = 30 * time.Second

// ErrNothing means that a run at a target has no checkpoint there.
var ErrNothing = errors.New("nothing to resume from: there is no whole checkpoint")

// OfRun opens the target of a run; nil for "".
func OfRun(text string) (archive.Bucket, error) {
	if text == "" {
		return nil, nil
	}
	b, err := Open(text)
	if err != nil {
		return nil, fmt.Errorf("--checkpoints %s: %w", text, err)
	}
	return b, nil
}

// Free checks that a target can be reached and holds no run.
func Free(ctx context.Context, b archive.Bucket) error {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	switch _, err := archive.Newest(ctx, b); {
	case errors.Is(err, archive.ErrNoRun):
		if folder, ok := b.(archive.Folder); ok {
			if err := folder.Try(); err != nil {
				return fmt.Errorf("--checkpoints %s: %w", b, err)
			}
		}
		return nil
	case err != nil:
		return fmt.Errorf("--checkpoints %w", err)
	}
	return fmt.Errorf("--checkpoints %s: it holds a run; give another place, or continue that run: launcher resume %s", b, b)
}

// Holds reports whether text names a target, and not a run directory.
func Holds(text string) bool {
	if IsURL(text) {
		return true
	}
	_, none := os.Stat(filepath.Join(text, "job.json"))
	claims, err := os.Stat(filepath.Join(text, "claims"))
	return errors.Is(none, os.ErrNotExist) && err == nil && claims.IsDir()
}

// Restore makes a run directory of what a target has, and returns its path. path is where; "" means the name of a new run. The error
// wraps [archive.ErrNoRun] where the target has no run, and [ErrNothing] where that has no checkpoint.
func Restore(ctx context.Context, b archive.Bucket, path string, say func(text string)) (string, error) {
	claim, err := archive.Newest(ctx, b)
	if err != nil {
		return "", err
	}
	var dir *rundir.Dir
	if path == "" {
		dir, err = rundir.Create("", claim.Job.Program, time.Now())
	} else {
		dir, err = rundir.CreateAgain(path)
	}
	if err != nil {
		return "", err
	}
	found, err := archive.Fetch(ctx, b, claim, dir.Path(), 0)
	for _, text := range found.Refused {
		say(text + "; the checkpoint is not used")
	}
	if err == nil && found.Step == 0 {
		err = fmt.Errorf("%s: %w", b, ErrNothing)
		if len(found.Refused) > 0 {
			err = fmt.Errorf("%s: nothing to resume from: no checkpoint can be used", b)
		}
	}
	if err == nil {
		err = restoreFirst(ctx, b, claim, dir, say)
	}
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(dir.File("checkpoints")), dir.Close())
	}
	claim.Job.Started = time.Now().UTC() // in this directory
	dir.InheritSkips(found.Skips)
	if err := errors.Join(dir.WriteJob(claim.Job, claim.Data), dir.Close()); err != nil {
		return "", err
	}
	say(fmt.Sprintf("step %d of %s is in %s", found.Step, b, dir))
	return dir.Path(), nil
}

// restoreFirst gets the first values of a Python program. Without them, the program makes its own: the run goes on if they are the same.
func restoreFirst(ctx context.Context, b archive.Bucket, claim archive.Claim, dir *rundir.Dir, say func(text string)) error {
	if claim.First == "" {
		return nil
	}
	if _, err := dir.MakeFirst(); err != nil {
		return err
	}
	refused, err := archive.FetchFirst(ctx, b, claim, dir.File(rundir.FirstValues))
	if refused != "" {
		say(refused + "; the first values of the program are made again")
	}
	return err
}

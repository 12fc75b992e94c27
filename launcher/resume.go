package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

func newResume() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "resume [flags] RUN_DIR",
		Short: "Resume a run that has ended",
		Long: `resume continues the run of a run directory from its newest whole checkpoint,
with the program and the program's flags of before, which job.json has. It need not
have as many workers or stages: the result is the same, bit for bit.

Program and data must be those of before, by their SHA-256. A checkpoint that was
altered or cut off is refused, and the one before it used. The line files of the run
directory grow on: steps after the checkpoint appear in metrics.jsonl once more, with a
higher plan, and the last line of a step counts.`,
		Example: `  launcher resume runs/latest
  launcher resume runs/gpt-20260102-150405 --workers 2 --stages 1`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("RUN_DIR is missing: give the directory of a run, such as runs/latest")
			}
			if len(args) > 1 {
				return fmt.Errorf("unexpected argument %q: give RUN_DIR; the program and its flags are those of before", args[1])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return resume(cmd, f, args[0])
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	sharedFlags(flags, &f)
	zero := map[string]string{"int": "0", "bool": "false", "duration": "0s"}
	for _, name := range []string{"workers", "stages", "mirrors", "min-workers", "respawn", "detect", "call-timeout", "digests", "verify"} {
		flag := flags.Lookup(name)
		flag.Usage, flag.DefValue = flag.Usage+" (default as before)", zero[flag.Value.Type()]
	}
	return cmd
}

// resume takes the run directory and trains on.
func resume(cmd *cobra.Command, f runFlags, path string) error {
	dir, was, err := rundir.Resume(path)
	switch {
	case errors.Is(err, rundir.ErrNoRun), errors.Is(err, rundir.ErrInUse):
		return err
	case err != nil:
		return cli.Fail(err)
	}
	defer dir.Close() // for the returns before Serve, which closes it
	job := was.Job
	if s := was.Summary; s != nil && s.Steps == job.Steps && s.ParamsSHA256 != "" {
		return cli.Fail(fmt.Errorf("%s: nothing to resume: all %d steps are done", path, job.Steps))
	}
	if job.Command == "" {
		return cli.Fail(fmt.Errorf("%s: job.json has no command: a run that was started by trainer.Run cannot be resumed", path))
	}
	if err := f.inherit(job, cmd.Flags().Changed); err != nil {
		return cli.Fail(fmt.Errorf("%s: job.json: %w", path, err))
	}
	if err := f.validate(cmd); err != nil {
		return err
	}
	again, err := newest(cmd.Context(), dir, job, was.Notes, cmd.ErrOrStderr())
	if err != nil {
		return cli.Fail(fmt.Errorf("%s: %w", path, err))
	}
	again.Calls = was.Calls
	if again.Plan = was.Plan; was.Last != nil {
		again.Number = was.Last.Plan
	}
	if again.Data, err = dir.ReadData(); err != nil {
		return cli.Fail(err)
	}
	if err := os.Chdir(job.Dir); err != nil {
		return cli.Fail(fmt.Errorf("%s: job.json: the dir in which PROGRAM was given: %w", path, err))
	}
	p, err := resolve(job.Command)
	if err != nil {
		return err
	}
	return trainIn(cmd.Context(), f, p, job.Args, dir, again, cmd.OutOrStdout(), cmd.ErrOrStderr())
}

// inherit takes over from the run before what was not changed.
func (f *runFlags) inherit(job rundir.Job, changed func(flag string) bool) error {
	f.reduction, f.zero, f.hosts, f.reshape = cmp.Or(job.Reduction, "exact"), job.Zero, 1, cmp.Or(job.Reshape, "full")
	_, err := session.ParseReduction(f.reduction)
	if _, err2 := controller.ParseReshape(f.reshape); err != nil || err2 != nil {
		return fmt.Errorf("job.json: %w", cmp.Or(err, err2))
	}
	inherit(changed("workers"), &f.workers, job.Workers)
	inherit(changed("stages"), &f.stages, min(job.Stages, max(f.workers, 1)))
	inherit(changed("mirrors"), &f.mirrors, job.Mirrors)
	inherit(changed("min-workers"), &f.least, min(job.MinWorkers, max(f.workers, 1)))
	inherit(changed("respawn"), &f.respawn, job.Respawn)
	inherit(changed("digests"), &f.digests, !job.NoDigests)
	inherit(changed("verify"), &f.verify, job.Verify)
	if !changed("call-timeout") {
		calls, err := time.ParseDuration(cmp.Or(job.CallTimeout, timing.Call.String()))
		if err != nil {
			return fmt.Errorf("call_timeout is %q: give a time such as 1m", job.CallTimeout)
		}
		f.calls = calls
	}
	if !changed("detect") {
		detect, err := time.ParseDuration(job.Detect)
		if err != nil {
			return fmt.Errorf("detect is %q: give a time such as 1s", job.Detect)
		}
		if f.detect = detect; detect == 0 { // a run without the launcher has none
			f.detect = time.Second
		}
	}
	return nil
}

// inherit sets a flag as before, unless it was given.
func inherit[T any](given bool, flag *T, before T) {
	if !given {
		*flag = before
	}
}

// newest finds the checkpoint to resume from, and reports those that cannot be used, after notes.
func newest(ctx context.Context, dir *rundir.Dir, job rundir.Job, notes []string, stderr io.Writer) (*session.Resume, error) {
	r, refused, err := checkpoint.Newest(ctx, dir.Path(), job.ID())
	again := &session.Resume{Job: job, Note: notes}
	for _, text := range notes {
		fmt.Fprintf(stderr, "launcher: %s\n", text)
	}
	for _, fault := range refused {
		if errors.Is(fault, checkpoint.ErrUnfinished) {
			continue // the run ended meanwhile
		}
		text := fmt.Sprintf("%v; the checkpoint is not used", fault)
		fmt.Fprintf(stderr, "launcher: %s\n", text)
		again.Note = append(again.Note, text)
	}
	if errors.Is(err, checkpoint.ErrNone) {
		return nil, errors.New("nothing to resume from: there is no whole checkpoint; start again with launcher run")
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	again.Step = r.Manifest().Step
	return again, nil
}

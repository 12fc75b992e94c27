package inspect

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/model"
	"github.com/soliton-train/soliton/launcher/internal/bucket"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// The files of an export.
const (
	modelFile     = model.File
	optimizerFile = model.OptimizerFile
)

// NewExport returns the command.
func NewExport() *cobra.Command {
	var number, output string
	var optimizer bool
	cmd := &cobra.Command{
		Use:   "export [flags] [RUN_DIR|URL]",
		Short: "Write a checkpoint as model.safetensors",
		Long: `export writes the parameters of a checkpoint as model.safetensors: the newest whole one of
RUN_DIR, by default runs/latest, or that of --step. The run may be under way. The file is what the
run would have written, had it ended with that step; --init-from takes it.

With --optimizer, optimizer.safetensors beside it has the optimizer's state: for adamw the tensors
exp_avg/NAME and exp_avg_sq/NAME, for sgd momentum/NAME, with the shapes of the parameters. Its
metadata has the number of updates as "step". --init-optimizer takes it, beside --init-from.

All files of the checkpoint are read and checked against their SHA-256 before. Those of a URL, or
of the folder of --checkpoints, are copied to TMPDIR meanwhile.`,
		Example: `  launcher export runs/latest
  launcher export --step 4000 --optimizer --output exported/ runs/gpt-20260102-150405
  launcher export --output exported/ s3://bucket/run`,
		Args: cli.AtMost(1, "[RUN_DIR|URL]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := append(args, cli.Latest)[0]
			step := 0
			if cmd.Flags().Changed("step") {
				var err error
				if step, err = strconv.Atoi(number); err != nil || step < 1 { // in decimal, though names of files begin with zeros
					return fmt.Errorf("--step %s: give a whole number of at least 1", faults.Value(number))
				}
			}
			if output == "" {
				return errors.New("--output names no directory; give one, or leave it out for this one")
			}
			var job rundir.Job
			of := bucket.Holds(path)
			if !of {
				run, err := cli.ReadRun(path)
				if err != nil {
					return err
				}
				job = run.Job
			}
			names := []string{modelFile}
			if optimizer {
				names = append(names, optimizerFile)
			}
			for _, name := range names {
				_, err := os.Lstat(filepath.Join(output, name))
				if err == nil {
					return fmt.Errorf("--output %s: %s is there already; give another directory", output, name)
				}
				if at := (*fs.PathError)(nil); !errors.Is(err, fs.ErrNotExist) && errors.As(err, &at) {
					return fmt.Errorf("--output %s: %w; give another directory", output, at.Err)
				}
			}
			if of {
				dir, err := os.MkdirTemp("", "export-*")
				if err != nil {
					return cli.Fail(err)
				}
				defer os.RemoveAll(dir)
				if job, err = fetch(cmd.Context(), path, dir, step); err != nil {
					return cli.Fail(err)
				}
				path = dir
			}
			at, err := export(cmd.Context(), path, job, step, output, names)
			if err != nil {
				return cli.Fail(err)
			}
			for _, name := range names {
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: the state after step %d\n", filepath.Join(output, name), at); err != nil {
					return cli.Fail(err)
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&number, "step", "", "`step` of the checkpoint, also as in the names of its files (default the newest whole one)")
	cmd.Flags().StringVar(&output, "output", ".", "`directory` for the files, which is made")
	cmd.Flags().BoolVar(&optimizer, "optimizer", false, "write the optimizer's state as well")
	return cmd
}

// fetch copies a checkpoint of a target, the newest whole one for step 0, into a directory.
func fetch(ctx context.Context, url, dir string, step int) (rundir.Job, error) {
	b, err := bucket.Open(url)
	if err != nil {
		return rundir.Job{}, fmt.Errorf("%s: %w", url, err)
	}
	claim, err := archive.Newest(ctx, b)
	if err != nil {
		return rundir.Job{}, err
	}
	found, err := archive.Fetch(ctx, b, claim, dir, step)
	if err == nil && found.Step == 0 {
		err = fmt.Errorf("%s: no whole checkpoint", b)
		if step > 0 {
			err = fmt.Errorf("--step %d: no whole checkpoint; launcher checkpoints %s lists what there is", step, b)
		}
		if len(found.Refused) > 0 {
			err = fmt.Errorf("%w: %s", err, found.Refused[0])
		}
	}
	return claim.Job, err
}

// export writes files of a checkpoint of a run, the newest one for step 0, into a directory.
func export(ctx context.Context, dir string, job rundir.Job, step int, output string, names []string) (at int, err error) {
	r, err := openCheckpoint(ctx, dir, job.Eras(), step)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	if err := os.MkdirAll(output, 0o777); err != nil {
		return 0, err
	}
	for _, name := range names {
		content := r.ExportModel
		if name == optimizerFile {
			content = func(ctx context.Context, w io.Writer) error { return r.ExportOptimizer(ctx, w, job.InitUpdates) }
		}
		if err := writeFile(filepath.Join(output, name), func(w io.Writer) error { return content(ctx, w) }); err != nil {
			return 0, err
		}
	}
	return r.Manifest().Step, nil
}

// openCheckpoint opens a checkpoint that is whole, with all its files verified.
func openCheckpoint(ctx context.Context, dir string, of rundir.Eras, step int) (*checkpoint.Reader, error) {
	if step > 0 {
		r, err := checkpoint.At(dir, of, step)
		if err == nil {
			if err = r.Verify(ctx); err != nil {
				r.Close()
			}
		}
		if err != nil {
			return nil, fmt.Errorf("--step %d: %w; launcher checkpoints lists what there is", step, err)
		}
		return r, nil
	}
	r, refused, err := checkpoint.Newest(ctx, dir, of)
	if err != nil && len(refused) > 0 {
		err = fmt.Errorf("%w: %w", err, refused[0])
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return r, nil
}

// writeFile writes a file that appears under its name whole.
func writeFile(path string, content func(io.Writer) error) error {
	f, err := rundir.NewFile(path)
	if err != nil {
		return err
	}
	b := bufio.NewWriterSize(f, 1<<20)
	if err := content(b); err != nil {
		f.Discard()
		return err
	}
	if err := b.Flush(); err != nil {
		f.Discard()
		return err
	}
	return f.Commit()
}

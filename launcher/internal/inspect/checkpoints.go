package inspect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/launcher/internal/bucket"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// Saved is a checkpoint as launcher checkpoints prints it.
type Saved struct {
	Step    int        `json:"step"`
	Bytes   int64      `json:"bytes"`    // of all files, wherever they are; 0 where they are not known
	Loss    *float64   `json:"loss"`     // of the step
	ValLoss *float64   `json:"val_loss"` // of the evaluation that followed the step
	Made    *time.Time `json:"made"`
	State   string     `json:"state"` // whole, verified, partial (other machines have the rest), unfinished or unusable
	Here    int        `json:"files_here"`
	Files   int        `json:"files"`
	Error   string     `json:"error,omitempty"` // why it cannot be used
}

// NewCheckpoints returns the command.
func NewCheckpoints() *cobra.Command {
	var asJSON, check bool
	cmd := &cobra.Command{
		Use:   "checkpoints [RUN_DIR|URL]",
		Short: "List the checkpoints of a run",
		Long: `checkpoints lists what a run directory, by default runs/latest, has of checkpoints, the
newest first: step, size, the loss of the step, val_loss where an evaluation followed it, age,
and state. Of a URL, or the folder of --checkpoints, it lists what arrived there.

A checkpoint is whole if all its files have their sizes; with --check they are read, and it is
verified if they have their SHA-256. It is partial if other machines of the run have the rest,
unfinished while it is written or if the run ended meanwhile, and otherwise unusable. With
--check, the exit status is 1 if any is unusable.

launcher run --keep, --keep-every and --keep-best say which checkpoints stay.`,
		Example: `  launcher checkpoints
  launcher checkpoints --check runs/gpt-20260102-150405
  launcher checkpoints s3://bucket/run
  launcher checkpoints --json | jq 'min_by(.val_loss // infinite).step'`,
		Args: cli.AtMost(1, "[RUN_DIR|URL]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := append(args, cli.Latest)[0]
			all, err := listed(cmd.Context(), path, check)
			if err != nil {
				return err
			}
			if err := cli.Print(cmd.OutOrStdout(), all, asJSON, func(out io.Writer) error { return printCheckpoints(out, path, all, time.Now()) }); err != nil {
				return err
			}
			for _, c := range all {
				if check && c.State == "unusable" {
					return cli.Exit(1)
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "read all files and check their digests")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	return cmd
}

// listed returns the checkpoints of a run directory or target, the newest first.
func listed(ctx context.Context, path string, check bool) ([]Saved, error) {
	if bucket.Holds(path) {
		b, err := bucket.Open(path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all, err := archived(ctx, b, check)
		if err != nil {
			return nil, cli.Fail(err)
		}
		return all, nil
	}
	if _, err := cli.ReadRun(path); err != nil {
		return nil, err
	}
	all, err := Checkpoints(ctx, path, check)
	if err != nil {
		return nil, cli.Fail(err)
	}
	return all, nil
}

// archived returns the checkpoints of a target.
func archived(ctx context.Context, b archive.Bucket, check bool) ([]Saved, error) {
	entries, err := archive.List(ctx, b, check)
	if err != nil {
		return nil, err
	}
	all := []Saved{}
	for _, e := range entries {
		c := Saved{Step: e.Step, State: "whole", Here: e.Here}
		if e.Manifest != nil {
			c.describe(e.Manifest)
		}
		switch {
		case e.Err != nil:
			c.State, c.Error = "unusable", e.Err.Error()
		case check:
			c.State = "verified"
		}
		all = append(all, c)
	}
	return all, nil
}

// describe takes what a manifest says.
func (c *Saved) describe(m *checkpoint.Manifest) {
	c.Bytes, c.Loss, c.ValLoss, c.Files = m.Size(), m.Loss, m.ValLoss, len(m.Files)
	if !m.Made.IsZero() {
		c.Made = &m.Made.Time
	}
}

// Checkpoints returns the checkpoints of a run directory, the newest first.
func Checkpoints(ctx context.Context, dir string, check bool) ([]Saved, error) {
	entries, err := checkpoint.List(dir)
	if err != nil {
		return nil, err
	}
	all := []Saved{}
	for _, e := range entries {
		c := Saved{Step: e.Step, State: "whole"}
		if m := e.Manifest; m != nil {
			c.describe(m)
			for i := range m.Files {
				if has, err := checkpoint.Has(ctx, dir, m, i, false); err != nil {
					return nil, err
				} else if has {
					c.Here++
				}
			}
			if check {
				err := verify(ctx, dir, e.Step)
				switch {
				case err == nil:
					c.State = "verified"
				case checkpoint.IsRemoved(dir, e.Step): // its run needs it no longer
					continue
				case !errors.As(err, &e.Err):
					return nil, err
				}
			}
			if c.Here < c.Files {
				c.State = "partial"
			}
		}
		switch {
		case e.Err == nil:
		case errors.Is(e.Err, checkpoint.ErrUnfinished):
			c.State = "unfinished"
		default:
			c.State, c.Error = "unusable", e.Err.Error()
		}
		all = append(all, c)
	}
	return all, nil
}

// verify reads what a directory has of a checkpoint. The error is a *checkpoint.Error where a file is at fault.
func verify(ctx context.Context, dir string, step int) error {
	r, err := checkpoint.Open(dir, step)
	if err != nil {
		return err
	}
	defer r.Close()
	return r.VerifyHere(ctx)
}

func printCheckpoints(out io.Writer, path string, all []Saved, now time.Time) error {
	if len(all) == 0 {
		_, err := fmt.Fprintf(out, "%s has no checkpoints\n", path)
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "STEP\tMB\tLOSS\tVAL_LOSS\tAGE\tSTATE")
	number := func(x *float64) string {
		if x == nil {
			return "-"
		}
		return fmt.Sprintf("%.4f", *x)
	}
	for _, c := range all {
		size, old, state := "-", "-", c.State
		if c.Files > 0 {
			size = fmt.Sprintf("%.1f", float64(c.Bytes)/1e6)
		}
		if c.Made != nil {
			old = age(max(0, now.Sub(*c.Made).Seconds()))
		}
		switch {
		case c.Error != "":
			state += ": " + c.Error
		case c.State == "partial":
			state += fmt.Sprintf(": %d of %d files are on this machine", c.Here, c.Files)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", c.Step, size, number(c.Loss), number(c.ValLoss), old, state)
	}
	return w.Flush()
}

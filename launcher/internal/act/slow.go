package act

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// NewSlow returns the command.
func NewSlow() *cobra.Command {
	return &cobra.Command{
		Use:   "slow RUN_DIR W FACTOR",
		Short: "Slow a worker of a run",
		Long: `slow makes a worker compute at FACTOR of its speed: it pauses after each task in proportion.
FACTOR is above 0 and at most 1; 1 restores. The run learns of it by its effects only.
W is the number of a worker; launcher status lists them.`,
		Example: "  launcher slow runs/latest 2 0.5\n  launcher slow runs/latest 2 1",
		Args: func(_ *cobra.Command, args []string) error {
			missing := cli.NeedRun("W is missing: give the number of a worker", "FACTOR is missing: give a share of the full speed, such as 0.5")
			if err := missing(nil, args); err != nil {
				return err
			}
			var faults []error
			if w, err := strconv.Atoi(args[1]); err != nil || w < 0 {
				faults = append(faults, fmt.Errorf("W is %q: give the number of a worker", args[1]))
			}
			if _, err := chaos.ParseFactor(args[2]); err != nil {
				faults = append(faults, fmt.Errorf("FACTOR: %w", err))
			}
			return errors.Join(append(faults, cli.AtMost(3, "RUN_DIR, W and FACTOR")(nil, args))...)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			w, _ := strconv.Atoi(args[1])           // checked above
			factor, _ := chaos.ParseFactor(args[2]) // the same
			return Slow(cmd.Context(), args[0], w, factor)
		},
	}
}

// slowName is the kind of fault.
const slowName = "slow"

// Slow makes a worker of a run slow, for the command as for the page. A worker that is not in the run is wrong usage.
func Slow(ctx context.Context, runDir string, w int, factor float64) error {
	run, targets, err := find(runDir, []int{w})
	switch {
	case err != nil:
		return err
	case run.Host != "":
		_, err := Ask(ctx, runDir, control.Inject{Kind: slowName, Workers: []int{w}, Factor: factor})
		return cli.Fail(err)
	}
	if err := Local(runDir, slowName, targets[0], factor); err != nil {
		return cli.Fail(fmt.Errorf("worker %d: %w", w, err))
	}
	return nil
}

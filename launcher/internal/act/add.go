// Package act has the commands that act on a run under way: they inject faults, add workers, and stop it.
package act

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// NewAdd returns the command.
func NewAdd() *cobra.Command {
	return &cobra.Command{
		Use:   "add RUN_DIR [N]",
		Short: "Start more workers for a run",
		Long: `add starts N more workers for a run, 1 where N is left out, and prints their numbers. They get
the state that they will hold while training continues, and take part from the next
step on. launcher status lists them then.`,
		Example: "  launcher add runs/latest 2",
		Args: func(_ *cobra.Command, args []string) error {
			if err := cli.NeedRun()(nil, args); err != nil {
				return err
			}
			if len(args) > 1 {
				if n, err := strconv.Atoi(args[1]); err != nil || n < 1 {
					return fmt.Errorf("N is %q: give the number of workers to start, at least 1", args[1])
				}
			}
			return cli.AtMost(2, "RUN_DIR and N")(nil, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			n := 1
			if len(args) > 1 {
				n, _ = strconv.Atoi(args[1]) // checked above
			}
			ids, err := Add(cmd.Context(), args[0], n)
			if err != nil {
				return cli.Fail(err)
			}
			words := make([]string, len(ids))
			for i, id := range ids {
				words[i] = strconv.Itoa(id)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "started: worker %s\n", strings.Join(words, ", "))
			return err
		},
	}
}

// Add asks the agent of a run for n more workers, and returns their numbers, for the command as for the page.
func Add(ctx context.Context, runDir string, n int) ([]int, error) {
	m, err := Ask(ctx, runDir, control.Add{N: n})
	if err != nil {
		return nil, err
	}
	added, ok := m.(control.Added)
	switch {
	case !ok:
		return nil, fmt.Errorf("the run's launcher answers with %T", m)
	case added.Refusal != "":
		return nil, errors.New(added.Refusal)
	}
	return added.Workers, nil
}

package inspect

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ssh"
)

const probeName = "probe"

// NewProbe returns the command that doctor --hosts runs on every machine.
func NewProbe() *cobra.Command {
	var at ports.Range
	cmd := &cobra.Command{
		Use:    probeName,
		Short:  "Try to reach other machines; started by doctor --hosts",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cli.Fail(ssh.Probe(cmd.Context(), at, os.Stdin, cli.Raw(cmd.OutOrStdout())))
		},
	}
	cmd.Flags().Var(&at, portsFlag, "`ports` to listen at")
	return cmd
}

const portsFlag = "ports"

// examineHosts looks at machines and at the network between them.
func examineHosts(cmd *cobra.Command, hosts []ssh.Host, at ports.Range, asJSON bool) error {
	report, err := ssh.Check(cmd.Context(), hosts, probeName, "--"+portsFlag+"="+at.String())
	if err != nil {
		return cli.Fail(err)
	}
	if err := cli.Print(cmd.OutOrStdout(), report, asJSON, func(out io.Writer) error {
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		for _, m := range report.Machines {
			fmt.Fprintf(w, "%s\t%s\t%s\n", markOf(m.Error == ""), m.Name, cmp.Or(m.Error, m.Version))
		}
		for _, p := range report.Pairs {
			fmt.Fprintf(w, "%s\t%s to %s\t", markOf(p.OK), p.From, p.To)
			if p.OK {
				fmt.Fprintf(w, "%s, MTU %d, %.1f ms\n", p.Addr, p.MTU, p.MS)
			} else {
				fmt.Fprintf(w, "%s at %s\n", p.Error, cmp.Or(p.Addr, "any address"))
			}
		}
		return w.Flush()
	}); err != nil {
		return err
	}
	if !report.OK() {
		return cli.Exit(1)
	}
	return nil
}

func markOf(good bool) mark {
	if good {
		return ok
	}
	return fail
}

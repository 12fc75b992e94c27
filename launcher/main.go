// Command launcher runs training programs and looks after this machine's part in
// a run.
//
//	launcher demo [--run-dir DIR]
//	launcher run [flags] PROGRAM [program flags]
//	launcher ls [DIR] [--json]
//	launcher status [RUN_DIR] [--json]
//	launcher trace [RUN_DIR] [--perfetto FILE] [--json]
//	launcher logs [RUN_DIR] [W] [-f]
//	launcher checkpoints [RUN_DIR] [--check] [--json]
//	launcher export [RUN_DIR] [--step S] [--optimizer] [--output DIR]
//	launcher doctor [--hosts HOST,...] [--json]
//	launcher plan [flags] [--json]
//	launcher kill|freeze|thaw|leave RUN_DIR W ...
//	launcher slow RUN_DIR W FACTOR
//	launcher stop RUN_DIR
//	launcher attach [RUN_DIR]
//	launcher resume [flags] RUN_DIR
//	launcher version
//
// See launcher COMMAND --help. Its exit status is 0 only when all steps are
// done, 2 for wrong usage, 130 after Ctrl-C, 75 after SIGTERM, and 1 otherwise.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/launcher/internal/act"
	"github.com/soliton-train/soliton/launcher/internal/away"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/clocks"
	"github.com/soliton-train/soliton/launcher/internal/demo"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
	"github.com/soliton-train/soliton/launcher/internal/kube"
	"github.com/soliton-train/soliton/launcher/internal/torch"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == demo.Job {
		demo.RunJob()
	}
	if len(os.Args) > 1 && (os.Args[1] == torch.Worker || os.Args[1] == torch.Values) {
		torch.Main()
	}
	os.Exit(execute(os.Args[1:], os.Stdout, os.Stderr))
}

// execute runs the command line and returns the exit status.
func execute(args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	stderr = cli.Cleaned{Raw: stderr}
	root.SetOut(cli.Cleaned{Raw: stdout})
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()

	var exit cli.Exit
	var failed cli.Failure
	switch {
	case err == nil:
		return session.ExitDone
	case errors.As(err, &exit):
		return int(exit)
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintf(stderr, "launcher: %s\n", line)
	}
	if errors.As(err, &failed) {
		return session.ExitFailed
	}
	fmt.Fprintf(stderr, "Try '%s --help'.\n", cmd.CommandPath())
	return session.ExitUsage
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "launcher",
		Short: "Run training programs",
		Long: `launcher runs training programs built on Soliton.

The exit status is 0 only when all steps are done, 2 for wrong usage, 130 after
Ctrl-C, 75 after SIGTERM, and 1 otherwise.`,
		Example: `  launcher demo
  launcher run ./examples/gpt
  launcher run --workers 4 --stages 2 ./examples/gpt --steps 50 --width 96
  launcher status
  launcher logs -f
  launcher doctor`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("there is no command %q: the commands are %s", args[0], commands(cmd))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("no command given: the commands are %s", commands(cmd))
		},
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(cli.FlagError)
	root.AddCommand(newRun(), newVersion(), inspect.NewList(), inspect.NewStatus(), inspect.NewTrace(), inspect.NewLogs(), inspect.NewCheckpoints(), inspect.NewExport(), inspect.NewDoctor(), act.NewSlow(), act.NewAdd(), inspect.NewPlan(),
		act.NewStop(), newResume(), newJoin(), kube.NewManifest(), newAttach(), demo.NewCommand(), away.NewCommand(), newAgent(), clocks.NewGuard(), inspect.NewProbe())
	for _, in := range act.Injections {
		root.AddCommand(in.Command())
	}
	return root
}

// commands lists the commands that users are told of.
func commands(root *cobra.Command) string {
	var names []string
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " and " + names[last]
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of the launcher",
		Long: `version prints the version of this executable, the commit that it was built from as far as that is
known, the version of Go and the platform, and the version of the protocol between launcher and
workers: PROGRAM must speak the same.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			version, commit := "(devel)", ""
			if info, ok := debug.ReadBuildInfo(); ok {
				version = cmp.Or(info.Main.Version, version)
				for _, s := range info.Settings {
					switch {
					case s.Key == "vcs.revision":
						commit = ", commit " + s.Value + commit
					case s.Key == "vcs.modified" && s.Value == "true":
						commit += " with changes"
					}
				}
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "launcher %s%s, %s, %s/%s, protocol %d\n",
				version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH, control.Protocol)
			return err
		},
	}
}

package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/net/control"
)

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

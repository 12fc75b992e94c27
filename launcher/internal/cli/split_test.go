package cli

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// Flags behind a first argument are the command's where it has them, and the program's otherwise.
func TestSplit(t *testing.T) {
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	own.Int("workers", 0, "")
	own.Bool("plain", false, "")
	for _, c := range []struct{ args, command, program string }{
		{"", "", ""},
		{"--workers 2 --steps 5", "--workers 2", "--steps 5"},
		{"--steps=5 --workers=2 -lr 1e-4", "--workers=2", "--steps=5 -lr 1e-4"},
		{"--flag --plain --seed -1", "--plain", "--flag --seed -1"},
		{"--plain -- --workers 3", "--plain", "--workers 3"},
		{"--lr .5 --workers", "--workers", "--lr .5"},
	} {
		command, program := Split(strings.Fields(c.args), own)
		if strings.Join(command, " ") != c.command || strings.Join(program, " ") != c.program {
			t.Errorf("%q: %q and %q", c.args, command, program)
		}
	}
}

// A flag that is given again replaces the one before, if that is certain to be right; the last one counts in any case.
func TestOverride(t *testing.T) {
	for _, c := range []struct{ was, more, want string }{
		{"--steps 5 --lr 1", "--lr 2", "--steps 5 --lr 2"},
		{"--steps=5 -lr=1 --x", "--lr 2 --steps 9", "--x --lr 2 --steps 9"},
		{"--every -1 --deep", "--every 5 --deep=false", "--deep --every 5 --deep=false"},
		{"--text -foo --seed 1", "--text bar", "--text -foo --seed 1 --text bar"},
		{"--data a --data b", "--data c", "--data c"},
	} {
		if got := Override(strings.Fields(c.was), strings.Fields(c.more)); !slices.Equal(got, strings.Fields(c.want)) {
			t.Errorf("%q with %q: %q", c.was, c.more, got)
		}
	}
}

package trainer_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/trainer"
)

func TestLaunchedArgs(t *testing.T) {
	for args, want := range map[string]string{
		"":                          "",
		"--plain --steps 3":         "--steps 3",
		"-run-dir x --steps=3":      "--steps=3",
		"--run-dir=x -fail --plain": "-fail --plain",
		"--unused --threads 2":      "--unused",
		"--unused=false --":         "--unused=false",
		"--checkpoint-every 90s":    "--checkpoint-every 90s",
		"--checkpoint-every -1s":    "--checkpoint-every -1s",
		"--checkpoint-every=500":    "--checkpoint-every=500",
	} {
		got := trainer.LaunchedArgs(testProgram, strings.Fields(args)...)
		if !slices.Equal(got, strings.Fields(want)) && strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %s", args, got, want)
		}
	}
}

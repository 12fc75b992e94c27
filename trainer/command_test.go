package trainer

import (
	"flag"
	"slices"
	"strings"
	"testing"
	"time"
)

// A flag that gathers its values gets each of them once.
func TestGatheringFlag(t *testing.T) {
	var got []string
	_, err := newCommand("prog", true, func(f *flag.FlagSet) func() (Job, error) {
		f.Func("path", "gathers", func(s string) error { got = append(got, s); return nil })
		return func() (Job, error) { return Job{}, nil }
	}).job([]string{"--path", "a", "--steps", "3", "--path", "b"})
	if err != nil || !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("values %q, error %v", got, err)
	}
}

// --checkpoint-every takes steps or a time; what is given last counts.
func TestCheckpointEvery(t *testing.T) {
	define := func(*flag.FlagSet) func() (Job, error) {
		return func() (Job, error) { return Job{CheckpointSteps: 9}, nil }
	}
	for args, want := range map[string]struct {
		steps int
		every time.Duration
	}{
		"":                       {9, 0},
		"--checkpoint-every 500": {500, 0},
		"--checkpoint-every 90s": {0, 90 * time.Second},
		"--checkpoint-every 0":   {0, 0},
		"--checkpoint-every -1":  {0, -time.Second},
		"--checkpoint-every -1s": {0, -time.Second},
		"--checkpoint-every 5 --checkpoint-every 2m": {0, 2 * time.Minute},
	} {
		job, err := newCommand("prog", false, define).job(strings.Fields(args))
		if err != nil || job.CheckpointSteps != want.steps || job.CheckpointEvery != want.every {
			t.Errorf("%q: %d steps, %v, %v; want %+v", args, job.CheckpointSteps, job.CheckpointEvery, err, want)
		}
	}
	if _, err := newCommand("prog", false, define).job([]string{"--checkpoint-every", "soon"}); err == nil || !strings.Contains(err.Error(), "give a number of steps, such as 500, or a time, such as 5m") {
		t.Errorf("a time that is none: %v", err)
	}
}

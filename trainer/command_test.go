package trainer

import (
	"flag"
	"slices"
	"testing"
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

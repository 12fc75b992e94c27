package cli

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
)

type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// A command that cannot print has failed; it was not used wrongly.
func TestFullOutputIsAFailure(t *testing.T) {
	_, err := fmt.Fprintln(Cleaned{full{}}, "text")
	var failed Failure
	if !errors.As(err, &failed) || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("%v", err)
	}
}

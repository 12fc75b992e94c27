package chaos

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
)

// A system without socket filters refuses by name, before and during a run.
func TestCutUnsupported(t *testing.T) {
	err := CanCut()
	if err == nil {
		t.Skip("this system can cut processes off; build with -tags portable")
	}
	if !errors.Is(err, errors.ErrUnsupported) || !strings.HasPrefix(err.Error(), "cut needs Linux") {
		t.Errorf("%v", err)
	}
	if err := new(Cuts).Apply(os.Getpid(), netip.MustParseAddr("127.0.0.1"), nil); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

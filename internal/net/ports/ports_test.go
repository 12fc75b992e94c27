package ports_test

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/net/ports"
)

func TestSet(t *testing.T) {
	for text, want := range map[string]string{"20000-20099": "20000-20099", "7-7": "7-7", "65535": "65535-65535", "": "", "0-9": "", "9-7": "", "1-65536": "", "a-b": "", "1-2-3": ""} {
		var r ports.Range
		if err := r.Set(text); (err == nil) != (want != "" || text == "") || r.String() != want {
			t.Errorf("%q: %v, %v", text, r, err)
		}
	}
}

// Each listener gets a port of its own, until all are taken, and another error ends the search.
func TestListen(t *testing.T) {
	r := ports.Range{From: 10, To: 14}
	taken := make(map[int]bool)
	listen := func(port int) error {
		if taken[port] {
			return fmt.Errorf("listen: %w", syscall.EADDRINUSE)
		}
		taken[port] = true
		return nil
	}
	for range 5 {
		if err := r.Listen(listen); err != nil {
			t.Error(err)
		}
	}
	for port := range 5 {
		if !taken[10+port] {
			t.Errorf("port %d is not used", 10+port)
		}
	}
	if err := r.Listen(listen); err == nil || err.Error() != "all ports of --ports 10-14 are in use" {
		t.Error(err)
	}
	other := errors.New("no such address")
	if err := r.Listen(func(int) error { return other }); !errors.Is(err, other) {
		t.Error(err)
	}
	if err := (ports.Range{}).Listen(func(port int) error { return fmt.Errorf("port %d", port) }); err.Error() != "port 0" {
		t.Error(err)
	}
}

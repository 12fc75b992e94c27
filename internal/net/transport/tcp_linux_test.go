//go:build linux && !portable

package transport

import (
	"net"
	"syscall"
	"testing"

	"github.com/soliton-train/soliton/internal/platform"
)

// Connections within the machine are not paced at either end, whatever the system does with others.
func TestUnpaced(t *testing.T) {
	system := ""
	first, err := (&net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		system = platform.Congestion(c)
		return nil
	}}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	l, err := TCP{}.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got := l.(tcpListener).congestion; got != system || got == "" {
		t.Errorf("the listener gives other machines %q, want %q", got, system)
	}
	ours, err := TCP{}.Dial(t.Context(), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	for _, c := range []net.Conn{ours, theirs} {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if got := platform.Congestion(raw); got != unpaced {
			t.Errorf("%v to %v: %q", c.LocalAddr(), c.RemoteAddr(), got)
		}
	}
	for addr, want := range map[string]string{"127.0.0.1:1": unpaced, "[::1]:1": unpaced, "10.1.2.3:1": unpaced, "10.1.2.4:1": system} {
		control := func(_, _ string, c syscall.RawConn) error {
			unpace(addr, "10.1.2.3", c)
			if got := platform.Congestion(c); got != want {
				t.Errorf("to %s: %q, want %q", addr, got, want)
			}
			return nil
		}
		l, err := (&net.ListenConfig{Control: control}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
}

//go:build linux && !portable

package transport

import (
	"net"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Connections over the loopback interface are not paced at either end, whatever the system does with others.
func TestUnpaced(t *testing.T) {
	system := ""
	first, err := (&net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		system = congestion(c)
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
		if got := congestion(raw); got != unpaced {
			t.Errorf("%v to %v: %q", c.LocalAddr(), c.RemoteAddr(), got)
		}
	}
	for addr, want := range map[string]string{"127.0.0.1:1": unpaced, "[::1]:1": unpaced, "[::ffff:127.0.0.2]:1": unpaced, "10.1.2.3:1": system, ":1": system} {
		l, err := (&net.ListenConfig{Control: func(network, _ string, c syscall.RawConn) error {
			err := limit(network, addr, c)
			if got := congestion(c); got != want {
				t.Errorf("%s: %q, want %q", addr, got, want)
			}
			return err
		}}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
}

// congestion returns the name of what controls the congestion of a TCP socket.
func congestion(c syscall.RawConn) (name string) {
	_ = c.Control(func(fd uintptr) { name, _ = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION) })
	name, _, _ = strings.Cut(name, "\x00")
	return name
}

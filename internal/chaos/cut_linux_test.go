//go:build !portable

package chaos

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/testkit/require"
)

// Two hosts at addresses of this machine, both in this process.
var near, far = netip.MustParseAddr("127.9.0.1"), netip.MustParseAddr("127.9.0.2")

func listenAt(t *testing.T, addr netip.Addr) *net.TCPListener {
	t.Helper()
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(t.Context(), "tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func dialFrom(ctx context.Context, addr netip.Addr, to net.Addr) (*net.TCPConn, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))}
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// retransmitted returns how often the kernel has sent something again.
func retransmitted(t *testing.T, c *net.TCPConn) (n uint32) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				n = info.Total_retrans
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A cut loses what is sent without an error: no connection breaks and none comes about. What is
// within a host passes. Once it is over, all arrives in its order.
func TestCuts(t *testing.T) {
	l := listenAt(t, far)
	there, err := dialFrom(t.Context(), near, l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	here, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(far, 0)))
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()

	var c Cuts
	apply := func(nearHears, farHears []netip.Addr) {
		t.Helper()
		err := errors.Join(c.Apply(os.Getpid(), near, nearHears), c.Apply(os.Getpid(), far, farHears))
		require.Tool(t, "cut", err == nil, "no process may be cut off: "+errorText(err))
	}
	apply([]netip.Addr{far}, []netip.Addr{near})
	if _, err := there.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(30 * time.Second)
	for retransmitted(t, there) < 2 {
		if time.Now().After(deadline) {
			t.Fatal("what is lost is not sent again")
		}
		time.Sleep(time.Millisecond)
	}
	here.SetReadDeadline(time.Now().Add(time.Millisecond))
	if n, err := here.Read(make([]byte, 1)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes came through: %v", n, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := dialFrom(ctx, near, l.Addr()); !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a new connection: %v", err)
	}
	neighbour, err := dialFrom(t.Context(), far, l.Addr())
	if err != nil {
		t.Fatalf("within a host: %v", err)
	}
	defer neighbour.Close()
	inherits, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer inherits.Close()
	say := func(from netip.Addr, text string) {
		t.Helper()
		u, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), udp.LocalAddr().(*net.UDPAddr))
		if err == nil {
			_, err = u.Write([]byte(text))
			_ = u.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	say(near, "lost")
	say(far, "kept")
	text := make([]byte, 8)
	if n, err := udp.Read(text); err != nil || string(text[:n]) != "kept" {
		t.Errorf("%q came through: %v", text[:n], err)
	}

	apply(nil, nil)
	if _, err := there.Write([]byte("b")); err != nil {
		t.Fatal(err)
	}
	here.SetReadDeadline(time.Now().Add(30 * time.Second))
	both := make([]byte, 2)
	if _, err := io.ReadFull(here, both); err != nil || string(both) != "ab" {
		t.Errorf("afterwards came %q: %v", both, err)
	}
	again, err := dialFrom(t.Context(), near, l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// A process that has ended has nothing to be kept from, reaped or not.
func TestCutsOfTheDead(t *testing.T) {
	p := exec.Command("true")
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, p.Process.Pid, &info, syscall.WEXITED|syscall.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	var c Cuts
	if err := c.Apply(p.Process.Pid, near, []netip.Addr{far}); err != nil {
		t.Errorf("before it is reaped: %v", err)
	}
	p.Wait()
	if err := c.Apply(p.Process.Pid, near, []netip.Addr{far}); err != nil {
		t.Errorf("after it is reaped: %v", err)
	}
}

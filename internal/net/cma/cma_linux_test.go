//go:build linux && !portable

package cma

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/testkit/require"
)

func address[T any](x *T) uint64 { return uint64(uintptr(unsafe.Pointer(x))) }

// pair returns both ends of a socket.
func pair(t *testing.T) (caller, answerer *net.UnixConn) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if caller, err = net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { caller.Close() })
	if answerer, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { answerer.Close() })
	return caller, answerer
}

func at(t *testing.T, c *net.UnixConn) *Process {
	t.Helper()
	p, err := At(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func TestRead(t *testing.T) {
	require.Reads(t)
	caller, answerer := pair(t)
	src := make([]byte, 2*piece+4321)
	for i := range src {
		src[i] = byte(rand.Uint32())
	}
	word := uint64(77)
	for _, p := range []*Process{at(t, caller), at(t, answerer)} {
		for _, n := range []int{0, 1, 4096, piece, piece + 1, len(src)} {
			dst := make([]byte, n)
			if err := p.Read(dst, address(&src[0]), address(&word), 77, nil); err != nil || !bytes.Equal(dst, src[:n]) {
				t.Errorf("%d bytes: %v, equal %v", n, err, bytes.Equal(dst, src[:n]))
			}
		}
		if err := p.Read(make([]byte, 10), address(&src[0]), address(&word), 78, nil); !errors.Is(err, ErrChanged) {
			t.Errorf("another word: %v", err)
		}
		if err := p.Read(make([]byte, 10), 8, address(&word), 77, nil); !errors.Is(err, unix.EFAULT) {
			t.Errorf("an address without memory: %v", err)
		}
		if err := p.Read(make([]byte, len(src)), address(&src[0]), address(&word), 77, func() bool { return true }); !errors.Is(err, ErrStopped) {
			t.Errorf("stopped: %v", err)
		}
		if err := p.Read(nil, 0, 8, 77, nil); !errors.Is(err, unix.EFAULT) {
			t.Errorf("a word without memory: %v", err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := p.Read(nil, 0, address(&word), 77, nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		if err := p.Close(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a second Close: %v", err)
		}
	}
}

// What a child runs: it connects, says where its word is, and waits for its end.
const envSocket = "CMA_TEST_SOCKET"

func TestMain(m *testing.M) {
	if name := os.Getenv(envSocket); name != "" {
		word := uint64(4711)
		c, err := net.Dial("unix", name)
		if err != nil {
			panic(err)
		}
		_, _ = c.Write([]byte(strconv.FormatUint(address(&word), 10) + "\n"))
		_, _ = c.Read(make([]byte, 1))
		if word != 4711 {
			panic("overwritten")
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A process that has ended is not read, even if another one had its number by then.
func TestReadEnded(t *testing.T) {
	require.Reads(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), envSocket+"="+l.Addr().String())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	line := make([]byte, 64)
	n, err := c.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	word, err := strconv.ParseUint(strings.TrimSpace(string(line[:n])), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	p := at(t, c)
	if err := p.Read(nil, 0, word, 4711, nil); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err := p.Read(nil, 0, word, 4711, nil); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("after its end: %v", err)
	}
	// The number now belongs to another process, as far as the reader knows.
	word = 4711
	p.pid = os.Getpid()
	if err := p.Read(nil, 0, address(&word), 4711, nil); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("another process of the same number: %v", err)
	}
}

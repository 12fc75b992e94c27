//go:build linux && !portable

package shm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sockets returns two ends of a unix socket.
func sockets(t *testing.T) (near, far *net.UnixConn) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if near, err = net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr)); err != nil {
		t.Fatal(err)
	}
	if far, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		near.Close()
		far.Close()
	})
	return near, far
}

// pair returns two ends of a connection in shared memory.
func pair(t *testing.T) (near, far *Conn) {
	t.Helper()
	a, b := sockets(t)
	var wg sync.WaitGroup
	var reasons, errs [2]error
	wg.Go(func() { near, reasons[0], errs[0] = Offer(a) })
	wg.Go(func() { far, reasons[1], errs[1] = Accept(b) })
	wg.Wait()
	if err := errors.Join(reasons[0], reasons[1], errs[0], errs[1]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		near.Close()
		far.Close()
	})
	return near, far
}

func TestConnBothWays(t *testing.T) {
	near, far := pair(t)
	want := make([]byte, 5*Size+17)
	for i := range want {
		want[i] = byte(i*7 + i>>8)
	}
	var wg sync.WaitGroup
	for _, c := range []struct{ from, to *Conn }{{near, far}, {far, near}} {
		wg.Go(func() {
			if n, err := c.from.WriteBuffers(net.Buffers{want[:1], nil, want[1:100], want[100:]}); err != nil || n != int64(len(want)) {
				t.Errorf("wrote %d bytes: %v", n, err)
			}
		})
		wg.Go(func() {
			got := make([]byte, len(want))
			if _, err := io.ReadFull(c.to, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("other bytes arrived (%v)", err)
			}
		})
	}
	wg.Wait()
}

// What is in the ring can be read after the other side has ended, in whichever way: both are the end of its socket.
func TestConnReadsToTheEnd(t *testing.T) {
	near, far := pair(t)
	want := bytes.Repeat([]byte("end"), 1000)
	if _, err := near.Write(want); err != nil {
		t.Fatal(err)
	}
	if err := near.Close(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(far); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d, %v", len(got), len(want), err)
	}
	if _, err := near.Write(want); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	if err := near.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("second close: %v", err)
	}
}

// Close ends calls that wait, and a deadline does; what was reported as written is what arrives.
func TestConnWaits(t *testing.T) {
	near, far := pair(t)
	near.SetDeadline(time.Now().Add(time.Millisecond))
	if _, err := near.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	big := bytes.Repeat([]byte{1}, 2*Size)
	n, err := near.Write(big)
	if !errors.Is(err, os.ErrDeadlineExceeded) || n != Size {
		t.Errorf("wrote %d bytes into a ring of %d: %v", n, Size, err)
	}
	near.SetDeadline(time.Time{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := near.Write(big[:1000]); err != nil {
			t.Error(err)
		}
	})
	if _, err := io.ReadFull(far, make([]byte, Size+1000)); err != nil {
		t.Error(err)
	}
	wg.Wait()
	wg.Go(func() {
		if _, err := near.Read(make([]byte, 1)); err == nil {
			t.Error("a read of nothing succeeded")
		}
	})
	wg.Go(func() {
		if _, err := near.Write(big); err == nil {
			t.Error("a write into a full ring succeeded")
		}
	})
	for near.out.sleeps.Load() == 0 || near.in.sleeps.Load() == 0 { // until both wait
		runtime.Gosched()
	}
	near.Close()
	wg.Wait()
}

// The other side may break the ring at any moment: the connection ends, and nothing else.
func TestConnHostile(t *testing.T) {
	near, far := pair(t)
	if _, err := far.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint64(far.mem[256:], math.MaxUint64) // far writes in direction 1
	if _, err := near.Read(make([]byte, 8)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("read: %v", err)
	}
	binary.LittleEndian.PutUint64(far.mem[64:], 1<<40)
	if _, err := near.Write([]byte("x")); !errors.Is(err, ErrCorrupt) {
		t.Errorf("write: %v", err)
	}
}

// An offer whose memory could shrink under us, or whose files are something else, is refused.
func TestAcceptRefuses(t *testing.T) {
	offer := func(magic string, size uint32) []byte {
		return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32([]byte(magic), size), 0)
	}
	loose := func() *shared {
		fd, err := unix.MemfdCreate("loose", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, FileSize)
		}
		good, cerr := create()
		if err = errors.Join(err, cerr); err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(good.fds[0])
		good.fds[0] = fd
		return good
	}
	swapped := func() *shared {
		s, err := create()
		if err != nil {
			t.Fatal(err)
		}
		s.fds[0], s.fds[1] = s.fds[1], s.fds[0]
		return s
	}
	good := func() *shared {
		s, err := create()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for name, c := range map[string]struct {
		offer []byte
		files *shared
		n     int
	}{
		"other bytes":     {offer("SLTNSHM0", Size), good(), files},
		"another size":    {offer(magic, 2*Size), good(), files},
		"no files":        {offer(magic, Size), good(), 0},
		"a file too few":  {offer(magic, Size), good(), files - 1},
		"short":           {offer(magic, Size)[:9], good(), files},
		"not sealed":      {offer(magic, Size), loose(), files},
		"no event file":   {offer(magic, Size), swapped(), files},
		"files of a none": {offer(magic, 0), good(), files},
	} {
		t.Run(name, func(t *testing.T) {
			defer c.files.close()
			a, b := sockets(t)
			if _, _, err := a.WriteMsgUnix(c.offer, unix.UnixRights(c.files.fds[:c.n]...), nil); err != nil {
				t.Fatal(err)
			}
			if conn, reason, err := Accept(b); err == nil {
				t.Errorf("accepted: %v, %v", conn, reason)
			}
		})
	}
	t.Run("none", func(t *testing.T) {
		a, b := sockets(t)
		if _, err := a.Write(offer(magic, 0)); err != nil {
			t.Fatal(err)
		}
		if conn, reason, err := Accept(b); conn != nil || reason == nil || err != nil {
			t.Errorf("%v, %v, %v", conn, reason, err)
		}
	})
}

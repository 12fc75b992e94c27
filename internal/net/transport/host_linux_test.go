package transport

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Many workers that dial at once wait for a listener that is slow to accept, as over TCP, and as long as their contexts allow.
func TestHostBacklog(t *testing.T) {
	h := Host{Folder: folder(t), Name: "0.0"}
	l := listen(t, h)
	raw, err := l.(unixListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 1) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
	const callers = 128
	dialled := make(chan error, callers)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var conns []net.Conn
	var mu sync.Mutex
	dial := func(ctx context.Context) {
		wg.Go(func() {
			c, err := h.Dial(ctx, l.Addr())
			if err == nil {
				mu.Lock()
				conns = append(conns, c)
				mu.Unlock()
			}
			dialled <- err
		})
	}
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range callers {
		dial(ctx)
	}
	for range 2 { // the queue holds two
		if err := <-dialled; err != nil {
			t.Error(err)
		}
	}
	late, cancelLate := context.WithCancel(ctx)
	cancelLate()
	if c, err := h.Dial(late, l.Addr()); err == nil {
		c.Close()
		t.Error("dialled after the end of the context")
	}
	for range callers {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	for range callers - 2 {
		if err := <-dialled; err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	// A queue that stays full ends the call with its context.
	for range 2 {
		dial(ctx)
		if err := <-dialled; err != nil {
			t.Error(err)
		}
	}
	short, cancelShort := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancelShort()
	dial(short)
	if err := <-dialled; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a call of a full queue: %v", err)
	}
}

// The kernel keeps no more of what is sent than comm counts on.
func TestHostUnread(t *testing.T) {
	h := Host{Folder: folder(t), Name: "0.0"}
	l := listen(t, h)
	near, err := h.Dial(t.Context(), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	for _, c := range []net.Conn{near, far} {
		_ = c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if n, err := c.Write(make([]byte, 16<<20)); !errors.Is(err, os.ErrDeadlineExceeded) || n > Unsent+Unread {
			t.Errorf("%d bytes wait: %v", n, err)
		}
	}
}

package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// memBuffer is how many bytes one direction of a mem connection holds.
const memBuffer = 64 << 10

// Mem is a network in memory: what listens on it can be dialled on it. Its
// connections are buffered, wait on nothing but condition variables, and take
// time from timers only, so all of it works in a testing/synctest bubble.
type Mem struct {
	// Latency is how long every byte takes to the other side. It must not
	// change once there are connections.
	Latency time.Duration

	mu        sync.Mutex
	listeners map[string]*memListener
	next      int
}

// NewMem returns an empty network.
func NewMem() *Mem { return &Mem{listeners: make(map[string]*memListener)} }

// Listen opens a listener at any name that is free; an empty one means one of
// the network's choice.
func (m *Mem) Listen(addr string) (Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if addr == "" {
		m.next++
		addr = fmt.Sprintf("mem:%d", m.next)
	}
	if _, taken := m.listeners[addr]; taken {
		return nil, fmt.Errorf("transport: listen on %q: address already in use", addr)
	}
	l := &memListener{mem: m, addr: addr, queue: make(chan net.Conn), closed: make(chan struct{})}
	m.listeners[addr] = l
	return l, nil
}

// Dial connects to a listener and waits until it accepts.
func (m *Mem) Dial(ctx context.Context, addr string) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	l := m.listeners[addr]
	m.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("transport: dial %q: connection refused", addr)
	}
	near, far := memPipe(addr, m.Latency)
	select {
	case l.queue <- far:
		return near, nil
	case <-l.closed:
		return nil, fmt.Errorf("transport: dial %q: connection refused", addr)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type memListener struct {
	mem    *Mem
	addr   string
	queue  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Addr() string { return l.addr }

func (l *memListener) Close() error {
	l.once.Do(func() {
		l.mem.mu.Lock()
		delete(l.mem.listeners, l.addr)
		l.mem.mu.Unlock()
		close(l.closed)
	})
	return nil
}

// memPipe returns the two ends of a connection.
func memPipe(addr string, latency time.Duration) (near, far net.Conn) {
	ab, ba := newMemHalf(latency), newMemHalf(latency)
	return &memConn{in: ba, out: ab, addr: memAddr(addr)}, &memConn{in: ab, out: ba, addr: memAddr(addr)}
}

type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

// memConn is one end: it reads from one half and writes to the other.
type memConn struct {
	in, out *memHalf
	addr    memAddr
}

func (c *memConn) Read(p []byte) (int, error)  { return c.in.read(p) }
func (c *memConn) Write(p []byte) (int, error) { return c.out.write(p) }

func (c *memConn) Close() error {
	c.out.close(io.EOF, net.ErrClosed)                       // the other side reads what is there, then EOF
	c.in.close(net.ErrClosed, errors.New("broken mem pipe")) // and cannot write
	return nil
}

func (c *memConn) LocalAddr() net.Addr                { return c.addr }
func (c *memConn) RemoteAddr() net.Addr               { return c.addr }
func (c *memConn) SetReadDeadline(t time.Time) error  { c.in.readBy.set(c.in, t); return nil }
func (c *memConn) SetWriteDeadline(t time.Time) error { c.out.writeBy.set(c.out, t); return nil }
func (c *memConn) SetDeadline(t time.Time) error {
	c.in.readBy.set(c.in, t)
	c.out.writeBy.set(c.out, t)
	return nil
}

// memHalf is one direction: a ring of bytes.
type memHalf struct {
	mu       sync.Mutex
	changed  sync.Cond
	ring     []byte
	at, used int
	there    int // of the used bytes, those that have arrived
	latency  time.Duration

	readErr, writeErr error // set when closed
	readBy, writeBy   memDeadline
}

func newMemHalf(latency time.Duration) *memHalf {
	h := &memHalf{ring: make([]byte, memBuffer), latency: latency}
	h.changed.L = &h.mu
	return h
}

func (h *memHalf) close(readErr, writeErr error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.readErr == nil || errors.Is(readErr, net.ErrClosed) {
		h.readErr = readErr
	}
	if h.writeErr == nil || errors.Is(writeErr, net.ErrClosed) {
		h.writeErr = writeErr
	}
	h.readBy.stop()
	h.writeBy.stop()
	h.changed.Broadcast()
}

func (h *memHalf) read(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		switch {
		case errors.Is(h.readErr, net.ErrClosed):
			return 0, net.ErrClosed
		case h.readBy.passed:
			return 0, os.ErrDeadlineExceeded
		case len(p) == 0:
			return 0, nil
		case h.there > 0:
			n := copy(p, h.ring[h.at:min(h.at+h.there, len(h.ring))])
			if n < len(p) && n < h.there {
				n += copy(p[n:], h.ring[:h.there-n])
			}
			h.at = (h.at + n) % len(h.ring)
			h.used -= n
			h.there -= n
			h.changed.Broadcast()
			return n, nil
		case h.readErr != nil && h.used == 0:
			return 0, h.readErr
		}
		h.changed.Wait()
	}
}

func (h *memHalf) write(p []byte) (n int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		switch {
		case h.writeErr != nil:
			return n, h.writeErr
		case h.writeBy.passed:
			return n, os.ErrDeadlineExceeded
		case n == len(p):
			return n, nil
		case h.used < len(h.ring):
			end := (h.at + h.used) % len(h.ring)
			m := copy(h.ring[end:min(end+len(h.ring)-h.used, len(h.ring))], p[n:])
			n += m
			h.used += m
			h.arrive(m)
			continue
		}
		h.changed.Wait()
	}
}

// arrive lets the reader see n more bytes, after the latency.
func (h *memHalf) arrive(n int) {
	if h.latency == 0 {
		h.there += n
		h.changed.Broadcast()
		return
	}
	time.AfterFunc(h.latency, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.there += n
		h.changed.Broadcast()
	})
}

// memDeadline is a deadline of one side of a half.
type memDeadline struct {
	timer  *time.Timer
	passed bool
	count  int // counts calls of set, so that an old timer changes nothing
}

func (d *memDeadline) set(h *memHalf, t time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	d.stop()
	d.count++
	d.passed = false
	if t.IsZero() {
		return
	}
	wait := time.Until(t)
	if wait <= 0 {
		d.passed = true
		h.changed.Broadcast()
		return
	}
	mine := d.count
	d.timer = time.AfterFunc(wait, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if d.count == mine {
			d.passed = true
			h.changed.Broadcast()
		}
	})
}

func (d *memDeadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

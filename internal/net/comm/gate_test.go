package comm

import (
	"context"
	"net"
	"os"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/transport"
)

// gated is a mem network whose dialled connections write nothing more after a
// number of bytes, until told to go on.
type gated struct {
	*transport.Mem
	mu    sync.Mutex
	conns []*gatedConn
}

// hold lets n more bytes pass on every connection; -1 is no limit.
func (g *gated) hold(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.conns {
		c.mu.Lock()
		c.left = n
		c.cond.Broadcast()
		c.mu.Unlock()
	}
}

func (g *gated) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := g.Mem.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	gc := &gatedConn{Conn: c, left: -1}
	gc.cond.L = &gc.mu
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conns = append(g.conns, gc)
	return gc, nil
}

type gatedConn struct {
	net.Conn
	mu     sync.Mutex
	cond   sync.Cond
	left   int
	late   bool
	closed bool
}

func (c *gatedConn) Write(p []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return n, net.ErrClosed
		case c.late:
			return n, os.ErrDeadlineExceeded
		case n == len(p):
			return n, nil
		case c.left == 0:
			c.cond.Wait()
			continue
		}
		k := len(p) - n
		if c.left > 0 {
			k = min(k, c.left)
			c.left -= k
		}
		c.mu.Unlock()
		m, err := c.Conn.Write(p[n : n+k])
		c.mu.Lock()
		n += m
		if err != nil {
			return n, err
		}
	}
}

func (c *gatedConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.late = !t.IsZero()
	c.cond.Broadcast()
	c.mu.Unlock()
	return c.Conn.SetWriteDeadline(t)
}

func (c *gatedConn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.cond.Broadcast()
	c.mu.Unlock()
	return c.Conn.Close()
}

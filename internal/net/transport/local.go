package transport

import (
	"net"

	"github.com/soliton-train/soliton/internal/net/cma"
)

// Neighbour returns the process at the other end of a connection within this host, whose memory may be read; nil where the other end may be
// on another host, or where the transport is not to read memory. The caller closes it.
func Neighbour(c net.Conn) (*cma.Process, error) {
	if c, ok := c.(*net.UnixConn); ok {
		return cma.At(c)
	}
	return nil, nil
}

// unread is a unix socket to a process whose memory is not to be read.
type unread struct{ *net.UnixConn }

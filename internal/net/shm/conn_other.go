//go:build !linux || portable

package shm

import (
	"errors"
	"net"
)

// Conn is a connection through shared memory, which this system has no means for.
type Conn struct{ net.Conn }

var errSystem = errors.New("shm: links in shared memory need Linux")

// Offer leaves the connection a socket. Both ends are on this system.
func Offer(*net.UnixConn) (conn *Conn, reason, err error) { return nil, errSystem, nil }

// Accept is documented with [Offer].
func Accept(*net.UnixConn) (conn *Conn, reason, err error) { return nil, errSystem, nil }

// WriteBuffers is of the connections that there are on Linux.
func (c *Conn) WriteBuffers(b net.Buffers) (int64, error) { return b.WriteTo(c.Conn) }

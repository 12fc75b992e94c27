//go:build !linux || portable

package cma

import (
	"errors"
	"net"
)

// Process is the process at the other end of a unix socket, whose memory this system does not show.
type Process struct{}

// At returns nil.
func At(*net.UnixConn) (*Process, error) { return nil, nil }

// Another fails.
func (*Process) Another() (*Process, error) { return nil, errors.ErrUnsupported }

// Number returns 0.
func (*Process) Number() int { return 0 }

// Read fails.
func (*Process) Read(dst []byte, addr, wordAddr, value uint64, stop func() bool) error {
	return errors.ErrUnsupported
}

// Close does nothing.
func (*Process) Close() error { return nil }

// AllowSiblings does nothing.
func AllowSiblings() {}

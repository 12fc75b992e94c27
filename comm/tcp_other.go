//go:build !linux

package comm

import "syscall"

// limitUnsent leaves the kernel's own limit where none can be set per
// socket.
func limitUnsent(syscall.RawConn) error { return nil }

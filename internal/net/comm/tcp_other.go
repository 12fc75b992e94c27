//go:build !linux

package comm

import "syscall"

// limitKernel leaves the kernel's own limits where none can be set per
// socket.
func limitKernel(syscall.RawConn) error { return nil }

package require

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Reads returns when the system lets processes read each other's memory, which filters of system calls forbid; see Tool.
func Reads(t testing.TB) {
	t.Helper()
	var from, to byte
	local := unix.Iovec{Base: &to}
	local.SetLen(1)
	_, err := unix.ProcessVMReadv(os.Getpid(), []unix.Iovec{local}, []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&from)), Len: 1}}, 0)
	reason := ""
	if err != nil {
		reason = "process_vm_readv: " + err.Error()
	}
	Tool(t, "cma", err == nil, reason)
}

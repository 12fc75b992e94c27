package pages

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// advise asks for large pages for those that lie in b as a whole. Where there are none, it does nothing.
func advise(b []byte) {
	lo := -uintptr(unsafe.Pointer(&b[0])) % hugePage
	hi := (uintptr(len(b)) - lo) / hugePage * hugePage
	_ = unix.Madvise(b[lo:lo+hi], unix.MADV_HUGEPAGE)
}

package comm

import (
	"errors"
	"syscall"
)

// tcpNotSentLowat is TCP_NOTSENT_LOWAT of linux/tcp.h.
const tcpNotSentLowat = 25

// limitKernel keeps at most Unsent bytes unsent and Unread bytes unread in the
// kernel. A write that is under way may pass the mark by one kernel buffer,
// hence half of the first; the kernel doubles the second itself.
func limitKernel(c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = errors.Join(syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpNotSentLowat, Unsent/2),
			syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, Unread/2))
	}); e != nil {
		return e
	}
	return err
}

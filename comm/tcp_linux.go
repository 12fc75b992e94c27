package comm

import "syscall"

// tcpNotSentLowat is TCP_NOTSENT_LOWAT of linux/tcp.h.
const tcpNotSentLowat = 25

// limitUnsent keeps at most Unsent bytes unsent in the kernel. A write that
// is under way may pass the mark by one kernel buffer, hence the half.
func limitUnsent(c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpNotSentLowat, Unsent/2)
	}); e != nil {
		return e
	}
	return err
}

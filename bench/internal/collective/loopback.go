package collective

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
)

// loopback is what the network of the machine can carry: a process of a ring that sends as many bytes to the next one as each rank of an all-reduce has to,
// 2(n-1)/n of its numbers, while it receives as many from the one before. Nothing is added, and no part waits for another, so no all-reduce over the same sockets
// is faster.
type loopback struct {
	l    net.Listener
	n    int
	next net.Conn
	prev net.Conn
	out  []byte
	in   []byte
}

// unpaced has connections sent as fast as they are read, as those of workers within a machine are.
func unpaced(_, _ string, c syscall.RawConn) error {
	platform.SetCongestion(c, "reno")
	return nil
}

// loopbackPiece is how much a process writes, or reads, at a time.
const loopbackPiece = 256 << 10

// ring connects the process to its neighbours, at the addresses of all.
func (r *loopback) ring(self int, addrs []string) (err error) {
	r.n = len(addrs)
	if r.next, err = (&net.Dialer{Control: unpaced}).Dial("tcp", addrs[(self+1)%r.n]); err != nil {
		return err
	}
	if r.prev, err = r.l.Accept(); err != nil {
		return err
	}
	r.out, r.in = make([]byte, loopbackPiece), make([]byte, loopbackPiece)
	return nil
}

func (r *loopback) close() {
	for _, c := range []io.Closer{r.l, r.next, r.prev} {
		if c != nil {
			c.Close()
		}
	}
}

// carry returns what it took, in each round, to send and receive the bytes of an all-reduce.
func (r *loopback) carry(elements, rounds, calls int) (ms []float64, err error) {
	size := elements * 4 * 2 * (r.n - 1) / r.n
	for range rounds {
		// Until a byte has gone round twice, some have not begun.
		if _, err := r.exchange(2*(r.n-1), 1); err != nil {
			return nil, err
		}
		took, err := r.exchange(calls, size)
		if err != nil {
			return nil, err
		}
		ms = append(ms, took.Seconds()*1e3/float64(calls))
	}
	return ms, nil
}

// exchange sends and receives size bytes, times over, and begins none before the one before has come.
func (r *loopback) exchange(times, size int) (time.Duration, error) {
	began := time.Now()
	sends, sent := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		var err error
		for range sends {
			for left := size; left > 0 && err == nil; left -= min(left, len(r.out)) {
				_, err = r.next.Write(r.out[:min(left, len(r.out))])
			}
		}
		sent <- err
	}()
	var err error
	for range times {
		sends <- struct{}{}
		for left := size; left > 0 && err == nil; {
			var n int
			n, err = r.prev.Read(r.in[:min(left, len(r.in))])
			left -= n
		}
	}
	close(sends)
	if err != nil {
		r.next.Close()
	}
	return time.Since(began), errors.Join(err, <-sent)
}

// serveLoopback is a process of a ring: it says its address, reads those of all, and then carries as each line asks.
func serveLoopback(self int, in *bufio.Scanner) error {
	l, err := (&net.ListenConfig{Control: unpaced}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	r := &loopback{l: l}
	defer r.close()
	fmt.Println(l.Addr())
	if !in.Scan() {
		return in.Err()
	}
	if err := r.ring(self, strings.Fields(in.Text())); err != nil {
		return err
	}
	return serve(in, r.carry)
}

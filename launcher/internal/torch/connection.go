package torch

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/platform"
)

// The kinds of requests, as python/soliton/_child.py has them.
const (
	askSetup byte = 1 + iota
	askFork
	askFirst
	askSample
	askForward
	askBackward
	askLoss
	askDrop
	askSuspect
	askOnStep
	askOnEnd
	askFiles // the answer to saidLooks
	askHandOver
	askForget
)

// The kinds of replies.
const (
	saidDone   byte = 0
	saidFailed byte = 1
	saidLooks  byte = 2 // in place of the reply to askSetup, any number of times before it: for data files
)

const (
	headerSize = 5        // length and kind of a frame
	maxReply   = 1 << 20  // bytes, of a reply to all but askSetup
	maxSetup   = 64 << 20 // bytes of a description, and of the files that a program has looked for

	maxOpen    = 64          // requests without replies, so that neither side waits for the other to read
	stopGrace  = time.Second // for a stopped process to continue
	lookEvery  = 100 * time.Millisecond
	writeLimit = time.Minute // for a request, which is small, to be taken
)

// connection is one to a Python process. Replies come in the order of requests.
type connection struct {
	*net.UnixConn
	in  *bufio.Reader
	pid int // of the process, which is killed if it stays stopped while this waits for a reply
	buf [headerSize + 16*8]byte
}

func newConnection(conn *net.UnixConn, pid int) *connection {
	c := &connection{UnixConn: conn, pid: pid}
	c.in = bufio.NewReader(replies{c})
	return c
}

// ask sends a request, with a file if it is not nil.
func (c *connection) ask(kind byte, payload []byte, file *os.File) error {
	frame := append(binary.LittleEndian.AppendUint32(c.buf[:0], uint32(len(payload))), kind)
	frame = append(frame, payload...)
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	_ = c.SetWriteDeadline(time.Now().Add(writeLimit))
	for first := true; first || len(frame) > 0; first = false {
		n, _, err := c.WriteMsgUnix(frame, rights, nil)
		if err != nil {
			return &lostError{err: err}
		}
		frame, rights = frame[n:], nil
	}
	return nil
}

// send sends a request of numbers.
func (c *connection) send(kind byte, numbers ...int) error {
	payload := make([]byte, 0, 16*8)
	for _, n := range numbers {
		payload = binary.LittleEndian.AppendUint64(payload, uint64(n))
	}
	return c.ask(kind, payload, nil)
}

// receive receives a reply of at most limit bytes.
func (c *connection) receive(limit int) ([]byte, error) {
	return settled(c.frame(limit))
}

// frame receives the kind and the content of a reply of at most limit bytes.
func (c *connection) frame(limit int) (kind byte, payload []byte, err error) {
	var header [headerSize]byte
	if err := c.fill(header[:]); err != nil {
		return 0, nil, err
	}
	size := binary.LittleEndian.Uint32(header[:])
	if uint64(size) > uint64(limit) {
		return 0, nil, &failure{Text: fmt.Sprintf("the Python process sent a reply of %d bytes, more than %d; does the program write to its socket?", size, limit)}
	}
	payload = make([]byte, size)
	return header[4], payload, c.fill(payload)
}

// settled returns what a reply brings.
func settled(kind byte, payload []byte, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	switch kind {
	case saidDone:
		return payload, nil
	case saidFailed:
		f := new(failure)
		if err := json.Unmarshal(payload, f); err != nil {
			return nil, &failure{Text: fmt.Sprintf("the Python process sent an error that cannot be read: %v", err)}
		}
		return nil, f
	}
	return nil, &failure{Text: "the Python process sent a reply of unknown kind " + strconv.Itoa(int(kind))}
}

// done receives the reply to a request of numbers: how long it took, and what it returns.
func (c *connection) done() (took time.Duration, said []byte, err error) {
	payload, err := c.receive(maxReply)
	if err != nil {
		return 0, nil, err
	}
	if len(payload) < 8 {
		return 0, nil, &failure{Text: fmt.Sprintf("the Python process sent a reply of %d bytes, too few", len(payload))}
	}
	return max(0, time.Duration(binary.LittleEndian.Uint64(payload))), payload[8:], nil
}

// fill reads all of b.
func (c *connection) fill(b []byte) error {
	if _, err := io.ReadFull(c.in, b); err != nil {
		return &lostError{err: err}
	}
	return nil
}

// replies are what the process writes.
type replies struct{ *connection }

// Read implements [io.Reader].
func (r replies) Read(b []byte) (int, error) {
	for stopped := time.Duration(0); ; {
		_ = r.SetReadDeadline(time.Now().Add(lookEvery))
		n, err := r.UnixConn.Read(b)
		switch {
		case n > 0 || !errors.Is(err, os.ErrDeadlineExceeded):
			return n, err
		case !platform.Stopped(r.pid):
			stopped = 0
		default:
			if stopped += lookEvery; stopped >= stopGrace {
				_ = syscall.Kill(r.pid, syscall.SIGKILL)
			}
		}
	}
}

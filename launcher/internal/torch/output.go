package torch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	maxPrinted = 16 << 20 // bytes of what Python processes print that are kept
	maxFlushed = 1 << 20  // bytes that a flush copies, more than a pipe holds
)

// output is the standard output and error of the Python processes of a worker: a pipe, since the bound must hold for C code and child
// processes too. The first maxPrinted bytes go to the log, the others nowhere.
type output struct {
	ours, theirs *os.File
	pipe         syscall.RawConn // ours
	ended        chan struct{}   // closed when the goroutine has ended

	mu   sync.Mutex
	log  io.Writer
	left int // bytes to keep
	buf  [32 << 10]byte
}

// newOutput returns an output to a log. Its goroutine ends with close.
func newOutput(log io.Writer) (*output, error) {
	fail := func(err error) (*output, error) { return nil, fmt.Errorf("pipe for the output of Python: %w", err) }
	ours, theirs, err := os.Pipe()
	if err != nil {
		return fail(err)
	}
	o := &output{ours: ours, theirs: theirs, ended: make(chan struct{}), log: log, left: maxPrinted}
	o.pipe, err = ours.SyscallConn()
	if err = errors.Join(err, unix.SetNonblock(int(theirs.Fd()), false)); err != nil { // print does not expect EAGAIN
		return fail(errors.Join(err, ours.Close(), theirs.Close()))
	}
	go func() {
		defer close(o.ended)
		for o.pipe.Read(o.copy) == nil {
		}
	}()
	return o, nil
}

// copy copies what is in the pipe, and reports whether there may be more.
func (o *output) copy(fd uintptr) (more bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for copied := 0; copied < maxFlushed; {
		n, err := unix.Read(int(fd), o.buf[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n <= 0 {
			return false
		}
		copied += n
		o.keep(o.buf[:n])
	}
	return true
}

// keep writes to the log what the bound leaves. A log that cannot be written must not stop the program.
func (o *output) keep(text []byte) {
	if o.left == 0 {
		return
	}
	text = text[:min(len(text), o.left)]
	o.left -= len(text)
	_, _ = o.log.Write(text)
	if o.left == 0 {
		fmt.Fprintf(o.log, "\nsoliton: the Python processes of this worker have printed %d MiB; what they print from here on is left out\n", maxPrinted>>20)
	}
}

// flush copies what was printed before.
func (o *output) flush() {
	_ = o.pipe.Control(func(fd uintptr) { o.copy(fd) })
}

// close copies what was printed before. What processes print from then on fails.
func (o *output) close() {
	o.flush()
	_ = o.theirs.Close()
	_ = o.ours.Close()
	<-o.ended
}

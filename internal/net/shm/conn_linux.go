//go:build linux && !portable

package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is a connection whose bytes pass through shared memory. Its socket wakes the reader and tells of the end of the other
// process; an event file wakes the writer. Only a Read learns that the other side has ended, so a Write that waits for room ends
// then if someone reads, or with its deadline.
type Conn struct {
	socket *net.UnixConn
	mem    []byte
	uses   atomic.Int32 // calls that use mem, and one until Close; the last one frees it
	closed atomic.Bool

	reading sync.Mutex
	in      *Ring
	bells   [64]byte
	end     error // of the socket; what is in the ring may still be read
	free    int   // event file at which the other side's writer waits

	writing sync.Mutex
	bell    syscall.RawConn // the socket
	ring    func(fd uintptr)
	rung    error // of ring
	out     *Ring
	room    *os.File // event file at which our writer waits
}

// The offer of a caller is 16 bytes: magic, uint32 Size or 0 for none, uint32 zero. With it come the memory and the event files of
// the writers of both directions. The answer is one byte, 1 if the answerer uses them.
const (
	magic     = "SLTNSHM1"
	offerSize = 16
	files     = 3

	seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
)

// Offer offers shared memory to the other end of a connection, at which Accept is called. Both do so at the same place of what they
// send and receive. It returns nil where the connection stays a socket, with the reason, and an error if it is broken.
func Offer(c *net.UnixConn) (conn *Conn, reason, err error) {
	offer := append(make([]byte, 0, offerSize), magic...)
	s, reason := create()
	if reason != nil {
		_, err := c.Write(append(offer, make([]byte, 8)...))
		if err == nil {
			_, err = io.ReadFull(c, make([]byte, 1))
		}
		return nil, reason, err
	}
	offer = binary.LittleEndian.AppendUint32(offer, Size)
	offer = binary.LittleEndian.AppendUint32(offer, 0)
	_, _, err = c.WriteMsgUnix(offer, unix.UnixRights(s.fds[:]...), nil)
	var answer [1]byte
	if err == nil {
		_, err = io.ReadFull(c, answer[:])
	}
	if err != nil || answer[0] != 1 {
		return nil, errors.New("shm: the other side could not map the memory"), errors.Join(err, s.close())
	}
	conn, err = s.conn(c, 0)
	return conn, nil, err
}

// Accept takes the offer of the other end.
func Accept(c *net.UnixConn) (conn *Conn, reason, err error) {
	var offer [offerSize]byte
	oob := make([]byte, unix.CmsgSpace(4*files)) // further files are closed by the kernel
	n, oobn, flags, _, err := c.ReadMsgUnix(offer[:], oob)
	if err != nil {
		return nil, nil, err
	}
	fds, err := rights(oob[:oobn])
	s := &shared{}
	switch size := binary.LittleEndian.Uint32(offer[8:]); {
	case err != nil:
	case n != offerSize || string(offer[:8]) != magic || binary.LittleEndian.Uint32(offer[12:]) != 0 || flags&unix.MSG_CTRUNC != 0:
		err = errors.New("shm: not an offer of shared memory")
	case size == 0 && len(fds) == 0:
		reason = errors.New("shm: the other side has no shared memory to offer")
	case size != Size || len(fds) != files:
		err = fmt.Errorf("shm: an offer of rings of %d bytes with %d files, not %d and %d", size, len(fds), Size, files)
	default:
		copy(s.fds[:], fds)
		fds = nil
		if err = s.check(); err == nil {
			reason = s.mmap()
		}
	}
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err != nil || reason != nil {
		err = errors.Join(err, s.close())
	}
	if err != nil {
		return nil, nil, err
	}
	answer := []byte{1}
	if reason != nil {
		answer[0] = 0
	}
	if _, err := c.Write(answer); err != nil || reason != nil {
		return nil, reason, errors.Join(err, s.close())
	}
	conn, err = s.conn(c, 1)
	return conn, nil, err
}

// rights returns the files that came with a message.
func rights(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	for _, m := range messages {
		got, rerr := unix.ParseUnixRights(&m)
		fds, err = append(fds, got...), errors.Join(err, rerr)
	}
	return fds, err
}

// shared is what both ends share: the memory, and where the writers of both directions wait. Zero is no file.
type shared struct {
	fds [files]int
	mem []byte
}

// create makes the memory. It is sealed, so that no access past its end is possible whatever the other side does.
func create() (*shared, error) {
	s := &shared{}
	var err error
	if s.fds[0], err = unix.MemfdCreate("soliton-link", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return nil, fmt.Errorf("shm: create memory: %w", err)
	}
	if err = unix.Ftruncate(s.fds[0], FileSize); err == nil {
		_, err = unix.FcntlInt(uintptr(s.fds[0]), unix.F_ADD_SEALS, seals)
	}
	for i := 1; i < files && err == nil; i++ {
		s.fds[i], err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	}
	if err == nil {
		err = s.mmap()
	}
	if err != nil {
		return nil, fmt.Errorf("shm: create memory: %w", errors.Join(err, s.close()))
	}
	return s, nil
}

// check makes sure that the files of an offer are what they must be.
func (s *shared) check() error {
	var st unix.Stat_t
	if err := unix.Fstat(s.fds[0], &st); err != nil || st.Size != FileSize {
		return fmt.Errorf("shm: the offered memory has %d bytes, not %d (%v)", st.Size, FileSize, err)
	}
	if have, err := unix.FcntlInt(uintptr(s.fds[0]), unix.F_GET_SEALS, 0); err != nil || have&seals != seals {
		return fmt.Errorf("shm: the offered memory has seals %#x, not %#x (%v)", have, seals, err)
	}
	for _, fd := range s.fds[1:] {
		kind, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err != nil || kind != "anon_inode:[eventfd]" {
			return fmt.Errorf("shm: an event file is %q (%v)", kind, err)
		}
		if err := unix.SetNonblock(fd, true); err != nil {
			return fmt.Errorf("shm: event file: %w", err)
		}
	}
	return nil
}

func (s *shared) mmap() (err error) {
	if s.mem, err = unix.Mmap(s.fds[0], 0, FileSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		err = fmt.Errorf("shm: map memory: %w", err)
	}
	return err
}

func (s *shared) close() (err error) {
	if s.mem != nil {
		err = unix.Munmap(s.mem)
	}
	for _, fd := range s.fds {
		if fd > 0 {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	*s = shared{}
	return err
}

// conn makes the connection of the end that writes in a direction.
func (s *shared) conn(socket *net.UnixConn, direction int) (*Conn, error) {
	err := unix.Close(s.fds[0])
	room := os.NewFile(uintptr(s.fds[1+direction]), "room") // the poller waits for it, since it does not block
	c := &Conn{
		socket: socket, mem: s.mem,
		in: Reader(s.mem, 1-direction), out: Writer(s.mem, direction),
		free: s.fds[2-direction], room: room,
	}
	c.uses.Store(1)
	c.ring = func(fd uintptr) { c.rung = unix.Send(int(fd), bellByte, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) }
	if err == nil {
		c.bell, err = socket.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// use keeps the memory during a call; it reports false after Close.
func (c *Conn) use() bool {
	for {
		n := c.uses.Load()
		if n == 0 || c.closed.Load() {
			return false
		}
		if c.uses.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// unuse is the end of a use.
func (c *Conn) unuse() {
	if c.uses.Add(-1) == 0 {
		_ = unix.Munmap(c.mem) // neither can fail
		_ = unix.Close(c.free)
	}
}

// Close ends the connection, and calls that wait. The other side may still read what is in the ring.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return net.ErrClosed
	}
	defer c.unuse()
	return errors.Join(c.socket.Close(), c.room.Close())
}

// Read reads what there is, and waits until there is something.
func (c *Conn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if !c.use() {
		return 0, net.ErrClosed
	}
	defer c.unuse()
	for {
		n, err := c.in.Take(b)
		if n > 0 && c.in.WakeWriter() {
			c.wakeWriter()
		}
		if n > 0 || err != nil || len(b) == 0 {
			return n, err
		}
		if c.end != nil {
			return 0, c.end
		}
		if empty, err := c.in.Empty(); err != nil || !empty {
			if err != nil {
				return 0, err
			}
			continue
		}
		_, err = c.socket.Read(c.bells[:])
		c.in.Awake()
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) || c.closed.Load():
			return 0, err
		default:
			c.end = err // but first, the rest of the ring
		}
	}
}

// Write is WriteBuffers of one buffer.
func (c *Conn) Write(b []byte) (int, error) {
	n, err := c.WriteBuffers(net.Buffers{b})
	return int(n), err
}

// stretch is how many bytes are written before the reader is woken: it reads them while further ones are written.
const stretch = 64 << 10

// WriteBuffers writes all buffers, and waits until there is room. It does not change the slice of buffers.
func (c *Conn) WriteBuffers(buffers net.Buffers) (written int64, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if !c.use() {
		return 0, net.ErrClosed
	}
	defer c.unuse()
	told := int64(0) // of this much, the reader knows
	tell := func() error {
		if told == written {
			return nil
		}
		told = written
		c.out.Publish()
		if c.out.WakeReader() {
			return c.wakeReader()
		}
		return nil
	}
	for _, b := range buffers {
		for len(b) > 0 {
			n, err := c.out.Put(b[:min(len(b), stretch)])
			b = b[n:]
			written += int64(n)
			if err == nil && (n == 0 || written-told >= stretch) {
				err = tell()
			}
			if err == nil && n == 0 {
				err = c.waitForRoom()
			}
			if err != nil {
				return written, err
			}
		}
	}
	return written, tell()
}

// waitForRoom returns when there may be room.
func (c *Conn) waitForRoom() error {
	full, err := c.out.Full()
	if err != nil || !full {
		return err
	}
	var count [8]byte
	_, err = c.room.Read(count[:])
	c.out.Awake()
	if c.closed.Load() {
		return net.ErrClosed
	}
	return err
}

// wakeReader wakes the other side's reader, whatever our deadlines. If the socket is full of bells that it has not read, it is awake.
func (c *Conn) wakeReader() error {
	if err := c.bell.Control(c.ring); err != nil {
		return err
	}
	if c.rung != nil && !errors.Is(c.rung, syscall.EAGAIN) {
		return fmt.Errorf("shm: wake the reader: %w", c.rung)
	}
	return nil
}

var bellByte = []byte{1}

var one = binary.NativeEndian.AppendUint64(nil, 1)

// wakeWriter wakes the other side's writer. Where the count of the file is at its limit, that writer is awake.
func (c *Conn) wakeWriter() { _, _ = unix.Write(c.free, one) }

// LocalAddr returns that of the socket.
func (c *Conn) LocalAddr() net.Addr { return c.socket.LocalAddr() }

// RemoteAddr returns that of the socket.
func (c *Conn) RemoteAddr() net.Addr { return c.socket.RemoteAddr() }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline bounds how long a Read waits. What is there is read even after the deadline.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.socket.SetReadDeadline(t) }

// SetWriteDeadline bounds how long a Write waits for room.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.room.SetReadDeadline(t) }

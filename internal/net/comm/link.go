package comm

import (
	"bufio"
	"container/heap"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/net/line"
)

// link is one connection to a peer. The peer's loop makes it, writes to it,
// and joins its reader before it lets go of it.
type link struct {
	p       *peer
	conn    net.Conn
	number  uint64
	pool    int     // bytes of the peer's pool
	machine Machine // of the peer
	dead    bool    // what still comes is ignored

	counted bool // as new, by Connect; under e.mu

	// Under e.mu. A line is a connection of its own for collectives (package line).
	lines    bool // both ends can have one
	line     *line.Line
	lineless bool               // there will be none
	dialled  bool               // we have dialled the link, and dial the line
	asked    bool               // for a line
	dialling context.CancelFunc // nil: nothing dials it
	lineLost atomic.Value       // why the line has failed; an error

	reach               // how the peer's memory is read
	ours  atomic.Uint64 // our fence, which the peer reads

	// Of the writer, under e.mu.
	ctl     []byte // small frames that wait
	writing bool
	kicked  bool
	nextID  uint64
	window  int // free bytes of the peer's pool
	offers  int // messages announced and not answered
	out     map[uint64]*Sending
	bulk    turns[*Sending]
	syncs   uint64 // asked for
	synced  uint64 // answered

	// Of the reader, under e.mu.
	lastID     uint64
	in         map[uint64]*incoming
	reading    *incoming // whose buffer the reader is in
	readKicked bool
	pooled     int         // bytes in our pool
	returned   int         // bytes free again that the peer does not know of
	offered    int         // messages that wait for our credit
	credit     []*incoming // messages that hold it
	ready      turns[*incoming]
}

// past is a deadline that has passed.
var past = time.Unix(1, 0)

// control queues a small frame; it goes before all bulk.
func (l *link) control(f Frame) {
	l.ctl = f.Append(l.ctl)
	l.p.wakeUp()
}

// release gives the room of an early message back.
func (l *link) release(size int) {
	l.pooled -= charge(size)
	l.returned += charge(size)
	if l.returned >= l.p.e.cfg.Pool/8 {
		l.control(Frame{Type: FrameReturn, Pool: uint32(l.returned)})
		l.returned = 0
	}
}

// kickWriter makes the writer return from the kernel. It takes what is left of
// the chunk into its own memory and goes on.
func (l *link) kickWriter() {
	if l.writing && !l.kicked {
		l.kicked = true
		l.conn.SetWriteDeadline(past)
	}
}

// kickReader makes the reader return from a read into a receive's buffer.
func (l *link) kickReader() {
	if l.reading != nil && !l.readKicked {
		l.readKicked = true
		l.conn.SetReadDeadline(past)
	}
}

// maxPieces bounds the messages that one write carries.
const maxPieces = 64

// batch is what one write carries: small frames, then chunks, each of a
// message.
type batch struct {
	l      *link
	ctl    []byte
	heads  []byte // headers, of maxPieces chunks at most
	pieces [maxPieces]piece
	n      int
	bufs   net.Buffers
	vec    net.Buffers
}

type piece struct {
	s    *Sending
	from int // first buffer of the piece: header, then data
	last bool
}

// fill takes the next batch and reports whether there is anything. Lower
// priorities wait while higher ones fill the chunk.
func (b *batch) fill() bool {
	l := b.l
	e := l.p.e
	b.ctl, l.ctl = l.ctl, b.ctl[:0]
	b.heads, b.bufs, b.n = b.heads[:0], b.bufs[:0], 0
	if len(b.ctl) > 0 {
		b.bufs = append(b.bufs, b.ctl)
	}
	for room := e.cfg.Chunk; room > 0 && len(l.bulk) > 0 && b.n < maxPieces; {
		s := l.bulk[0]
		at := len(b.heads)
		if s.id == 0 {
			l.nextID++
			s.id = l.nextID
			b.heads = Frame{Type: FrameOpen, ID: s.id, Key: s.key, Size: int64(len(s.data)), Priority: s.prio, Eager: true}.Append(b.heads)
		}
		n := min(room, len(s.data)-s.off)
		b.heads = appendHeader(b.heads, FrameData, s.id, n)
		p := &b.pieces[b.n]
		b.n++
		*p = piece{s: s, from: len(b.bufs)}
		b.bufs = append(b.bufs, b.heads[at:], s.data[s.off:s.off+n])
		s.off += n
		s.busy = true
		room -= n + headerSize
		if s.off == len(s.data) {
			p.last = true
			heap.Pop(&l.bulk)
		}
	}
	l.writing = len(b.bufs) > 0
	return l.writing
}

// write writes the batch. When it is told to hurry, it copies what is left and
// lets go of all messages in it before it goes on.
func (b *batch) write() (n int, err error) {
	l := b.l
	e := l.p.e
	total := 0
	for _, buf := range b.bufs {
		total += len(buf)
	}
	b.vec = append(b.vec[:0], b.bufs...)
	vec := b.vec
	written, err := vec.WriteTo(l.conn)
	e.lock()
	l.writing = false
	var rest []byte
	if l.kicked {
		l.kicked = false
		if errors.Is(err, os.ErrDeadlineExceeded) {
			skip := int(written)
			for _, buf := range b.bufs {
				k := min(skip, len(buf))
				skip -= k
				rest = append(rest, buf[k:]...)
			}
			err = nil
		}
		l.conn.SetWriteDeadline(time.Time{})
	}
	for _, p := range b.pieces[:b.n] {
		s := p.s
		s.busy = false
		l.p.stats.BytesSent += int64(len(b.bufs[p.from+1]))
		switch {
		case s.cancel != nil && !(p.last && err == nil):
			l.p.retract(s, s.cancel)
		case p.last && err == nil:
			l.p.stats.MessagesSent++
			l.p.endSending(s, nil)
		case p.last:
			l.p.endSending(s, &Error{Op: "send", Peer: l.p.Session, Key: s.key, Remote: true, Err: lostErr(err)})
		}
	}
	l.p.stats.WireSent += int64(total)
	clear(b.bufs[:cap(b.bufs)])
	clear(b.vec[:cap(b.vec)])
	e.unlock()
	if err == nil && rest != nil {
		_, err = l.conn.Write(rest)
	}
	return total, err
}

// read reads frames until the connection ends or breaks the protocol.
func (l *link) read() error {
	e := l.p.e
	br := bufio.NewReaderSize(l.conn, 4<<10) // enough for many small frames; chunks pass it by
	fr := NewFrameReader(br)
	var scratch []byte
	for {
		f, err := fr.Next()
		if err != nil {
			return err
		}
		e.lock()
		if l.dead {
			e.unlock()
			return net.ErrClosed
		}
		l.p.stats.WireReceived += int64(headerSize + f.Len)
		var in *incoming
		switch f.Type {
		case FrameOpen, FrameOffer:
			err = e.in.open(l, f)
		case FrameData:
			in = l.in[f.ID]
			if in == nil || in.state == inOffered || in.addr != 0 || f.Len > in.size-in.got || f.Len == 0 && in.size > 0 {
				err = protocolError("%v: not of a message under way", f)
			}
		case FrameCredit, FrameDrop, FrameTaken:
			err = l.answered(f)
		case FrameReach:
			err = l.reached(f)
		case FrameProbe: // below, without the lock
		case FrameCancel:
			if in := l.in[f.ID]; in != nil {
				e.in.cancelled(in)
			}
		case FrameReturn:
			if l.window += int(f.Pool); l.window > l.pool {
				err = protocolError("%v: more room than there ever was", f)
			} else {
				l.p.dispatch()
			}
		case FrameSync:
			l.control(Frame{Type: FrameSynced, ID: f.ID})
		case FrameSynced:
			err = l.syncAnswered(f.ID)
		case FrameNoLine:
			l.noLine()
		case FrameAskLine:
			l.dialLine()
		default:
			err = protocolError("%v on a link that is up", f)
		}
		if err == nil && len(l.ctl) > maxControl {
			err = protocolError("%d bytes of answers are not read", len(l.ctl))
		}
		e.unlock()
		if err != nil {
			return err
		}
		if f.Type == FrameProbe {
			if err := l.probe(f); err != nil {
				return err
			}
		}
		if in != nil {
			if scratch, err = l.readChunk(br, in, f.Len, scratch); err != nil {
				return err
			}
		}
	}
}

// readChunk reads a chunk to where its message goes; that may change while it
// waits. scratch is memory to throw bytes into.
func (l *link) readChunk(br *bufio.Reader, in *incoming, left int, scratch []byte) ([]byte, error) {
	e := l.p.e
	e.lock()
	defer e.unlock()
	for left > 0 {
		var dst []byte
		switch in.state {
		case inFilling:
			dst = in.recv.buf[in.got : in.got+left]
			in.busy = true
			l.reading = in
		case inPooling:
			dst = in.pool[in.got : in.got+left]
		default:
			if scratch == nil {
				scratch = make([]byte, 32<<10)
			}
			dst = scratch[:min(left, len(scratch))]
		}
		e.unlock()
		n, err := br.Read(dst)
		e.lock()
		in.got += n
		left -= n
		in.busy = false
		l.reading = nil
		if l.readKicked {
			l.readKicked = false
			l.conn.SetReadDeadline(time.Time{})
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = nil
			}
		}
		if r := in.recv; in.state == inFilling && r.cancel != nil {
			in.state, in.recv = inDiscard, nil
			r.filling = nil
			e.in.fail(r, r.cancel)
		}
		if l.dead {
			return scratch, net.ErrClosed
		}
		if err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return scratch, err
		}
	}
	if l.dead { // since the frame's header was read, for an empty message
		return scratch, net.ErrClosed
	}
	if in.got == in.size {
		e.in.arrived(in)
	}
	return scratch, nil
}

// down takes the link apart. Its reader, its writer and what fetches have ended.
func (l *link) down(err error) {
	e := l.p.e
	l.dead = true
	l.p.ends++
	for _, in := range l.in {
		e.in.lost(in)
	}
	clear(l.in)
	l.p.failAll(lostErr(err))
}

package comm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/board"
)

// FrameType is the first byte of a frame.
type FrameType uint8

// The frames; the package comment has their payloads.
const (
	FrameHello   FrameType = 1 + iota // first from the side that dialled
	FrameWelcome                      // answer: the link is up
	FrameRefuse                       // answer: there is none; the connection ends
	FrameOpen                         // announces a message
	FrameData                         // a chunk of a message
	FrameCredit                       // the receiver has room: send the message's data
	FrameDrop                         // the receiver does not want the message: it has it
	FrameCancel                       // the sender gives the message up
	FrameReturn                       // room in the pool is free again
	FrameSync                         // asks for a synced when all before it is read
	FrameSynced                       // answer: it is
	FrameProbe                        // where our fence and our board are: read and open them if you can
	FrameReach                        // answer: what of it worked
	FrameOffer                        // announces a message, and where its data are
	FrameTaken                        // answer: they were read
	FrameLine                         // first from the side that dialled: the connection is the line of a link
	FrameNoLine                       // there will be no line
	FrameAskLine                      // asks the side that dialled the link for a line
	frameEnd
)

const (
	headerSize = 16

	// MaxChunk bounds the payload of a data frame.
	MaxChunk = 1 << 20

	magic       = 0x4e544c53 // "SLTN"
	wireVersion = 6
	orderMark   = 0x0102
)

var frameTypes = [...]struct {
	name string
	size int // of the payload; -1 varies
}{
	FrameHello: {"hello", 24 + sideSize}, FrameWelcome: {"welcome", sideSize}, FrameRefuse: {"refuse", 16}, FrameOpen: {"open", keySize + 12},
	FrameData: {"data", -1}, FrameCredit: {"credit", 0}, FrameDrop: {"drop", 0}, FrameCancel: {"cancel", 0}, FrameReturn: {"return", 4},
	FrameSync: {"sync", 0}, FrameSynced: {"synced", 0},
	FrameProbe: {"probe", 32}, FrameReach: {"reach", 16}, FrameOffer: {"offer", keySize + 28}, FrameTaken: {"taken", 8},
	FrameLine: {"line", 24}, FrameNoLine: {"no line", 0}, FrameAskLine: {"ask for a line", 0},
}

// Refusal says why a link was refused.
type Refusal uint8

// The reasons.
const (
	RefusedNotMember Refusal = 1 + iota // the caller is not in our membership (yet, or any more)
	RefusedWrongPeer                    // the caller looks for another session than ours
	RefusedCrossed                      // we are calling too, and our call wins
	RefusedLinked                       // a newer link exists than the caller knows of
	RefusedVersion                      // another protocol version or byte order
	RefusedLine                         // no line belongs to the link that the caller names, or the system has none left
	refusedEnd
)

var refusals = [...]string{
	RefusedNotMember: "not a member there", RefusedWrongPeer: "another session answers there", RefusedCrossed: "calls crossed",
	RefusedLinked: "linked already", RefusedVersion: "another protocol version or byte order", RefusedLine: "no line there",
}

// String returns the reason in words.
func (r Refusal) String() string { return id.NameOf("reason ", uint8(r), refusals[:]...) }

// Frame is one decoded frame without the data of a chunk. Fields that its
// type does not have are zero.
type Frame struct {
	Type FrameType
	ID   uint64 // of the message: FrameOpen, FrameData, FrameCredit, FrameDrop, FrameCancel, FrameOffer, FrameTaken; else of a FrameSync
	Len  int    // bytes of payload

	Key      Key      // FrameOpen, FrameOffer
	Size     int64    // FrameOpen, FrameOffer: bytes of the message
	Priority Priority // FrameOpen, FrameOffer
	Eager    bool     // FrameOpen: data follow without credit

	Addr  uint64        // in the memory of the sender. FrameProbe: of its fence, 0 where its memory is not to be read; FrameOffer: of the data
	Fence uint64        // its value. FrameProbe, FrameOffer
	Board board.Ticket  // FrameProbe: zero where it has none
	Read  bool          // FrameReach: the fence was read
	Open  bool          // FrameReach: the board was opened
	Place uint64        // FrameReach: the board's place there
	Took  time.Duration // FrameTaken: for the read, at most maxTook

	From, To id.Session // FrameHello, FrameLine
	Link     uint64     // FrameHello, FrameRefuse: newest link known; FrameWelcome: number of this one; FrameLine: of that whose line it is
	Lines    bool       // FrameHello, FrameWelcome: the link can have a line
	Machine  Machine    // FrameHello, FrameWelcome: of the sender
	Pool     uint32     // FrameHello, FrameWelcome: bytes of pool for early messages; FrameReturn: bytes free again
	Reason   Refusal    // FrameRefuse
}

// String names the frame in errors.
func (f Frame) String() string {
	name := "frame"
	if f.Type > 0 && f.Type < frameEnd {
		name = frameTypes[f.Type].name
	}
	return fmt.Sprintf("%s #%d, %d bytes", name, f.ID, f.Len)
}

// appendHeader appends the 16 bytes every frame begins with.
func appendHeader(b []byte, t FrameType, id uint64, n int) []byte {
	b = append(b, byte(t), 0, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(n))
	return binary.LittleEndian.AppendUint64(b, id)
}

// Append appends the frame's encoding; that of a FrameData is its header.
func (f Frame) Append(b []byte) []byte {
	n := frameTypes[f.Type].size
	if n < 0 {
		n = f.Len
	}
	b = appendHeader(b, f.Type, f.ID, n)
	le := binary.LittleEndian
	switch f.Type {
	case FrameHello:
		b = le.AppendUint32(b, magic)
		b = le.AppendUint16(b, wireVersion)
		b = binary.NativeEndian.AppendUint16(b, orderMark)
		b = auth.Ends{From: f.From, To: f.To}.Append(b)
		b = f.appendSide(b)
	case FrameWelcome:
		b = f.appendSide(b)
	case FrameLine:
		b = auth.Ends{From: f.From, To: f.To}.Append(b)
		b = le.AppendUint64(b, f.Link)
	case FrameRefuse:
		b = le.AppendUint64(b, f.Link)
		b = append(b, byte(f.Reason), 0, 0, 0, 0, 0, 0, 0)
	case FrameOpen, FrameOffer:
		b = f.Key.append(b)
		b = le.AppendUint64(b, uint64(f.Size))
		b = le.AppendUint16(b, uint16(f.Priority))
		b = le.AppendUint16(b, uint16(flag(f.Eager)))
		if f.Type == FrameOffer {
			b = le.AppendUint64(b, f.Addr)
			b = le.AppendUint64(b, f.Fence)
		}
	case FrameReturn:
		b = le.AppendUint32(b, f.Pool)
	case FrameProbe:
		b = le.AppendUint64(b, f.Addr)
		b = le.AppendUint64(b, f.Fence)
		b = le.AppendUint64(b, f.Board.File)
		b = le.AppendUint64(b, f.Board.Nonce)
	case FrameReach:
		var works uint64
		if f.Read {
			works |= 1
		}
		if f.Open {
			works |= 2
		}
		b = le.AppendUint64(b, works)
		b = le.AppendUint64(b, f.Place)
	case FrameTaken:
		b = le.AppendUint64(b, uint64(f.Took))
	}
	return b
}

// sideSize is the size of what both sides of a link say of themselves as it begins.
const sideSize = 24

func (f Frame) appendSide(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, f.Link)
	b = le.AppendUint32(b, f.Pool)
	b = le.AppendUint16(b, uint16(flag(f.Lines)))
	b = le.AppendUint16(b, f.Machine.Processors)
	return le.AppendUint64(b, f.Machine.Number)
}

func (f *Frame) decodeSide(p []byte) {
	le := binary.LittleEndian
	f.Link, f.Pool, f.Lines = le.Uint64(p), le.Uint32(p[8:]), le.Uint16(p[12:]) != 0
	f.Machine = Machine{Number: le.Uint64(p[16:]), Processors: le.Uint16(p[14:])}
}

func flag(set bool) uint32 {
	if set {
		return 1
	}
	return 0
}

// errVersion is a hello of another protocol version or byte order.
var errVersion = errors.New("comm: hello of another protocol version or byte order")

// FrameReader decodes a stream of frames. It allocates nothing per frame, and
// whatever the bytes, it returns frames or an error.
type FrameReader struct {
	r   io.Reader
	buf [headerSize + keySize + 28]byte
}

// NewFrameReader returns a reader of r.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Next reads the next frame. After a FrameData, the caller must read the
// Len bytes of its chunk from the underlying reader. The error is io.EOF at
// the end between two frames, of class [ErrProtocol] for bytes that are no
// frame, else the reader's.
func (fr *FrameReader) Next() (Frame, error) {
	h := fr.buf[:headerSize]
	if _, err := io.ReadFull(fr.r, h); err != nil {
		return Frame{}, err
	}
	f := Frame{Type: FrameType(h[0]), ID: binary.LittleEndian.Uint64(h[8:])}
	n := binary.LittleEndian.Uint32(h[4:])
	switch {
	case f.Type == 0 || f.Type >= frameEnd || h[1]|h[2]|h[3] != 0:
		return Frame{}, protocolError("no frame begins with % x", h[:4])
	case f.Type == FrameData:
		if n > MaxChunk {
			return Frame{}, protocolError("a chunk of %d bytes, at most %d are allowed", n, MaxChunk)
		}
		f.Len = int(n)
		return f, nil
	case int(n) != frameTypes[f.Type].size:
		if p := fr.buf[headerSize : headerSize+8]; f.Type == FrameHello && n >= 8 { // that of another version may have another size
			if _, err := io.ReadFull(fr.r, p); err == nil && binary.LittleEndian.Uint32(p) == magic && binary.LittleEndian.Uint16(p[4:]) != wireVersion {
				return f, errVersion
			}
		}
		return Frame{}, protocolError("a %s frame with %d bytes", frameTypes[f.Type].name, n)
	}
	f.Len = int(n)
	p := fr.buf[headerSize : headerSize+f.Len]
	if _, err := io.ReadFull(fr.r, p); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	return f, f.decode(p)
}

// decode reads the payload p, which has the size of f's type.
func (f *Frame) decode(p []byte) error {
	le := binary.LittleEndian
	switch f.Type {
	case FrameHello:
		if le.Uint32(p) != magic {
			return protocolError("hello without our magic number")
		}
		if le.Uint16(p[4:]) != wireVersion || binary.NativeEndian.Uint16(p[6:]) != orderMark {
			return errVersion
		}
		ends := auth.DecodeEnds(p[8:])
		f.From, f.To = ends.From, ends.To
		f.decodeSide(p[24:])
	case FrameWelcome:
		f.decodeSide(p)
	case FrameLine:
		ends := auth.DecodeEnds(p)
		f.From, f.To, f.Link = ends.From, ends.To, le.Uint64(p[16:])
	case FrameRefuse:
		f.Link, f.Reason = le.Uint64(p), Refusal(p[8])
		if f.Reason == 0 || f.Reason >= refusedEnd {
			return protocolError("refusal without a reason")
		}
	case FrameOpen, FrameOffer:
		key, ok := decodeKey(p)
		size := int64(le.Uint64(p[keySize:]))
		flags := le.Uint16(p[keySize+10:])
		if !ok || size < 0 || size > MaxMessage || flags > 1 {
			return protocolError("a message without a valid key and size")
		}
		f.Key, f.Size, f.Priority, f.Eager = key, size, Priority(le.Uint16(p[keySize+8:])), flags == 1
		if f.Type == FrameOffer {
			f.Addr, f.Fence = le.Uint64(p[keySize+12:]), le.Uint64(p[keySize+20:])
			if f.Eager || f.Size == 0 || f.Addr == 0 {
				return protocolError("an offer without data at a place")
			}
		}
	case FrameReturn:
		f.Pool = le.Uint32(p)
	case FrameProbe:
		f.Addr, f.Fence, f.Board = le.Uint64(p), le.Uint64(p[8:]), board.Ticket{File: le.Uint64(p[16:]), Nonce: le.Uint64(p[24:])}
	case FrameReach:
		works := le.Uint64(p)
		if works > 3 {
			return protocolError("a reach of an unknown kind")
		}
		f.Read, f.Open, f.Place = works&1 != 0, works&2 != 0, le.Uint64(p[8:])
	case FrameTaken:
		took := le.Uint64(p)
		if took > uint64(maxTook) {
			return protocolError("a read of %d ns", took)
		}
		f.Took = time.Duration(took)
	}
	return nil
}

// fits reports whether a session can be named on the wire.
func fits(s id.Session) bool {
	return s.Worker >= 0 && s.Worker <= math.MaxUint32 && s.Incarnation >= 0 && s.Incarnation <= math.MaxUint32
}

// MaxMessage bounds the size of a message in bytes.
const MaxMessage = 1 << 40

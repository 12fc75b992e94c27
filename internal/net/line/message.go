package line

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/soliton-train/soliton/internal/id"
)

// Name names a message of an operation of a group. A sender sends one message of a name on a line.
type Name struct {
	Group, Tag        uint16
	Op                uint8
	From, Round, Part uint32 // rank of the sender; round and part of the operation
	Step              uint64
	Version           id.Version
}

// Message is a message on its way out or in. Its zero value is ready for use, and it may be used again after it has ended.
type Message struct {
	line *Line
	name Name
	data []byte
	at   int // bytes that are sent, or have come
	size int // of a message that comes, once it is known
	in   bool
	over bool
	err  error
}

// On reports whether the message is on a line.
func (m *Message) On(l *Line) bool { return m.line == l }

// Passed returns the size of a message that has ended, and whether it has come; ok reports whether all of it has passed.
func (m *Message) Passed() (size int, in, ok bool) { return len(m.data), m.in, m.over && m.err == nil }

// The errors.
var (
	// ErrClosed is the end of a line that its owner has closed.
	ErrClosed = errors.New("line closed")
	// ErrSize is a message that is longer than the memory for it, or shorter.
	ErrSize = errors.New("wrong size")
	// ErrUsed is a name that is in use.
	ErrUsed = errors.New("name in use")
	// ErrMany is a message too many that is expected at a time.
	ErrMany = errors.New("too many messages at a time")
	// ErrProtocol is bytes that are no frame, or a frame that cannot be.
	ErrProtocol = errors.New("protocol violated")
)

const (
	// MaxEager is the size up to which a message is sent before its receiver has memory for it.
	MaxEager = 32 << 10

	maxEagers = 64    // sent and not wanted yet
	maxEarly  = 256   // eager messages that a line keeps
	maxWants  = 16384 // without their message
	company   = 32    // wants of eager messages that wait for others
	maxChunk  = 256 << 10
	header    = 56
)

type kind uint8

const (
	kindWant kind = 1 + iota
	kindEager
	kindData
)

// frame is what a frame begins with.
type frame struct {
	kind   kind
	length int
	name   Name
	size   int
}

func (f frame) append(b []byte) []byte {
	le, n := binary.LittleEndian, f.name
	b = append(b, byte(f.kind), n.Op)
	b = le.AppendUint16(b, n.Group)
	b = le.AppendUint16(b, n.Tag)
	b = append(b, 0, 0)
	b = le.AppendUint32(b, uint32(f.length))
	b = le.AppendUint32(b, n.From)
	b = le.AppendUint32(b, n.Round)
	b = le.AppendUint32(b, n.Part)
	b = le.AppendUint64(b, uint64(f.size))
	b = le.AppendUint64(b, n.Step)
	b = le.AppendUint64(b, uint64(n.Version.Generation))
	return le.AppendUint64(b, uint64(n.Version.N))
}

// decode reads what a frame begins with from header bytes.
func decode(b []byte) (frame, error) {
	le := binary.LittleEndian
	f := frame{kind: kind(b[0]), length: int(le.Uint32(b[8:])), name: Name{
		Op: b[1], Group: le.Uint16(b[2:]), Tag: le.Uint16(b[4:]), From: le.Uint32(b[12:]), Round: le.Uint32(b[16:]), Part: le.Uint32(b[20:]),
		Step: le.Uint64(b[32:]), Version: id.Version{Generation: int(le.Uint64(b[40:])), N: int(le.Uint64(b[48:]))},
	}}
	size := le.Uint64(b[24:])
	ok := b[6]|b[7] == 0 && size <= math.MaxInt64/2
	f.size = int(size)
	switch f.kind {
	case kindWant:
		ok = ok && f.length == 0
	case kindEager:
		ok = ok && f.length == f.size && f.size <= MaxEager
	case kindData:
		ok = ok && f.length <= min(maxChunk, f.size) && (f.length > 0 || f.size == 0)
	default:
		ok = false
	}
	if !ok {
		return f, fmt.Errorf("%w: no frame begins with % x", ErrProtocol, b[:16])
	}
	return f, nil
}

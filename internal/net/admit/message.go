package admit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"
)

const (
	// MaxRequest bounds a request in bytes.
	MaxRequest = 64 << 10
	// MaxReply bounds a reply in bytes.
	MaxReply = 16 << 20

	maxLine   = 1 << 10
	magic     = "SLTNJOIN"
	helloSize = len(magic) + len(Token{})
	frameHead = 5
)

// kind is the type of a frame.
type kind byte

const (
	admitted kind = iota + 1 // the verdict on a token
	unknown
	expired
	request
	reply
	refused // with a line of text
)

// limit is how many bytes a frame may have.
func (k kind) limit() uint32 {
	switch k {
	case request:
		return MaxRequest
	case reply:
		return MaxReply
	case refused:
		return maxLine
	}
	return 0
}

// errGarbage means that bytes are none of the protocol's.
var errGarbage = errors.New("the other end does not speak this protocol")

// frame returns the encoding of a frame.
func frame(k kind, payload []byte) []byte {
	b := append(make([]byte, 0, frameHead+len(payload)), byte(k))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// readFrame reads a frame of one of the kinds. It reads nothing beyond it, and takes no memory for bytes that have not come.
func readFrame(r io.Reader, kinds ...kind) (kind, []byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(head[1:])
	for _, k := range kinds {
		if byte(k) != head[0] {
			continue
		}
		if n > k.limit() {
			return 0, nil, fmt.Errorf("%w: a message of %d bytes, more than %d", errGarbage, n, k.limit())
		}
		b, err := io.ReadAll(io.LimitReader(r, int64(n)))
		if err == nil && len(b) < int(n) {
			err = io.ErrUnexpectedEOF
		}
		return k, b, err
	}
	return 0, nil, fmt.Errorf("%w: a message of type %d", errGarbage, head[0])
}

// line returns a text as one line that a terminal can show.
func line(text string) string {
	text = strings.ToValidUTF8(strings.Join(strings.Fields(text), " "), "?")
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
	return strings.ToValidUTF8(text[:min(len(text), maxLine)], "")
}

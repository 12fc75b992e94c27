package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// Bounds of what arrives.
const (
	MaxFrame = 16 << 20 // bytes of a body
	MaxItems = 1 << 18  // elements of an array or map
	maxDepth = 16       // containers in containers
)

var (
	// ErrFrameSize is the error for a body above [MaxFrame], from Send and Receive.
	ErrFrameSize = errors.New("control: frame is larger than 16 MiB")

	// ErrFormat is the class of errors for a body that is no message.
	ErrFormat = errors.New("control: not a message of this protocol")
)

// Marshal returns a message as it travels in another one.
func Marshal(m Message) ([]byte, error) {
	frame, err := encode(m)
	if err != nil {
		return nil, err
	}
	return frame[4:], nil
}

// Unmarshal reads what Marshal has made. Its errors are of the class [ErrFormat].
func Unmarshal(body []byte) (Message, error) { return decode(body) }

// Warm makes the first messages of a recovery as quick as later ones: msgpack takes a type apart when it
// meets it first.
func Warm() {
	for _, m := range []Message{Query{}, Answer{}, Order{}, Applied{}, LinkLost{}, Spans{Spans: []Span{{}}}} {
		if body, err := Marshal(m); err == nil {
			_, _ = Unmarshal(body)
		}
	}
}

// encode returns the whole frame of m.
func encode(m Message) ([]byte, error) {
	var b bytes.Buffer
	b.Write(make([]byte, 4))
	enc := msgpack.NewEncoder(&b)
	enc.SetCustomStructTag("json")
	if err := errors.Join(enc.EncodeArrayLen(2), enc.EncodeString(m.kind()), enc.Encode(m)); err != nil {
		return nil, fmt.Errorf("control: encode %s: %w", m.kind(), err)
	}
	if b.Len()-4 > MaxFrame {
		return nil, fmt.Errorf("%w: %s has %d bytes", ErrFrameSize, m.kind(), b.Len()-4)
	}
	binary.BigEndian.PutUint32(b.Bytes(), uint32(b.Len()-4))
	return b.Bytes(), nil
}

// decode returns the message a body holds.
func decode(body []byte) (Message, error) {
	if err := check(body); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrFormat, err)
	}
	dec := msgpack.NewDecoder(bytes.NewReader(body))
	dec.SetCustomStructTag("json")
	n, err := dec.DecodeArrayLen()
	if err == nil && n != 2 {
		err = fmt.Errorf("array of %d instead of kind and message", n)
	}
	var kind string
	if err == nil {
		kind, err = dec.DecodeString()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrFormat, err)
	}
	var m Message
	switch kind {
	case Hello{}.kind():
		m, err = decodeAs[Hello](dec)
	case Beat{}.kind():
		m, err = decodeAs[Beat](dec)
	case Note{}.kind():
		m, err = decodeAs[Note](dec)
	case Ready{}.kind():
		m, err = decodeAs[Ready](dec)
	case Start{}.kind():
		m, err = decodeAs[Start](dec)
	case Step{}.kind():
		m, err = decodeAs[Step](dec)
	case Spans{}.kind():
		m, err = decodeAs[Spans](dec)
	case Output{}.kind():
		m, err = decodeAs[Output](dec)
	case Clock{}.kind():
		m, err = decodeAs[Clock](dec)
	case Stop{}.kind():
		m, err = decodeAs[Stop](dec)
	case Done{}.kind():
		m, err = decodeAs[Done](dec)
	case Failed{}.kind():
		m, err = decodeAs[Failed](dec)
	case Release{}.kind():
		m, err = decodeAs[Release](dec)
	case Query{}.kind():
		m, err = decodeAs[Query](dec)
	case Answer{}.kind():
		m, err = decodeAs[Answer](dec)
	case Order{}.kind():
		m, err = decodeAs[Order](dec)
	case Applied{}.kind():
		m, err = decodeAs[Applied](dec)
	case Repaired{}.kind():
		m, err = decodeAs[Repaired](dec)
	case Fill{}.kind():
		m, err = decodeAs[Fill](dec)
	case Level{}.kind():
		m, err = decodeAs[Level](dec)
	case LinkLost{}.kind():
		m, err = decodeAs[LinkLost](dec)
	case Save{}.kind():
		m, err = decodeAs[Save](dec)
	case Saved{}.kind():
		m, err = decodeAs[Saved](dec)
	case Leave{}.kind():
		m, err = decodeAs[Leave](dec)
	case Harm{}.kind():
		m, err = decodeAs[Harm](dec)
	case Host{}.kind():
		m, err = decodeAs[Host](dec)
	case Lead{}.kind():
		m, err = decodeAs[Lead](dec)
	case Told{}.kind():
		m, err = decodeAs[Told](dec)
	case Relayed{}.kind():
		m, err = decodeAs[Relayed](dec)
	case Closed{}.kind():
		m, err = decodeAs[Closed](dec)
	case Exited{}.kind():
		m, err = decodeAs[Exited](dec)
	case Begin{}.kind():
		m, err = decodeAs[Begin](dec)
	case Kill{}.kind():
		m, err = decodeAs[Kill](dec)
	case Add{}.kind():
		m, err = decodeAs[Add](dec)
	case Added{}.kind():
		m, err = decodeAs[Added](dec)
	case Watch{}.kind():
		m, err = decodeAs[Watch](dec)
	case Timeline{}.kind():
		m, err = decodeAs[Timeline](dec)
	default:
		return nil, fmt.Errorf("%w: unknown kind %.40q", ErrFormat, kind)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %v", ErrFormat, kind, err)
	}
	return m, nil
}

func decodeAs[M Message](dec *msgpack.Decoder) (Message, error) {
	var m M
	if err := dec.Decode(&m); err != nil {
		return nil, err
	}
	return m, nil
}

// check walks over a body and reports what a decoder should not be given:
// containers deeper than maxDepth or with more than MaxItems elements,
// lengths beyond the end, and anything but exactly one value. Afterwards the
// decoder's recursion and its allocations are bounded by the body's size.
func check(b []byte) error {
	var open [maxDepth]int // values still to come in each open container
	open[0] = 1
	depth := 0
	for {
		for open[depth] == 0 {
			if depth == 0 {
				if len(b) != 0 {
					return fmt.Errorf("%d bytes after the message", len(b))
				}
				return nil
			}
			depth--
		}
		open[depth]--

		if len(b) == 0 {
			return errors.New("cut short")
		}
		c := b[0]
		b = b[1:]
		var head, size, items int // bytes of the length field, of plain content, values inside
		switch {
		case msgpcode.IsFixedNum(c), c == msgpcode.Nil, c == msgpcode.False, c == msgpcode.True:
		case msgpcode.IsFixedString(c):
			size = int(c & msgpcode.FixedStrMask)
		case msgpcode.IsFixedArray(c):
			items = int(c & msgpcode.FixedArrayMask)
		case msgpcode.IsFixedMap(c):
			items = 2 * int(c&msgpcode.FixedMapMask)
		default:
			switch c {
			case msgpcode.Uint8, msgpcode.Int8:
				size = 1
			case msgpcode.Uint16, msgpcode.Int16, msgpcode.FixExt1:
				size = 2
			case msgpcode.FixExt2:
				size = 3
			case msgpcode.Uint32, msgpcode.Int32, msgpcode.Float:
				size = 4
			case msgpcode.FixExt4:
				size = 5
			case msgpcode.Uint64, msgpcode.Int64, msgpcode.Double:
				size = 8
			case msgpcode.FixExt8:
				size = 9
			case msgpcode.FixExt16:
				size = 17
			case msgpcode.Str8, msgpcode.Bin8, msgpcode.Ext8:
				head = 1
			case msgpcode.Str16, msgpcode.Bin16, msgpcode.Ext16, msgpcode.Array16, msgpcode.Map16:
				head = 2
			case msgpcode.Str32, msgpcode.Bin32, msgpcode.Ext32, msgpcode.Array32, msgpcode.Map32:
				head = 4
			default:
				return fmt.Errorf("byte %#x begins no value", c)
			}
		}
		if head > 0 {
			if len(b) < head {
				return errors.New("cut short")
			}
			var length uint64
			for _, d := range b[:head] {
				length = length<<8 | uint64(d)
			}
			b = b[head:]
			if length > uint64(len(b)) {
				return errors.New("cut short")
			}
			n := int(length)
			switch c {
			case msgpcode.Array16, msgpcode.Array32:
				items = n
			case msgpcode.Map16, msgpcode.Map32:
				items = 2 * n
			case msgpcode.Ext8, msgpcode.Ext16, msgpcode.Ext32:
				size = n + 1
			default:
				size = n
			}
		}
		if size > len(b) || items > len(b) {
			return errors.New("cut short")
		}
		b = b[size:]
		if items > 0 {
			if items > 2*MaxItems {
				return fmt.Errorf("container of more than %d elements", MaxItems)
			}
			if depth++; depth == maxDepth {
				return fmt.Errorf("more than %d containers in each other", maxDepth-1)
			}
			open[depth] = items
		}
	}
}

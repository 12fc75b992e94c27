package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/soliton-train/soliton/internal/net/wire"
	"github.com/vmihailenco/msgpack/v5"
)

// MaxFrame bounds the bytes of a body. What is in one keeps the bounds of [wire.Check].
const MaxFrame = 16 << 20

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
	enc.SetCustomStructTag(wire.Tag)
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
	if err := wire.Check(body); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrFormat, err)
	}
	dec := msgpack.NewDecoder(bytes.NewReader(body))
	dec.SetCustomStructTag(wire.Tag)
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

package control

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"

	"github.com/vmihailenco/msgpack/v5"
)

// MaxFrame bounds the bytes of a body. What is in one keeps the bounds of check: at most MaxItems elements a container, and 15 levels.
const MaxFrame = 16 << 20

var (
	// ErrFrameSize is the error for a body above [MaxFrame], from Send and Receive.
	ErrFrameSize = errors.New("control: frame is larger than 16 MiB")

	// ErrFormat is the class of errors for a body that is no message.
	ErrFormat = errors.New("control: not a message of this protocol")
)

// Marshal returns a message as it travels in another one.
func Marshal(m Message) ([]byte, error) {
	switch m := m.(type) {
	case Order:
		if m.body != nil {
			return m.body, nil
		}
	case Fill:
		if m.body != nil {
			return m.body, nil
		}
	}
	b, err := marshal(m.kind(), m)
	if err != nil {
		return nil, fmt.Errorf("control: encode %s: %w", m.kind(), err)
	}
	if len(b) > MaxFrame {
		return nil, fmt.Errorf("%w: %s has %d bytes", ErrFrameSize, m.kind(), len(b))
	}
	return b, nil
}

// share returns the encoding of a message that others may have to carry.
func share(m Message) ([]byte, error) {
	b, err := Marshal(m)
	if err == nil && len(b) > MaxFrame/2 {
		err = fmt.Errorf("%w: %s has %d bytes, and must leave room for a message around it", ErrFrameSize, m.kind(), len(b))
	}
	return b, err
}

// Unmarshal reads what Marshal returns. Its errors are of the class [ErrFormat].
func Unmarshal(body []byte) (Message, error) {
	if err := check(body); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrFormat, err)
	}
	dec := decoder(body)
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
	of, ok := kinds[kind]
	if !ok {
		return nil, fmt.Errorf("%w: unknown kind %.40q", ErrFormat, kind)
	}
	m := reflect.New(of)
	if err := dec.DecodeValue(m.Elem()); err != nil {
		return nil, fmt.Errorf("%w: %s: %v", ErrFormat, kind, err)
	}
	return m.Elem().Interface().(Message), nil
}

// kinds are the types of the messages, by their kind.
var kinds = make(map[string]reflect.Type)

func init() {
	for _, m := range []Message{
		Hello{}, Welcome{}, Beat{}, Note{}, Ready{}, Start{}, Step{}, Spans{}, Output{}, Clock{}, OpenClocks{}, Clocks{}, SetClock{}, ClockState{}, Stop{}, Done{}, Failed{}, Release{}, Hold{},
		Query{}, Answer{}, Order{}, Applied{}, Repaired{}, Fill{}, Level{}, LinkLost{}, Deliver{}, Delivered{}, Save{}, Saved{}, Unread{}, BadSample{}, Leave{}, Fault{},
		Host{}, Enter{}, Entered{}, Lead{}, Told{}, Reach{}, Reached{}, Copy{}, Shown{}, Survey{}, Surveyed{}, Keep{}, Kept{}, Drop{}, Fetch{}, Part{}, Upload{}, Uploaded{}, Sources{}, Lacks{}, Got{}, List{}, Listed{}, ReadLog{}, Logged{}, Relayed{}, Closed{}, Exited{}, Halted{}, Runs{}, Begin{}, Kill{}, Fence{}, Add{}, Added{}, Inject{}, Refused{}, Asked{}, Answered{}, Alive{}, Watch{}, Timeline{},
	} {
		kinds[m.kind()] = reflect.TypeOf(m)
	}
}

// Warm makes the first messages of a recovery as quick as later ones: msgpack takes a type apart when it meets it first.
func Warm() {
	for _, v := range []any{&Query{}, &Answer{}, &Order{}, &Fill{}, &Applied{}, &LinkLost{}, &Spans{}} {
		sample(reflect.ValueOf(v).Elem())
		if body, err := marshal(v); err == nil {
			_ = unmarshal(body, v)
		}
	}
}

// sample gives every slice and pointer of a value one element, so that nothing is left out.
func sample(v reflect.Value) {
	if !v.CanSet() {
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			sample(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		sample(v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		sample(v.Elem())
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint8, reflect.Uint64:
		v.SetUint(1)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("1")
	}
}

// marshal returns the encoding of one value, or of several as an array: msgpack, with names and omissions as in JSON, but for lists of small structs
// ([flat]).
func marshal(v ...any) ([]byte, error) {
	var b bytes.Buffer
	enc := msgpack.NewEncoder(&b)
	enc.SetCustomStructTag(structTag)
	enc.UseCompactInts(true)
	if len(v) > 1 {
		if err := enc.EncodeArrayLen(len(v)); err != nil {
			return nil, err
		}
	}
	for _, v := range v {
		if err := enc.Encode(v); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

// unmarshal sets v, a pointer, to what b encodes. What is missing in b stays as it is.
func unmarshal(b []byte, v any) error {
	if err := check(b); err != nil {
		return err
	}
	return decoder(b).Decode(v)
}

func decoder(b []byte) *msgpack.Decoder {
	dec := msgpack.NewDecoder(bytes.NewReader(b))
	dec.SetCustomStructTag(structTag)
	return dec
}

const structTag = "json" // names the fields

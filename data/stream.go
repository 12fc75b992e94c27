package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/soliton-train/soliton/trainer"
)

// Type is how a token is stored. All types are little-endian.
type Type int

// The types of tokens.
const (
	Uint8 Type = iota
	Uint16
	Uint32
	Int32
	Int64
)

func (t Type) width() int64 { return [...]int64{1, 2, 4, 4, 8}[t] }

func (t Type) valid() bool { return t >= Uint8 && t <= Int64 }

// decode writes the tokens in b to dst. bad is the index of the first that is above [math.MaxInt32] or negative, -1 for none.
func (t Type) decode(dst []int32, b []byte) (bad int) {
	var high uint64 // bits that no token has
	switch t {
	case Uint8:
		for i := range dst {
			dst[i] = int32(b[i])
		}
	case Uint16:
		for i := range dst {
			dst[i] = int32(binary.LittleEndian.Uint16(b[2*i:]))
		}
	case Uint32, Int32:
		for i := range dst {
			v := binary.LittleEndian.Uint32(b[4*i:])
			dst[i] = int32(v)
			high |= uint64(v)
		}
	case Int64:
		for i := range dst {
			v := binary.LittleEndian.Uint64(b[8*i:])
			dst[i] = int32(v)
			if v > math.MaxInt32 {
				dst[i] = -1
			}
			high |= v
		}
	}
	if high <= math.MaxInt32 {
		return -1
	}
	return slices.IndexFunc(dst, func(v int32) bool { return v < 0 })
}

// Stream is a sequence of tokens for a language model, made by [Text], [Tokens] or [Numpy]. A model has int32 inputs and
// targets of one shape [context]. Sample i has the tokens [i·context, i·context+context) as its input and those one further on as its
// target, so samples overlap by one token and there are (tokens-1)/context of them.
type Stream struct {
	stored *content
	kind   Type
	lo, hi int64 // the tokens of the stream in stored

	ends *content // of documents in stored, nil where none are known
	key  string   // that says which documents these are
}

// Text returns the bytes of files as tokens 0 to 255, in path order, as [trainer.Text] does, without holding them in memory. Patterns
// are as for trainer.Text. Errors are of type [*trainer.DataError].
func Text(patterns ...string) (*Stream, error) { return Tokens(Uint8, patterns...) }

// Tokens returns the tokens in binary files without a header, such as nanoGPT's train.bin (of [Uint16]), in path order.
func Tokens(t Type, patterns ...string) (*Stream, error) {
	if !t.valid() {
		return nil, &trainer.DataError{Reason: fmt.Sprintf("unknown type of tokens %d", t)}
	}
	c, err := streamed(patterns)
	if err != nil {
		return nil, err
	}
	return newStream(c, t)
}

// newStream returns the stream of all tokens in a content.
func newStream(c *content, t Type) (*Stream, error) {
	for _, f := range c.files {
		if n := f.size - f.skip; n%t.width() != 0 {
			return nil, &trainer.DataError{Path: f.shown(), Reason: fmt.Sprintf("has %d bytes of tokens, no multiple of %d", n, t.width())}
		}
	}
	if c.size() == 0 {
		return nil, &trainer.DataError{Path: c.files[0].shown(), Reason: fmt.Sprintf("has no tokens (%d files)", len(c.files))}
	}
	return &Stream{stored: c, kind: t, hi: c.size() / t.width()}, nil
}

// Tokens returns the number of tokens.
func (s *Stream) Tokens() int64 { return s.hi - s.lo }

// Split cuts the stream in two behind its first n tokens. A part without tokens is nil.
func (s *Stream) Split(n int64) (head, tail *Stream) {
	at := s.lo + min(max(n, 0), s.Tokens())
	return s.cut(s.lo, at), s.cut(at, s.hi)
}

// HoldOut splits the stream in two as [trainer.TextSet.HoldOut] does: every n-th file in path order is held out for evaluation. Of fewer
// files, and of documents, the last n-th part of the tokens is held out. A part without tokens is nil. It panics if n is below 2.
func (s *Stream) HoldOut(n int) (train, eval *Stream) {
	if n < 2 {
		panic(fmt.Sprintf("data: HoldOut of every %d. file leaves no tokens to train on", n))
	}
	files := s.stored.files
	if len(files) < n || s.ends != nil || s.Tokens() < s.stored.size()/s.kind.width() {
		return s.Split(s.Tokens() - s.Tokens()/int64(n))
	}
	var parts [2][]part
	for i, f := range files {
		held := 0
		if i%n == n-1 {
			held = 1
		}
		parts[held] = append(parts[held], f)
	}
	of := func(parts []part) *Stream {
		c := newContent(parts)
		all := &Stream{stored: c, kind: s.kind, hi: c.size() / s.kind.width()}
		return all.cut(0, all.hi)
	}
	return of(parts[0]), of(parts[1])
}

func (s *Stream) cut(lo, hi int64) *Stream {
	if lo >= hi {
		return nil
	}
	c := *s
	c.lo, c.hi = lo, hi
	return &c
}

// tokens writes the tokens from position at of the stream on to dst. buf is memory to use, which grows.
func (s *Stream) tokens(dst []int32, at int64, buf *[]byte) error {
	w := s.kind.width()
	if n := int64(len(dst)) * w; int64(cap(*buf)) < n {
		*buf = make([]byte, n)
	}
	b := (*buf)[:int64(len(dst))*w]
	if err := s.stored.read(b, (s.lo+at)*w); err != nil {
		return err
	}
	if bad := s.kind.decode(dst, b); bad >= 0 {
		return &trainer.DataError{Path: s.stored.files[0].shown(), Reason: fmt.Sprintf("token %d of the data is negative or above %d: is the type right?", s.lo+at+int64(bad), math.MaxInt32)}
	}
	return nil
}

// Len returns 0: how many samples there are depends on the model. See [Stream.Bind].
func (s *Stream) Len() int { return 0 }

// Sample fails: see [Stream.Bind].
func (s *Stream) Sample(trainer.Sample, trainer.Tensor, trainer.Tensor) error { return errUnbound }

var errUnbound = errors.New("data: a data set must be bound to a model before it has samples")

// Bind implements [trainer.Binder].
func (s *Stream) Bind(in, target trainer.Spec) (trainer.Dataset, error) {
	context, err := contextOf(in, target)
	if err != nil {
		return nil, err
	}
	if n := s.Tokens(); n < int64(context)+1 {
		return nil, &trainer.DataError{Reason: fmt.Sprintf("there are %d tokens, but the model's context of %d takes at least %d", n, context, context+1)}
	}
	files, err := s.stored.manifest()
	if err != nil {
		return nil, err
	}
	if s.lo > 0 || s.hi < s.stored.size()/s.kind.width() {
		files = append(files[:len(files):len(files)], recipe("tokens [%d:%d)", s.lo, s.hi))
	}
	return &contexts{stream: s, tokens: make([]int32, context+1), files: files}, nil
}

func contextOf(in, target trainer.Spec) (int, error) {
	if in.Kind != trainer.Int32 || len(in.Shape) != 1 || !target.Equal(in) {
		return 0, &trainer.DataError{Reason: fmt.Sprintf("tokens are for models whose input and target are both int32[context]; this one's are %v and %v", in, target)}
	}
	return in.Shape[0], nil
}

// contexts are a stream's samples of one length.
type contexts struct {
	stream *Stream
	tokens []int32 // of a sample
	buf    []byte
	files  []trainer.DataFile
}

func (c *contexts) Len() int { return int((c.stream.Tokens() - 1) / int64(len(c.tokens)-1)) }

func (c *contexts) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	if err := c.stream.tokens(c.tokens, int64(s.Index)*int64(len(c.tokens)-1), &c.buf); err != nil {
		return err
	}
	copy(in.I, c.tokens)
	copy(target.I, c.tokens[1:])
	return nil
}

func (c *contexts) Manifest() []trainer.DataFile { return c.files }

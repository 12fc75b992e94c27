// Package safetensors writes and reads the safetensors file format, as far as
// float32 tensors go.
//
// A file is, in this order: the length of the header as a little-endian
// uint64; the header, a JSON object padded with spaces to a multiple of 8
// bytes; the data. The header maps each tensor's name to
//
//	{"dtype":"F32","shape":[2,3],"data_offsets":[begin,end]}
//
// with offsets in bytes from the start of the data, and may map
// "__metadata__" to an object of strings. Data lies without gaps or overlap
// and fills the file. The format is specified at
// https://github.com/huggingface/safetensors.
//
// The writer lays tensors down in the order given. The reader treats a file
// as hostile: it checks all of the above, and allocates no more than the
// file's own size justifies.
package safetensors

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// MaxHeader is the largest header in bytes that the format allows.
const MaxHeader = 100_000_000

// metadataKey is the header's one key that names no tensor.
const metadataKey = "__metadata__"

// Info describes one tensor.
type Info struct {
	Name  string
	Shape []int
}

// Len returns the number of elements.
func (i Info) Len() int {
	n := 1
	for _, d := range i.Shape {
		n *= d
	}
	return n
}

// Error says what is wrong with a file.
type Error struct {
	Path   string
	Tensor string // "" if it is not about one tensor
	Reason string
}

func (e *Error) Error() string {
	if e.Tensor == "" {
		return fmt.Sprintf("%s: %s", e.Path, e.Reason)
	}
	return fmt.Sprintf("%s: tensor %q %s", e.Path, e.Tensor, e.Reason)
}

// Writer writes a file's tensors one after the other.
type Writer struct {
	w       io.Writer
	tensors []Info
	next    int
	left    int // elements of tensor next-1 still to come
}

// NewWriter writes the header for the given tensors. metadata may be nil.
func NewWriter(w io.Writer, metadata map[string]string, tensors []Info) (*Writer, error) {
	header, err := encodeHeader(metadata, tensors)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(header); err != nil {
		return nil, err
	}
	return &Writer{w: w, tensors: tensors}, nil
}

func encodeHeader(metadata map[string]string, tensors []Info) ([]byte, error) {
	var b bytes.Buffer
	b.Write(make([]byte, 8))
	b.WriteByte('{')
	if len(metadata) > 0 {
		b.WriteString(`"` + metadataKey + `":`)
		b.Write(must(json.Marshal(metadata)))
	}
	seen := make(map[string]bool)
	offset := 0
	for _, t := range tensors {
		switch {
		case t.Name == metadataKey || seen[t.Name]:
			return nil, fmt.Errorf("safetensors: tensor name %q is taken", t.Name)
		case !utf8.ValidString(t.Name):
			return nil, fmt.Errorf("safetensors: tensor name %q is not UTF-8", t.Name)
		}
		seen[t.Name] = true
		if b.Len() > 9 {
			b.WriteByte(',')
		}
		end := offset + 4*t.Len()
		b.Write(must(json.Marshal(t.Name)))
		b.WriteByte(':')
		b.Write(must(json.Marshal(entry{"F32", append([]int{}, t.Shape...), []int{offset, end}})))
		offset = end
	}
	b.WriteByte('}')
	for b.Len()%8 != 0 {
		b.WriteByte(' ')
	}
	if b.Len()-8 > MaxHeader {
		return nil, fmt.Errorf("safetensors: a header of %d bytes is too long", b.Len()-8)
	}
	binary.LittleEndian.PutUint64(b.Bytes(), uint64(b.Len()-8))
	return b.Bytes(), nil
}

// must is for values that cannot fail to marshal.
func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// Write writes the next elements. A tensor may come in several pieces, but a
// piece belongs to one tensor.
func (w *Writer) Write(data []float32) error {
	for w.left == 0 && w.next < len(w.tensors) {
		w.left = w.tensors[w.next].Len()
		w.next++
	}
	if len(data) > w.left {
		return fmt.Errorf("safetensors: %d elements written where %d were declared", len(data), w.left)
	}
	w.left -= len(data)
	for part := range slices.Chunk(data, 1<<14) {
		if _, err := w.w.Write(kernel.Bytes(part)); err != nil {
			return err
		}
	}
	return nil
}

// Close reports whether everything that the header declares was written. It
// does not close the underlying writer.
func (w *Writer) Close() error {
	missing := w.left
	for _, t := range w.tensors[w.next:] {
		missing += t.Len()
	}
	if missing > 0 {
		return fmt.Errorf("safetensors: %d declared elements were not written", missing)
	}
	return nil
}

// entry is a tensor in the header.
type entry struct {
	Type    string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets []int  `json:"data_offsets"`
}

// File is an open file whose header has been checked.
type File struct {
	Tensors  []Info // in the order of their data
	Metadata map[string]string

	path   string
	f      io.ReaderAt
	data   int64 // where the data begins
	places map[string]place
}

// place is where a tensor lies in the data.
type place struct{ offset, elements int }

// Open reads and checks the header of the file at path. Faults of its content
// are of type [*Error]; a file that cannot be read gives an [*os.PathError].
func Open(path string) (*File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO is refused below, without waiting for its writer
	if err != nil {
		return nil, err
	}
	file, err := newFile(path, f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return file, nil
}

func newFile(path string, f *os.File) (*File, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, &Error{Path: path, Reason: "not a regular file"}
	}
	return New(path, f, st.Size())
}

// New is [Open] for a content of the given size in bytes; errors give its path as path. The File it returns closes f where that is
// an [io.Closer]; where there is an error, f is still the caller's.
func New(path string, f io.ReaderAt, size int64) (*File, error) {
	fail := func(format string, args ...any) (*File, error) {
		return nil, &Error{Path: path, Reason: fmt.Sprintf(format, args...)}
	}
	var length [8]byte
	if size < 8 {
		return fail("cut short: %d bytes are no safetensors file", size)
	}
	if _, err := f.ReadAt(length[:], 0); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n < 2 {
		return fail("not a safetensors file: a header of %d bytes is no JSON object", n)
	}
	if n > MaxHeader {
		return fail("not a safetensors file: it declares a header of %d bytes", n)
	}
	if int64(n) > size-8 {
		return fail("cut short: %d bytes of a header of %d", size-8, n)
	}
	header := make([]byte, n)
	if _, err := f.ReadAt(header, 8); err != nil {
		return nil, err
	}
	file := &File{path: path, f: f, data: 8 + int64(n)}
	if err := file.parse(header, size-file.data); err != nil {
		err.Path = path
		return nil, err
	}
	return file, nil
}

// parse checks the header against itself and against the size of the data.
func (f *File) parse(header []byte, size int64) *Error {
	dec := json.NewDecoder(bytes.NewReader(header))
	bad := func(err error) *Error { return &Error{Reason: fmt.Sprintf("broken header: %v", err)} }
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return &Error{Reason: "broken header: it is no JSON object"}
	}
	entries := make(map[string]entry)
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return bad(err)
		}
		name := tok.(string) // a key, by the grammar
		if name == metadataKey {
			if f.Metadata != nil {
				return &Error{Reason: "broken header: two " + metadataKey}
			}
			if err := dec.Decode(&f.Metadata); err != nil {
				return bad(err)
			}
			continue
		}
		if _, ok := entries[name]; ok {
			return &Error{Tensor: name, Reason: "is declared twice"}
		}
		var e entry
		if err := dec.Decode(&e); err != nil {
			return &Error{Tensor: name, Reason: fmt.Sprintf("has a broken declaration: %v", err)}
		}
		if err := checkEntry(e); err != "" {
			return &Error{Tensor: name, Reason: err}
		}
		entries[name] = e
	}
	if _, err := dec.Token(); err != nil {
		return bad(err)
	}
	if rest := bytes.TrimRight(header[dec.InputOffset():], " "); len(rest) > 0 {
		return &Error{Reason: fmt.Sprintf("broken header: %d bytes after the JSON object", len(rest))}
	}

	names := slices.SortedFunc(maps.Keys(entries), func(a, b string) int {
		x, y := entries[a].Offsets, entries[b].Offsets
		return cmp.Or(x[0]-y[0], x[1]-y[1], cmp.Compare(a, b)) // empty tensors before the one that begins in the same place
	})
	f.places = make(map[string]place, len(names))
	at := 0
	for _, name := range names {
		e := entries[name]
		if e.Offsets[0] != at {
			return &Error{Tensor: name, Reason: fmt.Sprintf("lies at byte %d of the data, where %d is next: tensors overlap or leave a gap", e.Offsets[0], at)}
		}
		at = e.Offsets[1]
		if int64(at) > size {
			return &Error{Tensor: name, Reason: fmt.Sprintf("is cut short: its data ends at byte %d, the file's at %d", at, size)}
		}
		f.places[name] = place{e.Offsets[0], (at - e.Offsets[0]) / 4}
		f.Tensors = append(f.Tensors, Info{name, e.Shape})
	}
	if int64(at) != size {
		return &Error{Reason: fmt.Sprintf("%d bytes of data belong to no tensor", size-int64(at))}
	}
	return nil
}

// checkEntry returns what is wrong with a declaration by itself.
func checkEntry(e entry) string {
	if e.Type != "F32" {
		return fmt.Sprintf("has type %q; only F32 can be read", e.Type)
	}
	if e.Shape == nil || len(e.Offsets) != 2 {
		return "lacks a shape or its two offsets"
	}
	n := 1
	for _, d := range e.Shape {
		if d < 0 || d > 0 && n > math.MaxInt64/8/d {
			return fmt.Sprintf("has the impossible shape %v", e.Shape)
		}
		n *= d
	}
	if e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] {
		return fmt.Sprintf("has the impossible offsets %v", e.Offsets)
	}
	if e.Offsets[1]-e.Offsets[0] != 4*n {
		return fmt.Sprintf("has %d bytes of data, but shape %v takes %d", e.Offsets[1]-e.Offsets[0], e.Shape, 4*n)
	}
	return ""
}

// Len returns the number of elements of the named tensor; ok is false where
// there is none of that name.
func (f *File) Len(name string) (n int, ok bool) {
	p, ok := f.places[name]
	return p.elements, ok
}

// Read reads the named tensor into dst, which must have its size.
func (f *File) Read(name string, dst []float32) error {
	if p, ok := f.places[name]; ok && p.elements != len(dst) {
		return &Error{Path: f.path, Tensor: name, Reason: fmt.Sprintf("has %d elements, not %d", p.elements, len(dst))}
	}
	return f.ReadAt(name, 0, dst)
}

// ReadAt fills dst with the elements of the named tensor from element at on.
func (f *File) ReadAt(name string, at int, dst []float32) error {
	p, ok := f.places[name]
	if !ok {
		return &Error{Path: f.path, Tensor: name, Reason: "is missing"}
	}
	if at < 0 || at > p.elements || len(dst) > p.elements-at {
		return &Error{Path: f.path, Tensor: name, Reason: fmt.Sprintf("has %d elements, not %d from element %d on", p.elements, len(dst), at)}
	}
	buf := make([]byte, min(4*len(dst), 1<<16))
	r := io.NewSectionReader(f.f, f.data+int64(p.offset)+4*int64(at), 4*int64(len(dst)))
	for len(dst) > 0 {
		b := buf[:min(len(buf), 4*len(dst))]
		if _, err := io.ReadFull(r, b); err != nil {
			return &Error{Path: f.path, Tensor: name, Reason: fmt.Sprintf("could not be read: %v", err)}
		}
		for i := 0; i < len(b); i += 4 {
			dst[i/4] = math.Float32frombits(binary.LittleEndian.Uint32(b[i:]))
		}
		dst = dst[len(b)/4:]
	}
	return nil
}

// Finite returns an error that names the first element that is NaN or infinite, or negative in a tensor of which positive says that it has
// means of squares; nil if there is none. positive may be nil.
func (f *File) Finite(positive func(tensor string) bool) error {
	buf := make([]float32, 1<<14)
	for _, t := range f.Tensors {
		n, least := t.Len(), float32(math.Inf(-1))
		if positive != nil && positive(t.Name) {
			least = 0
		}
		for at := 0; at < n; at += len(buf) {
			part := buf[:min(len(buf), n-at)]
			if err := f.ReadAt(t.Name, at, part); err != nil {
				return err
			}
			for i, x := range part {
				if x-x != 0 {
					return &Error{Path: f.path, Tensor: t.Name, Reason: fmt.Sprintf("has %v as element %d; parameters must be finite", x, at+i)}
				}
				if x < least {
					return &Error{Path: f.path, Tensor: t.Name, Reason: fmt.Sprintf("has %v as element %d; a mean of squares is not negative", x, at+i)}
				}
			}
		}
	}
	return nil
}

// SHA256 returns the hash of the whole file in lower-case hexadecimal.
func (f *File) SHA256() (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f.f, 0, math.MaxInt64)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Path returns the path the file was opened by.
func (f *File) Path() string { return f.path }

// Close closes the file.
func (f *File) Close() error {
	if c, ok := f.f.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

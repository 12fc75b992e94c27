package trainer

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/soliton-train/soliton/internal/store/find"
)

// TextSet is text for a language model over bytes: the files' contents one
// after the other in path order. Sample i of a model with context C has the
// bytes [i·C, i·C+C) as its input and [i·C+1, i·C+C+1) as its target, so the
// samples overlap by one byte, and there are (bytes-1)/C of them.
//
// It is made by [Text] or [TextFiles], which look at the names and sizes of
// the files only. They are read when the job is validated.
type TextSet struct {
	pieces []piece
}

// piece is the part [lo, hi) of a file.
type piece struct {
	path         string
	lo, hi, size int64
	at           string // where this machine has the file
}

func (p piece) String() string {
	if p.lo == 0 && p.hi == p.size {
		return p.path
	}
	return fmt.Sprintf("%s[%d:%d]", p.path, p.lo, p.hi)
}

// DataError describes unusable data in one line.
type DataError = find.Error

// Text finds the files that match any of the patterns. A pattern is a file, a
// folder, which stands for all files in it and below whose names do not begin
// with a dot, or a pattern of [filepath.Match]. A file that matches several
// times counts once. Errors are of type [*DataError].
func Text(patterns ...string) (*TextSet, error) {
	files, err := find.Files(patterns...)
	if err != nil {
		return nil, err
	}
	return textOf(files)
}

// TextFiles is [Text] for a list of files.
func TextFiles(paths []string) (*TextSet, error) {
	files, err := find.List(paths)
	if err != nil {
		return nil, err
	}
	return textOf(files)
}

// LocalFile is a file that a program opens itself.
type LocalFile struct {
	Path string // its name, on the machine that has it
	At   string // where this machine has its content: Path, or a copy
}

// LocalFiles returns the files that match any of the patterns, as [Text] finds them, for a program that opens them itself: what this machine
// lacks comes from another machine of the run, checked by SHA-256. Call it before the job is made, on all machines with the same patterns. The
// files are no part of the job: that files of one name are equal where several machines have them is up to the program. Errors are of type
// [*DataError].
func LocalFiles(patterns ...string) ([]LocalFile, error) {
	files, err := find.Files(patterns...)
	if err != nil {
		return nil, err
	}
	all := make([]LocalFile, len(files))
	for i, f := range files {
		all[i] = LocalFile{f.Path, f.At()}
	}
	return all, nil
}

func textOf(files []find.File) (*TextSet, error) {
	t := &TextSet{}
	for _, f := range files {
		t.pieces = append(t.pieces, piece{f.Path, 0, f.Size, f.Size, f.At()})
	}
	switch total := t.Bytes(); {
	case len(t.pieces) == 0:
		return nil, &DataError{Reason: "no data: the list of files is empty"}
	case total == 0 && len(t.pieces) == 1:
		return nil, &DataError{Path: t.pieces[0].path, Reason: "is empty"}
	case total == 0:
		return nil, &DataError{Path: t.pieces[0].path, Reason: fmt.Sprintf("is empty, and so are the %d other files", len(t.pieces)-1)}
	}
	return t, nil
}

// HoldOut splits the text in two: every n-th file in path order is held out
// for evaluation. With fewer than n files, the last n-th part of the text is
// held out. It panics if n is below 2.
func (t *TextSet) HoldOut(n int) (train, eval *TextSet) {
	if n < 2 {
		panic(fmt.Sprintf("trainer: HoldOut of every %d. file leaves no text to train on", n))
	}
	if len(t.pieces) >= n {
		train, eval = &TextSet{}, &TextSet{}
		for i, p := range t.pieces {
			if i%n == n-1 {
				eval.pieces = append(eval.pieces, p)
			} else {
				train.pieces = append(train.pieces, p)
			}
		}
		return train, eval
	}
	return t.Split(t.Bytes() - t.Bytes()/int64(n))
}

// Split cuts the text in two behind its first n bytes.
func (t *TextSet) Split(n int64) (head, tail *TextSet) {
	head, tail = &TextSet{}, &TextSet{}
	for _, p := range t.pieces {
		mine := min(max(n, 0), p.hi-p.lo)
		if mine > 0 {
			head.pieces = append(head.pieces, piece{p.path, p.lo, p.lo + mine, p.size, p.at})
		}
		if p.lo+mine < p.hi {
			tail.pieces = append(tail.pieces, piece{p.path, p.lo + mine, p.hi, p.size, p.at})
		}
		n -= mine
	}
	return head, tail
}

// Bytes returns the size of the text.
func (t *TextSet) Bytes() (n int64) {
	for _, p := range t.pieces {
		n += p.hi - p.lo
	}
	return n
}

// Files returns the paths of the files, in order.
func (t *TextSet) Files() []string {
	paths := make([]string, len(t.pieces))
	for i, p := range t.pieces {
		paths[i] = p.path
	}
	return paths
}

// Len returns 0: how many samples there are depends on the model. See
// [TextSet.Bind].
func (t *TextSet) Len() int { return 0 }

// Sample fails: see [TextSet.Bind].
func (t *TextSet) Sample(Sample, Tensor, Tensor) error {
	return errors.New("trainer: text must be bound to a model before it has samples")
}

// Bind implements [Binder]: it reads the text, for a model whose input and
// target are int32 of one shape [context].
func (t *TextSet) Bind(in, target Spec) (Dataset, error) {
	if in.Kind != Int32 || len(in.Shape) != 1 || !target.Equal(in) {
		return nil, &DataError{Reason: fmt.Sprintf("text is for models whose input and target are both int32[context]; this one's are %v and %v", in, target)}
	}
	context := in.Shape[0]
	if n := t.Bytes(); n < int64(context)+1 {
		return nil, &DataError{Reason: fmt.Sprintf("the text has %d bytes, but the model's context of %d takes at least %d", n, context, context+1)}
	}
	b := &boundText{context: context, text: make([]byte, 0, t.Bytes())}
	for _, p := range t.pieces {
		part, err := p.read(b.text[len(b.text) : len(b.text)+int(p.hi-p.lo)])
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(part)
		b.text = b.text[:len(b.text)+len(part)]
		b.files = append(b.files, DataFile{Path: p.String(), Size: int64(len(part)), SHA256: hex.EncodeToString(sum[:])})
	}
	return b, nil
}

func (p piece) read(dst []byte) ([]byte, error) {
	f, err := os.Open(p.at)
	if err != nil {
		return nil, &DataError{Path: p.path, Reason: find.Cause(err)}
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() != p.size {
		return nil, &DataError{Path: p.path, Reason: fmt.Sprintf("has changed: it had %d bytes and has %d now", p.size, st.Size())}
	}
	if _, err := io.ReadFull(io.NewSectionReader(f, p.lo, p.hi-p.lo), dst); err != nil {
		return nil, &DataError{Path: p.path, Reason: find.Cause(err)}
	}
	return dst, nil
}

// boundText is text cut for one context length.
type boundText struct {
	text    []byte
	context int
	files   []DataFile
}

func (b *boundText) Len() int { return (len(b.text) - 1) / b.context }

func (b *boundText) Sample(s Sample, in, target Tensor) error {
	w := b.text[s.Index*b.context:][:b.context+1]
	for j := range b.context {
		in.I[j], target.I[j] = int32(w[j]), int32(w[j+1])
	}
	return nil
}

func (b *boundText) Manifest() []DataFile { return b.files }

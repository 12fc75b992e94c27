package data

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"path/filepath"
	"slices"

	"github.com/soliton-train/soliton/trainer"
)

// Packed is a stream of documents whose samples are made of whole documents; see [Stream.Pack].
type Packed struct{ stream *Stream }

// Pack returns a data set whose contexts are filled with whole documents: each goes to the context, of the last thousand or so, that
// it fills best. A document that is longer than a context is cut; no document is left out. No target is the beginning of another
// document. What is left of a context has targets -1, which the cross-entropy of package nn does not count. Attention does see the
// documents before it in the context.
//
// The stream is one that [Tokenize] has made, or a part of it. Which document goes where is worked out once for each length of
// contexts, by one process of a host, and kept in prepared files: so a sample is a pure function of its index here as well.
func (s *Stream) Pack() (*Packed, error) {
	if s.ends == nil {
		return nil, &trainer.DataError{Path: s.stored.files[0].shown(), Reason: "has no documents to pack; Tokenize makes tokens that have"}
	}
	return &Packed{s}, nil
}

// Len returns 0: see [Packed.Bind].
func (p *Packed) Len() int { return 0 }

// Sample fails: see [Packed.Bind].
func (p *Packed) Sample(trainer.Sample, trainer.Tensor, trainer.Tensor) error { return errUnbound }

// Files of an index.
const (
	piecesFile  = "pieces"  // of documents, in the order of samples: the first token, uint64, and the number of targets, uint32
	samplesFile = "samples" // how many pieces there are up to the end of each: uint64
	pieceSize   = 12
)

// Bind implements [trainer.Binder].
func (p *Packed) Bind(in, target trainer.Spec) (trainer.Dataset, error) {
	context, err := contextOf(in, target)
	if err != nil {
		return nil, err
	}
	s := p.stream
	folder, err := prepared(fmt.Sprintf("pack %d %d %d\n%s", context, s.lo, s.hi, s.key), func(folder string) error {
		h := sha256.New()
		var written int64
		size, err := writeFile(filepath.Join(folder, piecesFile), func(w io.Writer) error {
			n, err := writeFile(filepath.Join(folder, samplesFile), func(e io.Writer) error {
				x := packer{context: context, pieces: bufio.NewWriter(io.MultiWriter(w, h)), samples: bufio.NewWriter(e)}
				if err := s.documents(x.add); err != nil {
					return err
				}
				return x.finish()
			})
			written = n / 8
			return err
		})
		if err != nil {
			return asDataError(folder, err)
		}
		return source{Bytes: size, SHA256: hex.EncodeToString(h.Sum(nil)), Documents: written}.write(folder)
	})
	if err != nil {
		return nil, err
	}
	made, err := readSource(folder)
	if err != nil {
		return nil, err
	}
	pieces, err := existing(folder, piecesFile, made.Bytes)
	if err != nil {
		return nil, err
	}
	samples, err := existing(folder, samplesFile, 8*made.Documents)
	if err != nil {
		return nil, err
	}
	if made.Documents == 0 {
		return nil, &trainer.DataError{Path: s.stored.files[0].shown(), Reason: "has no document with text"}
	}
	files, err := s.stored.manifest()
	if err != nil {
		return nil, err
	}
	return &packedContexts{
		stream: s, context: context, n: int(made.Documents), pieces: newContent([]part{pieces}), samples: newContent([]part{samples}),
		tokens: make([]int32, context+1), files: append(files[:len(files):len(files)], recipe("packed into contexts of %d: %s", context, made.SHA256)),
	}, nil
}

// documents gives the first token and the end of every document that lies in the stream.
func (s *Stream) documents(take func(lo, hi int64) error) error {
	buf := make([]byte, 1<<16)
	var lo int64
	for at := int64(0); at < s.ends.size(); at += int64(len(buf)) {
		b := buf[:min(int64(len(buf)), s.ends.size()-at)]
		if err := s.ends.read(b, at); err != nil {
			return err
		}
		for ; len(b) > 0; b = b[8:] {
			hi := int64(binary.LittleEndian.Uint64(b))
			if hi <= lo || hi > s.stored.size()/s.kind.width() {
				return &trainer.DataError{Path: s.ends.files[0].path, Reason: "is damaged; remove its folder"}
			}
			if s.lo <= lo && hi <= s.hi {
				if err := take(lo, hi); err != nil {
					return err
				}
			}
			lo = hi
		}
	}
	return nil
}

// packer fills contexts with documents: a document goes where it leaves the least room.
type packer struct {
	context         int
	open            []*filling // by room, then age
	made            int
	count           uint64
	pieces, samples *bufio.Writer
}

// filling is a context that has room.
type filling struct {
	room, number int
	pieces       []piece
}

// piece is a part of a document: the first token, and the number of targets, each one token further on.
type piece struct {
	at int64
	n  int
}

const maxFilling = 1024

func (x *packer) add(lo, hi int64) error {
	for targets := hi - lo - 1; targets > 0; {
		p := piece{lo, int(min(targets, int64(x.context)))}
		if err := x.place(p); err != nil {
			return err
		}
		lo, targets = lo+int64(p.n), targets-int64(p.n)
	}
	return nil
}

func (x *packer) place(p piece) error {
	i, _ := slices.BinarySearchFunc(x.open, p.n, func(f *filling, n int) int { return f.room - n })
	var f *filling
	if i < len(x.open) {
		f = x.open[i]
		x.open = slices.Delete(x.open, i, i+1)
	} else {
		f = &filling{room: x.context, number: x.made}
		x.made++
	}
	f.room -= p.n
	f.pieces = append(f.pieces, p)
	if f.room == 0 {
		return x.write(f)
	}
	i, _ = slices.BinarySearchFunc(x.open, f, func(a, b *filling) int {
		if a.room != b.room {
			return a.room - b.room
		}
		return a.number - b.number
	})
	x.open = slices.Insert(x.open, i, f)
	if len(x.open) <= maxFilling {
		return nil
	}
	full := x.open[0]
	x.open = slices.Delete(x.open, 0, 1)
	return x.write(full)
}

func (x *packer) write(f *filling) error {
	for _, p := range f.pieces {
		b := binary.LittleEndian.AppendUint64(nil, uint64(p.at))
		if _, err := x.pieces.Write(binary.LittleEndian.AppendUint32(b, uint32(p.n))); err != nil {
			return err
		}
	}
	x.count += uint64(len(f.pieces))
	_, err := x.samples.Write(binary.LittleEndian.AppendUint64(nil, x.count))
	return err
}

func (x *packer) finish() error {
	for _, f := range x.open {
		if err := x.write(f); err != nil {
			return err
		}
	}
	if err := x.pieces.Flush(); err != nil {
		return err
	}
	return x.samples.Flush()
}

// packedContexts are the samples of one length.
type packedContexts struct {
	stream          *Stream
	context, n      int
	pieces, samples *content
	tokens          []int32
	index, buf      []byte
	files           []trainer.DataFile
}

func (p *packedContexts) Len() int { return p.n }

func (p *packedContexts) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	var ends [16]byte
	b := ends[:]
	if s.Index == 0 {
		b = ends[8:]
	}
	if err := p.samples.read(b, max(int64(s.Index)-1, 0)*8); err != nil {
		return err
	}
	lo, hi := binary.LittleEndian.Uint64(ends[:]), binary.LittleEndian.Uint64(ends[8:])
	if hi <= lo || hi-lo > uint64(p.context) || hi > uint64(p.pieces.size()/pieceSize) {
		return p.damaged()
	}
	p.index = slices.Grow(p.index[:0], int(hi-lo)*pieceSize)[:int(hi-lo)*pieceSize]
	if err := p.pieces.read(p.index, int64(lo)*pieceSize); err != nil {
		return err
	}
	at := 0
	for b := p.index; len(b) > 0; b = b[pieceSize:] {
		from, n := binary.LittleEndian.Uint64(b), int(binary.LittleEndian.Uint32(b[8:]))
		if n < 1 || n > p.context-at || from < uint64(p.stream.lo) || from > uint64(p.stream.hi)-uint64(n)-1 {
			return p.damaged()
		}
		tokens := p.tokens[:n+1]
		if err := p.stream.tokens(tokens, int64(from)-p.stream.lo, &p.buf); err != nil {
			return err
		}
		copy(in.I[at:], tokens[:n])
		copy(target.I[at:], tokens[1:])
		at += n
	}
	for ; at < p.context; at++ {
		in.I[at], target.I[at] = 0, -1
	}
	return nil
}

func (p *packedContexts) damaged() error {
	return &trainer.DataError{Path: p.pieces.files[0].path, Reason: "is damaged; remove its folder"}
}

func (p *packedContexts) Manifest() []trainer.DataFile { return p.files }

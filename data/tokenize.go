package data

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/soliton-train/soliton/trainer"
)

// Files of a tokenized corpus.
const (
	tokensFile = "tokens"
	endsFile   = "ends" // of the documents, in tokens: uint64
)

// Tokenize returns the tokens of a corpus, the token end behind each document. One process of a host encodes the corpus, once, into
// prepared files; the others wait and use them. The samples are those of any [Stream]; see [Stream.Pack] for another way.
func Tokenize(t *Tokenizer, end string, c *Corpus) (*Stream, error) {
	last, ok := t.Token(end)
	if !ok {
		return nil, &trainer.DataError{Path: t.path, Reason: fmt.Sprintf("has no token %q", end)}
	}
	files, err := c.key()
	if err != nil {
		return nil, err
	}
	kind := Uint16
	if t.Tokens() > math.MaxUint16+1 {
		kind = Uint32
	}
	key := fmt.Sprintf("tokenize %s %d\n%s", t.sum, last, files)
	folder, err := prepared(key, func(folder string) error {
		var documents int64
		h := sha256.New()
		var ends *bufio.Writer
		size, err := writeFile(filepath.Join(folder, tokensFile), func(w io.Writer) error {
			n, err := writeFile(filepath.Join(folder, endsFile), func(e io.Writer) error {
				ends = bufio.NewWriter(e)
				tokens := bufio.NewWriterSize(io.MultiWriter(w, h), 1<<20)
				if err := encodeAll(t, last, kind, c, tokens, ends); err != nil {
					return err
				}
				if err := tokens.Flush(); err != nil {
					return err
				}
				return ends.Flush()
			})
			documents = n / 8
			return err
		})
		if err != nil {
			return asDataError(folder, err)
		}
		return source{Bytes: size, SHA256: hex.EncodeToString(h.Sum(nil)), Documents: documents}.write(folder)
	})
	if err != nil {
		return nil, err
	}
	made, err := readSource(folder)
	if err != nil {
		return nil, err
	}
	tokens, err := existing(folder, tokensFile, made.Bytes)
	if err != nil {
		return nil, err
	}
	ends, err := existing(folder, endsFile, 8*made.Documents)
	if err != nil {
		return nil, err
	}
	tokens.name = fmt.Sprintf("tokens of %s by %s", c.files[0].Path, t.path)
	if n := len(c.files); n > 1 {
		tokens.name = fmt.Sprintf("tokens of %s to %s, %d files, by %s", c.files[0].Path, c.files[n-1].Path, n, t.path)
	}
	s, err := newStream(newContent([]part{tokens}), kind)
	if err != nil {
		return nil, err
	}
	s.ends, s.key = newContent([]part{ends}), key
	return s, nil
}

func asDataError(path string, err error) error {
	if errors.As(err, new(*trainer.DataError)) {
		return err
	}
	return failed(path, err)
}

// maxPortion is about how much text is encoded at once, and how many documents.
const (
	maxPortion   = 8 << 20
	maxDocuments = 1 << 14
)

// encodeAll writes the tokens of all documents, and where each ends.
func encodeAll(t *Tokenizer, last int32, kind Type, c *Corpus, tokens, ends *bufio.Writer) error {
	var texts []string
	var encoded [][]int32
	var size int
	var at uint64
	flush := func() error {
		encoded = append(encoded[:0], make([][]int32, len(texts))...)
		var next sync.Mutex
		taken := 0
		var tasks sync.WaitGroup
		for range min(runtime.GOMAXPROCS(0), len(texts)) {
			tasks.Go(func() {
				for {
					next.Lock()
					i := taken
					taken++
					next.Unlock()
					if i >= len(texts) {
						return
					}
					encoded[i] = append(t.Encode(nil, texts[i]), last)
				}
			})
		}
		tasks.Wait()
		var b [8]byte
		for _, document := range encoded {
			for _, token := range document {
				binary.LittleEndian.PutUint32(b[:], uint32(token))
				if _, err := tokens.Write(b[:kind.width()]); err != nil {
					return err
				}
			}
			at += uint64(len(document))
			binary.LittleEndian.PutUint64(b[:], at)
			if _, err := ends.Write(b[:]); err != nil {
				return err
			}
		}
		texts, size = texts[:0], 0
		return nil
	}
	err := c.each(func(text []byte) error {
		texts, size = append(texts, string(text)), size+len(text)
		if size < maxPortion && len(texts) < maxDocuments {
			return nil
		}
		return flush()
	})
	if err != nil {
		return err
	}
	return flush()
}

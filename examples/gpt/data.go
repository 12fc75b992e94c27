package main

import (
	"fmt"
	"io/fs"
	"math"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/soliton-train/soliton/data"
	_ "github.com/soliton-train/soliton/data/bucket" // s3://
	"github.com/soliton-train/soliton/data/parquet"
	"github.com/soliton-train/soliton/trainer"
)

// tokens are what the model trains on.
type tokens interface {
	trainer.Dataset
	count() int64
	holdOut(n int) (train, held tokens)
	split(n int64) (head, tail tokens)
}

// inMemory are the bytes of text in memory.
type inMemory struct{ *trainer.TextSet }

func (t inMemory) count() int64 { return t.Bytes() }

func (t inMemory) holdOut(n int) (train, held tokens) {
	a, b := t.HoldOut(n)
	return inMemory{a}, inMemory{b}
}

func (t inMemory) split(n int64) (head, tail tokens) {
	a, b := t.Split(n)
	return inMemory{a}, inMemory{b}
}

// stream are tokens that are read by position.
type stream struct{ *data.Stream } // nil for none

func (s stream) count() int64 {
	if s.Stream == nil {
		return 0
	}
	return s.Tokens()
}

func (s stream) holdOut(n int) (train, held tokens) {
	a, b := s.HoldOut(n)
	return stream{a}, stream{b}
}

func (s stream) split(n int64) (head, tail tokens) {
	a, b := s.Split(n)
	return stream{a}, stream{b}
}

// alphabet is what tokens stand for: bytes, or the words of a tokenizer.
type alphabet struct{ words *data.Tokenizer }

// readAlphabet reads a tokenizer.json; a path of "" stands for bytes.
func readAlphabet(path string) (a alphabet, err error) {
	if path == "" {
		return a, nil
	}
	if a.words, err = data.ReadTokenizer(path); err != nil {
		return a, fmt.Errorf("--tokenizer %w", err)
	}
	return a, nil
}

func (a alphabet) size() int {
	if a.words == nil {
		return math.MaxUint8 + 1
	}
	return a.words.Tokens()
}

// unit names tokens in messages.
func (a alphabet) unit() string {
	if a.words == nil {
		return "bytes"
	}
	return "tokens"
}

func (a alphabet) encode(text string) (tokens []int32) {
	if a.words != nil {
		return a.words.Encode(nil, text)
	}
	for _, b := range []byte(text) {
		tokens = append(tokens, int32(b))
	}
	return tokens
}

func (a alphabet) decode(tokens []int32) (text []byte) {
	if a.words != nil {
		return a.words.Decode(tokens)
	}
	for _, b := range tokens {
		text = append(text, byte(b))
	}
	return text
}

// formats of data files, by the end of their names without .gz and .zst.
var formats = map[string]string{".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".tar": "tar", ".bin": "uint16", ".npy": "npy"}

// dataFormat returns what the files of the data are.
func (o *options) dataFormat() (string, error) {
	if o.format != "auto" {
		return o.format, nil
	}
	of := func(name string) string {
		if strings.Contains(name, "://") {
			name, _, _ = strings.Cut(name, "?")
		}
		name = strings.TrimSuffix(strings.TrimSuffix(name, ".gz"), ".zst")
		if f := formats[path.Ext(name)]; f != "" {
			return f
		}
		return "text"
	}
	for _, name := range o.data {
		if f, first := of(name), of(o.data[0]); f != first {
			return "", fmt.Errorf("--data %s is of format %s, and %s of %s: give files of one format, or --format", o.data[0], first, name, f)
		}
	}
	return of(o.data[0]), nil
}

// open opens the data: by default, the Go source tree. vocab is how many different tokens they may have.
func (o *options) open(a alphabet) (all tokens, vocab int, err error) {
	if len(o.data) == 0 {
		text, err := o.goSource()
		return inMemory{text}, a.size(), err
	}
	format, err := o.dataFormat()
	if err != nil {
		return nil, 0, err
	}
	var s *data.Stream
	var documents *data.Corpus
	switch format {
	case "text":
		if a.words == nil {
			s, err = data.Text(o.data...)
		} else {
			documents, err = data.Files(o.data...)
		}
	case "jsonl":
		documents, err = data.JSONL(o.field, o.data...)
	case "parquet":
		documents, err = parquet.Text(o.field, o.data...)
	case "tar":
		var shards *data.Shards
		if shards, err = data.Tar(o.data...); err == nil {
			documents = shards.Texts(o.field)
		}
	case "uint16":
		s, err = data.Tokens(data.Uint16, o.data...)
	case "uint32":
		s, err = data.Tokens(data.Uint32, o.data...)
	case "npy":
		s, err = data.Numpy(o.data...)
	default:
		return nil, 0, fmt.Errorf("--format %s is not known: give auto, text, jsonl, parquet, tar, uint16, uint32 or npy", format)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("--data %w; give files or folders of %s", err, format)
	}
	if documents != nil {
		if a.words == nil {
			return nil, 0, fmt.Errorf("--data %s: documents of format %s need --tokenizer tokenizer.json", o.data[0], format)
		}
		if s, err = data.Tokenize(a.words, o.end, documents); err != nil {
			return nil, 0, fmt.Errorf("--data: %w", err)
		}
	}
	vocab = a.size()
	switch {
	case o.vocab > 0:
		vocab = int(o.vocab)
	case format != "text" && a.words == nil:
		return nil, 0, fmt.Errorf("--data %s: give --vocab, the number of different tokens, or the --tokenizer that made them", o.data[0])
	}
	return stream{s}, vocab, nil
}

// set returns the data set of tokens.
func (o *options) set(t tokens) (trainer.Dataset, error) {
	if !o.pack {
		return t, nil
	}
	if s, ok := t.(stream); ok {
		packed, err := s.Pack()
		if err != nil {
			return nil, fmt.Errorf("--pack: %w", err)
		}
		return packed, nil
	}
	return nil, fmt.Errorf("--pack: give --data of documents, and --tokenizer")
}

// goSource returns the text of the Go source tree.
func (o *options) goSource() (*trainer.TextSet, error) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, &trainer.DataError{Reason: fmt.Sprintf("the Go source tree is not at hand (go env GOROOT: %v): pass --data PATH", err)}
	}
	var files []string
	root := filepath.Join(strings.TrimSpace(string(out)), "src")
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && filepath.Ext(path) == ".go" {
			files = append(files, path)
		}
		return err
	})
	if err != nil || len(files) == 0 {
		return nil, &trainer.DataError{Path: root, Reason: "holds no Go source tree: pass --data PATH"}
	}
	return trainer.TextFiles(files)
}

// split holds out every 20th file of text, or the last 20th part of what are a few files or documents. Each part needs a sample, so it
// holds out one sample of short data, and nothing of very short ones: then held is nil.
func (o *options) split(all tokens, a alphabet, context int64) (train, held tokens, err error) {
	sample := context + 1 // tokens
	n := all.count()
	if n < sample {
		least := fmt.Sprintf("give at least %d %s of text", sample, a.unit())
		if n > 1 {
			least += fmt.Sprintf(", or --context %d or less", n-1)
		}
		return nil, nil, fmt.Errorf("--data: the text has %d %s, too few for --context %d: %s", n, a.unit(), context, least)
	}
	if train, held = all.holdOut(20); train.count() >= sample && held.count() >= sample {
		return train, held, nil
	}
	if n >= 2*sample {
		train, held = all.split(n - sample)
		return train, held, nil
	}
	return all, nil, nil
}

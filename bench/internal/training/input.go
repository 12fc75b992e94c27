package training

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	pq "github.com/parquet-go/parquet-go"

	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/data/parquet"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

const (
	inputContext = 128     // tokens of a sample
	inputPixels  = 28 * 28 // of an image
	inputEnd     = "<end>" // token behind a document
)

// A document is a row of a Parquet file, and a line of JSONL.
type document struct {
	Text string `json:"text" parquet:"text"`
}

// inputs are files of each format, with the same content where that can be.
type inputs struct {
	dir     string
	samples int
	order   rng.Perm
	header  int // bytes of the .npy
	texts   []string
}

// ofInput reads samples of each format, in the order of a random permutation, and documents in theirs.
func (k *keep) ofInput() error {
	in := inputs{dir: filepath.Join(k.dir, "input"), samples: k.samples, order: rng.NewPerm(1, 0, uint64(k.samples))}
	if err := os.Mkdir(in.dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(in.dir)
	if err := in.write(); err != nil {
		return err
	}
	if err := os.Setenv("XDG_CACHE_HOME", in.dir); err != nil { // where documents are prepared
		return err
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the plain readers have one thread
	tokenizer, err := data.ReadTokenizer(in.path("tokenizer.json"))
	if err != nil {
		return err
	}
	tokens := func(open func() (*data.Corpus, error)) func() (float64, error) {
		return func() (float64, error) { return in.tokenize(tokenizer, open) }
	}
	samples, images, documents := fmt.Sprintf("samples of %d tokens", inputContext), fmt.Sprintf("images of %d pixels", inputPixels), "documents of some 600 bytes"
	fmt.Printf("\n%s, %s and %s a second, what is cached, one thread\n", samples, images, documents)
	for _, c := range []struct {
		of, name    string
		ours, plain func() (float64, error)
	}{
		{samples, "uint16 tokens, against ReadAt",
			in.random(func() (trainer.Dataset, error) { return data.Tokens(data.Uint16, in.path("t.bin")) }),
			func() (float64, error) { return in.readAt("t.bin", 0, 2) }},
		{samples, "numpy, against ReadAt",
			in.random(func() (trainer.Dataset, error) { return data.Numpy(in.path("t.npy")) }),
			func() (float64, error) { return in.readAt("t.npy", in.header, 2) }},
		{samples, "text, against ReadAt",
			in.random(func() (trainer.Dataset, error) { return data.Text(in.path("t.txt")) }),
			func() (float64, error) { return in.readAt("t.txt", 0, 1) }},
		{samples, "tar, against archive/tar in order", in.random(in.shards), in.tarInOrder},
		{images, "idx images, against ReadAt", in.images, in.imagesAt},
		{documents, "JSONL to tokens, against encoding/json and the same tokenizer",
			tokens(func() (*data.Corpus, error) { return data.JSONL("text", in.path("d.jsonl")) }),
			func() (float64, error) { return in.jsonInOrder(tokenizer) }},
		{documents, "Parquet to tokens, against parquet-go and the same tokenizer",
			tokens(func() (*data.Corpus, error) { return parquet.Text("text", in.path("d.parquet")) }),
			func() (float64, error) { return in.parquetInOrder(tokenizer) }},
	} {
		ours, err := c.ours()
		if err != nil {
			return err
		}
		theirs, err := c.plain()
		if err != nil {
			return err
		}
		what, peer, _ := strings.Cut(c.name, ", against ")
		row := report.Row{Comparison: "keep", Case: c.of, Threads: 1, Ours: what, Theirs: peer, Unit: "samples/s", Kind: report.Rate}
		row.Add(ours, theirs)
		k.rec.Add(row)
		fmt.Printf("  %-64s %9.0f and %9.0f: %.2f\n", c.name, ours, theirs, ours/theirs)
	}
	return nil
}

func (in *inputs) path(name string) string { return filepath.Join(in.dir, name) }

// write makes the files.
func (in *inputs) write() error {
	tokens := make([]byte, 2*(in.samples*inputContext+1))
	for i := range len(tokens) / 2 {
		binary.LittleEndian.PutUint16(tokens[2*i:], uint16(i*7919%50000))
	}
	header := fmt.Sprintf("{'descr': '<u2', 'fortran_order': False, 'shape': (%d,), }", len(tokens)/2)
	header += strings.Repeat(" ", 64-(10+len(header)+1)%64) + "\n"
	npy := append([]byte("\x93NUMPY\x01\x00"), byte(len(header)), byte(len(header)>>8))
	npy = append(append(npy, header...), tokens...)
	in.header = 10 + len(header)
	text := make([]byte, in.samples*inputContext+1)
	for i := range text {
		text[i] = byte(32 + i*31%90)
	}
	var archive bytes.Buffer
	out := tar.NewWriter(&archive)
	for i := range in.samples {
		if err := out.WriteHeader(&tar.Header{Name: fmt.Sprintf("%08d.bin", i), Mode: 0o600, Size: 2 * inputContext}); err != nil {
			return err
		}
		if _, err := out.Write(tokens[2*i*inputContext:][:2*inputContext]); err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	count := binary.BigEndian.AppendUint32(nil, uint32(in.samples))
	images := append([]byte{0, 0, 8, 3}, count...)
	images = append(images, 0, 0, 0, 28, 0, 0, 0, 28)
	images = append(images, bytes.Repeat(text[:inputPixels], in.samples)...)
	labels := append(append([]byte{0, 0, 8, 1}, count...), make([]byte, in.samples)...)
	documents := min(in.samples, 20000)
	var lines, table bytes.Buffer
	rows := pq.NewGenericWriter[document](&table, pq.Compression(&pq.Snappy))
	for i := range documents {
		d := document{strings.Repeat(fmt.Sprintf("Line %d says that what was read is never wrong. ", i), 12)}
		in.texts = append(in.texts, d.Text)
		line, err := json.Marshal(d)
		if err != nil {
			return err
		}
		lines.Write(append(line, '\n'))
		if _, err := rows.Write([]document{d}); err != nil {
			return err
		}
	}
	if err := rows.Close(); err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"t.bin": tokens, "t.npy": npy, "t.txt": text, "t.tar": archive.Bytes(), "images": images, "labels": labels,
		"d.jsonl": lines.Bytes(), "d.parquet": table.Bytes(), "tokenizer.json": byteTokenizer(),
	} {
		if err := os.WriteFile(in.path(name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// byteTokenizer returns a tokenizer.json with a token for each byte, by the letters that byte-level encoding has for them.
func byteTokenizer() []byte {
	vocab := make(map[string]int)
	others := rune(256)
	for b := range 256 {
		letter := rune(b)
		if b < 33 || b > 126 && b < 161 || b == 173 {
			letter = others
			others++
		}
		vocab[string(letter)] = b
	}
	vocab[inputEnd] = 256
	text, err := json.Marshal(map[string]any{
		"added_tokens":  []any{map[string]any{"id": 256, "content": inputEnd, "special": true}},
		"pre_tokenizer": map[string]any{"type": "ByteLevel"},
		"model":         map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{}},
	})
	if err != nil {
		panic(err) // it is made of numbers and strings
	}
	return text
}

// perSecond is how many there were a second since then.
func perSecond(n int, since time.Time) float64 { return float64(n) / time.Since(since).Seconds() }

// random reads samples of a data set in the order of the permutation.
func (in *inputs) random(open func() (trainer.Dataset, error)) func() (float64, error) {
	return func() (float64, error) {
		return in.sample(open, trainer.Spec{Shape: []int{inputContext}, Kind: trainer.Int32}, trainer.Spec{Shape: []int{inputContext}, Kind: trainer.Int32})
	}
}

func (in *inputs) images() (float64, error) {
	return in.sample(func() (trainer.Dataset, error) { return data.IDX(in.path("images"), in.path("labels")) },
		trainer.Spec{Shape: []int{inputPixels}, Kind: trainer.Float32}, trainer.Spec{Kind: trainer.Int32})
}

func (in *inputs) sample(open func() (trainer.Dataset, error), input, target trainer.Spec) (float64, error) {
	d, err := open()
	if err != nil {
		return 0, err
	}
	bound, err := trainer.Bind(d, input, target)
	if err != nil {
		return 0, err
	}
	x, y := trainer.NewTensor(input.Kind, input.Shape...), trainer.NewTensor(target.Kind, target.Shape...)
	n, began := min(in.samples, bound.Len()), time.Now()
	for i := range n {
		if err := bound.Sample(trainer.Sample{Index: int(in.order.At(uint64(i))) % n}, x, y); err != nil {
			return 0, err
		}
	}
	return perSecond(n, began), nil
}

func (in *inputs) shards() (trainer.Dataset, error) {
	s, err := data.Tar(in.path("t.tar"))
	if err != nil {
		return nil, err
	}
	return s.Data("bench", func(fields map[string][]byte, _ trainer.Sample, x, _ trainer.Tensor) error {
		for j := range inputContext {
			x.I[j] = int32(binary.LittleEndian.Uint16(fields["bin"][2*j:]))
		}
		return nil
	}), nil
}

// tokenize prepares a corpus, and returns documents a second.
func (in *inputs) tokenize(t *data.Tokenizer, open func() (*data.Corpus, error)) (float64, error) {
	began := time.Now()
	c, err := open()
	if err != nil {
		return 0, err
	}
	s, err := data.Tokenize(t, inputEnd, c)
	if err != nil {
		return 0, err
	}
	rate := perSecond(len(in.texts), began)
	want := len(in.texts)
	for _, text := range in.texts {
		want += len(text)
	}
	if s.Tokens() != int64(want) {
		return 0, fmt.Errorf("%d tokens, want %d", s.Tokens(), want)
	}
	return rate, nil
}

// readAt reads the same bytes as a data set of tokens at the same places, and makes numbers of them.
func (in *inputs) readAt(name string, offset, size int) (float64, error) {
	f, err := os.Open(in.path(name))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	x, y, buf := make([]int32, inputContext), make([]int32, inputContext), make([]byte, size*(inputContext+1))
	began := time.Now()
	for i := range in.samples {
		if _, err := f.ReadAt(buf, int64(offset)+int64(in.order.At(uint64(i)))*int64(size*inputContext)); err != nil {
			return 0, err
		}
		for j := range inputContext {
			if size == 2 {
				x[j], y[j] = int32(binary.LittleEndian.Uint16(buf[2*j:])), int32(binary.LittleEndian.Uint16(buf[2*j+2:]))
			} else {
				x[j], y[j] = int32(buf[j]), int32(buf[j+1])
			}
		}
	}
	return perSecond(in.samples, began), nil
}

func (in *inputs) imagesAt() (float64, error) {
	images, err := os.Open(in.path("images"))
	if err != nil {
		return 0, err
	}
	defer images.Close()
	labels, err := os.Open(in.path("labels"))
	if err != nil {
		return 0, err
	}
	defer labels.Close()
	x, buf := make([]float32, inputPixels), make([]byte, inputPixels)
	var label [1]byte
	began := time.Now()
	for i := range in.samples {
		at := int64(in.order.At(uint64(i)))
		if _, err := images.ReadAt(buf, 16+at*inputPixels); err != nil {
			return 0, err
		}
		if _, err := labels.ReadAt(label[:], 8+at); err != nil {
			return 0, err
		}
		for j, b := range buf {
			x[j] = float32(b) / 255
		}
	}
	return perSecond(in.samples, began), nil
}

func (in *inputs) tarInOrder() (float64, error) {
	f, err := os.Open(in.path("t.tar"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	began, r := time.Now(), tar.NewReader(f)
	for n := 0; ; n++ {
		if _, err := r.Next(); err == io.EOF {
			return perSecond(n, began), nil
		} else if err != nil {
			return 0, err
		}
		if _, err := io.ReadAll(r); err != nil {
			return 0, err
		}
	}
}

// inOrder encodes documents as read returns them, and writes the tokens to a file, as data.Tokenize does. read returns io.EOF at the end.
func (in *inputs) inOrder(t *data.Tokenizer, read func() (string, error)) (float64, error) {
	f, err := os.Create(in.path("plain"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	began, out := time.Now(), bufio.NewWriterSize(f, 1<<20)
	var tokens []int32
	for n := 0; ; n++ {
		text, err := read()
		if errors.Is(err, io.EOF) {
			return perSecond(n, began), errors.Join(out.Flush(), f.Sync())
		} else if err != nil {
			return 0, err
		}
		tokens = append(t.Encode(tokens[:0], text), 256)
		for _, token := range tokens {
			var b [2]byte
			binary.LittleEndian.PutUint16(b[:], uint16(token))
			if _, err := out.Write(b[:]); err != nil {
				return 0, err
			}
		}
	}
}

func (in *inputs) jsonInOrder(t *data.Tokenizer) (float64, error) {
	f, err := os.Open(in.path("d.jsonl"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	d := json.NewDecoder(bufio.NewReaderSize(f, 1<<20))
	return in.inOrder(t, func() (string, error) {
		var row document
		err := d.Decode(&row)
		return row.Text, err
	})
}

func (in *inputs) parquetInOrder(t *data.Tokenizer) (float64, error) {
	f, err := os.Open(in.path("d.parquet"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	r := pq.NewGenericReader[document](f)
	defer r.Close()
	var rows [256]document
	var left []document
	return in.inOrder(t, func() (string, error) {
		if len(left) == 0 {
			n, err := r.Read(rows[:])
			if left = rows[:n]; n == 0 {
				return "", err
			}
		}
		row := left[0]
		left = left[1:]
		return row.Text, nil
	})
}

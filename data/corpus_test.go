package data_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/trainer"
)

// documents are texts of many lengths, some empty.
func documents(n int) (all []string) {
	r := rand.New(rand.NewPCG(1, 2))
	words := strings.Fields("the a committed step worker mixes naïve 日本語 1234 don't\n\n, .")
	for range n {
		var b strings.Builder
		for range int(r.ExpFloat64() * 12) {
			b.WriteString(words[r.IntN(len(words))] + " ")
		}
		all = append(all, b.String())
	}
	return all
}

// jsonl has a text in each line, between other fields and empty lines.
func jsonl(texts []string) (b []byte) {
	for i, text := range texts {
		line, err := json.Marshal(map[string]any{"id": i, "text": text, "more": []int{1}})
		if err != nil {
			panic(err)
		}
		b = append(append(b, line...), "\n\n"[:1+i%2]...)
	}
	return b
}

// corpus writes documents over files of three kinds, and returns them tokenized, together with their tokens.
func corpus(t *testing.T, texts []string) (s *data.Stream, want [][]int32) {
	t.Helper()
	dir, k := t.TempDir(), tokenizer(t, "llama3")
	n := len(texts) / 3
	write(t, filepath.Join(dir, "a.jsonl"), jsonl(texts[:n]))
	write(t, filepath.Join(dir, "b.jsonl.gz"), packed(t, ".gz", jsonl(texts[n:2*n])))
	write(t, filepath.Join(dir, "c.jsonl.zst"), packed(t, ".zst", jsonl(texts[2*n:])))
	c, err := data.JSONL("text", dir)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = data.Tokenize(k, "<|eot|>", c); err != nil {
		t.Fatal(err)
	}
	end, _ := k.Token("<|eot|>")
	for _, text := range texts {
		want = append(want, append(k.Encode(nil, text), end))
	}
	return s, want
}

// The tokens of documents follow one another, an end behind each.
func TestTokenize(t *testing.T) {
	s, documents := corpus(t, documents(200))
	want := slices.Concat(documents...)
	if s.Tokens() != int64(len(want)) {
		t.Fatalf("%d tokens, want %d", s.Tokens(), len(want))
	}
	const context = 16
	d := bound(t, s, context)
	for i := range d.Len() {
		x, y := sample(t, d, trainer.Sample{Index: i}, context)
		if !slices.Equal(x, want[i*context:][:context]) || !slices.Equal(y, want[i*context+1:][:context]) {
			t.Fatalf("sample %d: %v %v", i, x, y)
		}
	}
	// Files are documents as well.
	dir := t.TempDir()
	write(t, filepath.Join(dir, "1.txt"), []byte("one two"))
	write(t, filepath.Join(dir, "2.txt.zst"), packed(t, ".zst", []byte("three")))
	files, err := data.Files(dir)
	if err != nil {
		t.Fatal(err)
	}
	k := tokenizer(t, "gpt2")
	if s, err = data.Tokenize(k, "<|endoftext|>", files); err != nil {
		t.Fatal(err)
	}
	x, _ := sample(t, bound(t, s, int(s.Tokens()-1)), trainer.Sample{}, int(s.Tokens()-1))
	if got := string(k.Decode(x)); got != "one two<|endoftext|>three" {
		t.Errorf("%q", got)
	}
}

// Packed contexts have each target of each document once, behind the token before it, and little else.
func TestPack(t *testing.T) {
	s, documents := corpus(t, documents(600))
	for _, context := range []int{1, 16, 64, 1000} {
		for _, cut := range []int{0, 100} {
			stream, rest := s, documents
			if cut > 0 {
				// The cut is within a document, which counts for neither part.
				n := len(slices.Concat(documents[:cut]...))
				for n++; len(documents[cut]) < 2; cut++ {
					n += len(documents[cut])
				}
				_, stream = s.Split(int64(n))
				rest = documents[cut+1:]
			}
			p, err := stream.Pack()
			if err != nil {
				t.Fatal(err)
			}
			d := bound(t, p, context)
			pairs, filled := map[[2]int32]int{}, 0
			for i := range d.Len() {
				x, y := sample(t, d, trainer.Sample{Index: i}, context)
				for k := range x {
					if y[k] >= 0 {
						pairs[[2]int32{x[k], y[k]}]++
						filled++
					} else if y[k] != -1 || k == 0 {
						t.Fatalf("sample %d: %v %v", i, x, y)
					}
				}
			}
			want := 0
			for _, document := range rest {
				for k := range len(document) - 1 {
					pairs[[2]int32{document[k], document[k+1]}]--
					want++
				}
			}
			for pair, n := range pairs {
				if n != 0 {
					t.Fatalf("context %d: the pair %v comes %d times too often", context, pair, n)
				}
			}
			if share := float64(want) / float64(d.Len()*context); want != filled || share < 0.9 {
				t.Errorf("context %d: %d targets, want %d; %.2f of %d contexts are filled", context, filled, want, share, d.Len())
			}
			again := bound(t, p, context)
			equal(t, again, d, context)
			if got, want := fmt.Sprint(again.(trainer.Manifest).Manifest()), fmt.Sprint(d.(trainer.Manifest).Manifest()); got != want {
				t.Errorf("fingerprint %s, want %s", got, want)
			}
		}
	}
}

func TestCorpusFaults(t *testing.T) {
	dir, k := t.TempDir(), tokenizer(t, "gpt2")
	plain, err := data.Text(write(t, filepath.Join(dir, "plain"), []byte("text")))
	if err != nil {
		t.Fatal(err)
	}
	tokenize := func(end string, lines string) func() error {
		return func() error {
			c, err := data.JSONL("text", write(t, filepath.Join(dir, "a.jsonl"), []byte(lines)))
			if err != nil {
				return err
			}
			s, err := data.Tokenize(k, end, c)
			if err != nil {
				return err
			}
			p, err := s.Pack()
			if err != nil {
				return err
			}
			_, err = trainer.Bind(p, tokensOf(4), tokensOf(4))
			return err
		}
	}
	const end = "<|endoftext|>"
	for _, c := range []struct {
		try  func() error
		want string
	}{
		{func() error { _, err := data.JSONL("text", filepath.Join(dir, "none")); return err }, "none: no such file"},
		{func() error { _, err := plain.Pack(); return err }, "plain: has no documents to pack"},
		{tokenize("<|end|>", ""), `gpt2.json: has no token "<|end|>"`},
		{tokenize(end, "{\"text\":\"a\"}\n[1]\n"), "a.jsonl: line 2: is no JSON object"},
		{tokenize(end, "\n{\"txt\":\"a\"}\n"), `a.jsonl: line 2: has no field "text"`},
		{tokenize(end, "{\"text\":null}"), `a.jsonl: line 1: field "text" is no string`},
		{tokenize(end, "{\"text\":\"\"}"), "has no document with text"},
		{tokenize(end, "\n"), "has no tokens"},
	} {
		err := c.try()
		if e := (*trainer.DataError)(nil); !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want a DataError with %q", err, c.want)
		}
	}
}

func FuzzJSONL(f *testing.F) {
	k := tokenizer(f, "gpt2")
	f.Add(jsonl([]string{"one", "two"}))
	f.Fuzz(func(t *testing.T, content []byte) {
		c, err := data.JSONL("text", write(t, filepath.Join(t.TempDir(), "a.jsonl"), content))
		if err != nil {
			t.Fatal(err)
		}
		s, err := data.Tokenize(k, "<|endoftext|>", c)
		if err != nil {
			if !errors.As(err, new(*trainer.DataError)) {
				t.Errorf("%T: %v", err, err)
			}
			return
		}
		if s.Tokens() < 1 || s.Tokens() > 3*int64(len(content)) { // a byte that is no UTF-8 becomes a character of three
			t.Errorf("%d tokens in %d bytes", s.Tokens(), len(content))
		}
	})
}

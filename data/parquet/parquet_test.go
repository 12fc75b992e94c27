package parquet_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pq "github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/data/parquet"
	"github.com/soliton-train/soliton/trainer"
)

// TestMain keeps prepared files out of the user's folder.
func TestMain(m *testing.M) {
	cache, err := os.MkdirTemp("", "parquet-test-")
	if err != nil {
		panic(err)
	}
	_ = os.Setenv("XDG_CACHE_HOME", cache)
	_ = os.Setenv("HOME", cache)
	status := m.Run()
	_ = os.RemoveAll(cache)
	os.Exit(status)
}

type row struct {
	ID   int64    `parquet:"id"`
	Text *string  `parquet:"text,optional,dict"`
	Meta meta     `parquet:"meta"`
	Tags []string `parquet:"tags,list"`
}

type meta struct {
	Title string `parquet:"title"`
}

func table(tb testing.TB, n int, codec compress.Codec) []byte {
	tb.Helper()
	var b bytes.Buffer
	w := pq.NewGenericWriter[row](&b, pq.Compression(codec), pq.PageBufferSize(512), pq.MaxRowsPerRowGroup(40))
	for i := range n {
		text := fmt.Sprintf("text %d", i)
		r := row{ID: int64(i), Text: &text, Meta: meta{fmt.Sprint("title ", i)}, Tags: []string{"a", "b"}}
		if i%5 == 3 {
			r.Text = nil
		}
		if _, err := w.Write([]row{r}); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

func write(tb testing.TB, path string, content []byte) string {
	tb.Helper()
	if err := os.WriteFile(path, content, 0o644); err != nil {
		tb.Fatal(err)
	}
	return path
}

func tokenizer(tb testing.TB) *data.Tokenizer {
	tb.Helper()
	k, err := data.ReadTokenizer("../testdata/gpt2.json")
	if err != nil {
		tb.Fatal(err)
	}
	return k
}

const end = "<|endoftext|>"

// The values of a column are documents, over pages, row groups, codecs and files, and rows without a value are none.
func TestText(t *testing.T) {
	k := tokenizer(t)
	for i, codec := range []compress.Codec{&pq.Uncompressed, &pq.Snappy, &pq.Zstd} {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "a.parquet"), table(t, 100, codec))
		write(t, filepath.Join(dir, "b.parquet"), table(t, 7, codec))
		for column, text := range map[string]string{"text": "text", "meta.title": "title"} {
			c, err := parquet.Text(column, dir)
			if err != nil {
				t.Fatal(err)
			}
			s, err := data.Tokenize(k, end, c)
			if err != nil {
				t.Fatal(err)
			}
			spec := trainer.Spec{Shape: []int{int(s.Tokens()) - 1}, Kind: trainer.Int32}
			d, err := trainer.Bind(s, spec, spec)
			if err != nil {
				t.Fatal(err)
			}
			x, y := trainer.NewTensor(trainer.Int32, spec.Shape...), trainer.NewTensor(trainer.Int32, spec.Shape...)
			if err := d.Sample(trainer.Sample{}, x, y); err != nil {
				t.Fatal(err)
			}
			want := ""
			for _, n := range []int{100, 7} {
				for i := range n {
					if text == "title" || i%5 != 3 {
						want += fmt.Sprintf("%s %d%s", text, i, end)
					}
				}
			}
			if got := string(k.Decode(x.I)) + end; got != want {
				t.Errorf("codec %d, column %s: %.200s, want %.200s", i, column, got, want)
			}
		}
	}
}

func TestFaults(t *testing.T) {
	dir, k := t.TempDir(), tokenizer(t)
	whole := table(t, 50, &pq.Snappy)
	broken := bytes.Clone(whole)
	copy(broken[len(broken)-8:], "\xff\xff\xff\xff")
	for _, c := range []struct {
		column  string
		content []byte
		want    string
	}{
		{"none", whole, `a.parquet: has no column "none"`},
		{"id", whole, `a.parquet: column "id" is`},
		{"tags.list.element", whole, `a.parquet: column "tags.list.element" is`},
		{"text", []byte("text, and nothing else"), "a.parquet: is no Parquet file"},
		{"text", nil, "a.parquet: is no Parquet file"},
		{"text", broken, "a.parquet: has a footer of 4294967295 bytes"},
		{"text", append([]byte("PAR1"), bytes.Clone(whole[len(whole)/2:])...), "a.parquet: "},
	} {
		corpus, err := parquet.Text(c.column, write(t, filepath.Join(dir, "a.parquet"), c.content))
		if err == nil {
			_, err = data.Tokenize(k, end, corpus)
		}
		if e := (*trainer.DataError)(nil); !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want a DataError with %q", err, c.want)
		}
	}
}

func FuzzText(f *testing.F) {
	f.Add(table(f, 20, &pq.Snappy))
	f.Add(table(f, 3, &pq.Uncompressed))
	k := tokenizer(f)
	f.Fuzz(func(t *testing.T, content []byte) {
		c, err := parquet.Text("text", write(t, filepath.Join(t.TempDir(), "a.parquet"), content))
		if err == nil {
			_, err = data.Tokenize(k, end, c)
		}
		if err != nil && !errors.As(err, new(*trainer.DataError)) {
			t.Errorf("%T: %v", err, err)
		}
	})
}

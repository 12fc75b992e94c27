package bucket_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/data"
	_ "github.com/soliton-train/soliton/data/bucket"
	"github.com/soliton-train/soliton/internal/testkit/s3"
	"github.com/soliton-train/soliton/trainer"
)

// serve serves a folder, and returns the one of its bucket.
func serve(t *testing.T) (s *s3.Server, dir string) {
	t.Helper()
	s = &s3.Server{Dir: t.TempDir()}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "here", "AWS_ENDPOINT_URL": server.URL, "AWS_ENDPOINT_URL_S3": "",
	} {
		t.Setenv(name, value)
	}
	return s, filepath.Join(s.Dir, "corpus")
}

func write(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

const context = 50

func bound(t *testing.T, d trainer.Dataset) trainer.Dataset {
	t.Helper()
	spec := trainer.Spec{Shape: []int{context}, Kind: trainer.Int32}
	b, err := trainer.Bind(d, spec, spec)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func sample(d trainer.Dataset, i int) ([]int32, error) {
	x, y := trainer.NewTensor(trainer.Int32, context), trainer.NewTensor(trainer.Int32, context)
	err := d.Sample(trainer.Sample{Index: i}, x, y)
	return append(x.I, y.I...), err
}

// Objects have the samples of files, over their borders and those of blocks, and are asked for a block at a time.
func TestSamples(t *testing.T) {
	server, dir := serve(t)
	local := t.TempDir()
	for i, n := range []int{300, 700_000, 0, 5000} {
		text := make([]byte, n)
		for k := range text {
			text[k] = byte(k*7 + k>>8 + i)
		}
		name := fmt.Sprintf("part-%d.bin", i)
		write(t, filepath.Join(dir, "web", name), text)
		write(t, filepath.Join(local, name), text)
	}
	write(t, filepath.Join(dir, "web", ".hidden.bin"), []byte("x"))
	write(t, filepath.Join(dir, "other.bin"), []byte("x"))
	files, err := data.Text(local)
	if err != nil {
		t.Fatal(err)
	}
	want := bound(t, files)
	for _, url := range []string{"s3://corpus/web", "s3://corpus/web/", "s3://corpus/web/part-*.bin"} {
		s, err := data.Text(url)
		if err != nil {
			t.Fatal(err)
		}
		got := bound(t, s)
		if got.Len() != want.Len() || s.Tokens() != files.Tokens() {
			t.Fatalf("%s: %d samples of %d tokens, want %d of %d", url, got.Len(), s.Tokens(), want.Len(), files.Tokens())
		}
		before := server.Requests.Load()
		for i := range want.Len() {
			a, err1 := sample(got, i)
			b, err2 := sample(want, i)
			if err := errors.Join(err1, err2); err != nil || !slices.Equal(a, b) {
				t.Fatalf("%s: sample %d is %v, want %v (%v)", url, i, a, b, err)
			}
		}
		if n := server.Requests.Load() - before; n > 10 {
			t.Errorf("%d requests for 3 objects of 705 kB", n)
		}
		if m := got.(trainer.Manifest).Manifest(); len(m) != 4 || m[1].Path != "s3://corpus/web/part-1.bin" || m[1].Size != 700_000 || m[1].SHA256 == m[3].SHA256 {
			t.Errorf("%s: fingerprint %v", url, m)
		}
	}
}

// An object that has changed, and a server that does not answer, are errors of a sample; the next attempt asks again.
func TestFaults(t *testing.T) {
	server, dir := serve(t)
	path := filepath.Join(dir, "a.bin")
	write(t, path, bytes.Repeat([]byte("a text "), 1000))
	s, err := data.Text("s3://corpus/a.bin")
	if err != nil {
		t.Fatal(err)
	}
	d := bound(t, s)
	server.Down.Store(true)
	if _, err := sample(d, 0); !errors.As(err, new(*trainer.DataError)) || !strings.Contains(err.Error(), "s3://corpus/a.bin: byte 0: ") {
		t.Errorf("a server that is down: %v", err)
	}
	server.Down.Store(false)
	if _, err := sample(d, 0); err != nil {
		t.Error(err)
	}
	if err := os.Chtimes(path, time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	d = bound(t, s)
	if s, err = data.Text("s3://corpus/a.bin"); err != nil {
		t.Fatal(err)
	}
	old := bound(t, s)
	if err := os.Chtimes(path, time.Time{}, time.Unix(2, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := sample(old, 0); err == nil || !strings.Contains(err.Error(), "the object has changed") {
		t.Errorf("an object that has changed: %v", err)
	}
	if _, err := sample(d, 0); err != nil {
		t.Errorf("what was read before: %v", err)
	}
	for url, want := range map[string]string{
		"s3://corpus/none": "no object matches", "s3://none/a": "s3://none/a: ", "s3:///a": "give s3://BUCKET/OBJECTS", "s3://corpus/[": "is not a valid pattern",
		"s3://corpus/a?colour=red": "colour is not known", "s3://corpus/a?endpoint=x": "endpoint is not the URL of a server", "gs://corpus/a": "nothing reads gs:// here",
	} {
		if _, err := data.Text(url); !errors.As(err, new(*trainer.DataError)) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", url, err, want)
		}
	}
	if _, err := data.Text("s3://corpus/a.bin", path); err == nil || !strings.Contains(err.Error(), "a data set each") {
		t.Errorf("files and objects in one: %v", err)
	}
}

// Formats that are read as a whole are copied first, once.
func TestCopies(t *testing.T) {
	server, dir := serve(t)
	var lines []byte
	for i := range 200 {
		lines = fmt.Appendf(lines, "{\"text\": \"document %d\"}\n", i)
	}
	write(t, filepath.Join(dir, "a.jsonl"), lines)
	k, err := data.ReadTokenizer("../testdata/gpt2.json")
	if err != nil {
		t.Fatal(err)
	}
	open := func(pattern string) *data.Stream {
		c, err := data.JSONL("text", pattern)
		if err != nil {
			t.Fatal(err)
		}
		s, err := data.Tokenize(k, "<|endoftext|>", c)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	got, want := open("s3://corpus/a.jsonl"), open(filepath.Join(dir, "a.jsonl"))
	if got.Tokens() != want.Tokens() {
		t.Errorf("%d tokens, want %d", got.Tokens(), want.Tokens())
	}
	before := server.Requests.Load()
	open("s3://corpus/a.jsonl")
	if n := server.Requests.Load() - before; n != 1 {
		t.Errorf("%d requests for an object that was copied", n)
	}
}

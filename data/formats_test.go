package data_test

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/trainer"
)

// idx is a file of bytes with these dimensions.
func idx(content []byte, dims ...int) []byte {
	b := []byte{0, 0, 8, byte(len(dims))}
	for _, n := range dims {
		b = binary.BigEndian.AppendUint32(b, uint32(n))
	}
	return append(b, content...)
}

func TestIDX(t *testing.T) {
	dir := t.TempDir()
	const n, side = 7, 3
	var images, labels []byte
	for i := range n {
		for k := range side * side {
			images = append(images, byte(i*31+k*7))
		}
		labels = append(labels, byte(i%3))
	}
	write(t, filepath.Join(dir, "x"), idx(images, n, side, side))
	write(t, filepath.Join(dir, "x.gz"), packed(t, ".gz", idx(images, n, side, side)))
	write(t, filepath.Join(dir, "y"), idx(labels, n))
	in, target := trainer.Spec{Shape: []int{1, side, side}}, trainer.Spec{Shape: []int{1}, Kind: trainer.Int32}
	for _, name := range []string{"x", "x.gz"} {
		d, err := data.IDX(filepath.Join(dir, name), filepath.Join(dir, "y"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := trainer.Bind(d, in, target)
		if err != nil || b.Len() != n || len(b.(trainer.Manifest).Manifest()) != 2 {
			t.Fatal(b, err)
		}
		x, y := trainer.NewTensor(trainer.Float32, 1, side, side), trainer.NewTensor(trainer.Int32, 1)
		for i := range n {
			if err := b.Sample(trainer.Sample{Index: i}, x, y); err != nil {
				t.Fatal(err)
			}
			for k, v := range x.F {
				if v != float32(byte(i*31+k*7))/255 {
					t.Fatalf("image %d: %v", i, x.F)
				}
			}
			if y.I[0] != int32(i%3) {
				t.Errorf("image %d has label %d", i, y.I[0])
			}
		}
		if _, err := trainer.Bind(d, trainer.Spec{Shape: []int{8}}, target); err == nil || !strings.Contains(err.Error(), "images of [3 3] are for models with a float32 input of 9 numbers") {
			t.Error(err)
		}
	}
	for want, files := range map[string][2][]byte{
		"b: has 2 labels for the 1 images": {idx(make([]byte, 4), 1, 2, 2), idx(make([]byte, 2), 2)},
		"a: is no idx file of bytes":       {[]byte("text"), nil},
		"b: is no idx file of bytes":       {idx(make([]byte, 4), 1, 2, 2), idx(make([]byte, 4), 1, 2, 2)},
		"a: has 3 bytes of data":           {idx(make([]byte, 3), 1, 2, 2), nil},
		"a: has the dimensions":            {idx(nil, 1<<31, 1<<31, 1<<31), nil},
		"a: has no images":                 {idx(nil, 0, 2, 2), idx(nil, 0)},
	} {
		_, err := data.IDX(write(t, filepath.Join(dir, "a"), files[0]), write(t, filepath.Join(dir, "b"), files[1]))
		if e := (*trainer.DataError)(nil); !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want a DataError with %q", err, want)
		}
	}
}

func FuzzIDX(f *testing.F) {
	f.Add(idx(make([]byte, 8), 2, 2, 2), idx([]byte{0, 1}, 2))
	f.Fuzz(func(t *testing.T, images, labels []byte) {
		dir := t.TempDir()
		d, err := data.IDX(write(t, filepath.Join(dir, "a"), images), write(t, filepath.Join(dir, "b"), labels))
		if err != nil {
			if !errors.As(err, new(*trainer.DataError)) {
				t.Errorf("%T: %v", err, err)
			}
			return
		}
		_ = d
	})
}

// member is a file of an archive, or a folder if its name ends with a slash.
type member struct{ name, content string }

func archive(t testing.TB, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		h := &tar.Header{Name: m.name, Size: int64(len(m.content)), Mode: 0o644, Typeflag: tar.TypeReg}
		if strings.HasSuffix(m.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(m.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Samples of archives, plain and compressed, are read in any order, and decoded; their texts are a corpus.
func TestTar(t *testing.T) {
	dir := t.TempDir()
	var all []member
	long := strings.Repeat("d/", 80) // a name that needs a header of its own
	for i := range 10 {
		folder := []string{"", "train/", long}[i%3]
		all = append(all, member{folder, ""}, member{fmt.Sprintf("%s%03d.cls", folder, i), fmt.Sprint(i % 4)}, member{fmt.Sprintf("%s%03d.seg.txt", folder, i), strings.Repeat("x", 300*i)})
	}
	all[0].name, all[9].name = "./", ".hidden.txt"
	for i := range all {
		if all[i].name == "" {
			all[i].name = "other/"
		}
	}
	write(t, filepath.Join(dir, "a-0.tar"), archive(t, all[:12]...))
	write(t, filepath.Join(dir, "a-1.tar.gz"), packed(t, ".gz", archive(t, all[12:21]...)))
	write(t, filepath.Join(dir, "a-2.tar.zst"), packed(t, ".zst", archive(t, all[21:]...)))
	s, err := data.Tar(filepath.Join(dir, "a-*"))
	if err != nil {
		t.Fatal(err)
	}
	if s.Samples() != 10 || !slices.Equal(s.Fields(), []string{"cls", "seg.txt"}) {
		t.Fatalf("%d samples with fields %q", s.Samples(), s.Fields())
	}
	if _, err := s.Read(10); err == nil {
		t.Error("there is a sample 10")
	}
	d := s.Data("1", func(fields map[string][]byte, s trainer.Sample, in, target trainer.Tensor) error {
		class, err := strconv.Atoi(string(fields["cls"]))
		in.F[0], target.I[0] = float32(len(fields["seg.txt"])), int32(class)
		return err
	})
	one := trainer.Spec{Shape: []int{1}}
	b, err := trainer.Bind(d, one, tokensOf(1))
	if err != nil || b.Len() != 10 {
		t.Fatal(b, err)
	}
	x, y := trainer.NewTensor(trainer.Float32, 1), trainer.NewTensor(trainer.Int32, 1)
	for k := range 20 {
		i := k * 7 % 10
		if err := b.Sample(trainer.Sample{Index: i}, x, y); err != nil || x.F[0] != float32(300*i) || y.I[0] != int32(i%4) {
			t.Fatal(i, x.F, y.I, err)
		}
	}
	sums := func(d trainer.Dataset) string {
		b, err := trainer.Bind(d, one, tokensOf(1))
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(b.(trainer.Manifest).Manifest())
	}
	if sums(d) != sums(s.Data("1", nil)) || sums(d) == sums(s.Data("2", nil)) {
		t.Error("the fingerprint does not follow the version")
	}
	stream, err := data.Tokenize(tokenizer(t, "gpt2"), "<|endoftext|>", s.Texts("cls"))
	if err != nil || stream.Tokens() != 20 {
		t.Error(stream, err)
	}
}

func TestTarFaults(t *testing.T) {
	dir := t.TempDir()
	whole := archive(t, member{"a.txt", strings.Repeat("x", 2000)}, member{"b.txt", "y"})
	var many []member
	for i := range 300 {
		many = append(many, member{fmt.Sprintf("a.%d", i), ""})
	}
	for want, content := range map[string][]byte{
		"a.tar: byte 512: ":             whole[:1024],
		"a.tar: byte 512: arch":         []byte(strings.Repeat("text ", 200)),
		"has the field \"txt\" twice":   archive(t, member{"a.txt", "1"}, member{"a.txt", "2"}),
		"a.tar: has no samples":         archive(t, member{"README", "1"}),
		"one more field than 256":       archive(t, many...),
		"a.tar: has no samples (1 arch": nil,
	} {
		_, err := data.Tar(write(t, filepath.Join(dir, "a.tar"), content))
		if e := (*trainer.DataError)(nil); !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want a DataError with %q", err, want)
		}
	}
	path := write(t, filepath.Join(dir, "b.tar"), whole)
	s, err := data.Tar(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 700); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(0); err == nil || !strings.Contains(err.Error(), "b.tar: has changed") {
		t.Error(err)
	}
}

func FuzzTar(f *testing.F) {
	f.Add(archive(f, member{"a.txt", "text"}, member{"a.cls", "1"}, member{"b.txt", strings.Repeat("x", 1000)}))
	f.Fuzz(func(t *testing.T, content []byte) {
		s, err := data.Tar(write(t, filepath.Join(t.TempDir(), "a.tar"), content))
		if err != nil {
			if !errors.As(err, new(*trainer.DataError)) {
				t.Errorf("%T: %v", err, err)
			}
			return
		}
		total := 0
		for i := range s.Samples() {
			fields, err := s.Read(i)
			if err != nil {
				t.Fatal(err)
			}
			for _, value := range fields {
				total += len(value)
			}
		}
		if total > len(content) {
			t.Errorf("%d bytes in an archive of %d", total, len(content))
		}
	})
}

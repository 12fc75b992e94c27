package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func encode(t testing.TB) ([]byte, []Info, [][]float32) {
	infos := []Info{{"z.weight", []int{2, 3}}, {"none", []int{0, 4}}, {"a \"quoted\" ü", []int{}}, {"big", []int{20000}}}
	var data [][]float32
	for i, info := range infos {
		d := make([]float32, info.Len())
		for j := range d {
			d[j] = float32(i) + float32(j)/8
		}
		data = append(data, d)
	}
	data[0][0] = float32(math.Copysign(0, -1))
	var b bytes.Buffer
	w, err := NewWriter(&b, map[string]string{"format": "pt"}, infos)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range data[:3] {
		if err := w.Write(d); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err == nil {
		t.Error("Close did not notice that a tensor is missing")
	}
	for _, piece := range [][]float32{data[3][:7], data[3][7:]} {
		if err := w.Write(piece); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if err := w.Write([]float32{1}); err == nil {
		t.Error("more elements than declared were written")
	}
	return b.Bytes(), infos, data
}

func open(t testing.TB, content []byte) (*File, error) {
	path := filepath.Join(t.TempDir(), "m.safetensors")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err == nil {
		t.Cleanup(func() { f.Close() })
	}
	return f, err
}

func TestRoundTrip(t *testing.T) {
	b, infos, data := encode(t)
	if n := binary.LittleEndian.Uint64(b); n%8 != 0 {
		t.Errorf("the header has %d bytes, no multiple of 8", n)
	}
	f, err := open(t, b)
	if err != nil {
		t.Fatal(err)
	}
	if f.Metadata["format"] != "pt" || len(f.Tensors) != len(infos) {
		t.Fatalf("read %v with metadata %v", f.Tensors, f.Metadata)
	}
	for i, info := range infos {
		if i == 0 || i == 3 { // the empty and the scalar tensor may change places
			if got := f.Tensors[i]; got.Name != info.Name || !reflect.DeepEqual(got.Shape, info.Shape) {
				t.Errorf("tensor %d is %v, want %v", i, got, info)
			}
		}
		got := make([]float32, info.Len())
		if err := f.Read(info.Name, got); err != nil {
			t.Fatal(err)
		}
		for j := range got {
			if math.Float32bits(got[j]) != math.Float32bits(data[i][j]) {
				t.Fatalf("%s[%d] is %v, want %v", info.Name, j, got[j], data[i][j])
			}
		}
	}
	piece := make([]float32, 17000)
	if err := f.ReadAt("big", 1234, piece); err != nil || piece[0] != data[3][1234] || piece[16999] != data[3][18233] {
		t.Errorf("reading a piece: %v and %v, %v", piece[0], piece[16999], err)
	}
	if n, ok := f.Len("big"); n != 20000 || !ok {
		t.Errorf("Len = %d, %v", n, ok)
	}
	var e *Error
	for _, c := range []struct{ at, n int }{{-1, 1}, {20000, 1}, {1, 20000}, {20001, 0}, {math.MaxInt, 2}} {
		if err := f.ReadAt("big", c.at, make([]float32, c.n)); !errors.As(err, &e) || e.Tensor != "big" {
			t.Errorf("reading %d from %d: %v", c.n, c.at, err)
		}
	}
	if err := f.Read("z.weight", make([]float32, 5)); !errors.As(err, &e) || e.Tensor != "z.weight" {
		t.Errorf("reading into the wrong size: %v", err)
	}
	if err := f.Read("nobody", nil); !errors.As(err, &e) || e.Tensor != "nobody" {
		t.Errorf("reading an unknown tensor: %v", err)
	}
}

func TestWriterRefusesNames(t *testing.T) {
	for _, names := range [][]string{{"a", "a"}, {metadataKey}, {"\xff"}} {
		var infos []Info
		for _, n := range names {
			infos = append(infos, Info{n, []int{1}})
		}
		if _, err := NewWriter(&bytes.Buffer{}, nil, infos); err == nil {
			t.Errorf("%q was accepted", names)
		}
	}
}

func raw(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

func TestBrokenFiles(t *testing.T) {
	const one = `"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}`
	good, _, _ := encode(t)
	for _, c := range []struct {
		name    string
		content []byte
		want    string
	}{
		{"empty", nil, "cut short"},
		{"no header", raw("", 0), "no JSON object"},
		{"cut in header", good[:40], "cut short"},
		{"cut in data", good[:len(good)-1], `"big" is cut short`},
		{"huge header", binary.LittleEndian.AppendUint64(nil, 1<<62), "not a safetensors file"},
		{"text", []byte(strings.Repeat("hello ", 10)), "not a safetensors file"},
		{"list", raw(`[]`, 0), "no JSON object"},
		{"cut JSON", raw(`{`+one, 8), "broken header"},
		{"rubbish behind", raw(`{`+one+`}x`, 8), "1 bytes after"},
		{"twice", raw(`{`+one+`,`+one+`}`, 8), "declared twice"},
		{"type", raw(strings.Replace(`{`+one+`}`, "F32", "BF16", 1), 8), `type "BF16"`},
		{"shape", raw(`{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}`, 8), "impossible shape"},
		{"overflow", raw(`{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0), "impossible shape"},
		{"size", raw(`{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8), "takes 12"},
		{"offsets", raw(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}`, 8), "impossible offsets"},
		{"no offsets", raw(`{"a":{"dtype":"F32","shape":[2]}}`, 8), "lacks"},
		{"gap", raw(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`, 12), "gap"},
		{"overlap", raw(`{`+one+`,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`, 12), "overlap"},
		{"too long", raw(`{`+one+`}`, 9), "belong to no tensor"},
		{"metadata", raw(`{"__metadata__":{"a":1}}`, 0), "broken header"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := open(t, c.content)
			var e *Error
			if !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "m.safetensors") {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
		})
	}
}

func TestOpenMissing(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	var e *Error
	if _, err := Open(t.TempDir()); !errors.As(err, &e) {
		t.Errorf("opening a directory: %v", err)
	}
}

// Whatever the header says, either it is refused or the tensors fill the data
// exactly.
func FuzzParse(f *testing.F) {
	good, _, _ := encode(f)
	n := int(binary.LittleEndian.Uint64(good))
	f.Add(good[8:8+n], int64(len(good)-8-n))
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`), int64(8))
	f.Fuzz(func(t *testing.T, header []byte, size int64) {
		file := new(File)
		if size < 0 || file.parse(header, size) != nil {
			return
		}
		var sum int64
		for _, info := range file.Tensors {
			sum += 4 * int64(info.Len())
		}
		if sum != size {
			t.Fatalf("tensors of %d bytes in %d bytes of data", sum, size)
		}
	})
}

package data_test

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/trainer"
)

// TestMain keeps prepared files out of the user's folder.
func TestMain(m *testing.M) {
	cache, err := os.MkdirTemp("", "data-test-")
	if err != nil {
		panic(err)
	}
	_ = os.Setenv("XDG_CACHE_HOME", cache)
	_ = os.Setenv("HOME", cache)
	status := m.Run()
	_ = os.RemoveAll(cache)
	os.Exit(status)
}

func tokensOf(context int) trainer.Spec {
	return trainer.Spec{Shape: []int{context}, Kind: trainer.Int32}
}

func bound(t *testing.T, d trainer.Dataset, context int) trainer.Dataset {
	t.Helper()
	b, err := trainer.Bind(d, tokensOf(context), tokensOf(context))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// sample returns a sample's input and target.
func sample(t *testing.T, d trainer.Dataset, s trainer.Sample, context int) (in, target []int32) {
	t.Helper()
	x, y := trainer.NewTensor(trainer.Int32, context), trainer.NewTensor(trainer.Int32, context)
	if err := d.Sample(s, x, y); err != nil {
		t.Fatal(err)
	}
	return x.I, y.I
}

// equal checks that two data sets have the same samples.
func equal(t *testing.T, got, want trainer.Dataset, context int) {
	t.Helper()
	if got.Len() != want.Len() {
		t.Fatalf("%d samples, want %d", got.Len(), want.Len())
	}
	for i := range want.Len() {
		x, y := sample(t, got, trainer.Sample{Index: i}, context)
		wantX, wantY := sample(t, want, trainer.Sample{Index: i}, context)
		if !slices.Equal(x, wantX) || !slices.Equal(y, wantY) {
			t.Fatalf("sample %d: %v %v, want %v %v", i, x, y, wantX, wantY)
		}
	}
}

func write(t *testing.T, path string, content []byte) string {
	t.Helper()
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func packed(t *testing.T, suffix string, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if suffix == ".gz" {
		w := gzip.NewWriter(&b)
		if _, err := w.Write(content); err != nil || w.Close() != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	w, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(content); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Text has the samples and the fingerprint of trainer.Text, over the borders of files, empty ones, and compressed ones.
func TestText(t *testing.T) {
	dir := t.TempDir()
	plain, compressed := filepath.Join(dir, "plain"), filepath.Join(dir, "compressed")
	if err := errors.Join(os.Mkdir(plain, 0o755), os.Mkdir(compressed, 0o755)); err != nil {
		t.Fatal(err)
	}
	for i, text := range []string{"abc", "", "defghijklmnopqrst", "u", strings.Repeat("vwxyz", 99)} {
		write(t, filepath.Join(plain, fmt.Sprint(i)), []byte(text))
		suffix := []string{".gz", ".zst"}[i%2]
		write(t, filepath.Join(compressed, fmt.Sprint(i)+suffix), packed(t, suffix, []byte(text)))
	}
	want, err := trainer.Text(plain)
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{plain, compressed, compressed} {
		got, err := data.Text(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, context := range []int{1, 7, 64} {
			g, w := bound(t, got, context), bound(t, want, context)
			equal(t, g, w, context)
			sums := func(d trainer.Dataset) (sums []string) {
				for _, f := range d.(trainer.Manifest).Manifest() {
					sums = append(sums, fmt.Sprint(f.Size, f.SHA256))
				}
				return sums
			}
			if !slices.Equal(sums(g), sums(w)) {
				t.Errorf("%s: fingerprint %v, want %v", folder, sums(g), sums(w))
			}
		}
	}
}

// A stream holds out what trainer.Text does: every n-th file, or the last n-th part.
func TestHoldOut(t *testing.T) {
	const context = 4
	dir := t.TempDir()
	for i := range 7 {
		write(t, filepath.Join(dir, fmt.Sprint(i)), bytes.Repeat([]byte{byte('a' + i)}, 5+3*i))
	}
	want, err := trainer.Text(dir)
	if err != nil {
		t.Fatal(err)
	}
	got, err := data.Text(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{2, 3, 7, 8, 10} {
		wantTrain, wantHeld := want.HoldOut(n)
		train, held := got.HoldOut(n)
		equal(t, bound(t, train, context), bound(t, wantTrain, context), context)
		equal(t, bound(t, held, context), bound(t, wantHeld, context), context)
	}
	_, tail := got.Split(got.Tokens() - 40) // has no file of its own any more
	if train, held := tail.HoldOut(4); train.Tokens() != 30 || held.Tokens() != 10 {
		t.Errorf("%d and %d tokens of 40", train.Tokens(), held.Tokens())
	}
}

func TestTokenTypes(t *testing.T) {
	const n, context = 100, 8
	tokens := make([]int64, n)
	for i := range tokens {
		tokens[i] = int64(i*7919) % 200
	}
	encode := func(width int) (b []byte) {
		for _, v := range tokens {
			b = append(b, binary.LittleEndian.AppendUint64(nil, uint64(v))[:width]...)
		}
		return b
	}
	dir := t.TempDir()
	reference, err := data.Text(write(t, filepath.Join(dir, "bytes"), encode(1)))
	if err != nil {
		t.Fatal(err)
	}
	want := bound(t, reference, context)
	for kind, width := range map[data.Type]int{data.Uint8: 1, data.Uint16: 2, data.Uint32: 4, data.Int32: 4, data.Int64: 8} {
		path := write(t, filepath.Join(dir, fmt.Sprint(kind)+".bin"), encode(width))
		got, err := data.Tokens(kind, path)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, bound(t, got, context), want, context)
		head, tail := got.Split(33)
		x, _ := sample(t, bound(t, tail, context), trainer.Sample{}, context)
		if head.Tokens() != 33 || tail.Tokens() != n-33 || int64(x[0]) != tokens[33] {
			t.Errorf("%v: split into %d and %d tokens, the second begins with %d", kind, head.Tokens(), tail.Tokens(), x[0])
		}
	}
	for _, c := range []struct {
		descr   string
		width   int
		version byte
	}{{"|u1", 1, 1}, {"<u2", 2, 1}, {"<u4", 4, 2}, {"<i4", 4, 3}, {"<i8", 8, 1}, {"<u8", 8, 1}} {
		path := write(t, filepath.Join(dir, "array.npy"), npy(c.descr, fmt.Sprintf("(%d,)", n), c.version, encode(c.width)))
		got, err := data.Numpy(path)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, bound(t, got, context), want, context)
	}
}

// npy is an array as numpy.save writes it.
func npy(descr, shape string, version byte, content []byte) []byte {
	header := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': %s, }", descr, shape)
	b := []byte("\x93NUMPY" + string(rune(version)) + "\x00")
	size := 2
	if version > 1 {
		size = 4
	}
	header += strings.Repeat(" ", 63-(len(b)+size+len(header))%64) + "\n"
	b = append(b, binary.LittleEndian.AppendUint32(nil, uint32(len(header)))[:size]...)
	return append(append(b, header...), content...)
}

func TestFaults(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, content []byte) string { return write(t, filepath.Join(dir, name), content) }
	zipped := packed(t, ".gz", bytes.Repeat([]byte("text "), 1000))
	for _, c := range []struct {
		open func() (*data.Stream, error)
		want string
	}{
		{func() (*data.Stream, error) { return data.Text() }, "no data: name at least one file"},
		{func() (*data.Stream, error) { return data.Text(filepath.Join(dir, "none")) }, "none: no such file"},
		{func() (*data.Stream, error) { return data.Text(file("empty", nil)) }, "empty: has no tokens"},
		{func() (*data.Stream, error) { return data.Tokens(data.Uint16, file("odd.bin", []byte("abc"))) }, "odd.bin: has 3 bytes of tokens, no multiple of 2"},
		{func() (*data.Stream, error) { return data.Tokens(data.Type(9), file("a.bin", []byte("ab"))) }, "unknown type"},
		{func() (*data.Stream, error) { return data.Text(file("cut.gz", zipped[:len(zipped)/2])) }, "cut.gz: unpack: unexpected EOF"},
		{func() (*data.Stream, error) { return data.Text(file("no.gz", []byte("plain text"))) }, "no.gz: gzip: invalid header"},
		{func() (*data.Stream, error) { return data.Text(file("no.zst", []byte("plain text"))) }, "no.zst: unpack: "},
		{func() (*data.Stream, error) { return data.Numpy(file("a.npy", []byte("plain text"))) }, "a.npy: is no .npy file"},
		{func() (*data.Stream, error) { return data.Numpy(file("b.npy", npy("<f4", "(1,)", 1, make([]byte, 4)))) }, `b.npy: holds "<f4"`},
		{func() (*data.Stream, error) {
			return data.Numpy(file("c.npy", npy("<u2", "(2, 2)", 1, make([]byte, 8))))
		}, "c.npy: is no array of one dimension"},
		{func() (*data.Stream, error) {
			return data.Numpy(file("b2.npy", npy(">u2", "(4,)", 1, make([]byte, 8))))
		}, `b2.npy: holds ">u2"`},
		{func() (*data.Stream, error) {
			return data.Numpy(file("c2.npy", bytes.Replace(npy("<u2", "(4,)", 1, make([]byte, 8)), []byte("False"), []byte("True "), 1)))
		}, "c2.npy: is not in C order"},
		{func() (*data.Stream, error) { return data.Numpy(file("d.npy", npy("<u2", "(9,)", 1, make([]byte, 8)))) }, "d.npy: has 8 bytes of data for 9 elements"},
		{func() (*data.Stream, error) {
			return data.Numpy(file("e.npy", npy("<u2", "(9,)", 1, nil)[:40]))
		}, "e.npy: ends within its header"},
	} {
		_, err := c.open()
		if e := (*trainer.DataError)(nil); !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want a DataError with %q", err, c.want)
		}
	}
}

// A file that has changed, is gone, or holds what is no token is an error of the sample, and one that is back is read.
func TestUnreadable(t *testing.T) {
	const context = 4
	path := write(t, filepath.Join(t.TempDir(), "a.bin"), []byte("0123456789abcdef\xff\xff\xff\xff"))
	s, err := data.Tokens(data.Uint32, path)
	if err != nil {
		t.Fatal(err)
	}
	d := bound(t, s, context)
	in := trainer.NewTensor(trainer.Int32, context)
	fails := func(d trainer.Dataset, want string) {
		t.Helper()
		if err := d.Sample(trainer.Sample{}, in, trainer.NewTensor(trainer.Int32, context)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	fails(d, "token 4 of the data is negative")
	head, _ := s.Split(3)
	d = bound(t, head, 2)
	short, err := data.Text(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, []byte("shorter"))
	if _, err := trainer.Bind(short, tokensOf(2), tokensOf(2)); err == nil || !strings.Contains(err.Error(), "has changed: it had 20 bytes and has 7 now") {
		t.Error(err)
	}
	in = trainer.NewTensor(trainer.Int32, 2)
	if err := d.Sample(trainer.Sample{}, in, trainer.NewTensor(trainer.Int32, 2)); err == nil || !strings.Contains(err.Error(), "a.bin: byte") {
		t.Error(err)
	}
	write(t, path, []byte("0123456789abcdef\xff\xff\xff\xff"))
	sample(t, d, trainer.Sample{}, 2)
}

// A terabyte, sparse, binds at once, and its last sample is there. A change in what the fingerprint reads shows.
func TestTerabyte(t *testing.T) {
	const context, size = 64, 1 << 40
	path := filepath.Join(t.TempDir(), "train.bin")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Skipf("no sparse file of 1 TB: %v", err)
	}
	sum := func() string {
		s, err := data.Tokens(data.Uint16, path)
		if err != nil {
			t.Fatal(err)
		}
		d := bound(t, s, context)
		if want := (size/2 - 1) / context; d.Len() != want {
			t.Errorf("%d samples, want %d", d.Len(), want)
		}
		sample(t, d, trainer.Sample{Index: d.Len() - 1}, context)
		return d.(trainer.Manifest).Manifest()[0].SHA256
	}
	before := sum()
	if _, err := f.WriteAt([]byte{1}, size-1); err != nil {
		t.Fatal(err)
	}
	if sum() == before {
		t.Error("the fingerprint does not see the last byte")
	}
}

// Processes and goroutines that open one compressed file at once prepare it once, and a file that changes is prepared again.
func TestPreparedOnce(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "a.gz"), packed(t, ".gz", bytes.Repeat([]byte("one "), 10000)))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if s, err := data.Text(path); err != nil || s.Tokens() != 40000 {
				t.Error(s, err)
			}
		})
	}
	wg.Wait()
	write(t, path, packed(t, ".gz", []byte("another text")))
	if s, err := data.Text(path); err != nil || s.Tokens() != 12 {
		t.Error(s, err)
	}
}

// numbered has the index of a sample, and its epoch, as the sample.
type numbered struct{ n, base int }

func (d numbered) Len() int { return d.n }

func (d numbered) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	in.I[0], target.I[0] = int32(d.base+s.Index), int32(s.Epoch)
	return nil
}

// Over many epochs of a mix, each part gets its share to the sample, and gives none again before it has given all.
func TestMix(t *testing.T) {
	mix := data.Mix{Seed: 3, Parts: []data.Part{{numbered{10, 0}, 0.5}, {numbered{70, 1000}, 0.3}, {numbered{7, 2000}, 0.2}}, Samples: 29}
	const epochs = 40
	run := func() (samples [][2]int32, ordered bool) {
		d := bound(t, mix, 1)
		if d.Len() != 29 {
			t.Fatalf("%d samples", d.Len())
		}
		ordered = true
		for e := range epochs {
			for i := range d.Len() {
				in, epoch := sample(t, d, trainer.Sample{Index: i, Epoch: e}, 1)
				samples = append(samples, [2]int32{in[0], epoch[0]})
				ordered = ordered && (len(samples) < 2 || samples[len(samples)-1][0] == samples[len(samples)-2][0]+1)
			}
		}
		return samples, ordered
	}
	samples, ordered := run()
	if ordered {
		t.Error("the parts are not shuffled")
	}
	if again, _ := run(); !slices.Equal(again, samples) {
		t.Error("the same mix has other samples")
	}
	given := map[int32][]int32{} // by sample: epochs of the part in which it was given
	share := map[int32]int{}
	for _, s := range samples {
		given[s[0]] = append(given[s[0]], s[1])
		share[s[0]/1000]++
	}
	// 14.5, 8.7 and 5.8 of 29: 15 or 14, 9 and 6.
	if share[0] != 14*epochs || share[1] != 9*epochs || share[2] != 6*epochs {
		t.Errorf("shares %v", share)
	}
	for i, n := range []int{10, 70, 7} {
		whole := share[int32(i)] / n
		for k := range n {
			epochs := given[int32(1000*i+k)]
			for e := range whole {
				if e >= len(epochs) || epochs[e] != int32(e) {
					t.Fatalf("part %d gives sample %d in its epochs %v, want 0 to %d", i, k, epochs, whole-1)
				}
			}
			if len(epochs) > whole+1 {
				t.Fatalf("part %d gives sample %d in its epochs %v", i, k, epochs)
			}
		}
	}
	// Another order of reading gives the same samples.
	d := bound(t, mix, 1)
	for k := len(samples) - 1; k >= 0; k -= 7 {
		in, _ := sample(t, d, trainer.Sample{Index: k % 29, Epoch: k / 29}, 1)
		if in[0] != samples[k][0] {
			t.Fatalf("sample %d: %d, want %d", k, in[0], samples[k][0])
		}
	}
	for _, bad := range []data.Mix{{}, {Parts: []data.Part{{nil, 1}}}, {Parts: []data.Part{{numbered{1, 0}, 0}}}, {Samples: -1, Parts: []data.Part{{numbered{1, 0}, 1}}},
		{Parts: []data.Part{{numbered{0, 0}, 1}}}} {
		if _, err := trainer.Bind(bad, tokensOf(1), tokensOf(1)); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

func FuzzNumpy(f *testing.F) {
	f.Add(npy("<u2", "(4,)", 1, make([]byte, 8)))
	f.Add(npy("<i8", "(1,)", 2, make([]byte, 8)))
	f.Fuzz(func(t *testing.T, content []byte) {
		s, err := data.Numpy(write(t, filepath.Join(t.TempDir(), "a.npy"), content))
		if err != nil {
			if !errors.As(err, new(*trainer.DataError)) {
				t.Errorf("%T: %v", err, err)
			}
			return
		}
		if s.Tokens() < 1 || s.Tokens() > int64(len(content)) {
			t.Errorf("%d tokens in %d bytes", s.Tokens(), len(content))
		}
	})
}

func BenchmarkTokens(b *testing.B) {
	const context = 1024
	path := filepath.Join(b.TempDir(), "train.bin")
	if err := os.WriteFile(path, make([]byte, 64<<20), 0o644); err != nil {
		b.Fatal(err)
	}
	s, err := data.Tokens(data.Uint16, path)
	if err != nil {
		b.Fatal(err)
	}
	d, err := trainer.Bind(s, tokensOf(context), tokensOf(context))
	if err != nil {
		b.Fatal(err)
	}
	x, y := trainer.NewTensor(trainer.Int32, context), trainer.NewTensor(trainer.Int32, context)
	b.SetBytes(2 * context)
	for i := 0; b.Loop(); i++ {
		if err := d.Sample(trainer.Sample{Index: i * 7919 % d.Len()}, x, y); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPlain is what BenchmarkTokens is compared with: the file alone, read at the same places.
func BenchmarkPlain(b *testing.B) {
	const context = 1024
	path := filepath.Join(b.TempDir(), "train.bin")
	if err := os.WriteFile(path, make([]byte, 64<<20), 0o644); err != nil {
		b.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, 2*(context+1))
	b.SetBytes(2 * context)
	for i := 0; b.Loop(); i++ {
		if _, err := f.ReadAt(buf, int64(i*7919%(32<<10-1))*2*context); err != nil {
			b.Fatal(err)
		}
	}
}

// The fingerprint of files is made once for each of their states, and not kept where the last change is so new that the next one might
// not show.
func TestFingerprintIsKept(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "text"), []byte("a text that is hashed once!"))
	sum := func() string {
		s, err := data.Text(path)
		if err != nil {
			t.Fatal(err)
		}
		return bound(t, s, 4).(trainer.Manifest).Manifest()[0].SHA256
	}
	kept := func() (all []string) {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		found, err := filepath.Glob(filepath.Join(cache, "soliton", "data", "*", "manifest.json"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	before, first := len(kept()), sum()
	if n := len(kept()); n != before {
		t.Errorf("%d fingerprints are kept of a new file", n-before)
	}
	defer data.SetSettled(-time.Hour)()
	if sum() != first || len(kept()) != before+1 {
		t.Fatalf("%d fingerprints are kept", len(kept())-before)
	}
	for _, file := range kept() { // another process made it
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		write(t, file, bytes.ReplaceAll(text, []byte(first), []byte("known")))
	}
	if got := sum(); got != "known" {
		t.Errorf("fingerprint %s is made again", got)
	}
	write(t, path, []byte("a text that is hashed again"))
	if err := os.Chtimes(path, time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if got := sum(); got == "known" || got == first {
		t.Errorf("fingerprint %s of a file that has changed", got)
	}
}

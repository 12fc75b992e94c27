package trainer

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/store/find"
	"pgregory.net/rapid"
)

// tree writes files and returns their folder.
func fileTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func relative(t *testing.T, dir string, paths []string) []string {
	t.Helper()
	var rel []string
	for _, p := range paths {
		r, err := filepath.Rel(dir, p)
		if err != nil {
			t.Fatal(err)
		}
		rel = append(rel, r)
	}
	return rel
}

func TestTextFindsFiles(t *testing.T) {
	dir := fileTree(t, map[string]string{
		"b.txt": "bb", "a.txt": "a", "sub/c.txt": "ccc", "sub/deep/d.md": "dddd", ".git/x": "x", "sub/.hidden": "y", "[odd].txt": "z",
	})
	in := func(names ...string) (paths []string) {
		for _, n := range names {
			paths = append(paths, filepath.Join(dir, n))
		}
		return paths
	}
	for _, c := range []struct {
		patterns, want []string
	}{
		{in("b.txt"), []string{"b.txt"}},
		{in("*.txt"), []string{"[odd].txt", "a.txt", "b.txt"}},
		{in("sub", "b.txt", "sub/../b.txt", "*.txt"), []string{"[odd].txt", "a.txt", "b.txt", "sub/c.txt", "sub/deep/d.md"}},
		{in("s*"), []string{"sub/c.txt", "sub/deep/d.md"}},
		{in(""), []string{"[odd].txt", "a.txt", "b.txt", "sub/c.txt", "sub/deep/d.md"}},
		{in("[odd].txt"), []string{"[odd].txt"}},
		{in(".git/x"), []string{".git/x"}},
	} {
		text, err := Text(c.patterns...)
		if err != nil {
			t.Errorf("%q: %v", c.patterns, err)
			continue
		}
		if got := relative(t, dir, text.Files()); !slices.Equal(got, c.want) {
			t.Errorf("%q: files %q, want %q", relative(t, dir, c.patterns), got, c.want)
		}
	}
}

func TestTextErrors(t *testing.T) {
	dir := fileTree(t, map[string]string{"empty": "", "none/empty": "", "full": "abc"})
	if err := os.Mkdir(filepath.Join(dir, "bare"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ pattern, want string }{
		{"missing.txt", "missing.txt: no such file"},
		{"*.txt", "*.txt: no file matches"},
		{"[", "[: is not a valid pattern"},
		{"bare", "bare: holds no files"},
		{"empty", "empty: is empty"},
		{"none", "none/empty: is empty"},
	} {
		_, err := Text(filepath.Join(dir, c.pattern))
		var e *DataError
		if !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: error %v, want one with %q", c.pattern, err, c.want)
		}
	}
	if _, err := Text(); err == nil {
		t.Error("no patterns were accepted")
	}
	if _, err := TextFiles([]string{dir}); err == nil {
		t.Error("a folder was accepted as a file")
	}
}

func spec(n int) Spec { return Spec{Shape: []int{n}, Kind: Int32} }

func TestTextSamples(t *testing.T) {
	dir := fileTree(t, map[string]string{"a": "abcdef", "b": "ghij"})
	text, err := Text(dir)
	if err != nil {
		t.Fatal(err)
	}
	d, err := text.Bind(spec(3), spec(3))
	if err != nil {
		t.Fatal(err)
	}
	if d.Len() != 3 {
		t.Errorf("%d samples", d.Len())
	}
	var got []string
	for i := range d.Len() {
		in, target := tensor.NewInt(3), tensor.NewInt(3)
		if err := d.Sample(Sample{Index: i}, in, target); err != nil {
			t.Fatal(err)
		}
		b := []byte{}
		for _, x := range append(in.I, target.I...) {
			b = append(b, byte(x))
		}
		got = append(got, string(b))
	}
	if want := []string{"abcbcd", "defefg", "ghihij"}; !slices.Equal(got, want) {
		t.Errorf("samples %q, want %q", got, want)
	}

	if _, err := text.Bind(spec(9), spec(9)); err != nil {
		t.Errorf("a context that just fits: %v", err)
	}
	for _, c := range []struct {
		in, target Spec
		want       string
	}{
		{spec(10), spec(10), "has 10 bytes, but the model's context of 10 takes at least 11"},
		{Spec{Shape: []int{3}}, spec(3), "float32[3] and int32[3]"},
		{spec(3), spec(4), "int32[3] and int32[4]"},
	} {
		if _, err := text.Bind(c.in, c.target); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, %v: error %v, want one with %q", c.in, c.target, err, c.want)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "b"), []byte("shorter now?"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := text.Bind(spec(3), spec(3)); err == nil || !strings.Contains(err.Error(), "b: has changed") {
		t.Errorf("a file that changed: error %v", err)
	}
}

func TestHoldOut(t *testing.T) {
	dir := fileTree(t, map[string]string{"1": "aaaa", "2": "b", "3": "cc", "4": "ddd", "5": "e"})
	text, err := Text(dir)
	if err != nil {
		t.Fatal(err)
	}
	train, eval := text.HoldOut(2)
	if got := relative(t, dir, eval.Files()); !slices.Equal(got, []string{"2", "4"}) {
		t.Errorf("held out %q", got)
	}
	if got := relative(t, dir, train.Files()); !slices.Equal(got, []string{"1", "3", "5"}) {
		t.Errorf("left %q", got)
	}

	// With fewer files, the end of the text.
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(6, 20).Draw(t, "n")
		train, eval := text.HoldOut(n)
		if eval.Bytes() != text.Bytes()/int64(n) || train.Bytes()+eval.Bytes() != text.Bytes() {
			t.Fatalf("%d bytes left, %d held out", train.Bytes(), eval.Bytes())
		}
		all := ""
		for _, p := range append(train.pieces, eval.pieces...) {
			part, err := p.read(make([]byte, p.hi-p.lo))
			if err != nil {
				t.Fatal(err)
			}
			all += string(part)
		}
		if all != "aaaabccddde" {
			t.Fatalf("the parts make %q", all)
		}
	})
	_, eval = text.HoldOut(6)
	if got := eval.pieces[0].String(); filepath.Base(got) != "5" {
		t.Errorf("held out %q", got)
	}
	one, err := Text(filepath.Join(dir, "1"))
	if err != nil {
		t.Fatal(err)
	}
	_, eval = one.HoldOut(4)
	if got := eval.pieces[0].String(); filepath.Base(got) != "1[3:4]" {
		t.Errorf("held out %q", got)
	}
}

func TestSplit(t *testing.T) {
	text, err := Text(fileTree(t, map[string]string{"1": "aaaa", "2": "b", "3": "cc"}))
	if err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int64]int64{-1: 0, 0: 0, 1: 1, 4: 4, 5: 5, 6: 6, 7: 7, 9: 7} {
		head, tail := text.Split(n)
		if head.Bytes() != want || tail.Bytes() != 7-want {
			t.Errorf("behind %d bytes: %v and %v", n, head.pieces, tail.pieces)
		}
		for _, p := range append(head.pieces, tail.pieces...) {
			if p.lo >= p.hi {
				t.Errorf("behind %d bytes: the piece %v is empty", n, p)
			}
		}
	}
}

func TestSpread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 1<<40).Draw(t, "n")
		k := rapid.IntRange(1, min(n, 1000)).Draw(t, "k")
		for j := range k {
			if got, want := spread(j, k, n), j*n/k; n < 1<<40 && got != want {
				t.Fatalf("spread(%d, %d, %d) = %d, want %d", j, k, n, got, want)
			}
		}
	})
}

// elsewhere is another machine, which has the files of one pattern.
type elsewhere struct{ pattern, at string }

func (elsewhere) Found([]string) error { return nil }

func (e elsewhere) Get(pattern string, none *find.Error) ([]find.File, error) {
	if pattern != e.pattern {
		return nil, none
	}
	return []find.File{{Path: "far/x", Copy: e.at}}, nil
}

func TestLocalFiles(t *testing.T) {
	t.Chdir(fileTree(t, map[string]string{"here/b": "", "here/a": "", "here/.hidden": ""}))
	defer find.Ask(elsewhere{"far/*", "/cache/x"})()
	got, err := LocalFiles("here", "far/*")
	want := []LocalFile{{"far/x", "/cache/x"}, {"here/a", "here/a"}, {"here/b", "here/b"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	var none *DataError
	if _, err := LocalFiles("none"); !errors.As(err, &none) || none.Path != "none" {
		t.Errorf("%v", err)
	}
}

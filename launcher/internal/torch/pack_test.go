package torch

import (
	"archive/zip"
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, folder string, texts map[string]string) {
	t.Helper()
	for name, text := range texts {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// A pack has a program and the Python files below its folder, but not those of run directories and environments.
func TestPack(t *testing.T) {
	folder := t.TempDir()
	want := map[string]string{"train.py": "import inner.model", "inner/__init__.py": "", "inner/model.py": "x = 1"}
	write(t, folder, want)
	write(t, folder, map[string]string{
		"notes.txt": "", "inner/weights.pt": "", ".git/hook.py": "", "runs/a/job.json": "{}", "runs/a/first/program/train.py": "",
		"env/pyvenv.cfg": "", "env/lib/x.py": "", "inner/__pycache__/y.py": "",
	})
	var packs [2]bytes.Buffer
	for i := range packs {
		if err := Pack(&packs[i], filepath.Join(folder, "train.py")); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(packs[0].Bytes(), packs[1].Bytes()) {
		t.Error("two packs of the same files differ")
	}
	to := t.TempDir()
	pack := filepath.Join(to, "train.pyz")
	if err := os.WriteFile(pack, packs[0].Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	script, err := unpack(pack, filepath.Join(to, "program"))
	if err != nil || script != filepath.Join(to, "program", "train.py") {
		t.Fatalf("the program is %s: %v", script, err)
	}
	got := map[string]string{}
	for name := range want {
		text, err := os.ReadFile(filepath.Join(to, "program", name))
		if err != nil {
			t.Error(err)
		}
		got[name] = string(text)
	}
	if !maps.Equal(got, want) {
		t.Errorf("unpacked %q, want %q", got, want)
	}
	if n := strings.Count(packs[0].String(), ".py"); n != 2*len(want)+1 { // names, the list of them, and the program
		t.Errorf("%d names in the pack", n)
	}
}

// A pack that would write elsewhere, or without end, is refused.
func TestUnpackRefuses(t *testing.T) {
	for name, c := range map[string]struct{ comment, file, text, want string }{
		"no zip":         {"", "", "", "not a valid zip file"},
		"parent":         {"train.py", "../train.py", "", "a file with the name"},
		"absolute":       {"train.py", "/tmp/train.py", "", "a file with the name"},
		"unclean":        {"train.py", "a//train.py", "", "a file with the name"},
		"no Python file": {"train.py", "train.sh", "", "a file with the name"},
		"no program":     {"other.py", "train.py", "", "lacks its program"},
		"too large":      {"train.py", "train.py", strings.Repeat("#", maxPackBytes+1), "more than 64 MB"},
	} {
		pack := filepath.Join(t.TempDir(), "x.pyz")
		var b bytes.Buffer
		if c.file != "" {
			z := zip.NewWriter(&b)
			w, err := z.Create(c.file)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write([]byte(c.text)); err != nil {
				t.Fatal(err)
			}
			if err := z.SetComment(c.comment); err != nil {
				t.Fatal(err)
			}
			if err := z.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(pack, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := unpack(pack, t.TempDir()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/bench/internal/report"
)

// Each comparison has what all needs of it, and the package's documentation names it.
func TestComparisons(t *testing.T) {
	doc, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, c := range comparisons {
		if c.run == nil || c.About == "" || len(c.Quick) == 0 || c.Takes <= 0 || slices.Contains(names, c.Name) || checks[c.Name] != nil {
			t.Errorf("%s lacks something, or is there twice", c.Name)
		}
		names = append(names, c.Name)
	}
	for name := range checks {
		names = append(names, name)
		if err := find(name)(nil, &report.Recorder{}); err == nil || !strings.Contains(err.Error(), "measures no rows") {
			t.Errorf("%s with -rows: %v", name, err)
		}
	}
	for _, name := range names {
		if !strings.Contains(string(doc), "//	go run ./bench "+name+" ") {
			t.Errorf("go doc ./bench does not name %s", name)
		}
	}
	if find("nothing") != nil {
		t.Error("there is a command nothing")
	}
}

// A work tree differs from its commit by any file but those that all writes.
func TestTree(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("needs git")
	}
	dir := t.TempDir()
	write := func(name string) {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := session{root: dir}
	if _, _, err := s.tree(); err == nil {
		t.Error("a folder without git has a commit")
	}
	write("main.go")
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", "x"}} {
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	write(pageFile)
	write(filepath.Join(plotsDir, "step-rate.svg"))
	write(filepath.Join(rawDir, "step-1.txt"))
	commit, dirty, err := s.tree()
	if err != nil || dirty || len(commit) != 12 {
		t.Errorf("with its own files only: %q %v %v", commit, dirty, err)
	}
	write("new.go")
	if _, dirty, err := s.tree(); err != nil || !dirty {
		t.Errorf("with a new file: %v %v", dirty, err)
	}
}

func TestQuoted(t *testing.T) {
	if got := quoted([]string{"reduce", "-model", "--layers 1"}); got != "reduce -model '--layers 1'" {
		t.Error(got)
	}
}

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A module that uses this one by its public packages builds and trains, and the workers do not change its bits.
func TestModuleOutside(t *testing.T) {
	built(t)
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, from := range map[string]string{"main.go": testdata(t, "outside/main.go"), "go.sum": filepath.Join(root, "go.sum")} {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	const module = "github.com/soliton-train/soliton"
	mod := "module example.com/outside\n\ngo 1.26.0\n\nrequire " + module + " v0.0.0\n\nreplace " + module + " => " + root + "\n"
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte(mod), 0o644); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-mod=mod", "-o", "outside", ".")
	build.Dir = dir
	build.Env = append(os.Environ(), "GOPROXY=off") // all that it needs was needed to build this test
	if out, err := build.CombinedOutput(); strings.Contains(string(out), "GOPROXY=off") {
		t.Skipf("the module cache does not have all modules: %s", out)
	} else if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program := filepath.Join(dir, "outside")
	hash := func(flags ...string) string {
		cmd := launch(t, append(append([]string{"run", "--plain", "--run-dir", "r"}, flags...), program)...)
		if status, _, stderr := result(t, cmd); status != 0 {
			t.Fatalf("%v: exit status %d\n%s", flags, status, stderr)
		}
		var sum rundir.Summary
		readJSON(t, filepath.Join(cmd.Dir, "r", "summary.json"), &sum)
		return sum.ParamsSHA256
	}
	want := hash("--workers", "1")
	if got := hash("--workers", "4", "--stages", "2", "--chaos", "kill:2@15"); got != want {
		t.Errorf("params_sha256 is %s with four workers of which one is killed, and %s with one", got, want)
	}
}

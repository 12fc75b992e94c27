package exact

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// bin is the folder of what programs builds.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if bin, err = os.MkdirTemp("", "exact-test-"); err != nil {
			panic(err)
		}
		defer os.RemoveAll(bin)
		return m.Run()
	}())
}

var build = sync.OnceValue(func() error {
	if out, err := exec.Command("go", "build", "-o", bin+"/", "../../../launcher", "../../../examples/gpt").CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
})

// programs returns the launcher and the example that the tests of processes run. The first call builds them.
func programs(t *testing.T) (launcher, gpt string) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs processes: not with -short")
	}
	if err := build(); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(bin, "launcher"), filepath.Join(bin, "gpt")
}

package exact

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/testkit/require"
)

// The golden hashes hold on arm64, where the compiler fuses multiplications and additions that are not rounded explicitly. On other
// processors the test is cross-compiled and emulated, which makes it a hundred times slower, so the smallest job must do.
func TestGoldenOnARM64(t *testing.T) {
	switch {
	case runtime.GOARCH == "arm64":
		t.Skip("TestGolden runs on this processor")
	case testing.Short():
		t.Skip("left out with -short")
	case os.Getenv("GOAMD64") != "":
		t.Skip("GOAMD64 does not change it")
	}
	t.Parallel()
	emulator, err := exec.LookPath("qemu-aarch64")
	if err != nil {
		emulator, err = exec.LookPath("qemu-aarch64-static")
	}
	require.Tool(t, "qemu", err == nil && runtime.GOOS == "linux", "no qemu-aarch64 in PATH (Debian has it in qemu-user)")
	binary := filepath.Join(t.TempDir(), "exact.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", binary, ".")
	build.Env = append(os.Environ(), "GOOS=linux", "GOARCH=arm64", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), emulator, binary, "-test.v", "-test.run", "^TestGolden$/^tiny$").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestGolden/tiny") {
		t.Errorf("%v\n%s", err, out)
	}
}

package inspect

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/dvfs/nvml"
)

func TestDoctorNamesTheClocks(t *testing.T) {
	root := t.TempDir()
	if f := checkCPUClock(root); f.Mark != ok || !strings.Contains(f.Found, "not supported") || strings.Contains(f.Found, "\n") {
		t.Errorf("%+v", f)
	}
	dir := filepath.Join(root, "devices/system/cpu/cpufreq/policy0")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{
		"scaling_min_freq": "800000", "scaling_max_freq": "3000000", "cpuinfo_min_freq": "800000", "cpuinfo_max_freq": "3000000",
		"scaling_cur_freq": "2100000", "scaling_driver": "intel_pstate", "scaling_governor": "powersave",
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text+"\n"), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	const want = "processors (1 cpufreq policy, driver intel_pstate, governor powersave) at 2100 MHz, 800 to 3000 MHz in 23 steps, no counter of energy"
	if f := checkCPUClock(root); f.Mark != ok || f.Found != want {
		t.Errorf("%+v, want %s", f, want)
	}

	for _, c := range []struct {
		err  error
		mark mark
	}{{fmt.Errorf("no cards: %w", dvfs.ErrUnsupported), ok}, {fmt.Errorf("no cards: %w", dvfs.ErrPermission), warn}} {
		if f := checkCards(nil, c.err); len(f) != 1 || f[0].Mark != c.mark || f[0].Found != c.err.Error() {
			t.Errorf("%+v", f)
		}
	}
	for _, f := range checkCards(nvml.Open()) { // whatever this machine has
		if f.Check != "graphics card" || f.Found == "" || strings.Contains(f.Found, "\n") {
			t.Errorf("%+v", f)
		}
	}
}

// Package sysfs makes the files of sysfs that tests set clocks in.
package sysfs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Processors makes a tree as Linux shows it, with one clock that was set lower than the hardware's highest; limit returns
// what is set.
func Processors(t testing.TB) (sysfs string, limit func() string) {
	t.Helper()
	sysfs = t.TempDir()
	dir := filepath.Join(sysfs, "devices/system/cpu/cpufreq/policy0")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{
		"scaling_min_freq": "800000", "scaling_max_freq": "2000000", "cpuinfo_min_freq": "800000", "cpuinfo_max_freq": "3000000",
		"scaling_cur_freq": "2000000", "scaling_driver": "acpi-cpufreq", "scaling_governor": "schedutil",
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return sysfs, func() string {
		b, err := os.ReadFile(filepath.Join(dir, "scaling_max_freq"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
}

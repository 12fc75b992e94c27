package lab

import (
	"cmp"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// Machine describes this machine.
func Machine() report.Machine {
	first := func(file, pattern string) string {
		text, _ := os.ReadFile(file)
		m := regexp.MustCompile(pattern).FindSubmatch(text)
		if m == nil {
			return ""
		}
		return strings.TrimSpace(string(m[1]))
	}
	m := report.Machine{
		CPU: cmp.Or(first("/proc/cpuinfo", `(?m)^model name\s*:(.*)$`), "an unknown "+runtime.GOARCH+" processor"),
		OS:  cmp.Or(first("/etc/os-release", `(?m)^PRETTY_NAME="?([^"\n]*)`), runtime.GOOS),
		Go:  runtime.Version(), Path: kernel.Active().String(), Cores: runtime.NumCPU(),
	}
	if release, err := exec.Command("uname", "-sr").Output(); err == nil {
		m.Kernel = strings.TrimSpace(string(release))
	}
	kb, _ := strconv.ParseFloat(first("/proc/meminfo", `(?m)^MemTotal:\s*(\d+)`), 64)
	m.MemoryGB = kb * 1024 / 1e9
	return m
}

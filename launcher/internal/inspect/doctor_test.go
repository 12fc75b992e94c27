package inspect

import (
	"testing"
	"testing/fstest"

	"github.com/soliton-train/soliton/internal/platform"
)

func TestChecks(t *testing.T) {
	root := fstest.MapFS{
		"proc/cpuinfo":             {Data: []byte("processor\t: 0\nmodel name\t: Abacus 3000\n")},
		"proc/meminfo":             {Data: []byte("MemTotal: 8388608 kB\nMemAvailable: 524288 kB\n")},
		"sys/fs/cgroup/cpu.max":    {Data: []byte("150000 100000\n")},
		"sys/fs/cgroup/memory.max": {Data: []byte("1073741824\n")},
		"sys/devices/system/clocksource/clocksource0/current_clocksource": {Data: []byte("hpet\n")},
	}
	for _, c := range []struct {
		got  Finding
		mark mark
		text string
	}{
		{checkCPU(root), ok, "Abacus 3000"},
		{checkCPU(fstest.MapFS{}), ok, "unknown model"},
		{checkCores(root, 8, 8), warn, "8 usable, GOMAXPROCS 8, cgroup quota 1.5"},
		{checkCores(root, 8, 2), ok, "8 usable, GOMAXPROCS 2, cgroup quota 1.5"},
		{checkCores(fstest.MapFS{}, 4, 4), ok, "4 usable, GOMAXPROCS 4"},
		{checkMemory(root), warn, "512 MiB available of 8.0 GiB, cgroup limit 1.0 GiB"},
		{checkMemory(fstest.MapFS{}), warn, "unknown"},
		{checkClock(root), warn, "hpet"},
	} {
		if c.got.Mark != c.mark || c.got.Found != c.text {
			t.Errorf("got %+v, want %s %q", c.got, c.mark, c.text)
		}
	}
}

// What this system lacks is reported with its effect.
func TestDoctorPlatform(t *testing.T) {
	var found []string
	for _, f := range examine(fstest.MapFS{}) {
		if f.Check == "platform" {
			found = append(found, f.Found)
			if f.Mark != warn || f.Advice == "" {
				t.Errorf("%+v", f)
			}
		}
	}
	if len(found) != len(platform.Missing()) {
		t.Errorf("%q, want what of %+v is missing", found, platform.Missing())
	}
}

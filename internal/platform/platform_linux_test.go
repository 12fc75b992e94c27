//go:build !portable

package platform

import (
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

func TestMeminfo(t *testing.T) {
	for _, c := range []struct {
		text string
		want float64
		ok   bool
	}{
		{"MemTotal:       24681200 kB\nMemFree:  1 kB\nMemAvailable:   24021016 kB\nBuffers: 2 kB\n", 24021016 * 1024, true},
		{"MemTotal:       24681200 kB\n", 0, false},
		{"MemAvailable:   some kB\n", 0, false},
		{"", 0, false},
	} {
		if got, ok := parseMeminfo(strings.NewReader(c.text)); ok != c.ok || ok && got != c.want {
			t.Errorf("%q: %v, %v", c.text, got, ok)
		}
	}
}

// Limits of control groups of both versions count, those of the groups above as well, and a container's at the root of what is mounted.
func TestAvailableMemory(t *testing.T) {
	const free = "MemAvailable: 1000 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  float64
	}{
		"no groups":       {nil, 1024000},
		"no limit":        {map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "5\n"}, 1024000},
		"limit":           {map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "5000\n", "sys/fs/cgroup/a/memory.current": "2000\n", "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 500\n"}, 3500},
		"limit above":     {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "700\n", "sys/fs/cgroup/a/memory.current": "100\n", "sys/fs/cgroup/a/b/memory.max": "900\n", "sys/fs/cgroup/a/b/memory.current": "100\n"}, 600},
		"in a container":  {map[string]string{"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/memory.max": "700\n", "sys/fs/cgroup/memory.current": "900\n"}, 0},
		"more than there": {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "9000000\n", "sys/fs/cgroup/memory.current": "1\n"}, 1024000},
		"version 1": {map[string]string{
			"proc/self/cgroup": "7:cpu,cpuacct:/z\n6:memory:/docker/1\n0::/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "800\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "300\n",
			"sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
		}, 600},
		"version 1, no limit": {map[string]string{"proc/self/cgroup": "6:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "300\n"}, 1024000},
	} {
		root := fstest.MapFS{"proc/meminfo": {Data: []byte(free)}}
		for path, text := range c.files {
			root[path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got, ok := availableMemory(root); !ok || got != c.want {
			t.Errorf("%s: %v, %v; want %v", name, got, ok, c.want)
		}
	}
}

func TestRunnable(t *testing.T) {
	if n, ok := Runnable(); !ok || n < 1 {
		t.Errorf("%d, %v: this thread at least is runnable", n, ok)
	}
	for _, c := range []struct {
		line string
		want int
		ok   bool
	}{
		{"10.14 42.66 38.05 68/146 32310\n", 68, true},
		{"10.14 42.66 38.05 68 32310\n", 0, false},
		{"10.14 42.66 38.05 -1/146 32310\n", 0, false},
		{"10.14 42.66 38.05 99999999999/146 32310\n", 0, false},
		{"10.14 42.66 38.05\n", 0, false},
		{"", 0, false},
	} {
		if got, ok := parseLoad([]byte(c.line)); got != c.want || ok != c.ok {
			t.Errorf("%q: %d, %v", c.line, got, ok)
		}
	}
}

func TestParseDelay(t *testing.T) {
	for line, want := range map[string]time.Duration{"12 345 6\n": 345, "": 0, "1": 0, "1 x 2": 0, "1 -5 2": 0} {
		if got := parseDelay([]byte(line)); got != want {
			t.Errorf("%q: %v, want %v", line, got, want)
		}
	}
}

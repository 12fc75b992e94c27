//go:build !portable

package platform

import (
	"bufio"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
)

// AvailableMemory returns how many bytes the machine can give to this process, or false where that is unknown: what the kernel says that
// programs can get, or what the limits of this process's control groups leave of it.
func AvailableMemory() (bytes float64, ok bool) { return availableMemory(os.DirFS("/")) }

func availableMemory(root fs.FS) (bytes float64, ok bool) {
	f, err := root.Open("proc/meminfo")
	if err != nil {
		return 0, false
	}
	defer f.Close()
	if bytes, ok = parseMeminfo(f); !ok {
		return 0, false
	}
	groups, _ := fs.ReadFile(root, "proc/self/cgroup")
	for line := range strings.Lines(string(groups)) {
		hierarchy, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, at, found := strings.Cut(rest, ":")
		g := memoryGroup{root, "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"}
		switch {
		case !found:
			continue
		case hierarchy == "0" && controllers == "":
		case strings.Contains(","+controllers+",", ",memory,"):
			g = memoryGroup{root, "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}
		default:
			continue
		}
		// A limit of any group above counts as well. In a container, the group may lie outside of what is mounted, and its root is the container's.
		for at = path.Clean("/" + at); ; at = path.Dir(at) {
			if left, limited := g.left(at); limited {
				bytes = min(bytes, left)
			}
			if at == "/" {
				break
			}
		}
	}
	return bytes, true
}

// memoryGroup says where a version of control groups has what.
type memoryGroup struct {
	root                          fs.FS
	mount, limit, usage, inactive string
}

// left returns what a group may still take: the kernel can take back the cache of files that were not used lately.
func (g memoryGroup) left(at string) (bytes float64, limited bool) {
	limit, ok := g.number(at, g.limit)
	usage, known := g.number(at, g.usage)
	if !ok || !known || limit >= 1<<60 { // version 1 has a large number for none
		return 0, false
	}
	if f, err := g.root.Open(path.Join(g.mount, at, "memory.stat")); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if name, value, _ := strings.Cut(lines.Text(), " "); name == g.inactive {
				if n, err := strconv.ParseUint(value, 10, 63); err == nil {
					usage -= float64(n)
				}
			}
		}
	}
	return max(0, limit-max(0, usage)), true
}

// number reads a file with a number; "max" is none.
func (g memoryGroup) number(at, name string) (float64, bool) {
	text, err := fs.ReadFile(g.root, path.Join(g.mount, at, name))
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return float64(n), err == nil
}

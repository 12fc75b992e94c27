// Package memory reports how much memory the machine can give to programs.
package memory

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
)

// Available returns how many bytes the machine can give to programs, or false where the system does not say.
func Available() (bytes float64, ok bool) {
	f, err := os.Open("/proc/meminfo") // of Linux
	if err != nil {
		return 0, false
	}
	defer f.Close()
	return parse(f)
}

func parse(r io.Reader) (bytes float64, ok bool) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && fields[0] == "MemAvailable:" && fields[2] == "kB" {
			n, err := strconv.ParseUint(fields[1], 10, 63)
			return 1024 * float64(n), err == nil
		}
	}
	return 0, false
}

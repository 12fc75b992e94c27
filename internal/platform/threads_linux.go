//go:build !portable

package platform

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// Threads returns what the threads of a process do, by their numbers, or false where the system does not tell.
func Threads(pid int) (threads map[int]Thread, ok bool) {
	dirs, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	threads = make(map[int]Thread, len(dirs))
	counted := false
	for _, dir := range dirs {
		id, err := strconv.Atoi(filepath.Base(dir))
		stat, err2 := os.ReadFile(dir + "/stat")
		sched, err3 := os.ReadFile(dir + "/schedstat")
		if err != nil || err2 != nil {
			continue // it has ended
		}
		ran, known := parseRan(sched)
		if err3 != nil || !known {
			return nil, false
		}
		threads[id] = Thread{State: parseState(stat), Ran: ran}
		counted = counted || ran > 0
	}
	return threads, counted // some kernels have zeros only
}

// parseState reads the third field of a line of stat; the second may hold anything.
func parseState(line []byte) byte {
	if _, state, _ := bytes.Cut(line[bytes.LastIndexByte(line, ')')+1:], []byte(" ")); len(state) > 0 {
		return state[0]
	}
	return 0
}

// parseRan reads the first number of a line of schedstat: nanoseconds.
func parseRan(line []byte) (time.Duration, bool) {
	fields := bytes.Fields(line)
	if len(fields) != 3 {
		return 0, false
	}
	n, err := strconv.ParseInt(string(fields[0]), 10, 64)
	return time.Duration(n), err == nil
}

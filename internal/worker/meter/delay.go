package meter

import (
	"bytes"
	"os"
	"strconv"
	"time"
)

// threadDelay returns a function that says how long the calling thread has waited
// for a processor so far, and one that ends it. Where the system does not tell,
// it is always 0.
func threadDelay() (delay func() time.Duration, stop func()) {
	f, err := os.Open("/proc/thread-self/schedstat")
	if err != nil {
		return func() time.Duration { return 0 }, func() {}
	}
	buf := make([]byte, 96)
	return func() time.Duration {
		n, _ := f.ReadAt(buf, 0) // it ends with io.EOF
		return waited(buf[:n])
	}, func() { _ = f.Close() }
}

// waited reads the second number of a line of schedstat: nanoseconds.
func waited(line []byte) time.Duration {
	fields := bytes.Fields(line)
	if len(fields) < 2 {
		return 0
	}
	n, err := strconv.ParseInt(string(fields[1]), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return time.Duration(n)
}

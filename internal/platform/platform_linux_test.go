//go:build !portable

package platform

import (
	"strings"
	"testing"
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

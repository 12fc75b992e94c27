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

func TestParseDelay(t *testing.T) {
	for line, want := range map[string]time.Duration{"12 345 6\n": 345, "": 0, "1": 0, "1 x 2": 0, "1 -5 2": 0} {
		if got := parseDelay([]byte(line)); got != want {
			t.Errorf("%q: %v, want %v", line, got, want)
		}
	}
}

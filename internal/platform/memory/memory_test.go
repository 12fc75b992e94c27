package memory

import (
	"strings"
	"testing"
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
		if got, ok := parse(strings.NewReader(c.text)); ok != c.ok || ok && got != c.want {
			t.Errorf("%q: %v, %v", c.text, got, ok)
		}
	}
}

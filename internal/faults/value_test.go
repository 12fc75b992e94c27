package faults

import (
	"strings"
	"testing"
)

func TestValue(t *testing.T) {
	for text, want := range map[string]string{
		"4": "4", "a b": "a b", "é☃": "é☃", "": `""`, " 4": `" 4"`, "4\n": `"4\n"`, "\x1b[31m": `"\x1b[31m"`, "\xff": `"\xff"`, "a\u202eb": `"a\u202eb"`,
		strings.Repeat("é", 80): strings.Repeat("é", 80), strings.Repeat("é", 81): `"` + strings.Repeat("é", 80) + `"...`,
		strings.Repeat("a", 1<<20): `"` + strings.Repeat("a", 80) + `"...`,
	} {
		if got := Value(text); got != want {
			t.Errorf("%.90q: %s, want %s", text, got, want)
		}
	}
}

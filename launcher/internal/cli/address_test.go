package cli

import (
	"strings"
	"testing"
)

func TestAddress(t *testing.T) {
	for _, right := range []string{":0", "127.0.0.1:7070", "[::1]:0", "localhost:http", "b.example:65535"} {
		if err := Address("ui", right); err != nil {
			t.Error(err)
		}
	}
	for _, wrong := range []string{"", "x", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:-1", "1:2:3", "[::1", "\n:0", ":x", strings.Repeat("a", 300) + ":0"} {
		if err := Address("ui", wrong); err == nil || !strings.HasPrefix(err.Error(), "--ui=") || strings.Contains(err.Error(), "\n") || len(err.Error()) > 200 {
			t.Errorf("%.20q: %v", wrong, err)
		}
	}
}

func TestReachable(t *testing.T) {
	for _, right := range []string{"", "10.0.0.1", "10.0.0.1:7", "fd77::1", "[fd77::1]:7", "10.0.0.1,b.example,c.example:7"} {
		if errs := Reachable(strings.FieldsFunc(right, func(r rune) bool { return r == ',' })); errs != nil {
			t.Errorf("%s: %v", right, errs)
		}
	}
	for _, wrong := range []string{"x", "0.0.0.0", "[::]:7", "10.0.0.1,", ",10.0.0.1", "10.0.0.1,a\nb", "10.0.0.1," + strings.Repeat("a", 300)} {
		if err := Reachable(strings.Split(wrong, ",")).Err(); err == nil || !strings.HasPrefix(err.Error(), "--advertise ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.20q: %v", wrong, err)
		}
	}
	if errs := Reachable(make([]string, 3000)); len(errs) != 33 {
		t.Errorf("%d errors", len(errs))
	}
}

package find

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// other is another machine.
type other struct {
	has   map[string]string // copies here, by pattern
	asked []string
	found []string // patterns that match files of this machine
}

func (o *other) Found(patterns []string) error {
	o.found = append(o.found, patterns...)
	return nil
}

func (o *other) Get(pattern string, none *Error) ([]File, error) {
	o.asked = append(o.asked, pattern)
	if at := o.has[pattern]; at != "" {
		return []File{{Path: pattern, Copy: at}}, nil
	}
	return nil, none
}

func TestLocal(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := errors.Join(os.Mkdir("run", 0o700), os.WriteFile("run/x.bin", nil, 0o600), os.Mkdir("empty", 0o700), os.WriteFile("plain", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	far := func(names ...string) map[string]string {
		has := make(map[string]string)
		for _, n := range names {
			has[filepath.FromSlash(n)] = "/copy"
		}
		return has
	}
	for _, c := range []struct {
		path         string
		has          map[string]string
		want         string
		asked, found []string
	}{
		{path: "run", want: "run/x.bin", found: []string{"run/x.bin"}},
		{path: "plain", want: "plain", found: []string{"plain"}},
		{path: "empty", has: far("empty/x.bin"), want: "/copy", asked: []string{"empty/x.bin"}},
		{path: "gone", has: far("gone/x.bin"), want: "/copy", asked: []string{"gone/x.bin"}},
		{path: "gone", has: far("gone"), want: "/copy", asked: []string{"gone/x.bin", "gone"}},
		{path: "gone.bin", has: far("gone.bin"), want: "/copy", asked: []string{"gone.bin"}},
		{path: "gone", asked: []string{"gone/x.bin", "gone"}},
	} {
		alone, err := Local(c.path, "x.bin") // whoever opens it says what is wrong
		if err != nil || c.has == nil && c.want != "" && alone != c.want {
			t.Errorf("%s: alone %s, %v", c.path, alone, err)
		}
		o := &other{has: c.has}
		restore := Ask(o)
		got, err := Local(c.path, "x.bin")
		restore()
		if got != c.want || (err == nil) != (c.want != "") || !reflect.DeepEqual(o.asked, c.asked) || !reflect.DeepEqual(o.found, c.found) {
			t.Errorf("%s: %s, %v; asked %v, found %v", c.path, got, err, o.asked, o.found)
		}
	}
}

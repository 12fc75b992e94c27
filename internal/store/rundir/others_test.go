package rundir

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// Logs are read back as they were written, whatever is in them, and nothing else is read as logs.
func TestOthers(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "log"), 0o700); err != nil {
		t.Fatal(err)
	}
	if o, err := ReadOthers(dir); err != nil || o.Logs != nil || o.Notes != nil {
		t.Fatalf("%+v, %v", o, err)
	}
	heading := "==> b worker-2.1.log, bytes 3 to 9 <==\n"
	want := Others{
		Logs:  []OtherLog{{Host: "a", Text: []byte{}}, {"two words", 1, 0, 7, []byte(heading + "\n\n\xff")}, {"b", 2, 1, 3, []byte("no end")}},
		Notes: []string{"c: it is gone"},
	}
	write := want
	write.Notes = []string{"c: it\nis gone"}
	if err := WriteOthers(dir, write); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadOthers(dir); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, text := range []string{
		"x", "x\n", "==> \n", heading, heading + "123456", heading + "1234567", strings.Repeat("x", 2*maxHeading) + "\n",
		"==> b worker-2.1.log, bytes 9 to 3 <==\n\n", "==> b worker-2.1.log, bytes 0 to 99999999999999999999 <==\n\n", "==> b worker-99999999999999999999.1.log, bytes 0 to 0 <==\n\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, othersLog), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if o, err := ReadOthers(dir); err == nil {
			t.Errorf("%q: %+v", text, o)
		}
	}
}

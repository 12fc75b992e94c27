package ssh

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// given says that one flag is given.
func given(flag string) func(string) bool { return func(f string) bool { return f == flag } }

func TestParse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(file, []byte("# three\na\n\n  me@b.example:2 # here\n[fd77::2]:8\nfd77::3"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := []Host{{"a", 0}, {"me@b.example", 2}, {"fd77::2", 8}, {"fd77::3", 0}}
	for name, read := range map[string]func() ([]Host, error){
		"list": func() ([]Host, error) {
			return Of(given("hosts"), []string{"a", " me@b.example:2", "[fd77::2]:8", "fd77::3"}, "")
		},
		"file": func() ([]Host, error) { return Of(given("hosts-file"), nil, file) },
	} {
		if hosts, err := read(); err != nil || !slices.Equal(hosts, want) {
			t.Errorf("%s: %v, %v", name, hosts, err)
		}
	}
	if hosts, err := Of(given(""), nil, ""); hosts != nil || err != nil {
		t.Errorf("none: %v, %v", hosts, err)
	}
	for _, wrong := range []string{"", "-v", "-oProxyCommand=x", "a b", "a;b", "a:", "a:0", "a:99999999999999999999", "@a", "a@-b", "$(x)", "a'b", "ssh://a"} {
		if hosts, err := Of(given("hosts"), []string{"x", wrong}, ""); err == nil || !strings.HasPrefix(err.Error(), "--hosts: ") {
			t.Errorf("%q: %v, %v", wrong, hosts, err)
		}
	}
	for _, flag := range []string{"hosts", "hosts-file"} {
		if hosts, err := Of(given(flag), nil, ""); err == nil || !strings.HasPrefix(err.Error(), "--"+flag+": ") {
			t.Errorf("--%s with nothing: %v, %v", flag, hosts, err)
		}
	}
	if hosts, err := ReadFile("/dev/zero"); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("a file without end: %v, %v", hosts, err)
	}
}

func TestSplit(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Skip(err)
	}
	for _, local := range []string{"localhost", "127.0.0.1", "::1", name} {
		own, others, err := Split(t.Context(), []Host{{"b.invalid", 0}, {local, 3}, {"192.0.2.1", 0}, {"another-user@localhost", 0}})
		if err != nil || own == nil || own.Workers != 3 || len(others) != 3 {
			t.Errorf("%s: %v, %v, %v", local, own, others, err)
		}
	}
	if _, _, err := Split(t.Context(), []Host{{"localhost", 0}, {name, 0}}); err == nil || !strings.Contains(err.Error(), "localhost and "+name+" are both this machine") {
		t.Error(err)
	}
}

// What is shown of ssh is its last line, and of the launcher all that it says is wrong.
func TestWords(t *testing.T) {
	for text, want := range map[string]string{
		"": "",
		"** Welcome **\nssh: connect to host b port 22: Connection refused\r\n": "ssh: connect to host b port 22: Connection refused",
		"launcher: one\nlauncher: two\nTry 'launcher --help'.\n":                "one; two",
		strings.Repeat("x", 1<<20) + "\nend":                                    "end",
	} {
		var words tail
		if _, err := words.Write([]byte(text)); err != nil || words.last() != want {
			t.Errorf("%.40q: %q, %v", text, words.last(), err)
		}
	}
}

// The login shell of a user gets the scripts in single quotes.
func TestScriptsNeedNoQuoting(t *testing.T) {
	for _, s := range []string{useScript, sendScript} {
		if strings.ContainsAny(s, "'!\\\n") {
			t.Errorf("%s", s)
		}
	}
	for uname, want := range map[string]string{"Linux x86_64": "linux/amd64", "Linux aarch64": "linux/arm64", "Darwin arm64": "darwin/arm64"} {
		if got := systemOf(uname); got != want {
			t.Errorf("%s: %s", uname, got)
		}
	}
}

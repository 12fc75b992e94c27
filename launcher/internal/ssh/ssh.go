// Package ssh runs this launcher on other machines, over the user's ssh with its configuration.
//
// Nothing needs to be installed there but a shell. The launcher itself is copied once, into the user's cache folder, under its SHA-256, which is
// checked there before each use. Secrets pass over standard input, never as arguments.
package ssh

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// Error says why a host could not be used, in the words of ssh or of the launcher there.
type Error struct {
	Host   string
	Words  string
	Status int // exit status, 0 if there was none
}

// Failed is the exit status of ssh if it reached no shell, or lost it.
const Failed = 255

func (e *Error) Error() string { return e.Host + ": " + e.Words }

// Launcher is the executable file of this command.
type Launcher struct {
	// Errs gets what the launcher on the other machine, or ssh, prints to standard error; nil drops it.
	Errs io.Writer

	file   string
	sha256 string
}

// Own returns the running launcher.
func Own() (Launcher, error) {
	file, err := os.Executable()
	if err != nil {
		return Launcher{}, err
	}
	sum, err := rundir.FileSHA256(file)
	return Launcher{file: file, sha256: sum}, err
}

// Lines that the shell on the other machine prints before anything of the launcher. What comes before them is of the user's own start-up
// files.
const (
	has   = "soliton has it"
	lacks = "soliton lacks it on "
	sent  = "soliton got it at "
)

// The scripts contain no single quote, newline, backslash or exclamation mark: the login shell that takes them need not be a POSIX one.
const (
	folderScript = `d="${XDG_CACHE_HOME:-$HOME/.cache}/soliton/%s/%s"; f="$d/%s"; sum() { sha256sum 2>/dev/null || shasum -a 256; }; `
	useScript    = `if [ -x "$f" ]; then case "$(sum <"$f")" in %s*) echo "` + has + `"; exec "$f" %s;; esac; fi; echo "` + lacks + `$(uname -sm)"`
	findScript   = `if [ -x "$f" ]; then case "$(sum <"$f")" in %s*) echo "` + sent + `$f";; esac; fi`
	sendScript   = `umask 077; mkdir -p "$d" && t="$(mktemp "$d/.soliton-XXXXXX")" || exit 1; cat >"$t"; ` +
		`case "$(sum <"$t")" in %s*) chmod 700 "$t" && mv -f "$t" "$f" && echo "` + sent + `$f";; ` +
		`*) rm -f "$t"; echo "what came has another SHA-256, or sha256sum and shasum are missing" >&2; exit 1;; esac`
)

var plainArg = regexp.MustCompile(`^[A-Za-z0-9_./=:-]+$`)

// Run runs the launcher on a host, and copies it there first if it is not there. Each line of its standard output is told to line.
func (l Launcher) Run(ctx context.Context, h Host, args []string, stdin func() io.Reader, line func(string)) error {
	for _, a := range args {
		if !plainArg.MatchString(a) {
			return fmt.Errorf("ssh: the argument %q would have to be quoted", a)
		}
	}
	use := fmt.Sprintf(folderScript+useScript, "launchers", l.sha256, "launcher", l.sha256, strings.Join(args, " "))
	for range 2 {
		system, runs := "", false
		err := l.run(ctx, h, use, stdin(), func(text string) {
			switch {
			case runs:
				line(text)
			case text == has:
				runs = true
			case strings.HasPrefix(text, lacks):
				system = strings.TrimPrefix(text, lacks)
			}
		})
		if err != nil || runs {
			return err
		}
		if own := runtime.GOOS + "/" + runtime.GOARCH; systemOf(system) != own {
			return &Error{Host: h.Name, Words: fmt.Sprintf("it is %s, and this launcher is for %s", cmp.Or(system, "no POSIX system"), own)}
		}
		if err := l.send(ctx, h); err != nil {
			return err
		}
	}
	return &Error{Host: h.Name, Words: "the launcher was copied, and is not there"}
}

// systemOf returns the name in Go of what uname -sm prints.
func systemOf(uname string) string {
	system, arch, _ := strings.Cut(strings.ToLower(uname), " ")
	switch arch {
	case "x86_64":
		arch = "amd64"
	case "aarch64":
		arch = "arm64"
	}
	return system + "/" + arch
}

// send copies the launcher to a host.
func (l Launcher) send(ctx context.Context, h Host) error {
	_, err := l.copy(ctx, h, fmt.Sprintf(folderScript, "launchers", l.sha256, "launcher"), l.file, l.sha256)
	return err
}

// copy copies a file to where a script says, and returns the path there.
func (l Launcher) copy(ctx context.Context, h Host, script, path, sum string) (there string, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if err := l.run(ctx, h, script+fmt.Sprintf(sendScript, sum), file, func(text string) {
		if at, found := strings.CutPrefix(text, sent); found {
			there = at
		}
	}); err != nil {
		return "", err
	}
	if there == "" {
		return "", &Error{Host: h.Name, Words: "its shell did not take the file"}
	}
	return there, nil
}

// Put has a host have a program in its cache, where the program of a run would be, and returns the path there.
func (l Launcher) Put(ctx context.Context, h Host, path string) (there string, err error) {
	sum, err := rundir.FileSHA256(path)
	if err != nil {
		return "", err
	}
	name := filepath.Base(path)
	if !plainArg.MatchString(name) {
		name = "program"
	}
	script := fmt.Sprintf(folderScript, "programs", sum, name)
	if err := l.run(ctx, h, script+fmt.Sprintf(findScript, sum), nil, func(text string) {
		if at, found := strings.CutPrefix(text, sent); found {
			there = at
		}
	}); err != nil || there != "" {
		return there, err
	}
	return l.copy(ctx, h, script, path, sum)
}

// Bounds of what is read from a host.
const (
	maxLine  = 1 << 20
	maxWords = 8 << 10
)

// The user's ssh asks nothing, since no terminal is there to answer, and opens nothing but this connection.
var options = []string{
	"BatchMode=yes", "RequestTTY=no", "RemoteCommand=none", "ClearAllForwardings=yes",
	fmt.Sprintf("ConnectTimeout=%.0f", timing.SSHConnect.Seconds()), fmt.Sprintf("ServerAliveInterval=%.0f", timing.SSHAlive.Seconds()), "ServerAliveCountMax=3",
}

// run runs a script on a host.
func (l Launcher) run(ctx context.Context, h Host, script string, stdin io.Reader, line func(string)) error {
	var args []string
	for _, o := range options {
		args = append(args, "-o", o)
	}
	return l.wait(ctx, h, exec.CommandContext(ctx, "ssh", append(args, "--", h.Name, "sh -c '"+script+"'")...), stdin, line)
}

// here runs the launcher on this machine.
func (l Launcher) here(ctx context.Context, h Host, args []string, stdin io.Reader, line func(string)) error {
	return l.wait(ctx, h, exec.CommandContext(ctx, l.file, args...), stdin, line)
}

// wait runs a command to its end.
func (l Launcher) wait(ctx context.Context, h Host, cmd *exec.Cmd, stdin io.Reader, line func(string)) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's Ctrl-C is for the launcher
	cmd.WaitDelay = time.Second                           // a shared connection of ssh in the background keeps standard error open
	var words tail
	out := lines{line: line}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &words
	if l.Errs != nil {
		cmd.Stderr = io.MultiWriter(&words, l.Errs)
	}
	err := cmd.Run()
	out.end()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return nil
	case errors.Is(err, exec.ErrNotFound):
		return &Error{Host: h.Name, Words: "there is no ssh command in PATH"}
	}
	return &Error{Host: h.Name, Words: cmp.Or(words.last(), err.Error()), Status: max(cmd.ProcessState.ExitCode(), 0)}
}

// lines tells of each line that is written.
type lines struct {
	line func(string)
	rest []byte
}

func (l *lines) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		text, rest, found := bytes.Cut(l.rest, []byte("\n"))
		if !found {
			break
		}
		l.line(strings.TrimSuffix(string(text), "\r"))
		l.rest = rest
	}
	if len(l.rest) > maxLine {
		l.end()
	}
	return len(b), nil
}

func (l *lines) end() {
	if len(l.rest) > 0 {
		l.line(string(l.rest))
	}
	l.rest = nil
}

// tail keeps the end of what is written.
type tail struct{ b []byte }

func (t *tail) Write(b []byte) (int, error) {
	t.b = append(t.b, b...)
	t.b = t.b[max(0, len(t.b)-maxWords):]
	return len(b), nil
}

// last returns what the launcher said, or the last line.
func (t *tail) last() string {
	var said []string
	last := ""
	for s := bufio.NewScanner(bytes.NewReader(t.b)); s.Scan(); {
		text := strings.TrimSpace(s.Text())
		if own, found := strings.CutPrefix(text, "launcher: "); found {
			said = append(said, own)
		}
		last = cmp.Or(text, last)
	}
	return cmp.Or(strings.Join(said, "; "), last)
}

package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// terminal opens a pseudo-terminal of the given width.
func terminal(t *testing.T, columns uint16) (keyboard, screen *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { keyboard.Close() })
	fd := int(keyboard.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns})
	}
	if err == nil {
		screen, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return keyboard, screen
}

// in makes the terminal a command's own.
func in(screen *os.File, cmd *exec.Cmd) {
	cmd.Env = append(os.Environ(), "TERM=xterm-256color")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = screen, screen, screen
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
}

// A terminal is asked nothing, neither by the launcher nor by a program that imports
// trainer: one that does not answer would hold up the start, and the answer of another
// would show up in the shell.
func TestPlainTerminal(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"run", "--help"}, {"run", "--plain", fake}, {"run", fake, "--steps", "0"}} {
		keyboard, screen := terminal(t, 40)
		cmd := launch(t, args...)
		in(screen, cmd)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		screen.Close()
		text, _ := io.ReadAll(keyboard) // an error is the end of the other side
		cmd.Wait()
		codes := regexp.MustCompile(`\x1b(\[[0-9;?]*.|.)`).FindAllString(string(text), -1)
		for _, code := range codes {
			if args[len(args)-1] != "0" || !regexp.MustCompile(`^\x1b\[[0-9;]*[mAJK]$`).MatchString(code) {
				t.Errorf("%v wrote %q in\n%q", args, code, text)
			}
		}
		if len(text) == 0 {
			t.Errorf("%v wrote nothing", args)
		}
	}
}

// In a terminal the run is shown live, the key Ctrl-C stops it, and what the program
// prints comes after the last frame.
func TestTerminal(t *testing.T) {
	keyboard, screen := terminal(t, 40)
	cmd := launch(t, "run", fake, "--hold", "2", "--steps", "9")
	in(screen, cmd)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	mode, err := unix.IoctlGetTermios(int(screen.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })

	var seen bytes.Buffer
	pressed := false
	buf := make([]byte, 4096)
	for {
		n, err := keyboard.Read(buf)
		seen.Write(buf[:n])
		if !pressed && strings.Contains(seen.String(), "22%") {
			pressed = true
			// So it would be left by a launcher that is killed now.
			if now, err := unix.IoctlGetTermios(int(screen.Fd()), unix.TCGETS); err != nil || *now != *mode {
				t.Errorf("the terminal's mode is %+v, not %+v, %v", now, mode, err)
			}
			screen.Close()
			io.WriteString(keyboard, "\x03")
		}
		if err != nil {
			break // the other side is closed
		}
	}
	cmd.Wait()
	text := seen.String()
	if status := cmd.ProcessState.ExitCode(); status != 130 {
		t.Errorf("status %d", status)
	}
	verdict := strings.Index(text, "ended after 2 of 9 steps: interrupt")
	output := strings.Index(text, "sampled text")
	line := strings.Index(text, "launcher: interrupted after step 2 of 9")
	if verdict < 0 || output < verdict || line < output {
		t.Errorf("verdict at %d, output at %d, error at %d in\n%q", verdict, output, line, text)
	}
	if code := regexp.MustCompile(`\x1b([^\[]|\[\?|\[[0-9;]*[^mAJK0-9;])`).FindString(text); code != "" {
		t.Errorf("the terminal was told %q", code) // a cursor hidden, say, would stay so
	}
}

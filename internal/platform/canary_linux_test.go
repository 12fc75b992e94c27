//go:build !portable

package platform

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

const child = "SOLITON_CANARY_TEST"

// The test binary is also the process that keeps a canary.
func TestMain(m *testing.M) {
	if what := os.Getenv(child); what != "" {
		os.Unsetenv(child)
		if err := keeper(what); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/soliton-train/soliton/internal/platform.keepThread"))
}

// keeper keeps the file 3, tells how it stands with its files, and comes to an end.
func keeper(what string) error {
	if err := KeepCanary(3); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(3, &st); err != unix.EBADF {
		return fmt.Errorf("the process still has the file: %v", err)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	own := 0
	for _, t := range tasks {
		fds, err := os.ReadDir("/proc/self/task/" + t.Name() + "/fd")
		if err != nil {
			return err
		}
		if len(fds) == 1 && fds[0].Name() == "3" {
			own++
			id, _ := strconv.Atoi(t.Name())
			if a, err := unix.SchedGetAttr(id, 0); err != nil || a.Runtime != canarySlice && a.Runtime != 0 { // 0: no such slices, or another policy
				return fmt.Errorf("the thread that has the file has time slices of %d ns (%v), want %d", a.Runtime, err, canarySlice)
			}
		}
	}
	if own != 1 {
		return fmt.Errorf("%d threads have the file alone", own)
	}
	for range 4 { // what is new has the files of the rest, and nothing keeps it from running
		done := make(chan error)
		go func() {
			runtime.LockOSThread()
			r, w, err := os.Pipe()
			if err == nil {
				_, err = w.Write([]byte("x"))
				w.Close()
				r.Close()
			}
			runtime.GC()
			done <- err
		}()
		if err := <-done; err != nil {
			return err
		}
	}
	if err := syscall.Setuid(os.Getuid()); err != nil { // needs all threads
		return err
	}
	switch what {
	case "child":
		sleep := exec.Command("/bin/sleep", "3600")
		if err := sleep.Start(); err != nil {
			return err
		}
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", sleep.Process.Pid))
		if err != nil {
			return err
		}
		for _, fd := range fds {
			if to, _ := os.Readlink(fd); strings.HasPrefix(to, "socket:") {
				return fmt.Errorf("the child has %s", to)
			}
		}
		fmt.Println("ready", sleep.Process.Pid)
	default:
		fmt.Println("ready", 0)
	}
	if what == "exit" {
		os.Exit(0)
	}
	if what == "panic" {
		panic("as it was told to")
	}
	for range 4 {
		go func() {
			for { //nolint:staticcheck // it is to be busy
			}
		}()
	}
	select {}
}

func TestCanary(t *testing.T) {
	for _, c := range []struct {
		what   string
		signal syscall.Signal
		killed bool
	}{
		{"kill", syscall.SIGKILL, true}, {"child", syscall.SIGKILL, true},
		{"term", syscall.SIGTERM, false}, {"exit", 0, false}, {"panic", 0, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			agent, process, err := NewCanary()
			if err != nil {
				t.Fatal(err)
			}
			defer agent.Close()
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), child+"="+c.what)
			cmd.ExtraFiles = []*os.File{process}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			process.Close()
			defer cmd.Wait()
			defer cmd.Process.Kill()
			var said string
			var pid int
			if n, err := fmt.Fscan(out, &said, &pid); n != 2 || said != "ready" {
				rest, _ := io.ReadAll(out)
				t.Fatalf("%s%s, %v", said, rest, err)
			}
			if pid > 0 {
				defer syscall.Kill(pid, syscall.SIGKILL)
			}
			if Killed(cmd.Process.Pid) {
				t.Error("it counts as killed before it is")
			}
			if c.signal != 0 {
				if err := cmd.Process.Signal(c.signal); err != nil {
					t.Fatal(err)
				}
			}
			// It is not reaped before Wait.
			if n, err := agent.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				t.Fatalf("%d bytes, %v", n, err)
			}
			if got := Killed(cmd.Process.Pid); got != c.killed {
				t.Errorf("killed: %v", got)
			}
		})
	}
}

func TestNoCanary(t *testing.T) {
	fds := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	agent, process, err := NewCanary()
	if err != nil {
		t.Fatal(err)
	}
	process.Close()
	if _, err := agent.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%v", err)
	}
	agent.Close()
	before := fds()
	if err := KeepCanary(1 << 20); err == nil {
		t.Error("a canary was kept with no file")
	}
	if after := fds(); after != before {
		t.Errorf("%d files, %d before", after, before)
	}
	if Killed(0) {
		t.Error("there is no such process")
	}
}

package machines

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary is also the first process of a space.
const (
	role    = "SOLITON_TEST_MACHINE" // the environment variable that says so, with a host name, or
	noHost  = "switch"
	hosts   = "SOLITON_TEST_MACHINE_HOSTS"
	folders = "SOLITON_TEST_MACHINE_HIDDEN"
)

func init() {
	if name := os.Getenv(role); name != "" {
		signal.Ignore(unix.SIGCHLD) // the kernel reaps the orphans that it adopts
		var err error
		if name != noHost {
			err = setUp(name)
		}
		if err == nil {
			fmt.Println("up")
			_, _ = io.Copy(io.Discard, os.Stdin) // ends when the test does
		} else {
			fmt.Println(err)
		}
		os.Exit(0)
	}
}

// setUp makes a machine of a process in new namespaces.
func setUp(name string) error {
	err := errors.Join(unix.Sethostname([]byte(name)),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("proc", "/proc", "proc", 0, ""))
	for folder := range strings.SplitSeq(os.Getenv(folders), ":") {
		if _, absent := os.Stat(folder); absent == nil {
			err = errors.Join(err, unix.Mount("tmpfs", folder, "tmpfs", 0, "mode=1777"))
		}
	}
	return errors.Join(err, os.WriteFile("/run/hosts", []byte(os.Getenv(hosts)), 0o644), unix.Mount("/run/hosts", "/etc/hosts", "", unix.MS_BIND, ""))
}

// hidden returns the folders in which machines would find what another has written, or the repository.
func hidden() []string {
	list := []string{"/tmp", "/var/tmp", "/run", "/dev/shm", "/root", os.TempDir()}
	if home, err := os.UserHomeDir(); err == nil {
		list = append(list, home)
	}
	for dir, err := os.Getwd(); err == nil && dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			list = append(list, dir)
		}
	}
	return list
}

// space is a process that holds new namespaces. It ends when its input does, and so when the test process does.
type space struct {
	cmd *exec.Cmd
	in  io.Closer
}

const all = unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID

// hold starts the process of a role. Its clock is the machine's, or ahead of it.
func hold(name string, flags uintptr, ahead time.Duration, env ...string) (*space, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{self}
	if ahead != 0 {
		seconds := fmt.Sprintf("%d", int(ahead.Seconds()))
		args = []string{"unshare", "--time", "--monotonic", seconds, "--boottime", seconds, "--", self}
	}
	var stderr bytes.Buffer
	s := &space{cmd: exec.Command(args[0], args[1:]...)}
	s.cmd.Env = append(append(os.Environ(), role+"="+name), env...)
	s.cmd.Stderr = &stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	var out io.Reader
	if s.in, err = s.cmd.StdinPipe(); err == nil {
		out, err = s.cmd.StdoutPipe()
	}
	if err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	if said, _ := bufio.NewReader(out).ReadString('\n'); said != "up\n" {
		s.end()
		return nil, fmt.Errorf("%s%s", said, bytes.TrimSpace(stderr.Bytes()))
	}
	return s, nil
}

// end kills the process, and with it all of a process table that it has opened; they are gone when it returns.
func (s *space) end() {
	_ = s.cmd.Process.Kill()
	s.in.Close()
	_ = s.cmd.Wait() // killed
}

// enter calls a function on a thread that is in other namespaces, which it leaves by ending.
func (s *space) enter(flags int, f func() error) error {
	end := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the main thread cannot end
			end <- s.enter(flags, f)
			runtime.UnlockOSThread()
			return
		}
		end <- func() error {
			fd, err := unix.PidfdOpen(s.cmd.Process.Pid, 0)
			if err != nil {
				return err
			}
			defer os.NewFile(uintptr(fd), "pidfd").Close()
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Setns(fd, flags); err != nil {
				return err
			}
			return f()
		}()
	}()
	return <-end
}

// network runs a command of this machine in the network of a space.
func (s *space) network(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := s.enter(unix.CLONE_NEWNET, cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(out.Bytes()))
	}
	return out.String(), err
}

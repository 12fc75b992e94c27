// Package detach lets a command continue without the terminal, or the ssh connection, from which it was started: in a process of its
// own session, which the first process leaves once the command has said that it can.
package detach

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// Flags say whether a command is to continue in the background.
type Flags struct {
	On bool // people gave --detach
	is bool // this is the process that continues
}

// Add adds the flags to a command. when is when the first process ends.
func (f *Flags) Add(cmd *cobra.Command, when string) {
	cmd.Flags().BoolVar(&f.On, "detach", false, "continue in the background once "+when+"; launcher attach shows it")
	cmd.Flags().BoolVar(&f.is, flag, false, "")
	_ = cmd.Flags().MarkHidden(flag)
}

// Hand hands the command to a process that continues, if it is to continue and this is not that process. done says that this one
// has no more to do.
func (f *Flags) Hand(cmd *cobra.Command) (done bool, err error) {
	if !f.On || f.is {
		return false, nil
	}
	status, err := start(cli.Raw(cmd.OutOrStdout()), cli.Raw(cmd.ErrOrStderr()))
	if err == nil && status != 0 {
		err = cli.Exit(status)
	}
	return true, err
}

// flag is the flag by which a process knows that it is the one that continues; people do not give it.
const flag = "detached"

// lifeline is the file descriptor at which that process finds its way to the first one.
const lifeline = 3

// start runs this command again in a session of its own, with the same arguments and one more flag, and the same standard input and outputs.
// It returns when that process leaves, with 0, or has ended, with its exit status. Until then the signals that end a program are
// that process's, which also hears if this one ends.
func start(stdout, stderr io.Writer) (status int, err error) {
	own, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("detach: %w", err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return 0, fmt.Errorf("detach: %w", err)
	}
	unix.CloseOnExec(fds[0])
	unix.CloseOnExec(fds[1])
	here, there := os.NewFile(uintptr(fds[0]), "lifeline"), os.NewFile(uintptr(fds[1]), "lifeline")
	defer here.Close()
	cmd := exec.Command(own, append([]string{os.Args[1], "--" + flag}, os.Args[2:]...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, stdout, stderr
	cmd.ExtraFiles = []*os.File{there}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	signals := make(chan os.Signal, 2)
	platform.NotifyEnd(signals)
	defer signal.Stop(signals)
	err = cmd.Start()
	_ = there.Close() // the child has its own
	if err != nil {
		return 0, fmt.Errorf("detach: %w", err)
	}
	said := make(chan bool, 1)
	go func() { // it ends with the other end
		b, _ := io.ReadAll(here)
		said <- bytes.Equal(b, left)
	}()
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s)
			continue
		case leaves := <-said:
			if leaves {
				return 0, cmd.Process.Release()
			}
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			return 0, fmt.Errorf("detach: %w", err)
		}
		if status = cmd.ProcessState.ExitCode(); status < 0 {
			return 0, fmt.Errorf("the launcher ended: %v", cmd.ProcessState)
		}
		return status, nil
	}
}

var left = []byte{1}

// Child is the process that continues. A nil one is a process that was not detached.
type Child struct {
	up   *os.File
	gone atomic.Bool // it has left
	once sync.Once
}

// Child returns the child that this process is; nil if it was not detached. orphaned is called, in a goroutine, if the process that
// started it ends before it has left.
func (f *Flags) Child(orphaned func()) (*Child, error) {
	if !f.is {
		return nil, nil
	}
	unix.CloseOnExec(lifeline)
	c := &Child{up: os.NewFile(lifeline, "lifeline")}
	info, err := c.up.Stat()
	if err != nil || info.Mode()&os.ModeSocket == 0 {
		return nil, fmt.Errorf("--%s is not for people: give --detach", flag)
	}
	go func() { // it ends with the other end
		_, _ = c.up.Read(make([]byte, 1))
		if !c.gone.Load() {
			orphaned()
		}
	}()
	return c, nil
}

// Stays reports whether the process that started this one still waits for it.
func (c *Child) Stays() bool { return c != nil && !c.gone.Load() }

// Leave appends what this process prints from now on to a file, and lets the process that started it end. It may be called again.
func (c *Child) Leave(log string) (err error) {
	if c == nil {
		return nil
	}
	c.once.Do(func() { err = c.leave(log) })
	return err
}

func (c *Child) leave(log string) error {
	to, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer to.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	for fd, f := range []*os.File{null, to, to} {
		if err := unix.Dup2(int(f.Fd()), fd); err != nil {
			return fmt.Errorf("detach: %w", err)
		}
	}
	c.gone.Store(true)
	_, _ = c.up.Write(left) // one that has gone does not wait
	_ = unix.Shutdown(lifeline, unix.SHUT_WR)
	return nil
}

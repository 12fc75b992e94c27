package chaos

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// The test program started with this variable is a worker that faults itself, with the schedule that the variable holds.
const childVar = "CHAOS_TEST_CHILD"

func TestMain(m *testing.M) {
	if spec := os.Getenv(childVar); spec != "" {
		child(spec)
	}
	goleak.VerifyTestMain(m)
}

// child begins steps until the fault. It prints the moment, and then anything that it does after the fault.
func child(spec string) {
	s, err := Parse(spec)
	if err != nil {
		panic(err)
	}
	trigger := NewTrigger(s.Faults, Self(), Hooks{Stamp: func(h Fault, moment int64) { fmt.Println(moment) }})
	for step := 1; step <= 2; step++ {
		trigger.StepBegan(step)
		trigger.Phase(step, PhaseForward)
	}
	fmt.Println("alive")
	io.Copy(io.Discard, os.Stdin) // until the parent has seen enough
	os.Exit(0)
}

func wait(t *testing.T, pid, options int) syscall.WaitStatus {
	t.Helper()
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(pid, &status, options, nil)
		if err == nil {
			return status
		}
		if !errors.Is(err, syscall.EINTR) {
			t.Fatal(err)
		}
	}
}

// A real process kills and freezes itself before it can say another word, after the moment that it says, by the clock of all processes.
func TestSelf(t *testing.T) {
	for _, c := range []struct {
		spec   string
		signal syscall.Signal // that stops or ends the child
		said   int            // words: the moment, and perhaps that it lives
	}{
		{"kill:0@2", syscall.SIGKILL, 1},
		{"freeze:0@2", syscall.SIGSTOP, 2},
		{"leave:0@2/forward", syscall.SIGTERM, 0},
		{"kill:0@1+1.5", syscall.SIGKILL, 0}, // 0: it depends
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childVar+"="+c.spec)
		cmd.Stderr = os.Stderr
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		before := Now()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		status := wait(t, cmd.Process.Pid, syscall.WUNTRACED)
		after := Now()
		if status.Stopped() {
			if err := Thaw(cmd.Process); err != nil {
				t.Error(err)
			}
			stdin.Close() // now it may end
		}
		rest, err := io.ReadAll(bufio.NewReader(stdout))
		if err != nil {
			t.Error(err)
		}
		stdin.Close()
		stdout.Close()
		words := strings.Fields(string(rest))
		if c.said > 0 && len(words) != c.said {
			t.Errorf("%s: the child said %q, want %d words", c.spec, words, c.said)
		}
		said := strings.Join(words, " ")
		moment, err := strconv.ParseInt(strings.Trim(said, "alive "), 10, 64)
		if err != nil || moment < before || moment > after {
			t.Errorf("%s: the child said %q, want a moment between %d and %d", c.spec, said, before, after)
		}
		if status.StopSignal() != c.signal && status.Signal() != c.signal {
			t.Errorf("%s: status %#x, want %v", c.spec, status, c.signal)
		}
		if status.Stopped() {
			wait(t, cmd.Process.Pid, 0)
		}
		cmd.Process.Release()
	}
}

// A real process of others is frozen, thawed and ended.
func TestProcess(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	ended := false
	defer func() {
		if !ended {
			cmd.Process.Kill()
			cmd.Wait()
		}
	}()
	p, err := Open(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	const changes = syscall.WUNTRACED | unix.WCONTINUED
	do := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	do("freeze", Freeze(p))
	if s := wait(t, pid, changes); !s.Stopped() {
		t.Errorf("status %#x after Freeze, want stopped", s)
	}
	do("thaw", Thaw(p))
	if s := wait(t, pid, changes); !s.Continued() {
		t.Errorf("status %#x after Thaw, want running", s)
	}

	do("terminate", Terminate(p))
	for {
		s := wait(t, pid, changes)
		if s.Signaled() && s.Signal() == syscall.SIGTERM {
			break
		}
		if !s.Stopped() && !s.Continued() {
			t.Fatalf("status %#x after Terminate, want SIGTERM", s)
		}
	}
	ended = true
	if err := Kill(p); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Kill of an ended process: %v, want ErrProcessDone", err)
	}
	if p, err := Open(pid); err == nil {
		t.Errorf("Open found process %d, which has ended: %v", pid, p)
	}
	cmd.Process.Release()
}

func TestOpenRefusesGroups(t *testing.T) {
	for _, pid := range []int{1, 0, -1, -300} {
		if _, err := Open(pid); err == nil || !strings.Contains(err.Error(), "want an id above 1") {
			t.Errorf("Open(%d): %v, want it to be refused", pid, err)
		}
	}
}

func TestNow(t *testing.T) {
	a := Now()
	if b := Now(); a <= 0 || b < a {
		t.Errorf("the clock said %d, then %d", a, b)
	}
}

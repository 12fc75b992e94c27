package spawn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/platform/progress"
)

// spinning launches a worker that computes without end, and returns it when it does so and has said all.
func spinning(t *testing.T, id int) (p *process, conn *control.Conn, child string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	p, err = launch(Command{Path: exe, Args: []string{"spin"}, WorkerID: id, Log: log, Key: auth.NewKey()})
	if err != nil {
		t.Fatal(err)
	}
	conn = control.New(p.Conn())
	if m, err := conn.Receive(t.Context()); err != nil {
		t.Fatalf("%v, %v", m, err)
	}
	m, err := conn.Receive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for p.progress.State().Running == nil { // which it says last
		time.Sleep(time.Millisecond)
	}
	return p, conn, m.(control.Output).Text
}

// A worker gets the environment of this process, without what is withheld.
func TestWithheld(t *testing.T) {
	t.Setenv("SPAWN_SECRET", "secret=value")
	t.Setenv("SPAWN_SECRET_NOT", "value")
	got := environ([]string{"SPAWN_SECRET", "SPAWN_ABSENT"})
	if !slices.Contains(got, "SPAWN_SECRET_NOT=value") || slices.ContainsFunc(got, func(e string) bool { return strings.Contains(e, "secret") }) {
		t.Errorf("%q", got)
	}
	if len(environ(nil)) != len(os.Environ()) {
		t.Error("nothing is withheld, and something is missing")
	}
}

// A worker that is killed has ended, and all is known of it, while its process is not reaped.
func TestEndsBeforeItIsReaped(t *testing.T) {
	for id := 1; id <= 4; id++ { // they want the processors, too
		p, conn, _ := spinning(t, id)
		p.attend()
		go p.reap()
		t.Cleanup(func() { End(p); conn.Close() })
	}
	p, conn, child := spinning(t, 0)
	defer conn.Close()
	p.attend()
	if err := unix.Kill(p.cmd.Process.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-p.Exited()
	check := func() {
		t.Helper()
		s := p.Status()
		if !s.Killed() || s.Text != "signal: killed" || s.Progress.Step != 3 || len(s.Progress.Begun) != 1 || s.Progress.Running == nil {
			t.Errorf("status %+v", s)
		}
		if p.LastOutput() != "hello from the worker" {
			t.Errorf("last output %q", p.LastOutput())
		}
	}
	check()
	// What it has said is there, and then nothing more, although its own end may be open.
	if m, err := conn.Receive(t.Context()); m != (control.Note{Text: "the last word"}) {
		t.Errorf("%v, %v", m, err)
	}
	if m, err := conn.Receive(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("%v, %v", m, err)
	}
	if fds, err := filepath.Glob("/proc/" + child + "/fd/*"); err != nil {
		t.Error(err)
	} else {
		for _, fd := range fds {
			if to, _ := os.Readlink(fd); strings.HasPrefix(to, "socket:") {
				t.Errorf("the worker's child has %s", to)
			}
		}
	}
	go p.reap()
	<-p.reaped
	check()
	if pid, err := strconv.Atoi(child); err != nil || pid == 0 || !p.dead {
		t.Errorf("child %q, %v; dead: %v", child, err, p.dead)
	}
}

// Of a worker that ends by itself more is to be known than that it has ended: reap tells of it, and
// also of one that was killed, where nothing else does.
func TestEndsWhenItIsReaped(t *testing.T) {
	p, conn, _ := spinning(t, 1)
	defer conn.Close()
	p.attend()
	if err := unix.Kill(p.cmd.Process.Pid, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.watch.Wait()
	select {
	case <-p.Exited():
		t.Error("it counts as killed")
	default:
	}
	go p.reap()
	<-p.reaped
	<-p.Exited()
	if s := p.Status(); s.Text != "signal: terminated" || s.Progress.Step != 3 {
		t.Errorf("status %+v", s)
	}

	p, conn, _ = spinning(t, 1) // its canary is not attended
	defer conn.Close()
	p.Kill()
	go p.reap()
	<-p.Exited()
	if s := p.Status(); !s.Killed() || s.Progress.Step != 3 {
		t.Errorf("status %+v", s)
	}
	<-p.reaped
}

func TestStartThatIsNone(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	if _, err := Start(Command{Path: "/etc/passwd"}); !errors.Is(err, os.ErrPermission) {
		t.Errorf("got %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

func TestLastLines(t *testing.T) {
	stack := strings.Repeat("goroutine\n", 2000)
	for _, c := range []struct{ log, want string }{
		{"", ""},
		{"a\nb\nc\nd\n", "b\nc\nd"},
		{"a\npanic: old\nb\npanic: boom\n" + stack, "panic: boom\ngoroutine\ngoroutine"},
		{"fatal error: all asleep\n\nx", "fatal error: all asleep\n\nx"},
		{"a\nSIGSYS: bad system call\nPC=0x48fa81 m=0 sigcode=0\n" + stack + "rip 0x48fa81\nrflags 0x286\ngs 0x0\n", "SIGSYS: bad system call\nPC=0x48fa81 m=0 sigcode=0\ngoroutine"},
		{"no panic: here\nb\n", "no panic: here\nb"},
		{"a\n" + strings.Repeat("x", 9<<10), strings.Repeat("x", 8<<10)},
	} {
		f, err := os.Create(filepath.Join(t.TempDir(), "log"))
		if err != nil {
			t.Fatal(err)
		}
		f.WriteString(c.log)
		if got := LastLines(f, 0, 3); got != c.want {
			t.Errorf("of %.40q: got %.80q, want %.80q", c.log, got, c.want)
		}
		f.Close()
	}
}

// The test binary is also the worker process of these tests.
func TestMain(m *testing.M) {
	if id, ok, err := control.Launched(); ok {
		if err != nil {
			panic(err)
		}
		fmt.Println("hello from the worker")
		for _, fd := range id.Canaries {
			if err := platform.KeepCanary(fd); err != nil {
				panic(err)
			}
		}
		conn, _, err := id.Connect(context.Background())
		if err != nil {
			panic(err)
		}
		spin(id, conn)
	}
	// It lives as long as the process, as its comment says.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/soliton-train/soliton/internal/platform.keepThread"))
}

// spin computes without end, with more threads than there are processors, and begins a pass when all is
// said; worker 0 starts a child before.
func spin(id control.Identity, conn *control.Conn) {
	r, err := progress.Open(os.NewFile(uintptr(id.Progress), "progress"))
	if err != nil {
		panic(err)
	}
	child := 0
	if id.WorkerID == 0 {
		p, err := os.StartProcess("/bin/sleep", []string{"sleep", "3600"}, &os.ProcAttr{})
		if err != nil {
			panic(err)
		}
		child = p.Pid
	}
	for range runtime.NumCPU() {
		go func() {
			for { //nolint:staticcheck // that is what it is for
			}
		}()
	}
	conn.Send(control.Output{Text: strconv.Itoa(child)})
	conn.Send(control.Note{Text: "the last word"})
	r.Begin(0, 3, progress.Pair{Stage: 1, Micro: 2}, true)
	select {}
}

// A process that a signal stops is known to be stopped, and to have been continued.
func TestHalted(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux, whose parents are told of stopped processes")
	}
	p, conn, _ := spinning(t, 1)
	p.attend()
	go p.reap()
	defer func() {
		End(p)
		_ = conn.Close()
	}()
	for range 3 {
		for _, signal := range []unix.Signal{unix.SIGSTOP, unix.SIGCONT} {
			if err := unix.Kill(p.cmd.Process.Pid, signal); err != nil {
				t.Fatal(err)
			}
			if stopped := <-p.Halted(); stopped != (signal == unix.SIGSTOP) {
				t.Fatalf("after %v: stopped %v", signal, stopped)
			}
			if is := p.Stopped(); is != (signal == unix.SIGSTOP) {
				t.Fatalf("after %v: it is stopped: %v", signal, is)
			}
		}
	}
	// It can be killed while it is stopped.
	if err := unix.Kill(p.cmd.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if !<-p.Halted() {
		t.Fatal("not stopped")
	}
	p.Kill()
	<-p.Exited()
}

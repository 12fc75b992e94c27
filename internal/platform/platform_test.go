package platform

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// What is written to a shared file is seen by all that have it mapped, and it has no name to find it by.
func TestSharedFile(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	f, err := SharedFile("soliton-test")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8); err != nil {
		t.Fatal(err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
		t.Errorf("%v is left in the folder of temporary files (%v)", names, err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	mem[3] = 7
	var b [8]byte
	if _, err := f.ReadAt(b[:], 0); err != nil || b[3] != 7 {
		t.Errorf("%v, %v", b, err)
	}
}

// A child is listed until it is reaped, and its exit is noticed before that.
func TestChild(t *testing.T) {
	cmd := exec.Command("/bin/sleep", "3600")
	cmd.SysProcAttr = ChildAttr(syscall.SIGKILL)
	stop := make(chan struct{})
	started := make(chan error)
	ended := make(chan error)
	go func() { // ChildAttr may bind the child to a thread
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- cmd.Start()
		<-stop
		WaitExit(cmd.Process.Pid, func(bool) {})
		ended <- nil
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if group, err := unix.Getpgid(pid); err != nil || group != pid {
		t.Errorf("the child is in group %d, want its own, %d (%v)", group, pid, err)
	}
	if all := Children(os.Getpid()); !slices.Contains(all, pid) {
		t.Errorf("the children are %v, without %d", all, pid)
	}
	if path := Executable(pid); path != "" {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-ended
	if err := unix.Kill(pid, 0); err != nil {
		t.Errorf("the child is reaped already: %v", err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the killed child succeeded")
	}
}

func TestSignalThread(t *testing.T) {
	if err := SignalThread(0); err != nil {
		t.Error(err)
	}
}

// Every gap says what it means for a run.
func TestMissing(t *testing.T) {
	for _, g := range Missing() {
		if g.Lacks == "" || g.Effect == "" {
			t.Errorf("%+v", g)
		}
	}
}

func TestThreadDelay(t *testing.T) {
	delay, stop := ThreadDelay()
	defer stop()
	if delay() < 0 {
		t.Error("a negative time")
	}
}

func TestNice(t *testing.T) {
	for _, c := range []struct {
		value string
		want  int
		ok    bool
	}{{"", standardNice, true}, {"0", 0, true}, {"19", 19, true}, {"20", standardNice, false}, {"-1", standardNice, false}, {"low", standardNice, false}} {
		if got, err := parseNice(c.value); got != c.want || (err == nil) != c.ok {
			t.Errorf("%q: %d, %v", c.value, got, err)
		}
	}
}

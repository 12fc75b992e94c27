package socket

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Another user neither reads the key nor reaches the socket.
func TestAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	t.Setenv("TMPDIR", "/tmp")
	l, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Remove()
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread ends with the goroutine
		const other = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, other, other, other); errno != 0 {
			t.Errorf("become another user: %v", errno)
			return
		}
		if _, err := os.ReadFile(filepath.Join(l.folder.dir, keyName)); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("read the key: %v", err)
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(fd)
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: l.Path()}); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("connect: %v", err)
		}
	}()
	<-done
}

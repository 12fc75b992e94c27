package host

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const socketName = "agent"

// sockets are the folders of this process's sockets, each with a lock that ends with the process.
// What a process that was killed has left is thereby known, and the next one removes it.
var sockets = struct {
	sync.Mutex
	sync.Once
	locks map[string]*os.File
}{locks: make(map[string]*os.File)}

// sweepAge is how old what is left must be: a folder has no lock yet just after it was made.
const sweepAge = 10 * time.Second

// socketDir makes the folder of a socket, which only this user may enter. removeSocketDir
// removes it.
func socketDir() (string, error) {
	// The kernel takes 107 bytes of path; MkdirTemp appends a number of 32 bits.
	const longest = 107 - len("/soliton-agent-4294967295/"+socketName)
	parent := os.TempDir()
	if len(parent) > longest {
		parent = "/tmp"
	}
	sockets.Do(func() { sweep(parent, time.Now().Add(-sweepAge)) })
	dir, err := os.MkdirTemp(parent, "soliton-agent-")
	if err == nil {
		if lock := lockDir(dir); lock != nil {
			sockets.Lock()
			defer sockets.Unlock()
			sockets.locks[dir] = lock
		}
		return dir, nil
	}
	if parent != os.TempDir() {
		return "", fmt.Errorf("TMPDIR %s is too long for a socket's path, and /tmp cannot take its place: %w; set TMPDIR to a directory of at most %d bytes",
			os.TempDir(), err, longest)
	}
	return "", fmt.Errorf("a folder for the worker's socket: %w; set TMPDIR to a directory you may write to", err)
}

// removeSocketDir removes a folder that socketDir made. What is left harms nobody.
func removeSocketDir(dir string) {
	_ = os.RemoveAll(dir)
	sockets.Lock()
	defer sockets.Unlock()
	if lock := sockets.locks[dir]; lock != nil {
		_ = lock.Close()
		delete(sockets.locks, dir)
	}
}

// lockDir takes the lock of a folder, nil if another process has it.
func lockDir(dir string) *os.File {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		_ = f.Close()
		return nil
	}
	return f
}

var socketDirs = regexp.MustCompile(`^soliton-agent-[0-9]+$`)

// sweep removes folders of this user's processes that are no more, as far as they are older.
func sweep(parent string, older time.Time) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return
	}
	for _, e := range entries {
		dir := filepath.Join(parent, e.Name())
		if !e.IsDir() || !socketDirs.MatchString(e.Name()) {
			continue
		}
		var st unix.Stat_t
		if unix.Lstat(dir, &st) != nil || int(st.Uid) != os.Geteuid() || !time.Unix(st.Mtim.Unix()).Before(older) {
			continue
		}
		if lock := lockDir(dir); lock != nil {
			_ = os.Remove(filepath.Join(dir, socketName))
			_ = os.Remove(dir) // which fails if there is anything else
			_ = lock.Close()
		}
	}
}

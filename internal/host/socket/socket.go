// Package socket makes the unix socket at which commands reach a host. It lies in a folder of its own, which only this user may
// enter, beside the key that commands prove to hold. The folder is locked while the process lives, so that a later process removes
// the folders of a killed one.
package socket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/timing"
)

const (
	name    = "agent"
	keyName = "key"
)

// maxUnproven bounds the connections that have not proved that they hold the key.
const maxUnproven = 64

// folders are named by the process that made them, and a random number.
var folders = regexp.MustCompile(`^soliton-agent-([0-9]+-)?[0-9]+$`)

// longest is the greatest length of the parent: the kernel takes 107 bytes of path, process IDs are below 2^22, and MkdirTemp
// appends a number of 32 bits.
const longest = 107 - len("/soliton-agent-4194304-4294967295/"+name)

// sweepAge is the least age of a folder that is swept: a new folder is not locked yet.
const sweepAge = 10 * time.Second

var sweepOnce sync.Once

// Listener listens in a folder that only this user may enter.
type Listener struct {
	*net.UnixListener
	dir   string
	lock  *os.File // may be nil
	key   auth.Key
	lobby *auth.Lobby
	once  sync.Once
}

// Listen makes a socket. Close ends the listener; Remove removes the folder.
func Listen() (*Listener, error) {
	dir, err := makeFolder()
	if err != nil {
		return nil, err
	}
	l := &Listener{dir: dir, lock: lock(dir), key: auth.NewKey(), lobby: auth.NewLobby(maxUnproven)}
	if err := os.WriteFile(filepath.Join(dir, keyName), l.key, 0o600); err != nil {
		l.Remove()
		return nil, fmt.Errorf("socket: %w", err)
	}
	if l.UnixListener, err = net.ListenUnix("unix", &net.UnixAddr{Name: l.Path(), Net: "unix"}); err != nil {
		l.Remove()
		return nil, fmt.Errorf("socket: %w", err)
	}
	return l, nil
}

func folderParent() string {
	if parent := os.TempDir(); len(parent) <= longest {
		return parent
	}
	return "/tmp"
}

func prefix(pid int) string { return fmt.Sprintf("soliton-agent-%d-", pid) }

func makeFolder() (string, error) {
	parent := folderParent()
	sweepOnce.Do(func() { sweep(parent, time.Now().Add(-sweepAge)) })
	dir, err := os.MkdirTemp(parent, prefix(os.Getpid()))
	switch {
	case err != nil && parent != os.TempDir():
		return "", fmt.Errorf("TMPDIR %s is too long for a socket's path, and /tmp cannot be used instead: %w; set TMPDIR to a directory of at most %d bytes",
			os.TempDir(), err, longest)
	case err != nil:
		return "", fmt.Errorf("make a folder for a socket: %w; set TMPDIR to a directory you may write to", err)
	}
	return dir, nil
}

// Admit has the caller of an accepted connection prove that it holds the key.
func (l *Listener) Admit(c net.Conn) error {
	l.lobby.Enter(c)
	defer l.lobby.Leave(c)
	return handshake(c, func() error {
		_, err := auth.Answer(c, l.key)
		return err
	})
}

// Close ends the listener and the connections that are still to be admitted.
func (l *Listener) Close() error {
	l.lobby.Close()
	return l.UnixListener.Close()
}

// Dial connects to the socket with a path, with the key beside it.
func Dial(ctx context.Context, path string) (net.Conn, error) {
	key, err := os.ReadFile(filepath.Join(filepath.Dir(path), keyName))
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if err := handshake(c, func() error { return auth.Call(c, key, auth.Ends{}, nil) }); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// handshake bounds the time of f, which proves who is at the ends of a connection.
func handshake(c net.Conn, f func() error) error {
	_ = c.SetDeadline(time.Now().Add(timing.Handshake))
	defer func() { _ = c.SetDeadline(time.Time{}) }()
	return f()
}

// Path returns the path of the socket.
func (l *Listener) Path() string { return filepath.Join(l.dir, name) }

// Remove removes the folder, as far as it can. Connections stay.
func (l *Listener) Remove() {
	l.once.Do(func() {
		_ = os.RemoveAll(l.dir)
		if l.lock != nil {
			_ = l.lock.Close()
		}
	})
}

// ForgetProcess removes the folders of a process of this user that has exited.
func ForgetProcess(pid int) {
	parent := folderParent()
	entries, _ := os.ReadDir(parent)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix(pid)) {
			Forget(filepath.Join(parent, e.Name(), name))
		}
	}
}

// Forget removes the folder of a socket with a path that another process has recorded, unless that process lives.
func Forget(path string) {
	dir := filepath.Dir(path)
	if filepath.Base(path) != name || !folders.MatchString(filepath.Base(dir)) {
		return
	}
	if lock := lock(dir); lock != nil {
		_ = os.RemoveAll(dir) // a later process removes what is left
		_ = lock.Close()
	}
}

// lock locks a folder, nil if another process has locked it.
func lock(dir string) *os.File {
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

// sweep removes folders of this user's dead processes that are older than a time.
func sweep(parent string, older time.Time) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return
	}
	for _, e := range entries {
		dir := filepath.Join(parent, e.Name())
		if !e.IsDir() || !folders.MatchString(e.Name()) {
			continue
		}
		var st unix.Stat_t
		if unix.Lstat(dir, &st) != nil || int(st.Uid) != os.Geteuid() || !time.Unix(st.Mtim.Unix()).Before(older) {
			continue
		}
		if lock := lock(dir); lock != nil {
			_ = os.Remove(filepath.Join(dir, name))
			_ = os.Remove(filepath.Join(dir, keyName))
			_ = os.Remove(dir) // fails if the folder holds anything else
			_ = lock.Close()
		}
	}
}

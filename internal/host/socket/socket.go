// Package socket makes the folders in which the unix sockets of a host lie: that at which commands reach it, beside the key that
// commands prove to hold, and those at which its workers reach each other. Only this user may enter a folder. It is locked while
// the process lives, so that a later process removes the folders of a killed one.
package socket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

const (
	name    = "agent"
	keyName = "key"
)

// maxUnproven bounds the connections that have not proved that they hold the key.
const maxUnproven = 64

// folders are named by the process that made them, and a random number.
var folders = regexp.MustCompile(`^(soliton-agent-(?:[0-9]+-)?)[0-9]+$`)

// links are the sockets of workers, named by their sessions.
var links = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)

// longest is the greatest length of the parent: process IDs are below 2^22, MkdirTemp appends a number of 32 bits, and the names of
// workers' sockets are the longest.
const longest = transport.MaxPath - len("/soliton-agent-4194304-4294967295/4095.99999999")

// sweepAge is the least age of a folder that is swept: a new folder is not locked yet.
const sweepAge = 10 * time.Second

var sweepOnce sync.Once

// Folder is a folder for sockets that only this user may enter.
type Folder struct {
	dir  string
	lock *os.File // may be nil
	once sync.Once
}

// NewFolder makes a folder in TMPDIR, or in /tmp if the paths of sockets in TMPDIR would be too long or hold characters that
// addresses do not. Remove removes it.
func NewFolder() (*Folder, error) {
	parent := folderParent()
	sweepOnce.Do(func() { sweep(parent, time.Now().Add(-sweepAge)) })
	dir, err := os.MkdirTemp(parent, prefix(os.Getpid()))
	switch {
	case err != nil && parent != temporary():
		return nil, fmt.Errorf("TMPDIR %s cannot be in the path of a socket, and /tmp cannot be used instead: %w; set TMPDIR to a directory of at most %d printable ASCII characters, without spaces and commas",
			os.TempDir(), err, longest)
	case err != nil:
		return nil, fmt.Errorf("make a folder for sockets: %w; set TMPDIR to a directory you may write to", err)
	}
	return &Folder{dir: dir, lock: lock(dir)}, nil
}

// temporary returns the absolute path of TMPDIR, because workers may run elsewhere.
func temporary() string {
	dir, err := filepath.Abs(os.TempDir())
	if err != nil {
		return os.TempDir()
	}
	return dir
}

func folderParent() string {
	parent := temporary()
	if len(parent) > longest || strings.ContainsFunc(parent, func(r rune) bool { return r <= ' ' || r > '~' || r == ',' }) {
		return "/tmp"
	}
	return parent
}

// Path returns the path of the folder.
func (f *Folder) Path() string { return f.dir }

// Remove removes the folder, as far as it can. Connections stay.
func (f *Folder) Remove() {
	f.once.Do(func() {
		// These need no file descriptor: a process that has none left removes its folder, too.
		for _, n := range []string{name, keyName} {
			_ = os.Remove(filepath.Join(f.dir, n))
		}
		if os.Remove(f.dir) != nil {
			_ = os.RemoveAll(f.dir)
		}
		if f.lock != nil {
			_ = f.lock.Close()
		}
	})
}

// Listener listens for commands, in a folder of its own.
type Listener struct {
	*net.UnixListener
	folder *Folder
	key    auth.Key
	lobby  *auth.Lobby
}

// Listen makes a socket. Close ends the listener; Remove removes the folder.
func Listen() (*Listener, error) {
	folder, err := NewFolder()
	if err != nil {
		return nil, err
	}
	l := &Listener{folder: folder, key: auth.NewKey(), lobby: auth.NewLobby(maxUnproven)}
	if err := os.WriteFile(filepath.Join(folder.dir, keyName), l.key, 0o600); err != nil {
		l.Remove()
		return nil, fmt.Errorf("socket: %w", err)
	}
	if l.UnixListener, err = net.ListenUnix("unix", &net.UnixAddr{Name: l.Path(), Net: "unix"}); err != nil {
		l.Remove()
		return nil, fmt.Errorf("socket: %w", err)
	}
	return l, nil
}

func prefix(pid int) string { return fmt.Sprintf("soliton-agent-%d-", pid) }

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
	key, err := readKey(filepath.Join(filepath.Dir(path), keyName))
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

// readKey reads a key from a file, and no more. It does not wait for one that is a named pipe.
func readKey(path string) (auth.Key, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	key := make(auth.Key, auth.KeySize)
	if _, err := io.ReadFull(f, key); err != nil {
		return nil, fmt.Errorf("%s is no key: %w", path, err)
	}
	return key, nil
}

// handshake bounds the time of f, which proves who is at the ends of a connection.
func handshake(c net.Conn, f func() error) error {
	_ = c.SetDeadline(time.Now().Add(timing.Handshake))
	defer func() { _ = c.SetDeadline(time.Time{}) }()
	return f()
}

// Path returns the path of the socket.
func (l *Listener) Path() string { return filepath.Join(l.folder.dir, name) }

// Remove removes the folder of the socket.
func (l *Listener) Remove() { l.folder.Remove() }

// ForgetProcess removes the folders of a process of this user that has exited.
func ForgetProcess(pid int) { forget(folderParent(), prefix(pid)) }

// Forget removes the folders of the process that made a socket with a path, which another process has recorded, unless the process
// lives.
func Forget(path string) {
	dir := filepath.Dir(path)
	if m := folders.FindStringSubmatch(filepath.Base(dir)); m != nil && filepath.Base(path) == name {
		forget(filepath.Dir(dir), m[1])
	}
}

// forget removes the folders whose names begin with a prefix, unless they are locked.
func forget(parent, prefix string) {
	entries, _ := os.ReadDir(parent)
	for _, e := range entries {
		if m := folders.FindStringSubmatch(e.Name()); m == nil || m[1] != prefix {
			continue
		}
		dir := filepath.Join(parent, e.Name())
		if lock := lock(dir); lock != nil {
			_ = os.RemoveAll(dir) // a later process removes what is left
			_ = lock.Close()
		}
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
			sockets, _ := os.ReadDir(dir)
			for _, s := range sockets {
				if s.Name() == name || s.Name() == keyName || links.MatchString(s.Name()) {
					_ = os.Remove(filepath.Join(dir, s.Name()))
				}
			}
			_ = os.Remove(dir) // fails if the folder holds anything else
			_ = lock.Close()
		}
	}
}

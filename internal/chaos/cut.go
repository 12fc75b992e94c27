package chaos

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cuts keeps packets from processes as a broken network does: packets in flight are lost without an error, and TCP sends them again
// once the fault is over. Cuts attaches a filter to the processes' own sockets, which needs the right to trace them (ptrace): those
// that the caller started, or those of its user, depending on the machine. Some kernels need CAP_NET_ADMIN as well. The zero value
// is ready for use, by one goroutine at a time.
type Cuts struct {
	known map[string]string // by the name of a socket, the addresses whose packets it drops
}

// CutError says that a process cannot be cut off.
type CutError struct {
	PID int
	Err error
}

func (e *CutError) Error() string {
	text := fmt.Sprintf("chaos: cut: the sockets of process %d: %v", e.PID, e.Err)
	if errors.Is(e.Err, fs.ErrPermission) || errors.Is(e.Err, unix.ENOSYS) {
		text += "; this needs the right to trace processes (ptrace), and with some kernels CAP_NET_ADMIN"
	}
	return text
}

func (e *CutError) Unwrap() error { return e.Err }

// Apply makes the sockets of a process that are bound to the IPv4 address own drop everything that comes from some addresses, and
// nothing else. Sockets that are opened later need another Apply; accepted ones inherit the filter of their listener. A process that
// has ended has no sockets. The kernel does not filter listeners of Multipath TCP, which Go makes unless GODEBUG has
// multipathtcp=0. The error is a [CutError].
func (c *Cuts) Apply(pid int, own netip.Addr, from []netip.Addr) error {
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	files, err := os.ReadDir(dir)
	if err != nil {
		return cutError(pid, err)
	}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return cutError(pid, err)
	}
	defer unix.Close(process) //nolint:errcheck // nothing was written
	want := fmt.Sprint(own, from)
	for _, f := range files {
		name, err := os.Readlink(filepath.Join(dir, f.Name()))
		if err != nil || !strings.HasPrefix(name, "socket:") || c.known[name] == want {
			continue // closed since, or nothing to do
		}
		number, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		fd, err := unix.PidfdGetfd(process, number, 0)
		if errors.Is(err, unix.EBADF) {
			continue // closed since
		}
		if err != nil {
			return cutError(pid, err)
		}
		done, err := filter(fd, own, from)
		_ = unix.Close(fd) // ours; the process has its own
		if err != nil {
			return cutError(pid, err)
		}
		if done {
			if c.known == nil {
				c.known = make(map[string]string)
			}
			c.known[name] = want
		}
	}
	return nil
}

func cutError(pid int, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || ended(pid) {
		return nil
	}
	return &CutError{PID: pid, Err: err}
}

// ended reports whether a process has ended, reaped or not. The kernel refuses access to its files then.
func ended(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	_, after, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" ")) // its name may hold any byte
	return bytes.HasPrefix(after, []byte("Z")) || bytes.HasPrefix(after, []byte("X"))
}

// filter makes a socket drop what comes from some addresses. It reports false for a socket without an address, to be tried again.
func filter(fd int, own netip.Addr, from []netip.Addr) (done bool, err error) {
	local, _ := unix.Getsockname(fd) // sockets of some families have no name
	a, ok := local.(*unix.SockaddrInet4)
	if !ok {
		return true, nil // not a socket to other hosts
	}
	switch addr := netip.AddrFrom4(a.Addr); {
	case addr.IsUnspecified():
		return false, nil
	case addr != own:
		return true, nil
	}
	if len(from) == 0 {
		err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		if errors.Is(err, unix.ENOENT) { // it never had one
			err = nil
		}
		return true, err
	}
	program := dropping(from)
	return true, unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

// dropping returns a program of the classic packet filter that keeps 0 bytes of what comes from the addresses, and all of the rest.
func dropping(from []netip.Addr) []unix.SockFilter {
	const (
		networkHeader = 0xfff00000 // SKF_NET_OFF
		sourceAddress = 12         // in the header of IPv4
	)
	program := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: networkHeader + sourceAddress}}
	for _, addr := range from {
		b := addr.As4()
		program = append(program,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K},
		)
	}
	return append(program, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff})
}

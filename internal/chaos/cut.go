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

// Cuts keeps packets from processes as a broken network does: what is under way is lost, nobody is told, and what TCP has in
// its hands comes after all once the harm is over. It does so with a filter on the processes' own sockets, for which the kernel
// asks the right to trace them (ptrace): those that the caller started, or those of its user, as the machine is set. Some kernels
// ask CAP_NET_ADMIN, too. The zero value is ready for use, by one goroutine at a time.
type Cuts struct {
	known map[string]string // by the name of a socket, the addresses that it hears nothing from
}

// CutError says that a process cannot be cut off.
type CutError struct {
	PID int
	Err error
}

func (e *CutError) Error() string {
	text := fmt.Sprintf("chaos: cut: the sockets of process %d: %v", e.PID, e.Err)
	if errors.Is(e.Err, fs.ErrPermission) || errors.Is(e.Err, unix.ENOSYS) {
		text += "; it takes the right to trace processes (ptrace), and with some kernels CAP_NET_ADMIN"
	}
	return text
}

func (e *CutError) Unwrap() error { return e.Err }

// Apply lets the sockets of a process that are bound to its IPv4 address own drop all that comes from some addresses, and
// nothing else. Sockets that are opened later need another Apply; those that a listener accepts have its filter. A process that
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

// ended reports whether a process waits to be reaped. The kernel takes its files for out of reach then.
func ended(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	_, after, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" ")) // its name may hold anything
	return bytes.HasPrefix(after, []byte("Z")) || bytes.HasPrefix(after, []byte("X"))
}

// filter lets a socket drop what comes from some addresses. It is not done with one that has no address yet.
func filter(fd int, own netip.Addr, from []netip.Addr) (done bool, err error) {
	local, _ := unix.Getsockname(fd) // sockets of some families have no name
	a, ok := local.(*unix.SockaddrInet4)
	if !ok {
		return true, nil // none that leads to others
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

// dropping returns a program of the classic packet filter: 0 bytes are kept of what comes from the addresses, all of the rest.
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

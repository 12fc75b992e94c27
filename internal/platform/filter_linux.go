//go:build !portable

package platform

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

// CanFilter returns an error where [FilterSockets] cannot work on this system.
func CanFilter() error { return nil }

// FilterSockets makes the sockets of a process that are bound to its IPv4 address own drop all packets from some addresses, and no
// others. Sockets that are opened later need another call; those that a listener accepts inherit its filter. done holds, by the
// name of a socket, what earlier calls did to it. A process that has exited has no sockets. The kernel does not filter listeners of
// Multipath TCP, which Go makes unless GODEBUG has multipathtcp=0.
func FilterSockets(pid int, own netip.Addr, from []netip.Addr, done map[string]string) error {
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	files, err := os.ReadDir(dir)
	if err != nil {
		return filterError(pid, err)
	}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return filterError(pid, err)
	}
	defer unix.Close(process) //nolint:errcheck // nothing was written
	want := fmt.Sprint(own, from)
	for _, f := range files {
		name, err := os.Readlink(filepath.Join(dir, f.Name()))
		if err != nil || !strings.HasPrefix(name, "socket:") || done[name] == want {
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
			return filterError(pid, err)
		}
		bound, err := filter(fd, own, from)
		_ = unix.Close(fd) // ours; the process has its own
		if err != nil {
			return filterError(pid, err)
		}
		if bound {
			done[name] = want
		}
	}
	return nil
}

func filterError(pid int, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || exited(pid) {
		return nil
	}
	return err
}

// exited reports whether a process has exited, reaped or not. The kernel refuses access to its files then.
func exited(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	_, after, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" ")) // its name may hold any byte
	return bytes.HasPrefix(after, []byte("Z")) || bytes.HasPrefix(after, []byte("X"))
}

// filter makes a socket drop what comes from some addresses. It returns false for a socket that has no address yet.
func filter(fd int, own netip.Addr, from []netip.Addr) (bound bool, err error) {
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

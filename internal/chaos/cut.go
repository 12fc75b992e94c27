package chaos

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"syscall"

	"github.com/soliton-train/soliton/internal/platform"
)

// Cuts keeps packets from processes as a broken network does: packets in flight are lost without an error, and TCP sends them again
// once the fault is over. Cuts attaches a filter to the processes' own sockets, which needs the right to trace them (ptrace): those
// that the caller started, or those of its user, depending on the machine. Some kernels need CAP_NET_ADMIN as well. The zero value
// is ready for use, by one goroutine at a time.
type Cuts struct {
	done map[string]string // what was done to each socket, for platform.FilterSockets
}

// CanCut returns an error on systems where no process can be cut off.
func CanCut() error {
	if err := platform.CanFilter(); err != nil {
		return fmt.Errorf("cut needs Linux, which can filter the sockets of other processes: %w", err)
	}
	return nil
}

// Apply makes the sockets of a process that are bound to its IPv4 address own drop all packets from some addresses; see
// [platform.FilterSockets]. Sockets that are opened later need another Apply.
func (c *Cuts) Apply(pid int, own netip.Addr, from []netip.Addr) error {
	if c.done == nil {
		c.done = make(map[string]string)
	}
	err := platform.FilterSockets(pid, own, from, c.done)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.ENOSYS):
		err = fmt.Errorf("%w; this needs the right to trace processes (ptrace), and with some kernels CAP_NET_ADMIN", err)
	}
	return fmt.Errorf("chaos: cut: the sockets of process %d: %w", pid, err)
}

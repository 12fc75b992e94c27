// Package devices has the clocks of the devices that workers compute on, of this machine and of others. A [Holder] opens them, sets
// them, and restores what it has set. The leader of a run holds those of its own machine; on another one a [Server] does for the
// leader, who sees them as a [Far] each.
//
// A server serves one link. When that ends, because its host or the leader failed or another host leads, it restores all clocks by
// itself. If its process is killed as well, the guard does that [Clocks].Save has prepared.
package devices

import (
	"context"
	"errors"

	"github.com/soliton-train/soliton/internal/dvfs"
)

// Clocks are those of the devices of this machine. Its methods are called by one goroutine at a time.
type Clocks interface {
	// Devices returns the devices that workers compute on, given the process of each worker. It is called again where a plan
	// has other workers, after all clocks are put back.
	Devices(processes map[int]int) ([]Device, error)

	// Save is called before the first clock is set that stays so when this process dies. When it returns,
	// a process that outlives this one will put back what the record says.
	Save(dvfs.Record) error

	// Close is called when no clock is to be set any more, or for now. restored says that all clocks are as they were found.
	Close(restored bool) error

	// Emulated says that the devices do not exist: workers are told how fast they are to be.
	Emulated() bool
}

// Device is one of them.
type Device struct {
	dvfs.Clock
	Kind    string                // cpu or gpu, for metrics
	Workers []int                 // WorkerIDs of those who compute on it
	Power   dvfs.Power            // nil: not known
	Speed   func(mhz int) float64 // of its work; nil: proportional to the frequency
}

// Holder gives the clocks of this machine to one leader at a time. Between Acquire and Release one goroutine uses it.
type Holder struct {
	clocks Clocks
	free   chan struct{}
	reset  func() // emulated devices are as they were: the workers are to know; may be nil
	keeper *dvfs.Keeper
}

// NewHolder returns the holder of c. reset is called after emulated clocks were restored.
func NewHolder(c Clocks, reset func()) *Holder {
	return &Holder{clocks: c, free: make(chan struct{}, 1), reset: reset}
}

// Acquire waits until no one else holds the clocks, or ctx ends.
func (h *Holder) Acquire(ctx context.Context) error {
	select {
	case h.free <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Open restores all clocks, and returns the devices of the workers.
func (h *Holder) Open(processes map[int]int) ([]Device, error) {
	if err := h.Restore(); err != nil {
		return nil, err
	}
	h.keeper = nil
	devices, err := h.clocks.Devices(processes)
	if err != nil {
		return nil, err
	}
	var clocks []dvfs.Clock
	for _, d := range devices {
		clocks = append(clocks, d.Clock)
	}
	h.keeper = dvfs.NewKeeper(clocks, h.clocks.Save)
	return devices, nil
}

// Apply sets clocks of the devices that Open has returned.
func (h *Holder) Apply(settings []dvfs.Setting) error { return h.keeper.Apply(settings) }

// Touched reports whether a clock is not as it was found.
func (h *Holder) Touched() bool { return h.keeper != nil && h.keeper.Touched() }

// Restore restores every clock that was set. After an error it may be called again.
func (h *Holder) Restore() error {
	if !h.Touched() {
		return nil
	}
	err := h.keeper.Close()
	if h.reset != nil && h.Emulated() {
		h.reset()
	}
	return err
}

// Release restores every clock and gives them to whoever acquires them next.
func (h *Holder) Release() error {
	err := h.Restore()
	err = errors.Join(err, h.clocks.Close(err == nil))
	h.keeper = nil
	<-h.free
	return err
}

// Emulated says that the devices do not exist.
func (h *Holder) Emulated() bool { return h.clocks.Emulated() }

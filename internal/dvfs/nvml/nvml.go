//go:build linux && cgo

package nvml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/soliton-train/soliton/internal/dvfs"
)

// maxCards bounds what the library may say that there is.
const maxCards = 256

// maxMHz is more than any card has.
const maxMHz = 100_000

// grid is how far apart the frequencies of a card are, in MHz. The library can list them, but its Go binding
// returns one of the list only; the driver takes the next frequency it has.
const grid = 15

// Library is the loaded library, and the cards that it knows.
type Library struct {
	lib    nvml.Interface
	cards  []*Card
	driver string
}

// Open loads the library and finds the cards; it changes nothing. The error is [dvfs.ErrUnsupported], wrapped, where there is
// no library, no driver or no card, and [dvfs.ErrPermission] where this process may not look. Close ends
// the use of the library.
func Open() (*Library, error) { return open(nvml.New()) }

func open(lib nvml.Interface) (*Library, error) {
	if ret := lib.Init(); ret != nvml.SUCCESS {
		if ret == nvml.ERROR_LIBRARY_NOT_FOUND {
			return nil, fmt.Errorf("no NVIDIA graphics cards: %w: libnvidia-ml.so.1 is not there; it comes with NVIDIA's driver", dvfs.ErrUnsupported)
		}
		return nil, fmt.Errorf("no NVIDIA graphics cards: %w", failure(ret))
	}
	l := &Library{lib: lib}
	if v, ret := lib.SystemGetDriverVersion(); ret == nvml.SUCCESS {
		l.driver = printable(v)
	}
	n, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		l.Close()
		return nil, fmt.Errorf("number of NVIDIA graphics cards: %w", failure(ret))
	}
	if n < 1 || n > maxCards {
		l.Close()
		return nil, fmt.Errorf("no NVIDIA graphics cards: %w: the driver knows %d", dvfs.ErrUnsupported, n)
	}
	for i := range n {
		c, err := openCard(lib, i)
		if err != nil {
			l.Close()
			return nil, err
		}
		l.cards = append(l.cards, c)
	}
	return l, nil
}

// Driver returns the version of the driver, "" where it is not known.
func (l *Library) Driver() string { return l.driver }

// Cards returns the cards in the library's order, which is that of their places on the bus.
func (l *Library) Cards() []*Card { return l.cards }

// Close ends the use of the library and of its cards. It changes no clock.
func (l *Library) Close() { _ = l.lib.Shutdown() }

// Card is the clock of one card.
type Card struct {
	dev    nvml.Device
	index  int
	model  string
	uuid   string
	lo, hi int
	steps  []int
}

func openCard(lib nvml.Interface, index int) (*Card, error) {
	c := &Card{index: index}
	bad := func(what string, ret nvml.Return) (*Card, error) {
		return nil, fmt.Errorf("graphics card %d: %s: %w", index, what, failure(ret))
	}
	var ret nvml.Return
	if c.dev, ret = lib.DeviceGetHandleByIndex(index); ret != nvml.SUCCESS {
		return bad("handle", ret)
	}
	if c.uuid, ret = c.dev.GetUUID(); ret != nvml.SUCCESS {
		return bad("UUID", ret)
	}
	c.uuid = printable(c.uuid)
	if name, ret := c.dev.GetName(); ret == nvml.SUCCESS {
		c.model = printable(name)
	}
	hi, ret := c.dev.GetMaxClockInfo(nvml.CLOCK_GRAPHICS)
	if ret != nvml.SUCCESS {
		return bad("highest frequency", ret)
	}
	lo, _, ret := c.dev.GetMinMaxClockOfPState(nvml.CLOCK_GRAPHICS, nvml.PSTATE_0)
	if ret != nvml.SUCCESS || lo == 0 {
		// Where the driver does not tell, a third: cards go lower, and nothing is won there.
		lo = hi / 3
	}
	if hi < 1 || hi > maxMHz || lo < 1 || lo > hi {
		return nil, fmt.Errorf("graphics card %d: %w: frequencies from %d to %d MHz", index, dvfs.ErrUnsupported, lo, hi)
	}
	c.lo, c.hi = int(lo), int(hi)
	c.steps = dvfs.Grid(c.lo, c.hi, grid)
	return c, nil
}

// Name is the card's index, model and UUID.
func (c *Card) Name() string { return fmt.Sprintf("GPU %d %s (%s)", c.index, c.model, c.uuid) }

// Limits implements [dvfs.Clock].
func (c *Card) Limits() (lo, hi int) { return c.lo, c.hi }

// Steps implements [dvfs.Clock].
func (c *Card) Steps() []int { return c.steps }

// Current implements [dvfs.Clock].
func (c *Card) Current() (int, error) {
	mhz, ret := c.dev.GetClockInfo(nvml.CLOCK_GRAPHICS)
	if ret != nvml.SUCCESS || mhz > maxMHz {
		return 0, c.failed("present frequency", ret)
	}
	return int(mhz), nil
}

// Found implements [dvfs.Clock]. The library does not tell whether the clock was locked: it is the highest.
func (c *Card) Found() int { return c.hi }

// Processes returns the processes that compute on the card, by their numbers as this process sees them where both are
// in one namespace.
func (c *Card) Processes() ([]int, error) {
	all, ret := c.dev.GetComputeRunningProcesses()
	if ret != nvml.SUCCESS {
		return nil, c.failed("processes", ret)
	}
	var pids []int
	for _, p := range all[:min(len(all), maxProcesses)] {
		pids = append(pids, int(p.Pid))
	}
	return pids, nil
}

// maxProcesses bounds those of a card.
const maxProcesses = 1 << 16

// Set implements [dvfs.Clock].
func (c *Card) Set(mhz int) error {
	if err := dvfs.CheckLimits(c, mhz); err != nil {
		return err
	}
	if ret := c.dev.SetGpuLockedClocks(uint32(c.lo), uint32(mhz)); ret != nvml.SUCCESS {
		return c.failed(fmt.Sprintf("set %d MHz", mhz), ret)
	}
	return nil
}

// Restore implements [dvfs.Clock].
func (c *Card) Restore() error {
	if ret := c.dev.ResetGpuLockedClocks(); ret != nvml.SUCCESS {
		return c.failed("put the clock back", ret)
	}
	return nil
}

// Energy is what the card has drawn since its driver was loaded.
func (c *Card) Energy() (float64, error) {
	mj, ret := c.dev.GetTotalEnergyConsumption()
	if ret != nvml.SUCCESS {
		return 0, c.failed("counter of energy", ret)
	}
	return float64(mj) / 1000, nil
}

// Watts returns what the card draws at the moment, and the limit that is set for it.
func (c *Card) Watts() (now, limit float64, err error) {
	mw, ret := c.dev.GetPowerUsage()
	if ret != nvml.SUCCESS {
		return 0, 0, c.failed("power", ret)
	}
	top, ret := c.dev.GetPowerManagementLimit()
	if ret != nvml.SUCCESS {
		return 0, 0, c.failed("limit of power", ret)
	}
	return float64(mw) / 1000, float64(top) / 1000, nil
}

// Saved implements [dvfs.Clock].
func (c *Card) Saved() (dvfs.Saved, bool) { return dvfs.Saved{Kind: dvfs.KindNVML, ID: c.uuid}, true }

func (c *Card) failed(what string, ret nvml.Return) error {
	return fmt.Errorf("%s: %s: %w", c.Name(), what, failure(ret))
}

// Restore puts the clocks of the cards in a record back. Without any in it, the library is not needed.
func Restore(r dvfs.Record) error {
	wanted := map[string]bool{}
	for _, s := range r.Clocks {
		if s.Kind == dvfs.KindNVML {
			wanted[s.ID] = true
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	l, err := Open()
	if err != nil {
		return err
	}
	defer l.Close()
	return l.restore(wanted)
}

func (l *Library) restore(wanted map[string]bool) error {
	var errs []error
	for _, c := range l.cards {
		if wanted[c.uuid] {
			errs = append(errs, c.Restore())
			delete(wanted, c.uuid)
		}
	}
	for id := range wanted {
		errs = append(errs, fmt.Errorf("graphics card %s: %w: it is not there", id, dvfs.ErrUnsupported))
	}
	return errors.Join(errs...)
}

// failure is the error of a call, in one of the classes of package dvfs.
func failure(ret nvml.Return) error {
	switch ret {
	case nvml.ERROR_NO_PERMISSION:
		return fmt.Errorf("%w: %s; root, or CAP_SYS_ADMIN, may set clocks", dvfs.ErrPermission, ret.Error())
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_NOT_FOUND:
		return fmt.Errorf("%w: %s", dvfs.ErrUnsupported, ret.Error())
	}
	return errors.New(ret.Error())
}

// printable is for what goes into names and messages.
func printable(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s[:min(len(s), 128)]))
}

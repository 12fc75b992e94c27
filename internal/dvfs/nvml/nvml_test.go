//go:build linux && cgo

package nvml

import (
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/soliton-train/soliton/internal/dvfs"
)

// state is what the clock of a card is at.
type state struct {
	locked  bool
	lo, hi  uint32
	refuses nvml.Return
}

// server is a machine with cards, of which the library's own mock stands for each.
func server(cards ...*state) *mock.Interface {
	devices := make([]nvml.Device, len(cards))
	for i, s := range cards {
		uuid := "GPU-" + string(rune('a'+i))
		devices[i] = &mock.Device{
			GetUUIDFunc:         func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
			GetNameFunc:         func() (string, nvml.Return) { return "Mock A100\x1b[31m", nvml.SUCCESS },
			GetMaxClockInfoFunc: func(nvml.ClockType) (uint32, nvml.Return) { return 1410, nvml.SUCCESS },
			GetMinMaxClockOfPStateFunc: func(nvml.ClockType, nvml.Pstates) (uint32, uint32, nvml.Return) {
				return 210, 1410, nvml.SUCCESS
			},
			GetClockInfoFunc:              func(nvml.ClockType) (uint32, nvml.Return) { return min(1410, s.hi), nvml.SUCCESS },
			GetTotalEnergyConsumptionFunc: func() (uint64, nvml.Return) { return 1500, nvml.SUCCESS },
			GetComputeRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) {
				return []nvml.ProcessInfo{{Pid: 41}, {Pid: 42}}, s.refuses
			},
			GetPowerUsageFunc:           func() (uint32, nvml.Return) { return 61_000, nvml.SUCCESS },
			GetPowerManagementLimitFunc: func() (uint32, nvml.Return) { return 400_000, nvml.SUCCESS },
			SetGpuLockedClocksFunc: func(lo, hi uint32) nvml.Return {
				if s.refuses == nvml.SUCCESS {
					s.locked, s.lo, s.hi = true, lo, hi
				}
				return s.refuses
			},
			ResetGpuLockedClocksFunc: func() nvml.Return {
				s.locked = false
				return s.refuses
			},
		}
	}
	return &mock.Interface{
		InitFunc:                   func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:               func() nvml.Return { return nvml.SUCCESS },
		SystemGetDriverVersionFunc: func() (string, nvml.Return) { return "550.54.15", nvml.SUCCESS },
		DeviceGetCountFunc:         func() (int, nvml.Return) { return len(devices), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) { return devices[i], nvml.SUCCESS },
	}
}

func TestCards(t *testing.T) {
	a, b := &state{hi: 1410}, &state{hi: 1410}
	l, err := open(server(a, b))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if len(l.Cards()) != 2 || l.Driver() != "550.54.15" {
		t.Fatalf("%d cards, driver %s", len(l.Cards()), l.Driver())
	}
	c := l.Cards()[1]
	if c.Name() != "GPU 1 Mock A100[31m (GPU-b)" {
		t.Errorf("%q", c.Name())
	}
	if lo, hi := c.Limits(); lo != 210 || hi != 1410 || len(c.Steps()) != 81 || c.Steps()[1] != 225 {
		t.Errorf("%d to %d MHz, %v", lo, hi, c.Steps())
	}
	if err := c.Set(1005); err != nil || !b.locked || b.lo != 210 || b.hi != 1005 || a.locked {
		t.Errorf("%v, %+v, %+v", err, a, b)
	}
	if mhz, err := c.Current(); mhz != 1005 || err != nil {
		t.Errorf("%d MHz, %v", mhz, err)
	}
	if j, err := c.Energy(); j != 1.5 || err != nil {
		t.Errorf("%v J, %v", j, err)
	}
	if now, limit, err := c.Watts(); now != 61 || limit != 400 || err != nil {
		t.Errorf("%v of %v W, %v", now, limit, err)
	}
	if pids, err := c.Processes(); err != nil || len(pids) != 2 || pids[1] != 42 || c.Found() != 1410 {
		t.Errorf("%v, %v", pids, err)
	}
	if err := c.Set(1411); !errors.Is(err, dvfs.ErrUnsupported) {
		t.Error(err)
	}
	saved, _ := c.Saved()
	if err := c.Restore(); err != nil || b.locked {
		t.Errorf("%v, %+v", err, b)
	}
	a.locked, b.locked = true, true
	if err := l.restore(map[string]bool{saved.ID: true, "GPU-z": true}); !errors.Is(err, dvfs.ErrUnsupported) || b.locked || !a.locked {
		t.Errorf("%v, %+v, %+v", err, a, b)
	}
	b.refuses = nvml.ERROR_NO_PERMISSION
	if err := c.Set(1005); !errors.Is(err, dvfs.ErrPermission) {
		t.Error(err)
	}
}

func TestWithoutCards(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*mock.Interface)
		want   error
	}{
		"no library":    {func(m *mock.Interface) { m.InitFunc = func() nvml.Return { return nvml.ERROR_LIBRARY_NOT_FOUND } }, dvfs.ErrUnsupported},
		"no driver":     {func(m *mock.Interface) { m.InitFunc = func() nvml.Return { return nvml.ERROR_DRIVER_NOT_LOADED } }, dvfs.ErrUnsupported},
		"no permission": {func(m *mock.Interface) { m.InitFunc = func() nvml.Return { return nvml.ERROR_NO_PERMISSION } }, dvfs.ErrPermission},
		"no card":       {func(m *mock.Interface) { m.DeviceGetCountFunc = func() (int, nvml.Return) { return 0, nvml.SUCCESS } }, dvfs.ErrUnsupported},
		"absurd count": {func(m *mock.Interface) {
			m.DeviceGetCountFunc = func() (int, nvml.Return) { return 1 << 30, nvml.SUCCESS }
		}, dvfs.ErrUnsupported},
	} {
		m := server(&state{})
		c.change(m)
		if _, err := open(m); !errors.Is(err, c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestThisMachine looks for the library where this runs: it is there, or one line says that it is not.
func TestThisMachine(t *testing.T) {
	l, err := Open()
	if err != nil {
		if !errors.Is(err, dvfs.ErrUnsupported) && !errors.Is(err, dvfs.ErrPermission) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q", err)
		}
		t.Log(err)
		if err := Restore(dvfs.Record{}); err != nil {
			t.Errorf("an empty record: %v", err)
		}
		return
	}
	defer l.Close()
	for _, c := range l.Cards() {
		lo, hi := c.Limits()
		mhz, err1 := c.Current()
		j, err2 := c.Energy()
		t.Log(c.Name(), lo, hi, mhz, err1, j, err2)
		now, limit, err1 := c.Watts()
		pids, err2 := c.Processes()
		t.Log(now, limit, err1, pids, err2)
	}
}

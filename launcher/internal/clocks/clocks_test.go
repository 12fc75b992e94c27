package clocks

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/host/devices"
	"github.com/soliton-train/soliton/internal/testkit/sysfs"
)

// What lies where records do may be anything.
func TestHostileRecords(t *testing.T) {
	tree, limit := sysfs.Processors(t)
	good := `{"clocks":[{"kind":"cpufreq","id":"","policies":[{"name":"policy0","min":800000,"max":2500000}]}]}`
	for name, c := range map[string]struct {
		prepare func(dir, record string) error
		restore bool // the clock
		stays   bool // the record
		fails   bool
	}{
		"none":     {func(dir, _ string) error { return os.RemoveAll(dir) }, false, false, false},
		"good":     {func(_, record string) error { return os.WriteFile(record, []byte(good), 0o600) }, true, false, false},
		"garbage":  {func(_, record string) error { return os.WriteFile(record, []byte("{"), 0o600) }, false, false, true},
		"too long": {func(_, record string) error { return os.WriteFile(record, make([]byte, dvfs.MaxRecord+1), 0o600) }, false, false, true},
		"beyond the hardware": {func(_, record string) error {
			return os.WriteFile(record, []byte(strings.Replace(good, "2500000", "9000000", 1)), 0o600)
		}, false, true, true},
		"others may write": {func(dir, record string) error {
			return errors.Join(os.WriteFile(record, []byte(good), 0o600), os.Chmod(dir, 0o777))
		}, false, true, true},
		"a link": {func(dir, record string) error {
			return errors.Join(os.WriteFile(filepath.Join(dir, "x"), []byte(good), 0o600), os.Symlink("x", record))
		}, false, true, true},
		"a pipe": {func(_, record string) error { return syscall.Mkfifo(record, 0o600) }, false, true, true},
		"of a launcher that lives": {func(dir, record string) error {
			f, err := os.Create(filepath.Join(dir, "lock"))
			if err != nil {
				return err
			}
			t.Cleanup(func() { f.Close() })
			return errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_EX), os.WriteFile(record, []byte(good), 0o600))
		}, false, true, false},
	} {
		dir := filepath.Join(t.TempDir(), "records")
		t.Setenv(recordEnv, dir)
		record := filepath.Join(dir, "clocks.json")
		if err := errors.Join(os.Mkdir(dir, 0o700), c.prepare(dir, record)); err != nil {
			t.Fatal(err)
		}
		was := limit()
		_, err := Restore(tree, false)
		if (err != nil) != c.fails {
			t.Errorf("%s: %v", name, err)
		}
		if restored := limit() != was; restored != c.restore {
			t.Errorf("%s: from %s to %s kHz", name, was, limit())
		}
		if _, err := os.Lstat(record); (err == nil) != c.stays {
			t.Errorf("%s: the record: %v", name, err)
		}
		if err := os.WriteFile(filepath.Join(tree, "devices/system/cpu/cpufreq/policy0/scaling_max_freq"), []byte("2000000\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Two runs do not set the same clocks.
func TestOneRunSetsClocks(t *testing.T) {
	t.Setenv(recordEnv, filepath.Join(t.TempDir(), "records"))
	var r dvfs.Record
	if err := json.Unmarshal([]byte(`{"clocks":[]}`), &r); err != nil {
		t.Fatal(err)
	}
	if err := openRecordDir(recordDir()); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(recordDir(), "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := keepRecord(r, t.TempDir()); !errors.Is(err, errOtherRun) {
		t.Error(err)
	}
}

// A worker computes where any process does that it has started.
func TestFamily(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sleep 100 & echo; wait")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	_, _ = out.Read(make([]byte, 1)) // the second one is there
	all := family(cmd.Process.Pid)
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = cmd.Wait()
	if len(all) != 2 || all[0] != cmd.Process.Pid {
		t.Errorf("the family of %d: %v", cmd.Process.Pid, all)
	}
}

// Who computes on which card is told by processes; who is on none computes on the processors.
func TestWhoseCards(t *testing.T) {
	cards := []card{{pids: []int{7, 100}}, {pids: []int{101, 102}}, {pids: []int{8}}}
	on, rest := whose(map[int][]int{0: {100}, 1: {101}, 2: {90, 102}, 3: {103}}, cards)
	if len(on) != 2 || fmt.Sprint(on[0].Workers, on[1].Workers, rest) != "[0] [1 2] [3]" {
		t.Errorf("%+v, %v", on, rest)
	}
	var clocks devices.Clocks = make(emulatedClocks)
	if all, err := clocks.Devices(map[int]int{3: 1, 1: 2}); err != nil || len(all) != 2 || all[0].Workers[0] != 1 || !clocks.Emulated() {
		t.Errorf("%+v, %v", all, err)
	}
}

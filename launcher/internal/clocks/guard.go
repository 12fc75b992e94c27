package clocks

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/dvfs/nvml"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// A clock stays as it was set when the launcher is killed. So before it sets the first one, the launcher writes down what it
// found, in a place that every launcher of this user on this machine looks into, and starts a guard: a process of
// its own that outlives it, and puts the clocks back when it is gone. If the guard is killed as well, the next launcher run, or
// launcher doctor, does. The record is locked for as long as its launcher lives.

// guardName is the hidden command of the guard.
const guardName = "clock-guard"

// recordDir is where records lie: a folder that ends with the machine's power, as the clocks' settings do, and that
// only this user may enter.
func recordDir() string {
	if dir := os.Getenv(recordEnv); dir != "" {
		return dir
	}
	if os.Geteuid() == 0 {
		if info, err := os.Stat("/run"); err == nil && info.IsDir() {
			return "/run/soliton-clocks"
		}
	}
	return filepath.Join("/tmp", fmt.Sprintf("soliton-clocks-%d", os.Geteuid()))
}

// recordEnv names another folder, for machines where several containers share clocks but not /run.
const recordEnv = "SOLITON_CLOCKS_DIR"

var errOtherRun = errors.New("another run sets the clocks of this machine")

// openRecordDir makes the folder, or checks that no other user can have written to it.
func openRecordDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return checkRecordDir(dir)
}

func checkRecordDir(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s: not a folder that only this user may write to: remove it", dir)
	}
	return nil
}

// keptRecord is the record of a run, and its guard.
type keptRecord struct {
	path  string
	lock  *os.File // the record itself
	guard *exec.Cmd
	pipe  io.Closer // its end is what the guard waits for
}

// keepRecord writes the record and starts the guard.
func keepRecord(r dvfs.Record, sysfs string) (*keptRecord, error) {
	dir := recordDir()
	if err := openRecordDir(dir); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		_ = lock.Close()
		return nil, errOtherRun
	}
	k := &keptRecord{path: filepath.Join(dir, "clocks.json"), lock: lock}
	if err := k.begin(r, sysfs); err != nil {
		return nil, errors.Join(err, k.close(true))
	}
	return k, nil
}

func (k *keptRecord) begin(r dvfs.Record, sysfs string) error {
	if _, err := os.Lstat(k.path); err == nil {
		return fmt.Errorf("%s tells of clocks that are still to be put back: launcher doctor tries", k.path)
	}
	if err := k.write(r); err != nil {
		return err
	}
	own, err := os.Executable()
	if err != nil {
		return err
	}
	k.guard = exec.Command(own, guardName, sysfs)
	k.guard.Env = append(os.Environ(), recordEnv+"="+filepath.Dir(k.path))
	k.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	pipe, err := k.guard.StdinPipe()
	if err != nil {
		return err
	}
	out, err := k.guard.StdoutPipe()
	if err != nil {
		return err
	}
	k.pipe = pipe
	if err := k.guard.Start(); err != nil {
		k.guard = nil
		return fmt.Errorf("guard of the clocks: %w", err)
	}
	if n, err := io.ReadFull(out, make([]byte, len(guardReady))); n < len(guardReady) {
		return fmt.Errorf("guard of the clocks: %w", err)
	}
	return nil
}

// guardReady is what the guard says when it may be relied on.
const guardReady = "ready\n"

// write writes the record; it is on disk when write returns.
func (k *keptRecord) write(r dvfs.Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(text) > dvfs.MaxRecord {
		return fmt.Errorf("%w: more than %d bytes", dvfs.ErrRecord, dvfs.MaxRecord)
	}
	return rundir.WriteFile(k.path, text)
}

// close ends the guard. Unless the clocks are restored, it tries that once more first.
func (k *keptRecord) close(restored bool) error {
	var err error
	if restored {
		if err = os.Remove(k.path); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	_ = k.lock.Close()
	if k.pipe != nil {
		_ = k.pipe.Close()
	}
	if k.guard != nil {
		_ = k.guard.Wait() // what it could not do, the record still says
	}
	return err
}

// NewGuard returns the hidden command of the guard.
func NewGuard() *cobra.Command {
	return &cobra.Command{
		Use:    guardName + " SYSFS",
		Short:  "Put clocks back when the launcher is gone; started by run",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
			if _, err := io.WriteString(cmd.OutOrStdout(), guardReady); err != nil {
				return cli.Fail(err)
			}
			_, _ = io.Copy(io.Discard, os.Stdin) // until the launcher closes it, or is gone
			_, err := Restore(args[0], true)
			return cli.Fail(err)
		},
	}
}

// Restore puts back the clocks that a launcher has left which was killed, and says which. It leaves those of one that
// lives alone, or waits for its end.
func Restore(sysfs string, wait bool) (said string, err error) {
	dir := recordDir()
	if err := checkRecordDir(dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil
		}
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	how := unix.LOCK_EX
	if !wait {
		how |= unix.LOCK_NB
	}
	for {
		if err = unix.Flock(int(lock.Fd()), how); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "clocks.json")
	text, err := readRecord(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	r, err := dvfs.ParseRecord(text)
	if err != nil {
		return "", errors.Join(fmt.Errorf("%s: %w; it is removed", path, err), os.Remove(path))
	}
	if err := errors.Join(dvfs.RestoreCPU(sysfs, r), nvml.Restore(r)); err != nil {
		return "", fmt.Errorf("clocks that a launcher has left which was killed cannot be put back: %w; %s says how they were", err, path)
	}
	var what []string
	for _, s := range r.Clocks {
		switch s.Kind {
		case dvfs.KindNVML:
			what = append(what, "graphics card "+s.ID)
		default:
			what = append(what, "processors")
		}
	}
	slices.Sort(what)
	return "clocks are as they were before a launcher that was killed: " + strings.Join(slices.Compact(what), ", "), os.Remove(path)
}

// readRecord reads a file that anything may be wrong with.
func readRecord(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a file: remove it", path)
	}
	return io.ReadAll(io.LimitReader(f, dvfs.MaxRecord+1))
}

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// diskSteps write more traces than a disk of half a megabyte holds.
const diskSteps = "400"

// smallDisk mounts a disk of a size, such as 2m.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size)
	require.Tool(t, "tmpfs", err == nil, fmt.Sprintf("mounting a small disk needs root: %v", err))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func diskCommand(t *testing.T, dir string, flags ...string) *exec.Cmd {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--workers", "2", "--run-dir", dir}, flags...)
	return launch(t, append(args, mlp, "--steps", diskSteps, "--micro-batch", "4", "--eval-every", "0", "--checkpoint-every", "300ms")...)
}

// onRoomyDisk returns the summary of a run on a disk with room.
func onRoomyDisk(t *testing.T) rundir.Summary {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "run")
	if status, stdout, stderr := result(t, diskCommand(t, dir)); status != 0 {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	return summaryOf(t, dir)
}

// A disk that is too small for the traces, or filled by others, costs no step, no worker and no bit.
func TestFullDisk(t *testing.T) {
	built(t)
	t.Parallel()
	want := onRoomyDisk(t)
	check := func(t *testing.T, dir string, lost bool) {
		t.Helper()
		got := summaryOf(t, dir)
		if len(want.ParamsSHA256) != 64 || got.ParamsSHA256 != want.ParamsSHA256 || got.StateSHA256 != want.StateSHA256 || got.WorkersLost > 0 != lost || got.Rollbacks != 0 {
			t.Errorf("%+v, want %+v", got, want)
		}
		for i, m := range metrics(t, dir) {
			if m.Step != i+1 {
				t.Fatalf("line %d of metrics.jsonl is of step %d", i+1, m.Step)
			}
		}
	}

	t.Run("traces", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(smallDisk(t, "512k"), "run")
		if status, stdout, stderr := result(t, diskCommand(t, dir)); status != 0 {
			t.Fatalf("status %d\n%s%s", status, stdout, stderr)
		}
		check(t, dir, false)
	})

	const holds = "training holds until there is room: the disk of "
	// fill runs until there is a checkpoint, fills the disk until training holds, and makes room again after meanwhile.
	// Meanwhile may fill what becomes free with more.
	fill := func(t *testing.T, size string, meanwhile func(dir string, out *spoken, more func()), lost bool, flags ...string) {
		t.Parallel()
		disk := smallDisk(t, size)
		dir := filepath.Join(disk, "run")
		cmd := diskCommand(t, dir, flags...)
		var out spoken
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		has := func(kind string) bool {
			text, _ := os.ReadFile(filepath.Join(dir, "events.jsonl"))
			for line := range strings.Lines(string(text)) {
				var e rundir.Event
				if json.Unmarshal([]byte(line), &e) == nil && e.Kind == kind {
					return true
				}
			}
			return false
		}
		until(t, func() bool { return has("checkpoint") })
		ballast, err := os.Create(filepath.Join(disk, "ballast"))
		if err != nil {
			t.Fatal(err)
		}
		defer ballast.Close()
		more := func() {
			if _, err := io.CopyN(ballast, endless{}, 4<<20); err != nil && !errors.Is(err, unix.ENOSPC) {
				t.Fatal(err)
			}
		}
		until(t, func() bool { more(); return out.said(holds) || has("end") })
		if !out.said(holds) {
			t.Fatalf("the run does not hold\n%s", &out)
		}
		text, err := exec.Command(binary, "status", "--json", dir).Output()
		var status inspect.Status
		if err = errors.Join(err, json.Unmarshal(text, &status)); err != nil || status.State != "running" || status.WorkersLost != 0 || has("full") && !strings.HasPrefix(status.DiskFull, holds) {
			t.Errorf("%s, %v", text, err)
		}
		if has("end") || has("lost") || has("evict") {
			t.Errorf("on the full disk\n%s", &out)
		}
		meanwhile(dir, &out, more)
		if err := errors.Join(ballast.Close(), os.Remove(ballast.Name())); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, &out)
		}
		check(t, dir, lost)
	}
	// remove removes the folder that has the run directory once there is a checkpoint. If for good, a file takes its place.
	remove := func(t *testing.T, good bool) (out *spoken, parent string) {
		t.Parallel()
		parent = filepath.Join(t.TempDir(), "all")
		dir := filepath.Join(parent, "run")
		cmd := diskCommand(t, dir)
		out = new(spoken)
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		until(t, func() bool {
			text, _ := os.ReadFile(filepath.Join(dir, "events.jsonl"))
			return strings.Contains(string(text), `"kind":"checkpoint"`)
		})
		for try := range 100 {
			// In one step: else a part of it may be made while another is being removed.
			err := os.Rename(parent, filepath.Join(t.TempDir(), "aside"))
			if err == nil && good {
				err = os.WriteFile(parent, nil, 0o600) // unless the run was faster
			}
			if err == nil {
				break
			}
			if try == 99 {
				t.Fatal(err)
			}
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if !out.said("was removed") {
			t.Errorf("it is not said\n%s", out)
		}
		return out, parent
	}
	t.Run("removed", func(t *testing.T) {
		_, parent := remove(t, false)
		dir := filepath.Join(parent, "run")
		check(t, dir, false)
		if _, err := os.Stat(filepath.Join(dir, "model.safetensors")); err != nil {
			t.Error(err)
		}
		if status, stdout, stderr := result(t, launch(t, "checkpoints", "--check", dir)); status != 0 || !strings.Contains(stdout, diskSteps) {
			t.Errorf("status %d\n%s%s", status, stdout, stderr)
		}
	})
	t.Run("removed for good", func(t *testing.T) {
		out, _ := remove(t, true)
		at := regexp.MustCompile("the records that it lacks, are in ([^ \n]+)\n").FindStringSubmatch(out.String())
		if at == nil {
			t.Fatalf("it is not said where the model is\n%s", out)
		}
		defer os.RemoveAll(at[1])
		check(t, at[1], false)
		if _, err := os.Stat(filepath.Join(at[1], "model.safetensors")); err != nil {
			t.Error(err)
		}
	})
	t.Run("others", func(t *testing.T) { fill(t, "2m", func(string, *spoken, func()) {}, false) })
	t.Run("and the leader dies", func(t *testing.T) {
		fill(t, "8m", func(dir string, out *spoken, more func()) {
			now, err := rundir.ReadWorkers(dir)
			pid := regexp.MustCompile("soliton-agent-([0-9]+)-").FindStringSubmatch(now.Agent)
			if err != nil || pid == nil {
				t.Fatalf("%+v, %v", now, err)
			}
			leader, _ := strconv.Atoi(pid[1])
			if err := syscall.Kill(leader, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("the run said\n%s", out)
				}
			})
			// The run may have gone on for a moment where a checkpoint that failed left room, and the next leader needs no more than that
			// until it goes on with training.
			until(t, func() bool {
				more()
				return out.said(" leads, and waits until the run directory can be written: ") || strings.Count(out.String(), holds) > 1
			})
		}, true, "--workers", "3", "--emulate-hosts", "3")
	})
}

// A launcher that can open no file holds training until it can again. A worker dies meanwhile.
func TestNoDescriptors(t *testing.T) {
	built(t)
	t.Parallel()
	want := onRoomyDisk(t)
	dir := filepath.Join(t.TempDir(), "run")
	cmd := diskCommand(t, dir, "--workers", "3", "--respawn")
	var out spoken
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	until(t, func() bool {
		text, _ := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
		return strings.Count(string(text), "\n") > 20
	})
	now, err := rundir.ReadWorkers(dir)
	if err != nil {
		t.Fatal(err)
	}
	var was unix.Rlimit
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}, nil); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(now.Workers[1].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return out.said("training holds until it can be written: ") })
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_NOFILE, &was, nil); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	got := summaryOf(t, dir)
	if len(want.ParamsSHA256) != 64 || got.ParamsSHA256 != want.ParamsSHA256 || got.WorkersLost != 1 || got.Rollbacks != 0 {
		t.Errorf("%+v, want %+v\n%s", got, want, &out)
	}
}

// spoken is what a process has said, while it speaks.
type spoken struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *spoken) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *spoken) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func (s *spoken) said(text string) bool { return strings.Contains(s.String(), text) }

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

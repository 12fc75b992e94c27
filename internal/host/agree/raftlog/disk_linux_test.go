package raftlog

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/internal/timing"
)

// A log that has begun takes votes and entries when others have filled the disk.
func TestRoomForVotes(t *testing.T) {
	disk := t.TempDir()
	err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=2m")
	require.Tool(t, "tmpfs", err == nil, fmt.Sprintf("mounting a small disk needs root: %v", err))
	t.Cleanup(func() {
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	dir := filepath.Join(disk, "agreement")
	f, err := createFiles(dir, "a", Config{Timeout: timing.Min}.raft())
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	f.setRoomAside(dir)
	var full error
	for n := 4 << 20; n > 0; n /= 2 { // the last page too
		if err := os.WriteFile(filepath.Join(disk, fmt.Sprint(n)), make([]byte, n), 0o600); err != nil {
			full = err
		}
	}
	if !errors.Is(full, unix.ENOSPC) {
		t.Fatalf("the disk takes more: %v", full)
	}
	for i := range uint64(100) {
		err := errors.Join(f.log.SetUint64(keyTerm, i+1), f.log.StoreLog(&raft.Log{Index: i + 1, Term: i + 1, Data: make([]byte, 1<<10)}))
		if err != nil {
			t.Fatalf("entry %d: %v", i, err)
		}
	}
}

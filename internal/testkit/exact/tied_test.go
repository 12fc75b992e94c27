package exact

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// A GPT whose head shares the table of tokens loses a worker, is stopped, and is resumed under another layout: its bits are those of an
// undisturbed run.
func TestTiedResumed(t *testing.T) {
	launcher, gpt := programs(t)
	args := strings.Fields("--tied --layers 1 --width 32 --heads 4 --context 32 --global-batch 12 --micro-batch 1 --steps 20 --eval-every 15 --data " + corpus)
	undisturbed := filepath.Join(t.TempDir(), "run")
	launchIn(t, undisturbed, launcher, append([]string{"--workers", "1", gpt}, args...)...)
	dir := filepath.Join(t.TempDir(), "run")
	b := begin(t, dir, append([]string{
		launcher, "run", "--plain", "--threads", "1", "--run-dir", dir, "--workers", "4", "--stages", "3", "--zero", "1",
		"--chaos", "kill:2@2", gpt, "--checkpoint-every", "-1s",
	}, args...)...)
	b.until("step 4", func() bool { return len(lines[rundir.Metrics](t, dir, "metrics.jsonl")) >= 4 })
	if err := b.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	b.end(130)
	if !slices.ContainsFunc(lines[rundir.Event](t, dir, "events.jsonl"), func(e rundir.Event) bool { return e.Kind == "recovered" }) {
		t.Error("no worker was lost")
	}
	begin(t, dir, launcher, "resume", "--plain", "--threads", "1", "--workers", "3", "--stages", "2", dir).end(0)
	sameRun(t, dir, undisturbed)
}

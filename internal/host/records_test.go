package host

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// A recovery does not wait for the files of the run directory, and they do not wait long for a recovery.
func TestRecordsWaitForARecovery(t *testing.T) {
	dir, err := rundir.Create(filepath.Join(t.TempDir(), "run"), "fake", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	lost := func() bool {
		events, err := os.ReadFile(dir.File("events.jsonl"))
		if err != nil {
			t.Error(err)
		}
		return strings.Contains(string(events), `"lost"`)
	}
	var died time.Time
	dies := trainer{steps: 9, at: 3, before: func(c *control.Conn) { died = time.Now(); c.Close() }}
	var shown atomic.Bool
	v := &recorder{on: func(e view.Event) {
		if c, ok := e.(view.Change); ok && c.Kind == "lost" {
			shown.Store(true)
		}
	}}
	asked := 0
	stays := trainer{steps: 9, at: -1, asked: func() {
		asked++
		if early := lost(); early && time.Since(died) < timing.Records {
			t.Error("the loss was written before the query")
		}
		for !shown.Load() || !lost() { // the recovery lasts until this worker has answered
			if time.Since(died) > time.Minute {
				t.Errorf("in the recovery, the loss is shown: %v, and written: %v", shown.Load(), lost())
				return
			}
			time.Sleep(time.Millisecond)
		}
	}}
	h := newHost(t, Config{RunDir: dir, Console: Console{View: v}, Settings: session.Settings{MinWorkers: 1, Mirrors: 1}})
	if o := runWith(t.Context(), h, stays.inProcess(), dies.inProcessAs(1)); o.Err != nil || asked != 1 {
		t.Errorf("%v, asked %d times", o.Err, asked)
	}
	var kinds []string
	for _, line := range readLines(t, dir.File("events.jsonl")) {
		kinds = append(kinds, line["kind"].(string))
	}
	if at := slices.Index(kinds, "lost"); at < 0 || slices.Index(kinds, "recovered") < at || slices.Index(kinds, "end") != len(kinds)-1 {
		t.Errorf("events: %s", kinds)
	}
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// After the loss of a machine, the files of the newest checkpoint that have one copy left are copied again, so that any of the others may
// be lost as well; and a machine that joins gets the manifest, so that it finds the checkpoint if it leads or resumes.
func TestCheckpointsAreCopiedAgain(t *testing.T) {
	built(t)
	t.Parallel()
	all := gatheredFor(t, 3, append([]string{"--keep", "3", emulated, "--layer-ms", "8", "--checkpoint-every", "30"}, cutJob...)...)
	noted := func(m *machine, part string) bool {
		text, _ := os.ReadFile(filepath.Join(m.run, "events.jsonl"))
		return strings.Contains(string(text), part)
	}
	whole := func(m *machine, step int) error { // all files of the checkpoint are there, and as they were written
		var job rundir.Job
		readJSON(t, filepath.Join(all[0].run, "job.json"), &job) // of all
		r, err := checkpoint.At(m.run, job.Eras(), step)
		if err != nil {
			return err
		}
		defer r.Close()
		return r.Verify(t.Context())
	}
	await(t, "a checkpoint", func() bool { return noted(all[0], "the state after step 30 is saved") })
	if err := whole(all[0], 30); err == nil {
		t.Fatal("the first of three machines has all files of the checkpoint")
	}
	all[1].kill(t)
	await(t, "copies", func() bool { return noted(all[0], "the checkpoint of step 30 has all its copies again") })
	for _, i := range []int{0, 2} {
		if err := whole(all[i], 30); err != nil {
			t.Errorf("machine %d: %v", i, err)
		}
	}
	late := startMachine(t, all[0].ticket, "join", "--plain", "--run-dir", "run", "-")
	var newest checkpoint.Entry // the next one, where all took long so far
	await(t, "the manifest on a machine that joins", func() bool {
		list, _ := checkpoint.List(late.run)
		if len(list) > 0 {
			newest = list[0]
		}
		return newest.Step > 0 && newest.Err == nil
	})
	if err := whole(late, newest.Step); err == nil {
		t.Error("a machine that joins has fetched files that have all their copies")
	}
}

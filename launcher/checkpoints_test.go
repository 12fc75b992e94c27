package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// A run keeps the checkpoints that its flags choose, at multiples of a number of steps and after the last one; they are listed, checked
// and exported.
func TestCheckpointsAreKeptListedAndExported(t *testing.T) {
	built(t)
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	status, out, errs := result(t, launch(t, "run", "--plain", "--run-dir", dir, "--workers", "2", "--threads", "1", "--keep", "100", mlp,
		"--steps", "50", "--checkpoint-every", "10", "--eval-every", "20"))
	if status != 0 {
		t.Fatalf("status %d\n%s%s", status, out, errs)
	}
	list := func(want int, args ...string) (all []inspect.Saved) {
		t.Helper()
		var out, errs strings.Builder
		if status := execute(append([]string{"checkpoints", "--json", dir}, args...), &out, &errs); status != want {
			t.Fatalf("status %d, want %d\n%s%s", status, want, &out, &errs)
		}
		if err := json.Unmarshal([]byte(out.String()), &all); err != nil {
			t.Fatal(err)
		}
		return all
	}
	metrics := make(map[int]rundir.Metrics)
	for _, m := range lines[rundir.Metrics](t, filepath.Join(dir, "metrics.jsonl")) {
		metrics[m.Step] = m
	}
	all := list(0, "--check")
	if len(all) == 0 || all[0].Step != 50 {
		t.Fatalf("the last step is not there: %+v", all)
	}
	for _, c := range all {
		m := metrics[c.Step]
		if c.Step%10 != 0 || c.State != "verified" || c.Bytes == 0 || c.Made == nil || c.Loss == nil || *c.Loss != m.Loss || (c.ValLoss == nil) != (m.ValLoss == nil) {
			t.Errorf("%+v of step %+v", c, m)
		}
	}

	// The checkpoint of the last step is the model that the run has written.
	to := filepath.Join(t.TempDir(), "exported")
	var said, wrong strings.Builder
	if status := execute([]string{"export", "--optimizer", "--output", to, dir}, &said, &wrong); status != 0 {
		t.Fatalf("status %d\n%s", status, &wrong)
	}
	if want := filepath.Join(to, "model.safetensors") + ": the state after step 50\n"; !strings.HasPrefix(said.String(), want) {
		t.Errorf("%s\nwant %s", &said, want)
	}
	var files [2][]byte
	for i, path := range []string{filepath.Join(dir, "model.safetensors"), filepath.Join(to, "model.safetensors")} {
		var err error
		if files[i], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(files[0], files[1]) {
		t.Error("the exported model is another one than that of the run")
	}
	if info, err := os.Stat(filepath.Join(to, "optimizer.safetensors")); err != nil || info.Size() < int64(len(files[0]))/2 {
		t.Errorf("the optimizer's state: %v", err)
	}

	// Damage is found by reading, and named.
	damaged, err := filepath.Glob(filepath.Join(dir, "checkpoints", "step-00000050", "*.safetensors"))
	if err != nil || len(damaged) == 0 {
		t.Fatal(damaged, err)
	}
	f, err := os.OpenFile(damaged[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	var last [1]byte
	info, _ := f.Stat()
	_, err = f.ReadAt(last[:], info.Size()-1)
	last[0] ^= 1
	if _, e := f.WriteAt(last[:], info.Size()-1); err != nil || e != nil || f.Close() != nil {
		t.Fatal(err, e)
	}
	if all := list(0); all[0].State != "whole" {
		t.Errorf("without reading: %+v", all[0])
	}
	if all := list(1, "--check"); all[0].State != "unusable" || !strings.Contains(all[0].Error, "altered") {
		t.Errorf("with a flipped bit: %+v", all[0])
	}
	for want, args := range map[string][]string{
		`model\.safetensors is there already`:          {"--output", to},
		`--step 50: .*altered: .*launcher checkpoints`: {"--step", "00000050", "--output", t.TempDir()},
		`--step 7: .*launcher checkpoints`:             {"--step", "7", "--output", t.TempDir()},
		`--step 0: give a whole number of at least 1`:  {"--step", "0"},
		`--output names no directory`:                  {"--output", ""},
	} {
		var out, errs strings.Builder
		if status := execute(append([]string{"export", dir}, args...), &out, &errs); status == 0 || !regexp.MustCompile(want).MatchString(errs.String()) {
			t.Errorf("%v: status %d, %s", args, status, &errs)
		}
	}
	var table, none strings.Builder
	if execute([]string{"checkpoints", dir}, &table, &none); !regexp.MustCompile(`(?m)^STEP +MB +LOSS +VAL_LOSS +AGE +STATE\n50 +\d+\.\d +\d+\.\d{4} +\d+\.\d{4} +\d+s +whole$`).MatchString(table.String()) {
		t.Errorf("%s%s", &table, &none)
	}
}

// --keep-best keeps the best checkpoint beside the newest ones.
func TestKeepBest(t *testing.T) {
	built(t)
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	status, out, errs := result(t, launch(t, "run", "--plain", "--run-dir", dir, "--workers", "1", "--threads", "1", "--keep", "1", "--keep-best", "loss", mlp,
		"--steps", "60", "--checkpoint-every", "10", "--eval-every", "0"))
	if status != 0 {
		t.Fatalf("status %d\n%s%s", status, out, errs)
	}
	all, err := inspect.Checkpoints(t.Context(), dir, false)
	if err != nil || len(all) < 1 || len(all) > 2 || all[0].Step != 60 {
		t.Fatalf("%+v, %v", all, err)
	}
	best := slices.MinFunc(all, func(a, b inspect.Saved) int {
		if *a.Loss < *b.Loss {
			return -1
		}
		return 1
	})
	for _, e := range lines[rundir.Event](t, filepath.Join(dir, "events.jsonl")) {
		if e.Kind != "checkpoint" {
			continue
		}
		for _, m := range lines[rundir.Metrics](t, filepath.Join(dir, "metrics.jsonl")) {
			if strings.Contains(e.Reason, "after step "+strconv.Itoa(m.Step)+" is") && m.Loss < *best.Loss {
				t.Errorf("step %d had the loss %v, and the best that is kept has %v", m.Step, m.Loss, *best.Loss)
			}
		}
	}
}

package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// What a resumed run is not told otherwise is as it was before.
func TestInherit(t *testing.T) {
	job := rundir.Job{
		Workers: 6, Stages: 3, Mirrors: 2, MinWorkers: 4, Detect: "3s", Respawn: true, NoDigests: true, Verify: 64, Reduction: "fast", Zero: 1, Reshape: "off",
		Dir: "/nowhere", Python: "bin/python", // which is not here
		Keep: 7, KeepEvery: "1h0m0s", KeepBest: "loss",
	}
	said := runFlags{workers: 2, stages: 1, mirrors: 0, least: 1, detect: time.Second, digests: true, verify: 9, zero: 2, reshape: "full"}
	for _, c := range []struct {
		changed []string
		want    runFlags
	}{
		{nil, runFlags{verify: 64, workers: 6, stages: 3, mirrors: 2, least: 4, respawn: true, detect: 3 * time.Second, reduction: "fast", zero: 1, reshape: "off"}},
		{[]string{"workers"}, runFlags{verify: 64, workers: 2, stages: 2, mirrors: 2, least: 2, respawn: true, detect: 3 * time.Second, reduction: "fast", zero: 1, reshape: "off"}},
		{[]string{"workers", "stages", "mirrors", "min-workers", "respawn", "detect", "digests", "verify", "zero", "reshape"},
			runFlags{verify: 9, workers: 2, stages: 1, least: 1, detect: time.Second, digests: true, reduction: "fast", zero: 2, reshape: "full"}},
	} {
		got := said
		if err := got.inherit(job, func(f string) bool { return slices.Contains(c.changed, f) }); err != nil || !got.same(c.want) {
			t.Errorf("%v changed: %+v, %v, want %+v", c.changed, got, err, c.want)
		}
	}
	kept, before := runFlags{keep: checkpoint.Keep{Newest: 2}}, checkpoint.Keep{Newest: 7, Every: time.Hour, Best: "loss"}
	if err := kept.inherit(job, func(f string) bool { return false }); err != nil || kept.keep != before {
		t.Errorf("%+v, %v, want %+v", kept.keep, err, before)
	}
	kept = runFlags{keep: checkpoint.Keep{Newest: 2}}
	if err := kept.inherit(job, func(f string) bool { return strings.HasPrefix(f, "keep") }); err != nil || kept.keep != (checkpoint.Keep{Newest: 2}) {
		t.Errorf("all given: %+v, %v", kept.keep, err)
	}
	job.Detect = "soon"
	if err := new(runFlags).inherit(job, func(string) bool { return false }); err == nil {
		t.Error("a job.json without a time was taken")
	}
}

func (f runFlags) same(g runFlags) bool {
	return f.workers == g.workers && f.stages == g.stages && f.mirrors == g.mirrors && f.least == g.least && f.respawn == g.respawn &&
		f.detect == g.detect && f.digests == g.digests && f.verify == g.verify && f.hosts == 1 && f.reduction == g.reduction && f.zero == g.zero && f.reshape == g.reshape
}

package training

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/rng"
)

// Keep tells what it costs to keep a run: steps while a checkpoint of so much state is written, from the copy to the manifest, against
// those of an undisturbed run; how fast a checkpoint is written and read, against dd on the same disk; what zstd would gain and
// cost on such a checkpoint; and how many samples a second data are read at, against the plain reader of each format. The bound
// for the mean step is 1.05 of an undisturbed one, with 10 steps or more of 3 s or more.
func Keep(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("keep", flag.ExitOnError)
	k := keep{rec: rec}
	f.StringVar(&k.dir, "dir", "", "folder on the disk that is to be measured (default that of temporary files)")
	f.IntVar(&k.state, "state", 1024, "parameters and optimizer state, in MB")
	f.IntVar(&k.width, "width", 1024, "width of the GPT, a multiple of 8")
	f.IntVar(&k.context, "context", 64, "its context")
	f.IntVar(&k.workers, "workers", 2, "worker processes, of one compute thread each")
	f.IntVar(&k.steps, "steps", 24, "steps of a run, of which the first two warm up")
	f.IntVar(&k.every, "every", 6, "steps from one checkpoint to the next")
	f.IntVar(&k.samples, "samples", 200000, "samples that are read of each format")
	f.StringVar(&k.run, "of", "", "run directory whose newest checkpoint is compressed (default that of the run of steps)")
	parts := f.String("parts", "steps,disk,zstd,input", "what is measured; zstd needs steps, or -of")
	if err := f.Parse(args); err != nil {
		return err
	}
	if k.state < 1 || k.width < 8 || k.width%8 != 0 || k.context < 1 || k.workers < 1 || k.every < 1 || k.steps < 2*k.every || k.steps < 4 || k.samples < 1 {
		return errors.New("-state, -context, -workers, -every and -samples: give at least 1; -width a multiple of 8; -steps at least 4, and twice -every")
	}
	dir, err := os.MkdirTemp(k.dir, "soliton-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	k.dir = dir
	fmt.Printf("%s, kernel path %v, %d cores\n", runtime.Version(), kernel.Active(), runtime.NumCPU())
	measures := map[string]func() error{"steps": k.ofSteps, "disk": k.ofDisk, "zstd": k.ofZstd, "input": k.ofInput}
	for _, part := range strings.Split(*parts, ",") {
		if measures[part] == nil {
			return fmt.Errorf("-parts %s: give some of steps, disk, zstd and input", *parts)
		}
		if err := measures[part](); err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
	}
	return nil
}

type keep struct {
	dir                                                   string
	state, width, context, workers, steps, every, samples int

	rec *report.Recorder
	run string // directory of the run with checkpoints
}

// ofSteps runs a GPT twice, once with checkpoints and once without.
func (k *keep) ofSteps() error {
	b := lab.TrainingBench{Dir: k.dir}
	if err := b.Build(); err != nil {
		return err
	}
	text := filepath.Join(k.dir, "text")
	if err := os.WriteFile(text, bytes.Repeat([]byte("To keep what was learned, write it down. "), 4096), 0o600); err != nil {
		return err
	}
	layers := max(1, k.state*1e6/12/(12*k.width*k.width))
	train := func(name, every string) ([]rundir.Metrics, string, error) {
		dir := filepath.Join(k.dir, name)
		cmd := exec.Command(filepath.Join(k.dir, "launcher"), "run", "--plain", "--workers", fmt.Sprint(k.workers), "--threads", "1", "--run-dir", dir, filepath.Join(k.dir, "gpt"),
			"--data", text, "--layers", fmt.Sprint(layers), "--width", fmt.Sprint(k.width), "--heads", "8", "--context", fmt.Sprint(k.context), "--dropout", "0",
			"--steps", fmt.Sprint(k.steps), "--eval-every", "0", "--checkpoint-every", every)
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, "", fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
		}
		all, err := lab.Lines[rundir.Metrics](dir, "metrics.jsonl")
		return all[min(2, len(all)):], dir, err
	}
	plain, dir, err := train("plain", "24h")
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	saved, dir, err := train("saved", fmt.Sprint(k.every))
	if err != nil {
		return err
	}
	k.run = dir
	events, err := lab.Lines[rundir.Event](dir, "events.jsonl")
	if err != nil {
		return err
	}
	var under []float64 // ms of steps between a copy and its manifest
	checkpoints := 0
	for _, e := range events {
		step := 0
		if _, err := fmt.Sscanf(e.Reason, "the state after step %d is saved", &step); e.Kind != "checkpoint" || err != nil || step == k.steps {
			continue
		}
		i := slices.IndexFunc(saved, func(m rundir.Metrics) bool { return m.Step == step })
		if i < 0 {
			continue
		}
		checkpoints++
		for _, m := range saved[i+1:] {
			if began := m.Time.Add(-lab.Milliseconds(m.MS)); began.Before(e.Time.Time) {
				under = append(under, m.MS)
			}
		}
	}
	ms := func(all []rundir.Metrics) (x []float64) {
		for _, m := range all {
			x = append(x, m.MS)
		}
		return x
	}
	mean := func(x []float64) float64 { return lab.Sum(x) / float64(max(len(x), 1)) }
	fmt.Printf("\nsteps of a GPT with %d layers of width %d, %d workers: ms\n", layers, k.width, k.workers)
	fmt.Printf("  undisturbed      %s\n", lab.List(ms(plain)))
	fmt.Printf("  under checkpoints%s\n", lab.List(under))
	if len(under) == 0 {
		return errors.New("no step ran while a checkpoint was written: use more -state")
	}
	k.rec.Add(report.Row{
		Comparison: "keep", Case: fmt.Sprintf("mean step of a GPT with %d layers of width %d", layers, k.width), Workers: k.workers, Threads: 1,
		Ours: "under checkpoints", Theirs: "undisturbed", Unit: "ms", Kind: report.Cost, Goal: 1.05, Samples: []report.Sample{{Ours: mean(under), Theirs: mean(ms(plain))}},
	})
	fmt.Printf("  mean step from the copy to the manifest by that of an undisturbed run: %.3f (%d steps, %d checkpoints)\n", mean(under)/mean(ms(plain)), len(under), checkpoints)
	fmt.Printf("  longest: %.0f ms, %.2f of an undisturbed step\n", slices.Max(under), slices.Max(under)/mean(ms(plain)))
	return nil
}

// speed prints a rate.
func speed(what string, size int64, took time.Duration) {
	fmt.Printf("  %-34s %8.0f MB/s (%.2f s)\n", what, float64(size)/1e6/took.Seconds(), took.Seconds())
}

// ofDisk writes and reads a checkpoint.
func (k *keep) ofDisk() error {
	const block = 4 << 20
	blocks := max(1, k.state*1000*1000/block)
	n := blocks * block / 12
	draw := rng.New(1, rng.Place{})
	part := checkpoint.Part{Job: "bench", Step: 1, Plan: id.Version{Generation: 1, N: 1}, Rule: "adamw", Shards: []checkpoint.Shard{{Range: id.Range{Hi: n}, Params: make([]float32, n)}}}
	for range 2 {
		part.Shards[0].Moments = append(part.Shards[0].Moments, make([]float32, n))
	}
	for _, x := range append(part.Shards[0].Moments, part.Shards[0].Params) {
		for i := range x {
			x[i] = draw.Float32()
		}
	}
	dir := filepath.Join(k.dir, "disk")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Printf("\n%d MB on %s\n", blocks*block/1000/1000, k.dir)
	raw := filepath.Join(dir, "dd")
	took := make(map[string]float64) // seconds
	timed := func(what string, do func() error) error {
		began := time.Now()
		err := do()
		took[what] = time.Since(began).Seconds()
		speed(what, int64(blocks*block), time.Since(began))
		return err
	}
	dd := func(args ...string) func() error {
		return func() error {
			if out, err := exec.Command("dd", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("dd: %w\n%s", err, out)
			}
			return nil
		}
	}
	const write, writeDD, read, readDD = "checkpoint, hashed and synced", "dd conv=fsync", "checkpoint, checked, what is cached", "dd of what is cached"
	if err := errors.Join(
		timed(writeDD, dd("if=/dev/zero", "of="+raw, fmt.Sprintf("bs=%d", block), fmt.Sprintf("count=%d", blocks), "conv=fsync")),
		timed(write, func() error {
			file, err := checkpoint.Write(context.Background(), dir, part)
			if err != nil {
				return err
			}
			return checkpoint.Commit(dir, checkpoint.Manifest{Job: part.Job, Step: 1, Plan: part.Plan, Rule: part.Rule, Layers: []int{n}, Files: []checkpoint.File{file}})
		}),
		timed(readDD, dd("if="+raw, "of=/dev/null", fmt.Sprintf("bs=%d", block))),
		timed(read, func() error {
			r, _, err := checkpoint.Newest(context.Background(), dir, rundir.Only(part.Job))
			if err != nil {
				return err
			}
			return errors.Join(r.Read(context.Background(), 0, 0, n, part.Shards[0].Params, part.Shards[0].Moments), r.Close())
		})); err != nil {
		return err
	}
	for _, pair := range [][2]string{{write, writeDD}, {read, readDD}} {
		row := report.Row{
			Comparison: "keep", Case: fmt.Sprintf("%d MB on disk", blocks*block/1000/1000), Ours: pair[0], Theirs: pair[1], Unit: "MB/s", Kind: report.Rate,
		}
		row.Add(float64(blocks*block)/1e6/took[pair[0]], float64(blocks*block)/1e6/took[pair[1]])
		k.rec.Add(row)
	}
	return nil
}

// ofZstd compresses the files of the run's newest checkpoint.
func (k *keep) ofZstd() error {
	if k.run == "" {
		return errors.New("it needs a run: give -parts steps,zstd or -of RUN_DIR")
	}
	var files []string
	if err := filepath.WalkDir(filepath.Join(k.run, "checkpoints"), func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".safetensors" {
			files = append(files, path)
		}
		return err
	}); err != nil || len(files) == 0 {
		return errors.Join(err, errors.New("the run has no checkpoint"))
	}
	raw, err := os.ReadFile(files[len(files)-1])
	if err != nil {
		return err
	}
	fmt.Printf("\nzstd of %s, %d MB, one thread\n", filepath.Base(files[len(files)-1]), len(raw)/1000/1000)
	planes := make([]byte, len(raw))
	for _, m := range []struct {
		name  string
		level zstd.EncoderLevel
		split bool
	}{
		{"fastest", zstd.SpeedFastest, false}, {"default", zstd.SpeedDefault, false},
		{"fastest, planes of bytes", zstd.SpeedFastest, true}, {"default, planes of bytes", zstd.SpeedDefault, true},
	} {
		enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(m.level), zstd.WithEncoderConcurrency(1))
		if err != nil {
			return err
		}
		began, from := time.Now(), raw
		if m.split {
			splitPlanes(planes, raw)
			from = planes
		}
		packed := enc.EncodeAll(from, nil)
		took := time.Since(began)
		fmt.Printf("  %s: %.1f %% of the size\n", m.name, 100*float64(len(packed))/float64(len(raw)))
		speed("compression", int64(len(raw)), took)
		dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(uint64(len(raw))+1))
		if err != nil {
			return err
		}
		began = time.Now()
		again, err := dec.DecodeAll(packed, nil)
		dec.Close()
		if err == nil && m.split {
			whole := make([]byte, len(again))
			joinPlanes(whole, again)
			again = whole
		}
		speed("decompression", int64(len(raw)), time.Since(began))
		if err != nil || !bytes.Equal(raw, again) {
			return errors.Join(err, errors.New("it is not what was compressed"))
		}
	}
	return nil
}

// splitPlanes brings the bytes of equal weight of all float32 together, those of the exponents first. What is left over follows.
func splitPlanes(to, from []byte) {
	n := len(from) / 4
	low, middle, high, top := to[3*n:4*n], to[2*n:3*n], to[n:2*n], to[:n]
	for i := range n {
		word := from[4*i : 4*i+4]
		low[i], middle[i], high[i], top[i] = word[0], word[1], word[2], word[3]
	}
	copy(to[4*n:], from[4*n:])
}

// joinPlanes undoes splitPlanes.
func joinPlanes(to, from []byte) {
	n := len(from) / 4
	low, middle, high, top := from[3*n:4*n], from[2*n:3*n], from[n:2*n], from[:n]
	for i := range n {
		word := to[4*i : 4*i+4]
		word[0], word[1], word[2], word[3] = low[i], middle[i], high[i], top[i]
	}
	copy(to[4*n:], from[4*n:])
}

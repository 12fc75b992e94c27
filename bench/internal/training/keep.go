package training

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
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
	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
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

// ofInput reads samples of each format, in the order of a random permutation.
func (k *keep) ofInput() error {
	const context = 128
	samples := k.samples
	tokens := make([]byte, 2*(samples*context+1))
	for i := range len(tokens) / 2 {
		binary.LittleEndian.PutUint16(tokens[2*i:], uint16(i*7919%50000))
	}
	header := fmt.Sprintf("{'descr': '<u2', 'fortran_order': False, 'shape': (%d,), }", len(tokens)/2)
	header += strings.Repeat(" ", 64-(10+len(header)+1)%64) + "\n"
	npy := append([]byte("\x93NUMPY\x01\x00"), byte(len(header)), byte(len(header)>>8))
	npy = append(append(npy, header...), tokens...)
	text := make([]byte, samples*context+1)
	for i := range text {
		text[i] = byte(32 + i*31%90)
	}
	var archive bytes.Buffer
	out := tar.NewWriter(&archive)
	for i := range samples {
		if err := out.WriteHeader(&tar.Header{Name: fmt.Sprintf("%08d.bin", i), Mode: 0o600, Size: 2 * context}); err != nil {
			return err
		}
		if _, err := out.Write(tokens[2*i*context:][:2*context]); err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	in := filepath.Join(k.dir, "input")
	if err := os.Mkdir(in, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(in)
	for name, content := range map[string][]byte{"t.bin": tokens, "t.npy": npy, "t.txt": text, "t.tar": archive.Bytes()} {
		if err := os.WriteFile(filepath.Join(in, name), content, 0o600); err != nil {
			return err
		}
	}
	order := rng.NewPerm(1, 0, uint64(samples))
	fmt.Printf("\nsamples of %d tokens a second, what is cached, one thread\n", context)
	input, target := trainer.Spec{Shape: []int{context}, Kind: trainer.Int32}, trainer.Spec{Shape: []int{context}, Kind: trainer.Int32}
	x, y := trainer.NewTensor(input.Kind, context), trainer.NewTensor(target.Kind, context)
	rate := func(d trainer.Dataset) (float64, error) {
		bound, err := trainer.Bind(d, input, target)
		if err != nil {
			return 0, err
		}
		n := min(samples, bound.Len())
		began := time.Now()
		for i := range n {
			if err := bound.Sample(trainer.Sample{Index: int(order.At(uint64(i))) % n}, x, y); err != nil {
				return 0, err
			}
		}
		return float64(n) / time.Since(began).Seconds(), nil
	}
	// plain reads the same bytes at the same places, and makes numbers of them.
	plain := func(name string, offset, size int) (float64, error) {
		f, err := os.Open(filepath.Join(in, name))
		if err != nil {
			return 0, err
		}
		defer f.Close()
		buf := make([]byte, size*(context+1))
		began := time.Now()
		for i := range samples {
			if _, err := f.ReadAt(buf, int64(offset)+int64(order.At(uint64(i)))*int64(size*context)); err != nil {
				return 0, err
			}
			for j := range context {
				if size == 2 {
					x.I[j], y.I[j] = int32(binary.LittleEndian.Uint16(buf[2*j:])), int32(binary.LittleEndian.Uint16(buf[2*j+2:]))
				} else {
					x.I[j], y.I[j] = int32(buf[j]), int32(buf[j+1])
				}
			}
		}
		return float64(samples) / time.Since(began).Seconds(), nil
	}
	sequential := func() (float64, error) {
		f, err := os.Open(filepath.Join(in, "t.tar"))
		if err != nil {
			return 0, err
		}
		defer f.Close()
		began, r := time.Now(), tar.NewReader(f)
		for n := 0; ; n++ {
			if _, err := r.Next(); err == io.EOF {
				return float64(n) / time.Since(began).Seconds(), nil
			} else if err != nil {
				return 0, err
			}
			if _, err := io.ReadAll(r); err != nil {
				return 0, err
			}
		}
	}
	shards := func() (trainer.Dataset, error) {
		s, err := data.Tar(filepath.Join(in, "t.tar"))
		if err != nil {
			return nil, err
		}
		return s.Data("bench", func(fields map[string][]byte, _ trainer.Sample, in, _ trainer.Tensor) error {
			for j := range context {
				in.I[j] = int32(binary.LittleEndian.Uint16(fields["bin"][2*j:]))
			}
			return nil
		}), nil
	}
	for _, c := range []struct {
		name  string
		open  func() (trainer.Dataset, error)
		plain func() (float64, error)
	}{
		{"uint16 tokens, against ReadAt", func() (trainer.Dataset, error) { return data.Tokens(data.Uint16, filepath.Join(in, "t.bin")) }, func() (float64, error) { return plain("t.bin", 0, 2) }},
		{"numpy, against ReadAt", func() (trainer.Dataset, error) { return data.Numpy(filepath.Join(in, "t.npy")) }, func() (float64, error) { return plain("t.npy", 10+len(header), 2) }},
		{"text, against ReadAt", func() (trainer.Dataset, error) { return data.Text(filepath.Join(in, "t.txt")) }, func() (float64, error) { return plain("t.txt", 0, 1) }},
		{"tar, against archive/tar in order", shards, sequential},
	} {
		d, err := c.open()
		if err != nil {
			return err
		}
		ours, err := rate(d)
		if err != nil {
			return err
		}
		theirs, err := c.plain()
		if err != nil {
			return err
		}
		what, peer, _ := strings.Cut(c.name, ", against ")
		row := report.Row{Comparison: "keep", Case: fmt.Sprintf("samples of %d tokens", context), Threads: 1, Ours: what, Theirs: peer, Unit: "samples/s", Kind: report.Rate}
		row.Add(ours, theirs)
		k.rec.Add(row)
		fmt.Printf("  %-36s %9.0f and %9.0f: %.2f\n", c.name, ours, theirs, ours/theirs)
	}
	return nil
}

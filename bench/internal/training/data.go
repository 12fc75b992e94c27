package training

import (
	"errors"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/testkit/s3"
	"github.com/soliton-train/soliton/rng"
)

// Data compares the steps of a GPT whose data are in a bucket with those of the same GPT whose data are on the disk, in turns. This process
// serves the bucket, and delays each answer. The data are larger than what workers keep of them. The bound for the ratio is 1.01.
func Data(args []string) error {
	f := flag.NewFlagSet("data", flag.ExitOnError)
	pairs := f.Int("pairs", 5, "turns of each side")
	steps := f.Int("steps", 14, "steps of a run, of which the first four warm up")
	delay := f.Duration("delay", 50*time.Millisecond, "of each answer of the bucket")
	workers := f.Int("workers", 2, "worker processes, of one compute thread each")
	size := f.Int("size", 256, "MB of data")
	model := f.String("model", "--layers 4 --width 384 --heads 6 --context 256 --dropout 0 --global-batch 32 --micro-batch 2", "`flags` of the GPT")
	limit := f.Duration("limit", 10*time.Minute, "how long a run may take")
	if err := f.Parse(args); err != nil {
		return err
	}
	const warm = 4
	if *pairs < 1 || *steps <= warm || *workers < 1 || *size < 1 || *delay < 0 {
		return fmt.Errorf("give at least 1 for -pairs, -workers and -size, more than %d for -steps, and 0 or more for -delay", warm)
	}
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(l.Dir)
	root := filepath.Join(l.Dir, "buckets")
	tokens := filepath.Join(root, "corpus", "train.bin")
	if err := writeTokens(tokens, *size); err != nil {
		return err
	}
	bucket := &s3.Server{Dir: root, Delay: *delay}
	server := httptest.NewServer(bucket)
	defer server.Close()
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "here", "AWS_ENDPOINT_URL": server.URL, "AWS_ENDPOINT_URL_S3": "",
		"XDG_CACHE_HOME": filepath.Join(l.Dir, "cache"),
	} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	fmt.Printf("%s, kernel path %v, %d cores; %d MB of tokens, %v for each answer of the bucket, %d workers\n%s\n",
		runtime.Version(), kernel.Active(), runtime.NumCPU(), *size, *delay, *workers, *model)
	hash := ""
	run := func(corpus string) (ms []float64, err error) {
		o, err := l.Run(lab.Trial{
			Flags: []string{"--workers", fmt.Sprint(*workers), "--threads", "1"}, Corpus: corpus, Limit: *limit,
			Program: append(strings.Fields(*model), "--vocab", "256", "--steps", fmt.Sprint(*steps), "--eval-every", "0"),
		})
		switch {
		case err != nil:
			return nil, err
		case o.Hung || o.Status != 0 || len(o.StepMS) != *steps:
			return nil, fmt.Errorf("a run on %s: status %d, %d steps\n%s", corpus, o.Status, len(o.StepMS), o.Output)
		case hash != "" && hash != o.Sum.ParamsSHA256:
			return nil, errors.New("the runs have different parameters")
		}
		hash = o.Sum.ParamsSHA256
		return o.StepMS[warm:], os.RemoveAll(o.Dir)
	}
	mean := func(x []float64) float64 { return lab.Sum(x) / float64(len(x)) }
	var ratios []float64
	for pair := range *pairs {
		sides := []string{tokens, "s3://corpus/train.bin"}
		ms := make(map[string][]float64)
		for i := range sides {
			side := sides[(i+pair)%2]
			before := bucket.Requests.Load()
			if ms[side], err = run(side); err != nil {
				return err
			}
			name := "disk"
			if strings.HasPrefix(side, "s3://") {
				name = "bucket"
			}
			fmt.Printf("  %-7s%s  (%d requests)\n", name, lab.List(ms[side]), bucket.Requests.Load()-before)
		}
		ratios = append(ratios, mean(ms[sides[1]])/mean(ms[sides[0]]))
		fmt.Printf("pair %d: mean step %.1f ms with the bucket, %.1f ms with the disk: %.4f\n", pair+1, mean(ms[sides[1]]), mean(ms[sides[0]]), ratios[pair])
	}
	fmt.Printf("step with the bucket by that with the disk: median %.4f, %.4f to %.4f of %d pairs; the bound is 1.01; equal parameters\n",
		lab.Median(ratios), slices.Min(ratios), slices.Max(ratios), len(ratios))
	return nil
}

// writeTokens writes random tokens below 256, of two bytes each.
func writeTokens(path string, mb int) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	draw := rng.New(1, rng.Place{})
	text := make([]byte, 1<<20)
	for i := 0; i < len(text); i += 2 {
		text[i] = byte(draw.Uint32())
	}
	for range mb {
		if _, err := f.Write(text); err != nil {
			return err
		}
	}
	return f.Sync()
}

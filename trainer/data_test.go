package trainer_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/trainer"
)

// flaky fails the first few times that it is asked for a sample in training.
type flaky struct {
	counts
	index int
	left  *int
}

func (f flaky) Sample(s trainer.Sample, in, target trainer.Tensor) error {
	if s.Index == f.index && *f.left > 0 {
		*f.left--
		return &fs.PathError{Op: "read", Path: "/mnt/data/7", Err: syscall.EIO}
	}
	return f.counts.Sample(s, in, target)
}

func TestTransientSampleError(t *testing.T) {
	want := run(t, smallJob())
	synctest.Test(t, func(t *testing.T) {
		job, failures := smallJob(), 3
		job.Data = flaky{counts{n: 40}, 7, &failures}
		if got := run(t, job); got.ParamsSHA256 != want.ParamsSHA256 || failures != 0 {
			t.Errorf("parameters %s, want %s; %d failures are left", got.ParamsSHA256, want.ParamsSHA256, failures)
		}
		failures = math.MaxInt
		_, err := trainer.Run(context.Background(), job)
		if !errors.Is(err, syscall.EIO) && (err == nil || !strings.Contains(err.Error(), "input/output error")) {
			t.Fatalf("error %v", err)
		}
		for _, part := range []string{"sample 7 of the data", "/mnt/data/7", "tried 5 times"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("the error is %q, without %q", err, part)
			}
		}
	})
}

// slow takes its time for each sample of training.
type slow struct {
	counts
	readers   int
	in, reads *atomic.Int32
}

func (s slow) Readers() int { return s.readers }

func (s slow) Sample(x trainer.Sample, in, target trainer.Tensor) error {
	if n := s.in.Add(1); n > int32(s.readers) {
		return fmt.Errorf("%d samples are read at a time", n)
	}
	defer s.in.Add(-1)
	if x.Train {
		s.reads.Add(1)
		<-time.After(10 * time.Millisecond)
	}
	return s.counts.Sample(x, in, target)
}

// Samples that are read ahead are read once, no more at a time than the data allow, and give the same bits, however many micro-batches run
// at a time.
func TestSlowData(t *testing.T) {
	small := smallJob()
	small.MicroBatch, small.Steps = 1, 20
	want := run(t, small)
	for _, c := range []struct{ threads, readers int }{{1, 1}, {2, 1}, {4, 1}, {1, 3}, {2, 2}, {4, 3}} {
		t.Run(fmt.Sprintf("%d threads, %d readers", c.threads, c.readers), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				job, s := small, slow{counts{n: 40}, c.readers, new(atomic.Int32), new(atomic.Int32)}
				job.Data, job.Threads = s, c.threads
				if got := run(t, job); got.ParamsSHA256 != want.ParamsSHA256 {
					t.Errorf("parameters %s, want %s", got.ParamsSHA256, want.ParamsSHA256)
				}
				need := int32(job.Steps * job.GlobalBatch)
				if n := s.reads.Load(); n < need || n > need+int32(job.GlobalBatch) { // spot checks read some once more
					t.Errorf("%d samples were read, of %d", n, need)
				}
			})
		})
	}
}

// A FIFO is no file to begin from: opening it would wait for a writer.
func TestInitFromFIFO(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	job := smallJob()
	job.InitFrom = path
	if err := job.Validate(); err == nil || !strings.Contains(err.Error(), "--init-from (Job.InitFrom)") || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("error %v", err)
	}
	dir := filepath.Dir(path)
	if err := os.Rename(path, filepath.Join(dir, "config.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := trainer.ReadConfig(dir, new(any)); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("error %v", err)
	}
}

func TestInitFromNotFinite(t *testing.T) {
	job := smallJob()
	job.RunDir = filepath.Join(t.TempDir(), "run")
	run(t, job)
	path := filepath.Join(job.RunDir, "model.safetensors")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, bits := range map[string][]byte{"NaN": {0, 0, 0xc0, 0x7f}, "+Inf": {0, 0, 0x80, 0x7f}, "-Inf": {0, 0, 0x80, 0xff}} {
		spoilt := slices.Clone(text)
		copy(spoilt[len(spoilt)-4:], bits)
		from := filepath.Join(t.TempDir(), "model.safetensors")
		if err := os.WriteFile(from, spoilt, 0o600); err != nil {
			t.Fatal(err)
		}
		next := smallJob()
		next.InitFrom = from
		if _, err := trainer.Run(context.Background(), next); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("has %s as element 1", name)) || !strings.Contains(err.Error(), "InitFrom") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/internal/worker/order"
	"github.com/soliton-train/soliton/trainer"
)

// numbered is a data set whose samples are their own numbers. Every bad-th cannot be read, unless that is 0.
type numbered struct{ n, base, bad int }

var errBad = errors.New("bad sector")

func (d numbered) Len() int { return d.n }

func (d numbered) Sample(s trainer.Sample, in, _ trainer.Tensor) error {
	if d.bad > 0 && s.Index%d.bad == d.bad-1 {
		return errBad
	}
	in.I[0] = int32(d.base + s.Index)
	return nil
}

// contexts is a data set whose samples are the digests of those of another one.
type contexts struct {
	data       trainer.Dataset
	in, target trainer.Tensor
}

func (d contexts) Len() int { return d.data.Len() }

func (d contexts) Sample(s trainer.Sample, in, _ trainer.Tensor) error {
	if err := d.data.Sample(s, d.in, d.target); err != nil {
		return err
	}
	var b []byte
	for _, x := range slices.Concat(d.in.I, d.target.I) {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	in.I[0] = int32(crc32.ChecksumIEEE(b) >> 1)
	return nil
}

// packed are documents that are packed into contexts.
func packed(tb testing.TB) contexts {
	tb.Helper()
	const context = 8
	tb.Setenv("XDG_CACHE_HOME", tb.TempDir())
	k, err := data.ReadTokenizer("../../data/testdata/gpt2.json")
	if err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(tb.TempDir(), "documents.jsonl")
	var lines []byte
	for i := range 60 {
		lines = fmt.Appendf(lines, "{\"text\": %q}\n", strings.Repeat(string(rune('!'+i)), 1+i*i%13))
	}
	if err := os.WriteFile(path, lines, 0o600); err != nil {
		tb.Fatal(err)
	}
	documents, err := data.JSONL("text", path)
	if err != nil {
		tb.Fatal(err)
	}
	tokens, err := data.Tokenize(k, "<|endoftext|>", documents)
	if err != nil {
		tb.Fatal(err)
	}
	pack, err := tokens.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	spec := trainer.Spec{Shape: []int{context}, Kind: trainer.Int32}
	bound, err := trainer.Bind(pack, spec, spec)
	if err != nil {
		tb.Fatal(err)
	}
	return contexts{bound, trainer.NewTensor(trainer.Int32, context), trainer.NewTensor(trainer.Int32, context)}
}

// audited is a mix of data sets as a process has it: with its own shuffle, and its own places in the parts. Several epochs of it, and more
// of its smallest part, go by in a run. Some samples cannot be read.
func audited(tb testing.TB, seed uint64, documents trainer.Dataset) Reader {
	spec := trainer.Spec{Shape: []int{1}, Kind: trainer.Int32}
	mix, err := trainer.Bind(data.Mix{Seed: seed, Parts: []data.Part{
		{Data: numbered{31, 0, 11}, Weight: 0.4}, {Data: numbered{7, 1000, 0}, Weight: 0.2}, {Data: numbered{19, 2000, 8}, Weight: 0.1}, {Data: documents, Weight: 0.3},
	}, Samples: 37}, spec, spec)
	if err != nil {
		tb.Fatal(err)
	}
	places, in := order.New(seed, mix.Len()), trainer.NewTensor(trainer.Int32, 1)
	return func(i uint64, skips int) (int, bool) {
		index, epoch := places.At(i)
		at := trainer.Sample{Index: (int(index) + skips) % mix.Len(), Epoch: int(epoch), Train: true}
		if err := mix.Sample(at, in, trainer.Tensor{}); errors.Is(err, errBad) {
			return 0, false
		} else if err != nil {
			tb.Fatal(err)
		}
		return int(in.I[0]), true
	}
}

// fatal are the faults that may end a worker.
var fatal = regexp.MustCompile("kill|freeze|halt|stop|leave|cut")

// lone is the number of a sample that one process alone cannot read.
const lone = 1003

// besides is a reader for which the lone sample is bad, as on a machine with a bad disk, if that is so when it is read.
func besides(bad *bool, of Reader) Reader {
	return func(i uint64, skips int) (int, bool) {
		n, ok := of(i, skips)
		return n, ok && (n != lone || !*bad)
	}
}

// alone is a reader that is the only one for which the lone sample is not bad.
func alone(bad bool, of Reader) Reader {
	return func(i uint64, skips int) (int, bool) {
		n, ok := of(i, skips)
		return n, ok && (n != lone || !bad)
	}
}

// TestSamples audits the numbers of the samples whose gradients random schedules of faults commit, of data that are mixed, packed, and in
// part unreadable, for all workers or for one: none is lost, none is repeated, none is skipped that can be read, and the order is that of
// an undisturbed run. Samples that one worker cannot read are left out of schedules that may end the others, as the run may end with them.
// In a third of the schedules one sample can be read by one worker only, which may pass on what comes of it before it is lost: then the
// sample is skipped, and the step must be made of the other one alone.
//
//	go test ./internal/sim -run Samples -v -schedules 10000 -seed 1
func TestSamples(t *testing.T) {
	documents := packed(t)
	steps, recoveries, skipped, refused := 0, 0, 0, 0
	for s := *seed; s < *seed+uint64(*schedules); s++ {
		r := rand.New(rand.NewPCG(s, 3))
		harmless, single := false, s%3 == 0
		c, text := scheduleOf(r, s, false, func(cfg *Config) {
			processes := 0
			cfg.Digests = true // as all runs that skip samples
			cfg.Samples = func() Reader {
				processes++
				of := audited(t, s, documents)
				if single {
					return alone(processes != 2, of)
				}
				if processes == 2 && cfg.Workers > 2 {
					return besides(&harmless, of)
				}
				return of
			}
		})
		harmless = !fatal.MatchString(text)
		// All other workers fail where the only one can still read the sample, or could in a step that was committed.
		if err := run(c, nil); err != nil && !(single && strings.Contains(err.Error(), "bad sector")) {
			t.Fatalf("seed %d (%s): %v", s, text, err)
		}
		n, err := c.audit(audited(t, s, documents))
		if err != nil {
			t.Fatalf("seed %d (%s): %v", s, text, err)
		}
		steps, recoveries, skipped, refused = steps+n, recoveries+c.Recoveries, skipped+len(c.books.skips), refused+c.refused
	}
	t.Logf("%d schedules with %d recoveries commit %d samples; %d are skipped, and %d workers cannot read what others can",
		*schedules, recoveries, steps*maxMicros*microBatch, skipped, refused)
}

// audit compares the samples in each update of each layer with those of the steps in order, without those in the ledger, and returns how
// many steps are committed.
func (c *Cluster) audit(sample Reader) (steps int, err error) {
	for _, i := range c.books.skips {
		for k := range c.skipped(i) {
			if n, ok := sample(i, k); ok && n != lone {
				return 0, fmt.Errorf("sample %d is skipped, and number %d, its %d., can be read", i, n, k)
			}
		}
	}
	steps = c.step()
	for step := 1; step <= steps; step++ {
		var want batches
		for m := range want {
			for k := range microBatch {
				i := uint64(((step-1)*c.cfg.Micros+m)*microBatch + k)
				n, ok := sample(i, c.skipped(i))
				if !ok {
					return steps, fmt.Errorf("step %d has sample %d, which cannot be read", step, i)
				}
				want[m] += fmt.Sprint(n, " ")
			}
		}
		used := c.used[step]
		if used == nil {
			used = make([]batches, len(c.cfg.Layers))
		}
		for layer, got := range used {
			if got == (batches{}) && step == steps {
				continue // all workers were killed between the commit and the update
			}
			if got != want {
				return steps, fmt.Errorf("step %d, layer %d: samples %q, want %q", step, layer, got, want)
			}
		}
	}
	return steps, nil
}

// The audit sees one sample that a worker reads in place of another.
func TestSamplesFindsFaults(t *testing.T) {
	workers := 0
	all := func() Reader { return audited(t, 1, numbered{23, 3000, 0}) }
	c := New(Config{
		Seed: 1, Workers: 3, Stages: 1, Micros: maxMicros, Mirrors: 1, Steps: 3, MinWorkers: 1, Layers: layers(), Detect: 300 * ms,
		Samples: func() Reader {
			workers++
			wrong, sample := workers == 2, all()
			return func(i uint64, skips int) (int, bool) {
				n, ok := sample(i, skips)
				if other, readable := sample(i^1, 0); ok && readable && wrong && i/(maxMicros*microBatch) == 1 {
					return other, true
				}
				return n, ok
			}
		},
	})
	if err := run(c, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.audit(all()); err == nil || !strings.Contains(err.Error(), "step 2, layer 0: samples") {
		t.Error(errors.Join(err, errors.New("the audit does not name step 2")))
	}
}

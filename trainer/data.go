package trainer

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/order"
	"github.com/soliton-train/soliton/internal/worker/process"
	"github.com/soliton-train/soliton/rng"
)

// Dataset is a fixed set of samples with random access. One goroutine at a time
// calls its methods. A sample must be the same bits whenever and wherever it is
// read; what it draws at random comes from [Sample.Rand]. Now and then a run reads
// a sample a second time, and ends if it differs.
type Dataset interface {
	// Len returns the number of samples.
	Len() int

	// Sample writes a sample to in and target, which have the shapes of the
	// model's Input and Target and unspecified content. After an error it is called
	// again a few times, then in another worker; if that fails too, the run ends with
	// the error, which should name the file. See the table in docs/api.md.
	Sample(s Sample, in, target Tensor) error
}

// Concurrent is a [Dataset] of which several goroutines may read samples at the
// same time.
type Concurrent interface {
	Dataset

	// Readers is how many goroutines may be in Sample at the same time. A worker
	// reads ahead with so many where reading takes a share of its time.
	Readers() int
}

// Sample identifies a sample that a [Dataset] is asked for.
type Sample struct {
	Index int // in [0, Len())

	// Epoch is the number of times that training has gone through the data
	// before. It is 0 outside of training.
	Epoch int

	// Train reports whether the sample is for training. Evaluation, and the
	// check of the data before the run, take samples without augmentation.
	Train bool

	// Rand is the random stream of this sample in this epoch, for augmentation.
	// It follows from Job.Seed, Epoch and Index, so every worker that reads the
	// sample draws the same numbers.
	Rand rng.Stream
}

// Binder is a data set whose samples depend on the model's inputs, such as
// text, which is cut into pieces as long as the model's context. The run uses
// the data set that Bind returns.
type Binder interface {
	Bind(in, target Spec) (Dataset, error)
}

// Manifest is implemented by data sets that are made from files.
type Manifest interface {
	// Manifest lists the files in a fixed order.
	Manifest() []DataFile
}

// DataFile names a file of the data, with its size in bytes and its SHA-256.
type DataFile = rundir.DataFile

// Bind returns the data set to use for a model, as a run does: that of a [Binder], or d itself. Data sets that are made of others
// call it. Its error is one line.
func Bind(d Dataset, in, target Spec) (Dataset, error) {
	if b, ok := d.(Binder); ok {
		var err error
		if d, err = b.Bind(in, target); err != nil {
			return nil, err
		}
	}
	if d.Len() < 1 {
		return nil, fmt.Errorf("has no samples")
	}
	return d, nil
}

// Bounds of what is hashed of a data set without files.
const (
	maxHashedBytes = 64 << 20
	hashedSamples  = 1024
)

// fingerprinter is a data set in another process, which hashes its samples there.
type fingerprinter interface{ Fingerprint() string }

// fingerprint returns the data_sha256 of a bound data set; see [Summary].
func (p *prepared) fingerprint(d Dataset) (sum string, files []DataFile, err error) {
	in, target := p.Model.Input, p.Model.Target
	if f, ok := d.(fingerprinter); ok {
		return f.Fingerprint(), nil, nil
	}
	h := sha256.New()
	if m, ok := d.(Manifest); ok {
		files = m.Manifest()
		for _, f := range files {
			fmt.Fprintf(h, "%d %s\n", f.Size, f.SHA256)
		}
		return hex.EncodeToString(h.Sum(nil)), files, nil
	}
	n := d.Len()
	fmt.Fprintf(h, "%d\n", n)
	take := n
	if size := 4 * (in.Len() + target.Len()); n > maxHashedBytes/size {
		take = min(n, hashedSamples)
	}
	x, y := NewTensor(in.Kind, in.Shape...), NewTensor(target.Kind, target.Shape...)
	var buf []byte
	for j := range take {
		i := spread(j, take, n)
		if err := read(p.calls, d, plainSample(p.Seed, i), x, y); err != nil {
			return "", nil, err
		}
		buf = appendBytes(appendBytes(buf[:0], x), y)
		h.Write(buf)
	}
	return hex.EncodeToString(h.Sum(nil)), nil, nil
}

// spread returns the j-th of k evenly spaced indices below n.
func spread(j, k, n int) int {
	// Without the product j·n, which may not fit.
	return j*(n/k) + j*(n%k)/k
}

func appendBytes(b []byte, t Tensor) []byte {
	for _, v := range t.I {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	for _, v := range t.F {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

// trainingSample is sample i of the run, counted over all steps, or so many samples behind it in the data, which are n.
func (p *prepared) trainingSample(o *order.Order, n int, i uint64, skips int) Sample {
	index, epoch := o.At(i)
	index = (index + uint64(skips)) % uint64(n)
	return Sample{Index: int(index), Epoch: int(epoch), Train: true, Rand: rng.ForSample(p.Seed, epoch, index)}
}

// plainSample is a sample outside of training.
func plainSample(seed uint64, i int) Sample {
	return Sample{Index: i, Rand: rng.ForSample(seed, 0, uint64(i))}
}

// read reads a sample, more than once if that fails. Its error is a [*process.SampleError].
func read(calls *process.Calls, d Dataset, s Sample, in, target Tensor) error {
	pause := timing.SampleRetry
	for try := 1; ; try++ {
		before := calls.Enter(control.CallSample, 0, s.Index)
		err := d.Sample(s, in, target)
		calls.Leave(before) // not deferred: a panic keeps it
		if err == nil {
			return nil
		}
		if try == timing.SampleTries {
			return &process.SampleError{Index: s.Index, Tries: try, Err: err}
		}
		time.Sleep(pause)
		pause *= timing.SampleGrowth
	}
}

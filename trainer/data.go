package trainer

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/rng"
)

// Dataset is a fixed set of samples with random access. Methods are called by
// one goroutine at a time. Training is as repeatable as the samples are.
type Dataset interface {
	// Len returns the number of samples.
	Len() int

	// Sample writes sample i to in and target, which have the shapes of the
	// model's Input and Target and unspecified content.
	Sample(i int, in, target Tensor) error
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

// bind returns the data set to use, and says what is wrong with it in one line.
func bind(d Dataset, in, target Spec) (Dataset, error) {
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

// fingerprint returns the data_sha256 of a bound data set; see [Summary].
func fingerprint(d Dataset, in, target Spec) (sum string, files []DataFile, err error) {
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
	x, y := sampleTensor(in), sampleTensor(target)
	var buf []byte
	for j := range take {
		i := spread(j, take, n)
		if err := d.Sample(i, x, y); err != nil {
			return "", nil, fmt.Errorf("sample %d: %w", i, err)
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

func sampleTensor(s Spec) Tensor {
	if s.Kind == Int32 {
		return tensor.NewInt(s.Shape...)
	}
	return tensor.New(s.Shape...)
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

// shuffle maps samples of the run, counted over all steps, to samples of the
// data: every epoch goes through all of them in an order of its own. It keeps
// the order of the newest epoch, nothing else.
type shuffle struct {
	seed  uint64
	n     uint64
	epoch uint64
	perm  rng.Perm
}

func newShuffle(seed uint64, n int) *shuffle {
	return &shuffle{seed: seed, n: uint64(n), perm: rng.NewPerm(seed, 0, uint64(n))}
}

func (s *shuffle) at(i uint64) int {
	if epoch := i / s.n; epoch != s.epoch {
		s.epoch, s.perm = epoch, rng.NewPerm(s.seed, epoch, s.n)
	}
	return int(s.perm.At(i % s.n))
}

package zero

import "github.com/soliton-train/soliton/internal/compute/kernel"

// Digest is [kernel.Digest] of a block as it was written, in the lower 32 bits. The
// zero Digest means that nothing is known.
type Digest uint64

const (
	known Digest = 1 << 32
	// altered is the digest of the result of a corrupted block, and originBit says that it was this array of the block. No block fits it.
	altered   Digest = 1 << 33
	originBit Digest = 1 << 34
)

// DigestOf returns the digest of a block.
func DigestOf(x []float32) Digest { return known | Digest(kernel.Digest(x)) }

// Fits reports whether the digest may be that of the block.
func (d Digest) Fits(x []float32) bool { return d == 0 || d == DigestOf(x) }

// Altered reports whether the block is the result of an update of a corrupted one, and origin whether this array of it was
// corrupted.
func (d Digest) Altered() (is, origin bool) { return d&altered != 0, d&originBit != 0 }

// array returns the parameters (0) or moment j-1.
func array(params []float32, moments [][]float32, j int) []float32 {
	if j == 0 {
		return params
	}
	return moments[j-1]
}

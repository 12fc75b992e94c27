package zero

import "github.com/soliton-train/soliton/internal/compute/kernel"

// Digest is [kernel.Digest] of a block as it was written, in the lower 32 bits. The
// zero Digest means that nothing is known.
type Digest uint64

const (
	known Digest = 1 << 32
	// altered is the digest of the result of a corrupted block. No block fits it.
	altered Digest = 1 << 33
)

// DigestOf returns the digest of a block.
func DigestOf(x []float32) Digest { return known | Digest(kernel.Digest(x)) }

// Fits reports whether the digest may be that of the block.
func (d Digest) Fits(x []float32) bool { return d == 0 || d == DigestOf(x) }

// array returns the parameters (0) or moment j-1.
func array(params []float32, moments [][]float32, j int) []float32 {
	if j == 0 {
		return params
	}
	return moments[j-1]
}

package rng

import (
	"fmt"
	"math"
	"math/bits"
)

// Widths of the two parts of counter word 1, which is Layer<<OpBits | Op.
const (
	OpBits    = 20
	LayerBits = 12
)

// Place names what the numbers of a stream are for. Two different places never share a number of the counter space.
type Place struct {
	Step   uint32 // optimizer step; 0 also serves draws before the first step, such as initial parameters
	Sample uint32 // sample, or micro-batch, within the step's global batch
	Layer  uint16 // model-wide number of the layer, below 1<<LayerBits
	Op     uint32 // which drawing operation within the layer, below 1<<OpBits
}

// Stream is the sequence of random numbers of one [Place] under one seed. It is a value: assigning it saves a position, and
// both copies continue from there with the same numbers. Make one with [New]; the zero Stream is the one of seed 0 and the zero
// Place.
type Stream struct {
	key  [2]uint32
	ctr  [4]uint32 // of the next block to draw
	buf  [4]uint32 // the newest block
	left uint8     // words of buf not handed out, from its end
	done bool      // the last block is in buf; there is no next one
}

// New returns the stream of a place from its beginning. It panics when p.Layer or p.Op does not fit into its bits, because a
// wrapped number would silently share the stream of another place.
func New(seed uint64, p Place) Stream {
	if p.Layer >= 1<<LayerBits {
		panic(fmt.Sprintf("rng: Place.Layer is %d; it must be below %d", p.Layer, 1<<LayerBits))
	}
	if p.Op >= 1<<OpBits {
		panic(fmt.Sprintf("rng: Place.Op is %d; it must be below %d", p.Op, 1<<OpBits))
	}
	return Stream{
		key: seedKey(seed),
		ctr: [4]uint32{0, uint32(p.Layer)<<OpBits | p.Op, p.Sample, p.Step},
	}
}

// sampleTag sets the counter that the key of an epoch's samples is drawn from apart from those of permutations.
const sampleTag = 0x73616D70 // "samp"

// ForSample returns the stream of sample i of the data in an epoch from its beginning, for random changes of the sample.
func ForSample(seed, epoch, i uint64) Stream {
	k := Philox([4]uint32{uint32(epoch), uint32(epoch >> 32), sampleTag, foldStep}, seedKey(seed))
	return Stream{key: [2]uint32{k[0], k[1]}, ctr: [4]uint32{0, 0, uint32(i), uint32(i >> 32)}}
}

// Key returns the Philox key of the stream, for kernels that draw whole blocks themselves.
func (s Stream) Key() [2]uint32 { return s.key }

// Counter returns the Philox counter of the stream's block 0, wherever the stream stands. Block b has b in word 0, and its
// four words are draws 4b to 4b+3 of [Stream.Uint32].
func (s Stream) Counter() [4]uint32 {
	return [4]uint32{0, s.ctr[1], s.ctr[2], s.ctr[3]}
}

// Uint32 returns the next 32 random bits. It panics after 1<<34 of them.
func (s *Stream) Uint32() uint32 {
	if s.left == 0 {
		s.next()
	}
	v := s.buf[4-s.left]
	s.left--
	return v
}

// next draws one block.
func (s *Stream) next() {
	if s.done {
		panic("rng: stream used up: 1<<34 draws were made at one place")
	}
	s.buf = Philox(s.ctr, s.key)
	s.left = 4
	s.ctr[0]++
	s.done = s.ctr[0] == 0
}

// Uint64 returns the next 64 random bits: two draws, low half first.
func (s *Stream) Uint64() uint64 {
	lo := s.Uint32()
	return uint64(s.Uint32())<<32 | uint64(lo)
}

// Float32 returns a uniform number in [0,1): a multiple of 1/1<<24, from the high bits of one draw.
func (s *Stream) Float32() float32 { return float32(float32(s.Uint32()>>8) * (1.0 / (1 << 24))) }

// Float64 returns a uniform number in [0,1): a multiple of 1/1<<53, from the high bits of one Uint64.
func (s *Stream) Float64() float64 {
	lo := s.Uint32()
	return unit(lo, s.Uint32())
}

// IntN returns a uniform integer in [0,n). It panics when n is not positive.
//
// The method is Lemire's, "Fast random integer generation in an interval" (ACM TOMACS 29, 2019): the high half of a product
// with n, where the few low halves that would favour some results are drawn again. It is exactly uniform and takes one Uint64
// nearly always, on machines of any word size.
func (s *Stream) IntN(n int) int {
	if n <= 0 {
		panic(fmt.Sprintf("rng: IntN(%d): the bound must be positive", n))
	}
	return int(s.below(uint64(n), s.Uint64()))
}

// below maps the draw v to [0,n), drawing again while v is one of the 2^64 mod n surplus values.
func (s *Stream) below(n, v uint64) uint64 {
	hi, lo := bits.Mul64(v, n)
	if lo < n {
		for surplus := -n % n; lo < surplus; {
			hi, lo = bits.Mul64(s.Uint64(), n)
		}
	}
	return hi
}

// Normal returns a number of the normal distribution with mean 0 and variance 1. It always takes two Uint64, one block when
// nothing else was drawn between, and lies within 8.6 of zero.
//
// The method is that of Box and Muller, "A note on the generation of random normal deviates" (1958), of whose two results the
// cosine one is taken: rejection methods take a varying number of draws, and the second result would be a state to keep.
func (s *Stream) Normal() float64 {
	radius := 1 - s.Float64() // in (0,1], so its logarithm is finite
	turn := s.Float64()
	return math.Sqrt(-2*log(radius)) * cosTurn(turn)
}

// Normals sets x to what as many calls of [Stream.Normal] return, several times faster.
func (s *Stream) Normals(x []float64) {
	var radius, turn [lane]float64
	for len(x) >= lane && s.left == 0 && !s.done && s.ctr[0] < math.MaxUint32-lane {
		ctr, key := s.ctr, s.key
		var w [4]uint32
		for i := range lane {
			w = Philox(ctr, key)
			ctr[0]++
			radius[i] = 1 - unit(w[0], w[1])
			turn[i] = unit(w[2], w[3])
		}
		s.ctr, s.buf = ctr, w
		normals(&radius, &turn)
		copy(x, radius[:])
		x = x[lane:]
	}
	for i := range x {
		x[i] = s.Normal()
	}
}

// unit is [Stream.Float64] of two draws.
func unit(lo, hi uint32) float64 {
	return float64(float64((uint64(hi)<<32|uint64(lo))>>11) * (1.0 / (1 << 53)))
}

package rng

import "math/bits"

// Perm is a keyed permutation of the integers 0 to n-1: a shuffled order that needs no table, takes constant memory for any n
// and can be asked for any position first. Make one with [NewPerm].
//
// It is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J.
// Computing 17, 1988) with [Philox] as its round function, over the smallest even number of bits that holds n-1. That permutes
// a power of four; elements at or beyond n are sent through again until they fall below n, which leaves a permutation of
// [0,n) (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The power of four is less
// than 4n, so a call takes fewer than four turns on average.
//
// Feistel networks of more than two bits are even permutations only, which keeps half of the orders of a small n from coming
// up as often as the others. So one bit of the key decides whether the network's results 0 and 1 change places.
type Perm struct {
	n    uint64
	key  [2]uint32
	half uint8  // bits of each half, 1 to 32
	coin uint64 // 1: elements 0 and 1 of the network's result change places
}

// permRounds is the number of Feistel rounds. Four suffice in the proof for large n, but small n mix more slowly: with six, the
// orders of five elements are measurably uneven. Twelve is twice that.
const permRounds = 12

// permTag and foldStep set the counter that a permutation's key is drawn from apart from those of streams.
const (
	permTag  = 0x7065726D // "perm"
	foldStep = 1<<32 - 1
)

// NewPerm returns the permutation of [0,n) for a data epoch under a seed. It panics when n is 0.
func NewPerm(seed, epoch uint64, n uint64) Perm {
	if n == 0 {
		panic("rng: NewPerm: n is 0; a permutation needs at least one element")
	}
	// The epoch is folded into a key of its own, so that the rounds have the whole counter.
	k := Philox([4]uint32{uint32(epoch), uint32(epoch >> 32), permTag, foldStep}, seedKey(seed))
	width := bits.Len64(n - 1) // bits that the largest element needs
	return Perm{n: n, key: [2]uint32{k[0], k[1]}, half: uint8(max(1, (width+1)/2)), coin: uint64(k[2] & 1)}
}

// Len returns n, the number of elements.
func (p Perm) Len() uint64 { return p.n }

// At returns the element at position i. It panics when i is not below n.
func (p Perm) At(i uint64) uint64 {
	if i >= p.n {
		panic("rng: Perm.At: the position is not below the number of elements")
	}
	// Walking ends: the network is a permutation, so the walk from i is a cycle that comes back to i < n at the latest.
	for {
		if i = p.network(i); i < p.n {
			return i
		}
	}
}

// network permutes [0, 4^half).
func (p Perm) network(x uint64) uint64 {
	mask := uint32(1<<p.half - 1)
	left, right := uint32(x>>p.half), uint32(x)&mask
	for round := range uint32(permRounds) {
		left, right = right, left^p.round(round, right)&mask
	}
	x = uint64(left)<<p.half | uint64(right)
	if x < 2 {
		x ^= p.coin
	}
	return x
}

// round is the round function: 32 random bits for a round's number and one half.
func (p Perm) round(round, half uint32) uint32 {
	return Philox([4]uint32{half, round, 0, 0}, p.key)[0]
}

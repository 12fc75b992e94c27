package rng

import "math/bits"

// Multipliers and key increments of Philox 4x32: table 2 and section 4.3 of the paper. The increments are the golden ratio
// and sqrt(3)-1 as fractions of 32 bits.
const (
	mul0 = 0xD2511F53
	mul1 = 0xCD9E8D57
	inc0 = 0x9E3779B9
	inc1 = 0xBB67AE85

	rounds = 10
)

// Philox returns the four random words of counter ctr under key, by Philox 4x32-10. For one key it is a bijection of the
// counters.
func Philox(ctr [4]uint32, key [2]uint32) [4]uint32 {
	c0, c1, c2, c3 := ctr[0], ctr[1], ctr[2], ctr[3]
	k0, k1 := key[0], key[1]
	for range rounds {
		hi0, lo0 := bits.Mul32(mul0, c0)
		hi1, lo1 := bits.Mul32(mul1, c2)
		c0, c1, c2, c3 = hi1^c1^k0, lo1, hi0^c3^k1, lo0
		k0 += inc0
		k1 += inc1
	}
	return [4]uint32{c0, c1, c2, c3}
}

// seedKey is the key of a seed: low word, then high word.
func seedKey(seed uint64) [2]uint32 { return [2]uint32{uint32(seed), uint32(seed >> 32)} }

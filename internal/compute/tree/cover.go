package tree

import "math/bits"

// Cover calls f for the fewest nodes of the gradient tree over m micro-batches
// that together are [lo, hi).
func Cover(m, lo, hi int, f func(Node)) {
	var visit func(n Node)
	visit = func(n Node) {
		switch {
		case hi <= n.Lo || n.Hi <= lo:
		case lo <= n.Lo && n.Hi <= hi:
			f(n)
		default:
			l, r := n.Split()
			visit(l)
			visit(r)
		}
	}
	visit(Root(m))
}

// CoverSize returns how many nodes [Cover] calls f for. All aligned blocks of a power
// of two are nodes, and so are the right halves of the root, of its right half
// and so on, which end with the last micro-batch.
func CoverSize(m, lo, hi int) (n int) {
	right := 0
	for ; lo < hi; n++ {
		if hi == m {
			for right < lo {
				right += 1 << (bits.Len(uint(m-right-1)) - 1)
			}
			if right == lo {
				return n + 1
			}
		}
		size := 1 << (bits.Len(uint(hi-lo)) - 1)
		if lo > 0 {
			size = min(size, lo&-lo)
		}
		lo += size
	}
	return n
}

// Runs calls f with each run [lo, hi) of equal values in a list, in order.
func Runs[T comparable](list []T, f func(value T, lo, hi int)) {
	for lo := 0; lo < len(list); {
		hi := lo + 1
		for hi < len(list) && list[hi] == list[lo] {
			hi++
		}
		f(list[lo], lo, hi)
		lo = hi
	}
}

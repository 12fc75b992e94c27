// Package tree holds the one order in which the results of micro-batches are
// added up, so that a sum has the same bits whichever worker computes which part.
//
// The micro-batches [0, M) of a step are the leaves of a binary tree. A node
// [lo, hi) of more than one leaf splits at the largest power of two below
// hi-lo, and its sum is the sum of its left child plus the sum of its right
// child, added in this order as one operation. Nothing else is ever added, so
// the root depends on M and the leaves only.
//
// The shape favours workers with contiguous, aligned runs of micro-batches:
// every aligned run of 2^k leaves is one node. A worker that finishes leaves
// in ascending order holds at most log2(M)+1 sums at a time.
package tree

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
)

// Node is the range [Lo, Hi) of micro-batches.
type Node struct{ Lo, Hi int }

// Root returns the node of all m micro-batches of a step.
func Root(m int) Node { return Node{0, m} }

// Leaf returns the node of micro-batch m.
func Leaf(m int) Node { return Node{m, m + 1} }

// Size returns the number of micro-batches.
func (n Node) Size() int { return n.Hi - n.Lo }

// String renders the node as "[4,6)".
func (n Node) String() string { return fmt.Sprintf("[%d,%d)", n.Lo, n.Hi) }

// Contains reports whether every micro-batch of o is one of n's.
func (n Node) Contains(o Node) bool { return n.Lo <= o.Lo && o.Hi <= n.Hi }

// Split returns the children of a node of at least two micro-batches.
func (n Node) Split() (left, right Node) {
	if n.Size() < 2 {
		panic(fmt.Sprintf("tree: node %v has no children", n))
	}
	mid := n.Lo + 1<<(bits.Len(uint(n.Size()-1))-1)
	return Node{n.Lo, mid}, Node{mid, n.Hi}
}

// Parent returns the node whose child n is in the tree below root, and the
// other child. ok is false for the root and for a range that is no node of
// that tree.
func (n Node) Parent(root Node) (parent, sibling Node, ok bool) {
	if n.Size() < 1 || !root.Contains(n) {
		return Node{}, Node{}, false
	}
	for at := root; at.Size() > 1; {
		left, right := at.Split()
		switch {
		case n == left:
			return at, right, true
		case n == right:
			return at, left, true
		case left.Contains(n):
			at = left
		case right.Contains(n):
			at = right
		default:
			return Node{}, Node{}, false
		}
	}
	return Node{}, Node{}, false
}

// Sums holds what is known of one sum over the tree: the values of disjoint
// nodes, merged as far as they go. It is plain data without locks.
type Sums[T any] struct {
	root  Node
	merge func(left, right T) T
	held  map[Node]T
}

// NewSums returns an empty sum over m micro-batches. merge adds the right
// value to the left one; it may reuse the memory of either.
func NewSums[T any](m int, merge func(left, right T) T) *Sums[T] {
	if m < 1 {
		panic(fmt.Sprintf("tree: sum over %d micro-batches", m))
	}
	return &Sums[T]{root: Root(m), merge: merge, held: make(map[Node]T)}
}

// Put adds the value of a node and merges all that has become complete. A
// value may come twice, from different sources and at different levels: one
// that lies inside a node already held is dropped, and held values inside
// the new node are replaced. Put returns the values that it did not keep.
// It panics if n is no node of the tree.
func (s *Sums[T]) Put(n Node, v T) (dropped []T) {
	_, _, ok := n.Parent(s.root)
	if !ok && n != s.root {
		panic(fmt.Sprintf("tree: %v is no node of %v", n, s.root))
	}
	for have, old := range s.held {
		if have.Contains(n) {
			return []T{v}
		}
		if n.Contains(have) {
			dropped = append(dropped, old)
			delete(s.held, have)
		}
	}
	for {
		parent, sibling, ok := n.Parent(s.root)
		other, have := s.held[sibling]
		if !ok || !have {
			s.held[n] = v
			return dropped
		}
		delete(s.held, sibling)
		if sibling.Lo < n.Lo {
			v = s.merge(other, v)
		} else {
			v = s.merge(v, other)
		}
		n = parent
	}
}

// Held returns how many values are held at the moment.
func (s *Sums[T]) Held() int { return len(s.held) }

// Nodes returns the nodes whose values are held, in order.
func (s *Sums[T]) Nodes() []Node {
	return slices.SortedFunc(maps.Keys(s.held), func(a, b Node) int { return a.Lo - b.Lo })
}

// At returns the value of a node that is held.
func (s *Sums[T]) At(n Node) (v T, ok bool) {
	v, ok = s.held[n]
	return v, ok
}

// Total returns the sum of all micro-batches, once it is complete.
func (s *Sums[T]) Total() (total T, ok bool) {
	total, ok = s.held[s.root]
	return total, ok
}

// Take is Total for the caller that consumes the sum: it leaves s empty, for
// the next step.
func (s *Sums[T]) Take() (total T, ok bool) {
	total, ok = s.Total()
	if ok {
		delete(s.held, s.root)
	}
	return total, ok
}

// Clear empties s and returns what it held.
func (s *Sums[T]) Clear() (dropped []T) {
	for n, v := range s.held {
		dropped = append(dropped, v)
		delete(s.held, n)
	}
	return dropped
}

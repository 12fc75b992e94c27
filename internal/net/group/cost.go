package group

import "github.com/soliton-train/soliton/internal/id"

// Algorithm is a way to carry an operation out.
type Algorithm uint8

// The algorithms.
const (
	Auto     Algorithm = iota // the cheaper one by [Choose]
	Ring                      // each member talks to its neighbours
	Direct                    // each member talks to all members it has something for
	Pairwise                  // of an all-reduce: a direct reduce-scatter, then a direct all-gather; of others: direct
)

// String returns the algorithm's name.
func (a Algorithm) String() string {
	return id.NameOf("algorithm", uint8(a), "auto", "ring", "direct", "pairwise")
}

// Cost is what an operation costs by the model in the package comment.
type Cost struct {
	Steps    int   // the longest chain of messages each of which waits for the one before
	Messages int   // of all members together
	Bytes    int64 // of all members together, without headers
	Busiest  int64 // bytes sent by the member that sends most
	Fan      int   // most senders to one member at once
	Adds     int64 // float32 additions of the member that adds most
}

// CostOf returns the cost of an operation of n members on size bytes in all:
// what is broadcast, the sum of all parts, or what is reduced. segment is
// Config.Segment. Parts are even; where n does not divide size the bytes are
// those of the next size that it does. The tree reduction's cost depends on
// its nodes; see [TreePlan].
func CostOf(op Op, a Algorithm, n int, size int64, segment int) Cost {
	if n < 2 {
		return Cost{}
	}
	m := int64(n)
	part := (size + m - 1) / m
	c := Cost{Steps: 1, Messages: n * (n - 1), Fan: n - 1}
	ring := a == Ring
	if ring {
		c.Steps, c.Fan = n-1, 1
	}
	switch op {
	case OpSend:
		return Cost{Steps: 1, Messages: 1, Bytes: size, Busiest: size, Fan: 1}
	case OpBroadcast:
		c.Messages, c.Bytes, c.Busiest, c.Fan = n-1, (m-1)*size, (m-1)*size, 1
		if ring {
			c.Messages, c.Busiest = (n-1)*segments(size, segment), size
		}
	case OpAllGather:
		c.Bytes, c.Busiest = m*(m-1)*part, (m-1)*part
	case OpReduceScatter:
		c.Bytes, c.Busiest, c.Adds = m*(m-1)*part, (m-1)*part, (m-1)*part/4
		c.Messages *= segments(part, segment)
	case OpAllReduce:
		c.Bytes, c.Busiest, c.Adds = m*(m-1)*size, (m-1)*size, (m-1)*size/4
		if a == Direct {
			c.Messages *= segments(size, segment)
		} else {
			c.Steps *= 2
			c.Messages *= segments(part, segment) + 1
			c.Bytes, c.Busiest, c.Adds = 2*m*(m-1)*part, 2*(m-1)*part, (m-1)*part/4
		}
	}
	return c
}

// segments returns in how many messages a ring sends size bytes.
func segments(size int64, segment int) int {
	return int(max(1, (size+int64(segment)-1)/int64(segment)))
}

// Rates, in seconds, of an ordinary data-centre network. All members go by the same, so that they choose the same algorithm.
const (
	latency = 30e-6  // of a small message from member to member
	message = 5e-6   // of a member's work for one more message
	perByte = 0.5e-9 // of one byte on a member's link
	add     = 0.2e-9 // of one float32 addition
	crowd   = 0.25   // of one byte more, as a share of perByte, when more than Config.Incast members send to one
)

// time returns how long an operation of n members takes.
func (c Cost) time(n, incast int) float64 {
	bytes := float64(c.Busiest) * perByte
	if c.Fan > incast {
		bytes *= 1 + crowd
	}
	return float64(c.Steps)*latency + float64(c.Messages)/float64(n)*message + bytes + float64(c.Adds)*add
}

// directSize is up to how many bytes each member of a host adds everything in an all-reduce: it waits once then, where parts take two rounds. It is not fitted to measured times.
const directSize = 16 << 10

// ChooseNear returns the algorithm between processes of one host, which share memory.
func ChooseNear(op Op, size int) Algorithm {
	if op == OpAllReduce && size > directSize {
		return Pairwise
	}
	return Direct
}

// Choose returns the cheapest algorithm. All members come to the same choice if their Config.Segment and Config.Incast are the same.
func Choose(op Op, n int, size int64, segment, incast int) Algorithm {
	best, least := Direct, CostOf(op, Direct, n, size, segment).time(n, incast)
	for _, a := range [...]Algorithm{Ring, Pairwise} {
		if a == Pairwise && op != OpAllReduce {
			continue
		}
		if t := CostOf(op, a, n, size, segment).time(n, incast); t < least {
			best, least = a, t
		}
	}
	return best
}

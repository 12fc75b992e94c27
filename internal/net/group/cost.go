package group

import (
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/line"
)

// Algorithm is a way to carry an operation out.
type Algorithm uint8

// The algorithms.
const (
	Auto     Algorithm = iota // the cheaper one by [Choose]
	Ring                      // each member talks to its neighbours
	Direct                    // each member talks to all members it has something for
	Pairwise                  // of an all-reduce: a direct reduce-scatter, then a direct all-gather; of others: direct
	Halving                   // of an all-reduce: members in pairs exchange halves, halves of these and so on; of others: direct. Where the number of members is no power of two: pairwise
)

// String returns the algorithm's name.
func (a Algorithm) String() string {
	return id.NameOf("algorithm", uint8(a), "auto", "ring", "direct", "pairwise", "halving")
}

// Cost is what an operation costs by the model in the package comment.
type Cost struct {
	Steps    int   // the longest chain of messages each of which waits for the one before
	Messages int   // of all members together
	Bytes    int64 // of all members together, without headers
	Busiest  int64 // bytes sent by the member that sends most
	Fan      int   // most senders to one member at once
	Adds     int64 // float32 additions of the member that adds most
	Credits  int   // messages of an all-reduce that wait for their receiver's word
	Longest  int64 // bytes that a member of an all-reduce has for another at a time
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
	if a == Halving && !powerOfTwo(n) {
		a = Pairwise
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
		credits := func(bytes int64) int { // one for each segment of so many bytes
			if min(bytes, int64(segment)) > line.MaxEager {
				return 1
			}
			return 0
		}
		switch k := segments(part, segment); a {
		case Direct:
			c.Messages *= segments(size, segment)
			c.Credits, c.Longest = c.Messages*credits(size), size
		case Halving:
			c.Steps, c.Messages, c.Fan, c.Longest = 0, 0, 1, int64(n/2)*part
			for ranks := n / 2; ranks > 0; ranks /= 2 {
				half := int64(ranks) * part
				k := segments(half, segment)
				c.Steps += 2
				c.Messages += n * (k + 1)
				c.Credits += n * (k + 1) * credits(half)
			}
			c.Bytes, c.Busiest, c.Adds = 2*m*(m-1)*part, 2*(m-1)*part, (m-1)*part/4
		default:
			c.Steps *= 2
			c.Messages *= k + 1
			c.Credits, c.Longest = c.Messages*credits(part), part
			c.Bytes, c.Busiest, c.Adds = 2*m*(m-1)*part, 2*(m-1)*part, (m-1)*part/4
		}
	}
	return c
}

// segments returns in how many messages a ring sends size bytes.
func segments(size int64, segment int) int {
	return int(max(1, (size+int64(segment)-1)/int64(segment)))
}

// rates are what the parts of an operation cost, in seconds. All members go by the same, so that they choose the same algorithm.
type rates struct {
	latency float64 // of a small message from member to member
	message float64 // of a member's work for one more message
	credit  float64 // the same for one that waits for its receiver's word
	perByte float64 // of one byte on a member's link
	add     float64 // of one float32 addition
	long    float64 // of one byte more, as a share of perByte, when there is more than a segment of them for a member at a time
	incasts float64 // of one byte more, as a share of perByte, when more than Config.Incast members send to one
}

var (
	// network is an ordinary data-centre network.
	network = rates{latency: 30e-6, message: 5e-6, perByte: 0.5e-9, add: 0.2e-9, incasts: 0.25}
	// loopback is that interface of a machine, where every byte is work of its processors: fitted to all-reduces of 1 KiB to 1 MiB between 2, 4 and 8 members on two processors (docs/performance.md).
	loopback = rates{latency: 1e-6, message: 4e-6, credit: 5e-6, perByte: 0.2e-9, add: 0.1e-9, long: 0.15}
)

// Place says where the members of a group are.
type Place struct {
	Crowd    float64 // of them for each processor, on the machine where that is most
	Together bool    // they are all on one machine, whose loopback interface is their network
}

// time returns how long an operation of n members takes.
func (c Cost) time(n, segment, incast int, p Place) float64 {
	r := network
	if p.Together {
		r = loopback
	}
	// No product is fused with a sum, which only some processors do: all members come to the same time.
	bytes := float64(float64(c.Busiest) * r.perByte)
	if c.Fan > incast {
		bytes *= 1 + r.incasts
	}
	if c.Longest > int64(segment) {
		bytes *= 1 + r.long
	}
	work := (float64(float64(c.Messages)*r.message)+float64(float64(c.Credits)*r.credit))/float64(n) + float64(float64(c.Adds)*r.add)
	if p.Together {
		work, bytes = work+bytes, 0
	}
	return float64(float64(c.Steps)*r.latency) + float64(max(1, p.Crowd)*work) + bytes
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

// ringSize is from how many bytes on an all-reduce of more than two members over a machine's loopback interface is a ring: 16 MiB took 0.75 to 0.93 of the time of others, 4 MiB 0.89 to 1.05.
const ringSize = 8 << 20

// Choose returns the cheapest algorithm at a place. All members come to the same choice if their Config.Segment and Config.Incast are the same.
func Choose(op Op, n int, size int64, segment, incast int, p Place) Algorithm {
	if p.Together && op == OpAllReduce && n > 2 && size >= ringSize {
		return Ring
	}
	best, least := Direct, CostOf(op, Direct, n, size, segment).time(n, segment, incast, p)
	for _, a := range [...]Algorithm{Pairwise, Halving, Ring} {
		if op != OpAllReduce && a != Ring || a == Halving && !powerOfTwo(n) {
			continue
		}
		if t := CostOf(op, a, n, size, segment).time(n, segment, incast, p); t < least {
			best, least = a, t
		}
	}
	return best
}

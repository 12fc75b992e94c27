// Package group runs collective operations between the workers of a job, on the links of package comm. A group has a version, and
// its members are edited in place.
//
//	g, err := group.New(endpoint, 1)
//	opened, err := g.Edit(ctx, version, members)
//	err = g.AllReduce(ctx, group.Call{Version: version, Step: 7}, buf)
//
// A [Group] runs operations under one version of its member list at a time. A failed operation returns an [*Error], and ends the
// version on all members that can be reached, and nothing else: the process, the links and single messages continue, and the next
// Edit begins a new version. Every operation that waits ends with its version and with its context; when it returns, all memory is
// the caller's.
//
// Operations run in the goroutine of their caller. The state of a group is under the lock of its endpoint, see [comm.Scope].
//
// Where all members are on one host and share memory (package board), an operation with Call.Algorithm Auto sends no messages but those of the tree reduction: each
// member shows once what the others are to have. At most 64 of them run at a time under a version. In steady state they allocate nothing.
//
// Otherwise, barriers, broadcasts and all-reduces use lines (package line) to those members whose links can have one: the goroutine of the call carries their messages. In steady state they allocate
// nothing either, but rings do.
//
// # Costs
//
// n members, S bytes in all (what is broadcast or reduced, or the sum of the
// parts), k segments of at most comm.Config.Segment bytes. Steps is the longest
// chain of messages that wait for each other; messages and bytes are those of
// all members, the last column those sent by the busiest. [CostOf] computes
// the table, [Choose] goes by it, and tests hold the operations against it.
//
//	                        steps    messages       bytes      busiest
//	barrier         direct  1        n(n-1)         0
//	                ring    n-1      n(n-1)         0
//	broadcast       direct  1        n-1            (n-1)S     (n-1)S
//	                ring    n-1      (n-1)k(S)      (n-1)S     S
//	all-gather      direct  1        n(n-1)         (n-1)S     (n-1)S/n
//	                ring    n-1      n(n-1)         (n-1)S     (n-1)S/n
//	reduce-scatter  direct  1        n(n-1)k(S/n)   (n-1)S     (n-1)S/n
//	                ring    n-1      n(n-1)k(S/n)   (n-1)S     (n-1)S/n
//	all-reduce      direct  1        n(n-1)k(S)     n(n-1)S    (n-1)S
//	                ring    2(n-1)   n(n-1)(k(S/n)+1)  2(n-1)S  2(n-1)S/n
//	                pairwise  2      n(n-1)(k(S/n)+1)  2(n-1)S  2(n-1)S/n
//	                halving  2 log2(n)  n·Σ(k(S/2^i)+1)  2(n-1)S  2(n-1)S/n   i = 1 to log2(n); n is a power of two
//
//	time = steps·30 µs + crowd·(messages/n·5 µs + additions·0.2 ns)
//	       + busiest·0.5 ns·(1.25 if more than comm.Config.Incast send to one)
//
// where crowd is how many members share a processor, on the machine where that is most, and 1 at least. These rates are those of an ordinary data-centre network, and not measured. Where all members are on one machine, and its
// loopback interface is their network, every byte of what goes on lines is work of its processors, too. There, an all-reduce takes
//
//	time = steps·1 µs + crowd·(messages/n·4 µs + messages above line.MaxEager/n·5 µs + additions·0.1 ns
//	       + busiest·0.2 ns·(1.15 if a member has more than a segment for another at a time))
//
// which is fitted to measured times (docs/performance.md). From 8 MiB on, an all-reduce of more than two is a ring there.
//
// A message above comm.Config.Eager takes one more round trip, for its credit. The
// tree reduction sends [TreePlan].Moves for every shard, each of the shard's
// size and in segments: n-1 moves where every member holds one node, which are
// the bytes of a reduce-scatter.
//
// Within a host, the choice is by size alone: an all-reduce of up to 16 KiB is direct, a larger one pairwise, and all else direct.
//
// There are no tree algorithms but the tree reduction, and the rates of networks are not measured.
package group

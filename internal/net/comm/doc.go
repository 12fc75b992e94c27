// Package comm has the links between the workers of a job: it admits sessions, and sends messages that are named by what they hold.
// Package group runs collective operations on them.
//
// # Use
//
//	e, err := comm.Listen(comm.Config{Self: self, Transport: transport.TCP{}})
//	err = e.SetMembers(peers)            // the sessions of the plan
//	r := e.Expect(key, buffer)           // one side
//	s := e.Post(peer, key, data, prio)   // the other
//
// An [Endpoint] has one link to every member it talks to. A [Key] names the
// content of a message; content depends on its key alone, so it does not
// matter which member sends it: the first copy is taken, further ones are
// dropped, and one that is early waits in a bounded pool or at its sender.
//
// # What holds
//
//   - Peers prove that they hold Config.Key before anything that they send is
//     parsed, and before a link is replaced; see package auth. Connections that
//     prove nothing do not keep others out.
//   - Only admitted sessions have links. When a session is evicted, its link is
//     closed, and what it sent and no receive has taken is dropped.
//   - Two workers that dial each other at once end with one link: the call of
//     the lower WorkerID wins. A lost link is made again, with growing pauses,
//     until the session is evicted.
//   - A receive ends when a whole message is in its buffer, or when nothing
//     writes to the buffer any more. If a link breaks in mid-message, the
//     receive waits for the next copy.
//   - A message is sent from the caller's memory, and received into it if a
//     receive is posted when its data arrive; no copy is made in between.
//   - Between processes of one host (Linux), a message above Config.Eager is copied once, by its
//     receiver, out of the sender's memory (package cma). A cancelled message is not
//     received so, whatever that memory holds since. Where the system does not let one process read
//     another, Config.OnLink is told, and the data pass through the link.
//   - Processes of one host open each other's boards (package board), for collectives of package group. Where
//     they cannot, Config.OnLink is told, and these send messages.
//   - A link over TCP without TLS gets a line (package line, Linux) with the first collective that could use it. The two end together.
//   - The reader of a link never waits for a receive. A message above
//     Config.Eager is sent only against credit, which it gets when its receive
//     is posted; early smaller ones are bounded by Config.Pool for each peer.
//   - Credit goes to Config.Incast peers at a time, to the most urgent message
//     first, then the oldest. A peer that waits for its turn cannot be
//     starved.
//   - On a link, small frames go before all data; then lower [Priority] before
//     higher, chunk by chunk; among equals the older first. At most
//     transport.Unsent bytes wait in the kernel for the network, and
//     transport.Unread for the receiver (Linux). A unix socket has both in one
//     buffer.
//
// What does not hold: messages of different keys arrive in no order. A send
// that has ended without an error need not have arrived: when a link is lost,
// Config.OnLink reports it, and the owner of the data sends them again;
// [Endpoint.Flush] waits until all has arrived. A link without traffic is not
// probed: others detect failures, and then evict the session.
//
// # Waiting
//
// Every call that waits ends on its message, on an eviction or a new version
// that makes it pointless, on its context, or on close; one whose context has
// ended still succeeds if it need not wait. When it returns, all memory is the
// caller's, even if the other side neither reads nor sends. Close joins every
// goroutine.
//
// # Failure
//
// Errors are an [*Error] around one of the classes [ErrClosed], [ErrVersion],
// [ErrLink], [ErrNotMember], [ErrStale], [ErrDuplicate], [ErrSize],
// [ErrAborted], [ErrRefused], [ErrProtocol] and [ErrUsage], or around the
// context's error; match them with errors.Is. A failed message ends nothing
// else: the process, the links and other messages continue.
//
// # Goroutines
//
//	accept    one per endpoint: takes connections from the listener
//	answer    one per connection whose proof and hello are being read, at most 256
//	peer.run  one per member: owns its link; dials, writes, and joins the two below
//	dial      one per member while its loop dials, and one while a line is dialled
//	tend      one per endpoint that has lines
//	link.read one per link: reads frames and data
//	fetch     one per link within a host: reads large messages from the peer's memory
//
// All state is under one lock of the endpoint, held for no system call but
// Close and SetDeadline of a connection, those that wake a sleeper on a board or let go of one, and those of lines, which do not wait. Callbacks ([Sending.OnDone],
// [Receiving.OnDone]) are called without it.
//
// # Wire format, version 5
//
// A connection carries frames both ways. All numbers are little-endian; the
// data of messages are in the byte order of the machines, which must be the
// same. Every frame begins with 16 bytes:
//
//	0  type      uint8
//	1  zero      3 bytes
//	4  length    uint32, bytes of payload
//	8  message   uint64, number of a message or a sync, or 0
//
// Payloads:
//
//	hello   48  "SLTN", uint16 version, uint16 0x0102 in the machine's order, from and to
//	            (each uint32 worker, uint32 incarnation), uint64 newest link known,
//	            uint32 pool, uint16 1 if the link can have a line, uint16 processors,
//	            uint64 number of the machine, or 0
//	welcome 24  uint64 number of the link, uint32 pool, uint16 1 if the link can have a line,
//	            uint16 processors, uint64 number of the machine, or 0
//	refuse  16  uint64 newest link known, uint8 reason, 7 bytes zero
//	open    56  key, uint64 size, uint16 priority, uint16 1 if eager
//	data     n  at most 1 MiB of the message, in order
//	credit   0  send the message
//	drop     0  forget the message, it is not wanted
//	cancel   0  the rest of the message will not come
//	return   4  uint32 bytes of pool that are free again
//	sync     0  answer with synced when all before this is read
//	synced   0  it is; the number is the sync's
//	probe   32  uint64 address of the sender's fence, or 0, uint64 its value, uint64 number of the open file of its board, uint64 the board's nonce, or 0
//	reach   16  uint64, 1 if the fence was read, plus 2 if the board was opened; uint64 place of the board there
//	offer   72  open, which is not eager, then uint64 address of the data, uint64 value of the fence
//	taken    8  the data of an offer were read; uint64 nanoseconds that this took
//	line    24  from and to, as in a hello; uint64 number of the link
//	no line  0  there will be none
//	ask for a line  0  dial one
//
//	key     44  uint8 kind, uint8 dir, uint16 zero, int32 layer, int32 micro, uint32 node lo,
//	            uint32 node hi, uint64 step, int64 lo, int64 hi
//
// A connection begins with the messages of package auth, in which both sides
// prove that they hold the key. The dialling side sends hello behind its proof,
// for the same two sessions, and the other answers welcome or refuse. Then each side
// numbers its messages from 1 upwards as it announces them with open, and its
// syncs from 1. An eager
// message's data follow at once and count, with [PoolOverhead], against the
// pool until return; of others, at most 16384 wait for credit or drop. Every
// message has at least one data frame, an empty one if it is empty. Links of a
// pair are numbered; a hello that knows of fewer links than there were, while
// one is up, is refused, and one that knows of all replaces it.
//
// Within a host, each side sends one probe first. The side that gets it reads the fence in the other's memory, opens the other's board (package board), and
// answers reach, whatever worked. From then on, where the fence was read, messages above Config.Eager are announced to it by offer, and answered by taken, by drop, or by
// credit where the fence has another value than announced. A side changes its fence before it uses the data of an offer without
// an answer for something else, which is when it sends cancel.
//
// Where both sides can have a line, the one that has dialled the link dials a second connection when a collective needs it, or the other asks for it. Behind its proof it sends line, and the
// other answers welcome, with the number of the link, or refuse. What follows is in package line. Where that fails, the side that dials sends no line on the link.
//
// A frame of an unknown type, a wrong length, a number that cannot be, or a
// zero that is not zero ends the connection: there are no trailing bytes to
// skip, and extensions take a new version.
//
// # Limitations
//
// One endpoint lock serves tens of
// links, not thousands. Under TLS every frame is a record of its own, and keys
// are not renewed in the life of a link, as should be done with AES-GCM every
// 300 GB. Up to 1 MiB of a peer's memory is read at a time, which nothing interrupts:
// where its pages come from a file system that hangs, the end of the link waits.
//
// # Testing
//
// transport.Mem is a network for testing/synctest bubbles;
// internal/net/commtest has what every transport must do, and Faults, which
// breaks any transport by a plan that is text.
package comm

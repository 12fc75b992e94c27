// Package line carries the messages of collectives over connections of their own: the goroutine that waits for a message reads and writes the sockets itself.
//
//	h, err := line.New()
//	l, err := h.Add(conn, nil, lost)   // on both ends
//	l.Post(m, name, data)              // on one
//	l.Expect(m, name, buf)             // on the other
//	err = h.Wait(m, stopped)           // on both
//
// A message passes a link of package comm by way of the goroutine that sends it, the writer of the link, the reader at the other end, and the goroutine that waits, each of which wakes
// the next. A [Hub] carries all messages of all its lines while one of its callers waits, so a caller waits for all that it posts. Otherwise, a goroutine of the hub reads what has come once a
// second, so that TCP does not take the end for dead.
//
// # What holds
//
//   - A message is sent from the memory of its sender into that of its receiver. No copy is made of one that is longer than [MaxEager].
//   - The sender sends a message when it has the receiver's want, which says that the memory for it is there. So whatever comes can be taken at once, and no message holds up another. Messages up
//     to MaxEager are sent before, and kept until they are expected; at most 64 of them have no want yet.
//   - A wait ends on its message, on the end of the line, or when stopped says so, for which [Hub.Ring] has it look.
//   - [Hub.Begin] begins a version of a group: what was sent under earlier ones is dropped.
//   - When a line fails, all its messages end with an error, and its owner is told.
//   - A thread that waits looks for a short time before it sleeps (package look). One of the goroutines that wait sleeps on all sockets; the others sleep until it wakes.
//
// What does not hold: a line that is closed may take along what was sent on it last. comm.Endpoint.Flush does not know of lines.
//
// # Wire format
//
// Both ends send frames. Every frame begins with 56 bytes; numbers are little-endian:
//
//	0  type     uint8: 1 want, 2 eager, 3 data
//	1  op       uint8
//	2  group    uint16
//	4  tag      uint16
//	6  zero     2 bytes
//	8  length   uint32, bytes of the message that follow
//	12 from     uint32
//	16 round    uint32
//	20 part     uint32
//	24 size     uint64, bytes of the message; of a want, bytes of the memory for it
//	32 step     uint64
//	40 version  int64 generation, int64 number
//
// A want has no data, an eager frame the whole message, a data frame at most 256 KiB of it, in order. Whatever else comes ends the line.
//
// Lines need Linux and a TCP connection without TLS.
package line

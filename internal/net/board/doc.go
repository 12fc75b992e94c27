// Package board has memory that processes of one host share, in which each shows data to the others by name.
//
// Every process has a [Board] of its own ([New]), which only it can write, and maps those of the others ([Board.Open]). It shows data in a slot: in the slot's
// memory, or by the address where the others can read them (package cma). A reader finds the data by their [Name], and says on its own board that it has taken
// them; when all readers have, the slot is free again. There is no order among what is shown, and no message: a process that waits looks at a number on the other's
// board, and sleeps on it where it must ([Bell]).
//
// The memory lives as long as a process has it mapped: when all of them have ended, SIGKILL included, nothing is left. No other process can write a board, not even one
// that opens its file (F_SEAL_FUTURE_WRITE, Linux 5.1). What another process writes on its own is not trusted: a reader stays within the memory that it has
// mapped, which cannot shrink.
//
// # Layout
//
// Numbers are in the byte order of the machine. The first 4096 bytes hold
//
//	  0  nonce     uint64, as in the board's ticket
//	 64  shown     uint32, changes with everything that the owner shows
//	128  took      uint32, changes with everything that the owner takes
//	192  sleepers  uint32, how many threads of the owner sleep on the numbers of others
//	256  used      uint32, as many of the first slots were ever used
//
// then come [Slots] heads of 64 bytes:
//
//	 0  claim    uint64: from bit 32 on how often the slot was reserved; 1 below that while something is shown, else 0
//	 8  name     4 uint64
//	40  address  uint64, in the owner's memory; 0: the data are in the slot
//	48  size     uint64
//
// then, for each of [MaxPeers] others, Slots uint32: for each slot of its board, the claim (from bit 32 on) of what the owner took from it last; and then the memory of
// the slots, [LargeSize] bytes for each of the first [Large] and [SlotSize] for the others.
package board

// Slots is how many things a board shows at a time at most.
const Slots = 256

// The first Large slots, which are used first, have memory of LargeSize bytes each, and the others of SlotSize bytes: all of it is mapped by each process that opens the
// board, which may have little room for addresses (ulimit -v).
const (
	Large     = 16
	LargeSize = 1 << 20
	SlotSize  = 256 << 10
)

// MaxPeers is how many boards of others can be open at a time.
const MaxPeers = 1024

// Name names what is shown on a board. While it is shown, nothing else there has this name.
type Name [4]uint64

// Ticket is what another process of the host needs to open a board, beside the number of the process.
type Ticket struct {
	File  uint64 // number of the open file
	Nonce uint64 // not 0
}

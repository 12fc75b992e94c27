//go:build !linux || portable

package board

import "errors"

// Board is memory that this system does not share: there is none, and its methods do nothing.
type Board struct{}

// Peer is the board of another process, of which there is none either.
type Peer struct{}

// New fails.
func New() (*Board, error) { return nil, errors.ErrUnsupported }

// Ticket returns none.
func (*Board) Ticket() Ticket { return Ticket{} }

// Close does nothing.
func (*Board) Close() error { return nil }

// Sweep does nothing.
func (*Board) Sweep() error { return nil }

// Open fails.
func (*Board) Open(pid int, t Ticket) (*Peer, error) { return nil, errors.ErrUnsupported }

// Place returns none.
func (*Peer) Place() uint64 { return 0 }

// Sees reports false.
func (*Peer) Sees(place uint64) bool { return false }

// Hold reports false.
func (*Peer) Hold() bool { return false }

// Close does nothing.
func (*Peer) Close() error { return nil }

// Shown returns a bell that does not ring.
func (*Peer) Shown() Bell { return Bell{} }

// Took returns a bell that does not ring.
func (*Peer) Took() Bell { return Bell{} }

// Reserve finds no slot.
func (*Board) Reserve() (s Slot, late *Peer, ok bool) { return Slot{}, nil, false }

// Slot is a place on a board.
type Slot struct{}

// Memory returns none.
func (Slot) Memory() []byte { return nil }

// Show does nothing.
func (Slot) Show(name Name, addr uint64, size int, readers []*Peer) {}

// Late returns none.
func (Slot) Late() *Peer { return nil }

// Withdraw does nothing.
func (Slot) Withdraw() {}

// View is something that a peer shows.
type View struct {
	Addr uint64
	Size int
}

// Forgo does nothing.
func (*Peer) Forgo(of func(Name) bool) {}

// Find finds nothing.
func (*Peer) Find(name Name) (v View, ok bool) { return View{}, false }

// Data returns none.
func (View) Data() []byte { return nil }

// Take reports false.
func (View) Take() bool { return false }

// Bell is a number that never changes.
type Bell struct{}

// Alarm is another one.
type Alarm struct{}

// Now returns 0.
func (Bell) Now() uint32 { return 0 }

// Now returns 0.
func (*Alarm) Now() uint32 { return 0 }

// Ring does nothing.
func (*Alarm) Ring() {}

// Sleep returns at once.
func (Bell) Sleep(old uint32, a *Alarm, alarm uint32) {}

// Look reports whether the condition holds.
func (Bell) Look(done func() bool) bool { return done() }

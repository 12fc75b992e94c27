//go:build linux && !portable

package board

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Where things are; the package comment has it in words.
const (
	shownAt    = 64
	tookAt     = 128
	sleepersAt = 192
	usedAt     = 256
	headsAt    = 4096
	head       = 64
	takenAt    = headsAt + Slots*head
	dataAt     = takenAt + MaxPeers*Slots*4
	length     = dataAt + Large*LargeSize + (Slots-Large)*SlotSize

	shows = 1 // in a claim
)

// Board is a board of ours.
type Board struct {
	memory
	file int

	mu    sync.Mutex
	peers []*Peer  // by the place where we note what we took; nil: free
	left  []memory // of peers that are closed
	// By slot.
	turns   [Slots]uint32
	filling [Slots]bool    // reserved, and not shown
	late    [Slots][]*Peer // readers that have not taken what is shown, as far as we have looked
}

// New makes a board of ours. Its memory is got as it is used.
func New() (*Board, error) {
	file, err := unix.MemfdCreate("soliton-board", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("board: memory for other processes: %w", err)
	}
	b := &Board{file: file}
	if err = unix.Ftruncate(file, length); err == nil {
		b.memory, err = mapped(file, unix.PROT_READ|unix.PROT_WRITE)
	}
	if err == nil {
		// From here on, nothing that opens the file can write it.
		_, err = unix.FcntlInt(uintptr(file), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("board: memory for other processes: %w", err), b.unmap(), unix.Close(file))
	}
	*b.nonce() = rand.Uint64() | 1
	return b, nil
}

// Ticket returns what others need to open our board.
func (b *Board) Ticket() Ticket { return Ticket{File: uint64(b.file), Nonce: *b.nonce()} }

// Close lets go of the memory once no peer is open. Nothing may use the board any more.
func (b *Board) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := unix.Close(b.file)
	b.file = -1
	return errors.Join(err, b.tidy())
}

func (b *Board) tidy() error {
	if b.file >= 0 || slices.ContainsFunc(b.peers, func(p *Peer) bool { return p != nil }) {
		return nil
	}
	return errors.Join(b.sweep(), b.unmap())
}

// Sweep lets go of the memory of peers that have been closed. To unmap it takes processors that a recovery needs, so Close leaves that for later.
func (b *Board) Sweep() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sweep()
}

func (b *Board) sweep() (err error) {
	for _, m := range b.left {
		err = errors.Join(err, m.unmap())
	}
	b.left = nil
	return err
}

// Peer is the board of another process that has ours open, or will.
type Peer struct {
	memory
	ours *Board
	// Where we note on our board what we took from its, and where it notes on its what it took from ours.
	place, its int
	held       atomic.Int64
}

// Open maps the board of a process of this host.
func (b *Board) Open(pid int, t Ticket) (*Peer, error) {
	fail := func(err error) (*Peer, error) { return nil, fmt.Errorf("board: of process %d: %w", pid, err) }
	file, err := unix.Open(fmt.Sprintf("/proc/%d/fd/%d", pid, t.File), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = unix.Close(file) }()
	var st unix.Stat_t
	if err := unix.Fstat(file, &st); err != nil {
		return fail(err)
	}
	// Memory that becomes shorter would end us by SIGBUS.
	if seals, err := unix.FcntlInt(uintptr(file), unix.F_GET_SEALS, 0); err != nil || st.Size != length || seals&unix.F_SEAL_SHRINK == 0 {
		return fail(errors.Join(fmt.Errorf("its open file %d is none", t.File), err))
	}
	p := &Peer{ours: b, its: -1}
	p.held.Store(1)
	if p.memory, err = mapped(file, unix.PROT_READ); err != nil {
		return fail(err)
	}
	if *p.nonce() != t.Nonce {
		return fail(errors.Join(errors.New("it has another one by now"), p.unmap()))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.place = slices.Index(b.peers, nil); p.place < 0 {
		p.place = len(b.peers)
		b.peers = append(b.peers, nil)
	}
	if p.place >= MaxPeers {
		b.peers = b.peers[:p.place]
		return fail(errors.Join(fmt.Errorf("more than %d boards are open", MaxPeers), p.unmap()))
	}
	for i := range Slots { // what it is about is another's
		b.took(p.place, i).Store(0)
	}
	b.peers[p.place] = p
	return p, nil
}

// Place is what the other process has to know of us; see [Peer.Sees].
func (p *Peer) Place() uint64 { return uint64(p.place) }

// Sees says that the other process has our board open, and its Place; it reports whether that can be. From then on, it can be shown something.
func (p *Peer) Sees(place uint64) bool {
	if place >= MaxPeers {
		return false
	}
	p.its = int(place)
	return true
}

// Hold keeps the memory until one more Close, and reports whether it was there.
func (p *Peer) Hold() bool {
	for {
		n := p.held.Load()
		if n == 0 || p.held.CompareAndSwap(n, n+1) {
			return n > 0
		}
	}
}

// Close ends what Open or Hold began. After the last one, nothing waits for the peer, and nothing may use it; [Board.Sweep] lets go of the memory.
func (p *Peer) Close() error {
	if p.held.Add(-1) > 0 {
		return nil
	}
	b := p.ours
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.late {
		if k := slices.Index(b.late[i], p); k >= 0 {
			b.late[i] = slices.Delete(b.late[i], k, k+1)
		}
	}
	b.peers[p.place] = nil
	b.left = append(b.left, p.memory)
	p.memory = memory{}
	return b.tidy()
}

// Shown rings when the peer shows something.
func (p *Peer) Shown() Bell { return Bell{p.word(shownAt), p.ours.word(sleepersAt)} }

// Took rings when the peer takes something.
func (p *Peer) Took() Bell { return Bell{p.word(tookAt), p.ours.word(sleepersAt)} }

// wake wakes those that sleep on a number of our board, if one of these peers sleeps at all.
func (b *Board) wake(word *atomic.Uint32, peers []*Peer) {
	if slices.ContainsFunc(peers, func(p *Peer) bool { return p.word(sleepersAt).Load() != 0 }) {
		futexWake(word)
	}
}

// Slot is a place on our board.
type Slot struct {
	b    *Board
	i    int
	turn uint32
}

// Reserve returns a slot of our board, if one is free. Else it returns a peer that has yet to take something, which the caller closes.
func (b *Board) Reserve() (s Slot, late *Peer, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range Slots { // the first ones stay in the caches
		if b.filling[i] || b.tardy(i) != nil {
			continue
		}
		if b.turns[i]++; b.turns[i] == 0 { // which says of a peer that it has taken nothing
			b.turns[i] = 1
		}
		b.claim(i).Store(uint64(b.turns[i]) << 32)
		if b.word(usedAt).Load() <= uint32(i) {
			b.word(usedAt).Store(uint32(i) + 1)
		}
		b.filling[i] = true
		return Slot{b, i, b.turns[i]}, nil, true
	}
	for i := range Slots {
		if p := b.tardy(i); p != nil && p.Hold() {
			return Slot{}, p, false
		}
	}
	return Slot{}, nil, false
}

// tardy returns a reader that has not taken what a slot shows, or nil.
func (b *Board) tardy(i int) *Peer {
	for late := b.late[i]; len(late) > 0; late = late[:len(late)-1] {
		p := late[len(late)-1]
		if p.took(p.its, i).Load() != b.turns[i] {
			b.late[i] = late
			return p
		}
	}
	b.late[i] = b.late[i][:0]
	return nil
}

// Memory returns the slot's own memory.
func (s Slot) Memory() []byte { return s.b.data(s.i) }

// Show shows a number of bytes to peers that see our board: the first ones of the slot's memory, or, where addr is not 0, those at an address of our process. They
// must stay as they are until all have taken them, or they are withdrawn.
func (s Slot) Show(name Name, addr uint64, size int, readers []*Peer) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.filling[s.i] || b.turns[s.i] != s.turn {
		return // withdrawn
	}
	for k, x := range name {
		b.field(s.i, 1+k).Store(x)
	}
	b.field(s.i, 5).Store(addr)
	b.field(s.i, 6).Store(uint64(size))
	b.late[s.i] = append(b.late[s.i][:0], readers...)
	b.filling[s.i] = false
	b.claim(s.i).Store(uint64(s.turn)<<32 | shows)
	b.word(shownAt).Add(1)
	b.wake(b.word(shownAt), readers)
}

// Late returns a reader that has not taken what was shown, or nil.
func (s Slot) Late() *Peer {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.b.turns[s.i] != s.turn {
		return nil
	}
	return s.b.tardy(s.i)
}

// Withdraw frees the slot. Readers that have not taken the data cannot any more.
func (s Slot) Withdraw() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.b.turns[s.i] == s.turn {
		s.b.claim(s.i).Store(uint64(s.turn) << 32)
		s.b.filling[s.i], s.b.late[s.i] = false, s.b.late[s.i][:0]
	}
}

// View is something that a peer shows us.
type View struct {
	p    *Peer
	i    int
	turn uint32
	Addr uint64 // in the memory of the peer's process; 0: Data returns it
	Size int
}

// Find looks for something on a peer's board.
func (p *Peer) Find(name Name) (v View, ok bool) {
	for i := range p.slots() {
		c := p.claim(i).Load()
		if c&shows == 0 || p.name(i) != name {
			continue
		}
		addr, size := p.field(i, 5).Load(), p.field(i, 6).Load()
		if p.claim(i).Load() != c || size > 1<<62 || addr == 0 && size > uint64(len(p.data(i))) { // it may have become another's while we looked
			continue
		}
		return View{p, i, uint32(c >> 32), addr, int(size)}, true
	}
	return View{}, false
}

// Forgo takes, unread, what is shown of these names.
func (p *Peer) Forgo(of func(Name) bool) {
	for i := range p.slots() {
		if c := p.claim(i).Load(); c&shows != 0 && of(p.name(i)) {
			View{p: p, i: i, turn: uint32(c >> 32)}.Take()
		}
	}
}

// Data returns the bytes where they are on the board.
func (v View) Data() []byte { return v.p.data(v.i)[:v.Size] }

// Take says that we have read the data, and reports whether they were there until now.
func (v View) Take() bool {
	p := v.p
	if p.claim(v.i).Load() != uint64(v.turn)<<32|shows {
		return false
	}
	ours := p.ours
	ours.took(p.place, v.i).Store(v.turn)
	ours.word(tookAt).Add(1)
	if p.word(sleepersAt).Load() != 0 {
		futexWake(ours.word(tookAt))
	}
	return true
}

// memory is that of a board.
type memory struct{ mem []byte }

func mapped(file, protection int) (memory, error) {
	mem, err := unix.Mmap(file, 0, length, protection, unix.MAP_SHARED)
	return memory{mem}, err
}

func (m *memory) unmap() error {
	if m.mem == nil {
		return nil
	}
	mem := m.mem
	m.mem = nil
	return unix.Munmap(mem)
}

func (m *memory) nonce() *uint64             { return (*uint64)(unsafe.Pointer(&m.mem[0])) }
func (m *memory) word(at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&m.mem[at])) }
func (m *memory) claim(i int) *atomic.Uint64 { return m.field(i, 0) }
func (m *memory) field(i, n int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&m.mem[headsAt+i*head+8*n]))
}
func (m *memory) slots() int { return int(min(m.word(usedAt).Load(), Slots)) }

// data is the memory of a slot.
func (m *memory) data(i int) []byte {
	if i < Large {
		return m.mem[dataAt+i*LargeSize:][:LargeSize:LargeSize]
	}
	return m.mem[dataAt+Large*LargeSize+(i-Large)*SlotSize:][:SlotSize:SlotSize]
}

// took is what the owner took last of a slot, of the peer with this place.
func (m *memory) took(place, slot int) *atomic.Uint32 { return m.word(takenAt + 4*(place*Slots+slot)) }

func (m *memory) name(i int) (n Name) {
	for k := range n {
		n[k] = m.field(i, 1+k).Load()
	}
	return n
}

//go:build linux && !portable

package board

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// pair is two boards, each opened for the other.
type pair struct {
	ours, theirs *Board
	reader       *Peer // ours: the other
	seen         *Peer // of theirs: ours
}

func open(t *testing.T, by, of *Board) *Peer {
	t.Helper()
	p, err := by.Open(os.Getpid(), of.Ticket())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func board(t *testing.T) *Board {
	t.Helper()
	b, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// meet has two boards see each other.
func meet(t *testing.T, a, b *Board) (ofB, ofA *Peer) {
	t.Helper()
	ofB, ofA = open(t, a, b), open(t, b, a)
	if !ofB.Sees(ofA.Place()) || !ofA.Sees(ofB.Place()) {
		t.Fatal("they do not see each other")
	}
	return ofB, ofA
}

func two(t *testing.T) (p pair) {
	t.Helper()
	p.ours, p.theirs = board(t), board(t)
	p.reader, p.seen = meet(t, p.ours, p.theirs)
	return p
}

func (p pair) show(t *testing.T, name Name, data string) Slot {
	t.Helper()
	s, _, ok := p.ours.Reserve()
	if !ok {
		t.Fatal("no slot")
	}
	s.Show(name, 0, copy(s.Memory(), data), []*Peer{p.reader})
	return s
}

// A slot is seen until all have taken it, and free then.
func TestShow(t *testing.T) {
	p := two(t)
	third, seen := meet(t, p.ours, board(t))
	name := Name{1, 2, 3, 4}
	s, _, ok := p.ours.Reserve()
	if !ok {
		t.Fatal("a new board has no slot")
	}
	if _, ok := p.seen.Find(name); ok {
		t.Error("found before it was shown")
	}
	before := p.seen.Shown().Now()
	s.Show(name, 0, copy(s.Memory(), "hello"), []*Peer{p.reader, third})
	if p.seen.Shown().Now() == before {
		t.Error("the bell did not ring")
	}
	if _, ok := p.seen.Find(Name{1, 2, 3, 5}); ok {
		t.Error("found by another name")
	}
	v, ok := p.seen.Find(name)
	if !ok || v.Addr != 0 || string(v.Data()) != "hello" {
		t.Fatalf("found %v: %+v", ok, v)
	}
	before = p.reader.Took().Now()
	if !v.Take() || s.Late() != third || p.reader.Took().Now() == before {
		t.Error("not taken by one of two readers")
	}
	if again, ok := seen.Find(name); !ok || !again.Take() || s.Late() != nil {
		t.Error("not taken by both readers")
	}
	next, _, ok := p.ours.Reserve()
	if !ok || next.i != s.i || s.Late() != nil {
		t.Error("the slot is not used again")
	}
	if _, ok := p.seen.Find(name); ok || v.Take() {
		t.Error("there after its slot was reserved again")
	}
	s.Withdraw() // of the earlier turn
	next.Show(name, 4096, 1<<40, []*Peer{p.reader})
	if v, ok := p.seen.Find(name); !ok || v.Addr != 4096 || v.Size != 1<<40 || !v.Take() {
		t.Errorf("found %v: %+v", ok, v)
	}
}

// What is withdrawn cannot be taken, even by a reader that has found it, and even where the slot shows something else by then.
func TestWithdraw(t *testing.T) {
	p := two(t)
	s := p.show(t, Name{1}, "x")
	v, ok := p.seen.Find(Name{1})
	if !ok {
		t.Fatal("not found")
	}
	s.Withdraw()
	p.show(t, Name{1}, "y")
	if v.Take() {
		t.Error("taken after it was withdrawn")
	}
	two, three := p.show(t, Name{2}, "x"), p.show(t, Name{3}, "x")
	p.seen.Forgo(func(n Name) bool { return n[0] == 2 })
	if two.Late() != nil || three.Late() == nil {
		t.Error("not what was forgone is free")
	}
	s, _, _ = p.ours.Reserve()
	s.Withdraw()
	s.Show(Name{4}, 0, 1, []*Peer{p.reader})
	if _, ok := p.seen.Find(Name{4}); ok {
		t.Error("shown after it was withdrawn")
	}
}

// A board that is full has no slot until one is taken, or a reader is gone.
func TestFull(t *testing.T) {
	p := two(t)
	for k := range uint64(Slots) {
		p.show(t, Name{k}, "")
	}
	_, late, ok := p.ours.Reserve()
	if ok || late != p.reader {
		t.Fatal("a slot of a full board")
	}
	_ = late.Close()
	v, _ := p.seen.Find(Name{100})
	if !v.Take() {
		t.Error("not taken")
	}
	p.show(t, Name{Slots}, "")
	gone, err := p.ours.Open(os.Getpid(), board(t).Ticket())
	if err != nil || !gone.Sees(0) {
		t.Fatal(err)
	}
	v, _ = p.seen.Find(Name{101})
	v.Take()
	s, _, _ := p.ours.Reserve()
	s.Show(Name{}, 0, 0, []*Peer{gone})
	if s.Late() != gone {
		t.Error("not waited for")
	}
	_ = gone.Close()
	if s.Late() != nil {
		t.Error("waited for a peer that is closed")
	}
	if left := len(p.ours.left); left != 1 {
		t.Errorf("the memory of %d closed peers is left, want 1", left)
	}
	if err := p.ours.Sweep(); err != nil || p.ours.left != nil {
		t.Errorf("swept: %v, %d are left", err, len(p.ours.left))
	}
}

// Processes that show, take and withdraw at the same time never read other data than those of the name.
func TestRaces(t *testing.T) {
	ours := board(t)
	const readers, names, slots = 3, 4000, 8
	data := func(k uint64) []byte {
		b := make([]byte, 1+k%3000)
		rand.NewChaCha8([32]byte{byte(k), byte(k >> 8)}).Read(b)
		return b
	}
	var wg sync.WaitGroup
	taken := make([]int, readers)
	var all []*Peer
	for r := range readers {
		reader, seen := meet(t, ours, board(t))
		all = append(all, reader)
		wg.Go(func() {
			for k := range uint64(names) {
				got := make([]byte, 0, 4096)
				for {
					v, ok := seen.Find(Name{k, 7})
					if !ok {
						if _, past := seen.Find(Name{names, 9}); past { // it was withdrawn
							break
						}
						seen.Shown().Look(func() bool { return false })
						continue
					}
					got = append(got[:0], v.Data()...)
					if !v.Take() {
						break
					}
					taken[r]++
					if !bytes.Equal(got, data(k)) {
						t.Errorf("other data of %d", k)
					}
					break
				}
			}
		})
	}
	var shown []Slot
	for k := range uint64(names) {
		s, late, ok := ours.Reserve()
		for ; !ok; s, late, ok = ours.Reserve() {
			late.Took().Look(func() bool { return false })
			_ = late.Close()
		}
		s.Show(Name{k, 7}, 0, copy(s.Memory(), data(k)), all)
		if shown = append(shown, s); len(shown) == slots {
			shown[0].Withdraw()
			shown = shown[1:]
		}
	}
	end, _, _ := ours.Reserve()
	end.Show(Name{names, 9}, 0, 0, all)
	wg.Wait()
	for r, n := range taken {
		if n == 0 {
			t.Errorf("reader %d took nothing", r)
		}
	}
}

// Whatever another process writes on its board, a reader stays within the memory, and so does a process that waits for it.
func TestHostileBoard(t *testing.T) {
	p := two(t)
	r := rand.New(rand.NewPCG(1, 2))
	name := Name{1, 2, 3, 4}
	for range 20_000 {
		for range 4 {
			at := 4 * r.IntN((headsAt+4*head)/4)
			if r.IntN(4) == 0 {
				at = takenAt + 4*r.IntN(Slots)
			}
			binary.NativeEndian.PutUint32(p.ours.mem[at:], []uint32{0, 1, 2, 3, 1<<32 - 1, r.Uint32()}[r.IntN(6)])
		}
		for k, x := range name {
			p.ours.field(r.IntN(4), 1+k).Store(x)
		}
		if v, ok := p.seen.Find(name); ok {
			if v.Size < 0 || v.Addr == 0 && len(v.Data()) > LargeSize {
				t.Fatalf("found %+v", v)
			}
			v.Take()
		}
		s, late, ok := p.theirs.Reserve()
		if !ok {
			_ = late.Close()
			p.ours.took(p.reader.place, r.IntN(Slots)).Store(r.Uint32N(50))
			continue
		}
		s.Show(name, 0, 0, []*Peer{p.seen})
		s.Late()
	}
	if p.reader.Sees(MaxPeers) || p.reader.Sees(1<<63) {
		t.Error("a place that no board has")
	}
}

// Only a board can be opened, and only the one that is meant; another process cannot write it.
func TestOpen(t *testing.T) {
	b := board(t)
	ticket := b.Ticket()
	for what, bad := range map[string]Ticket{
		"another board": {ticket.File, ticket.Nonce + 1}, "no open file": {1 << 20, ticket.Nonce}, "a file of another kind": {2, ticket.Nonce},
	} {
		if p, err := b.Open(os.Getpid(), bad); err == nil {
			t.Errorf("%s was opened", what)
			_ = p.Close()
		}
	}
	short, err := unix.MemfdCreate("short", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(short)
	for _, size := range []int64{4096, length} { // the second could be made shorter
		if err := unix.Ftruncate(short, size); err != nil {
			t.Fatal(err)
		}
		if p, err := b.Open(os.Getpid(), Ticket{uint64(short), 0}); err == nil {
			t.Errorf("memory of %d bytes that is no board was opened", size)
			_ = p.Close()
		}
	}
	if err := unix.Ftruncate(int(ticket.File), 0); err == nil {
		t.Error("a board was made shorter")
	}
	file, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", ticket.File), unix.O_RDWR, 0)
	if err != nil {
		return // better still
	}
	defer unix.Close(file)
	if _, err := unix.Pwrite(file, []byte{1}, 0); err == nil {
		t.Error("a board was written through its file")
	}
	if _, err := unix.Mmap(file, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("a board was mapped to be written")
	}
}

// The memory is there until the last one lets go of it.
func TestHold(t *testing.T) {
	p := two(t)
	if !p.seen.Hold() {
		t.Fatal("a peer that is open is not held")
	}
	_ = p.seen.Close()
	p.seen.Shown().Now()
	_ = p.theirs.Close()
	s, _, _ := p.theirs.Reserve()
	s.Withdraw()
	_ = p.seen.Close()
	if p.seen.Hold() || p.theirs.mem != nil {
		t.Error("there after the end")
	}
}

// A thread that sleeps on a bell wakes when it rings, and when the alarm does, also where the system cannot wait for both.
func TestSleep(t *testing.T) {
	for _, one := range []bool{false, true} {
		oneOnly.Store(one)
		p := two(t)
		var a Alarm
		for i := range 200 {
			now, quiet := p.seen.Shown().Now(), a.Now()
			done := make(chan struct{})
			go func() {
				defer close(done)
				for p.seen.Shown().Now() == now && a.Now() == quiet {
					p.seen.Shown().Sleep(now, &a, quiet)
				}
			}()
			if i%2 == 0 {
				a.Ring()
			} else {
				p.show(t, Name{}, "").Withdraw()
			}
			<-done
		}
	}
	oneOnly.Store(false)
}

const envTicket = "BOARD_TEST_TICKET"

func TestMain(m *testing.M) {
	if ticket := os.Getenv(envTicket); ticket != "" {
		child(ticket)
		return
	}
	os.Exit(m.Run())
}

// child shows one thing on a board of its own, and sleeps until another one is shown to it.
func child(ticket string) {
	file, nonce, _ := strings.Cut(ticket, " ")
	n, _ := strconv.ParseUint(file, 10, 64)
	k, _ := strconv.ParseUint(nonce, 10, 64)
	ours, err := New()
	var theirs *Peer
	if err == nil {
		theirs, err = ours.Open(os.Getppid(), Ticket{n, k})
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(ours.Ticket().File, ours.Ticket().Nonce, theirs.Place())
	var place uint64
	_, _ = fmt.Scan(&place)
	theirs.Sees(place)
	var quiet Alarm
	for {
		now := theirs.Shown().Now()
		if v, ok := theirs.Find(Name{1}); ok {
			s, _, _ := ours.Reserve()
			s.Show(Name{2}, 0, copy(s.Memory(), v.Data()), []*Peer{theirs})
			v.Take()
			_, _ = os.Stdin.Read(make([]byte, 1)) // until it is killed
			return
		}
		theirs.Shown().Sleep(now, &quiet, 0)
	}
}

// Two processes show each other something; each sleeps until it is there. What a process showed can be read after its end.
func TestProcesses(t *testing.T) {
	ours := board(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d", envTicket, ours.Ticket().File, ours.Ticket().Nonce))
	in, _ := cmd.StdinPipe()
	defer in.Close()
	out, _ := cmd.StdoutPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var ticket Ticket
	var place uint64
	if _, err := fmt.Sscan(line, &ticket.File, &ticket.Nonce, &place); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	theirs, err := ours.Open(cmd.Process.Pid, ticket)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	theirs.Sees(place)
	fmt.Fprintln(in, theirs.Place())
	s, _, _ := ours.Reserve()
	s.Show(Name{1}, 0, copy(s.Memory(), "to and fro"), []*Peer{theirs})
	var quiet Alarm
	var v View
	for ok := false; !ok; {
		now := theirs.Shown().Now()
		if v, ok = theirs.Find(Name{2}); !ok {
			theirs.Shown().Sleep(now, &quiet, 0)
		}
	}
	for late := s.Late(); late != nil; late = s.Late() {
		if now := late.Took().Now(); s.Late() != nil {
			late.Took().Sleep(now, &quiet, 0)
		}
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if string(v.Data()) != "to and fro" || !v.Take() {
		t.Errorf("read %q", v.Data())
	}
}

// The memory of the slots fills the board, one after the other.
func TestSlotMemory(t *testing.T) {
	m := memory{mem: make([]byte, length)}
	at := dataAt
	for i := range Slots {
		data := m.data(i)
		if want := map[bool]int{true: LargeSize, false: SlotSize}[i < Large]; len(data) != want || cap(data) != want || &data[0] != &m.mem[at] {
			t.Fatalf("slot %d has %d bytes, or begins elsewhere than at %d", i, len(data), at)
		}
		at += len(data)
	}
	if at != length {
		t.Errorf("the slots end at %d of %d", at, length)
	}
}

package line

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/look"
	"github.com/soliton-train/soliton/internal/timing"
)

// Hub carries the messages of its lines.
type Hub struct {
	poller *poller

	mu     sync.Mutex
	lines  []*Line
	floors map[uint16]id.Version // of groups: what belongs to earlier versions is stale
	closed bool
	asleep bool          // a goroutine sleeps on the sockets
	woken  chan struct{} // closed and replaced when it is awake again
	others int           // goroutines that wait for that
	old    []socket      // to be closed when it is awake
	stop   chan struct{}
	task   sync.WaitGroup

	spare [][]byte // memory for early messages
}

// maxSpare bounds the memory that a hub keeps for early messages.
const maxSpare = 64

// memory returns memory for an early message.
func (h *Hub) memory(n int) []byte {
	if last := len(h.spare) - 1; last >= 0 {
		b := h.spare[last]
		h.spare = h.spare[:last]
		return b[:n]
	}
	return make([]byte, n, MaxEager)
}

// reuse takes memory back.
func (h *Hub) reuse(b []byte) {
	if len(h.spare) < maxSpare {
		h.spare = append(h.spare, b)
	}
}

// New returns a hub without lines. It fails with [errors.ErrUnsupported] where a system cannot have lines.
func New() (*Hub, error) {
	p, err := newPoller()
	if err != nil {
		return nil, fmt.Errorf("line: %w", err)
	}
	h := &Hub{poller: p, floors: make(map[uint16]id.Version), woken: make(chan struct{}), stop: make(chan struct{})}
	h.task.Go(h.tend)
	return h, nil
}

// Close ends all lines, and all waits with [ErrClosed].
func (h *Hub) Close() {
	h.mu.Lock()
	first := !h.closed
	if first {
		h.closed = true
		close(h.stop)
		for _, l := range slices.Clone(h.lines) {
			h.remove(l, ErrClosed)
		}
		if h.asleep {
			h.ring()
		} else {
			h.poller.close()
		}
	}
	h.mu.Unlock()
	h.task.Wait()
}

// tend reads what comes while no goroutine waits, so that the peers do not take the lines for broken.
func (h *Hub) tend() {
	t := time.NewTicker(timing.Tend)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-h.stop:
			return
		}
		for more := true; more; {
			h.mu.Lock()
			more = !h.closed && !h.asleep && h.carry(true)
			h.mu.Unlock()
		}
	}
}

// Capable reports whether a line can use a connection.
func Capable(c net.Conn) bool {
	_, ok := c.(*net.TCPConn)
	return ok && supported
}

// Add makes a line of a connection that is [Capable], and closes the connection in any case. The line first sends some bytes. lost is called when the line fails, unless it is closed before; it must not block.
func (h *Hub) Add(c net.Conn, first []byte, lost func(error)) (*Line, error) {
	s, err := newSocket(c)
	_ = c.Close() // the socket is another descriptor of the same connection
	if err != nil {
		return nil, fmt.Errorf("line: %w", err)
	}
	l := &Line{
		hub: h, sock: s, lost: lost, small: first, now: len(first) > 0, buf: make([]byte, 8<<10),
		posts: make(map[Name]*Message), wants: make(map[Name]int), eagers: make(map[Name]struct{}), expects: make(map[Name]*Message), early: make(map[Name][]byte),
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		s.close()
		return nil, ErrClosed
	}
	h.lines = append(h.lines, l)
	h.write(l)
	return l, nil
}

// Close ends the line and its messages, with an error.
func (l *Line) Close(err error) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	l.lost = func(error) {}
	l.hub.remove(l, err)
}

// Bytes returns how many bytes were sent and received.
func (l *Line) Bytes() (sent, received int64) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	return l.sentBytes, l.cameBytes
}

// remove ends a line, unless it has ended.
func (h *Hub) remove(l *Line, err error) {
	i := slices.Index(h.lines, l)
	if i < 0 {
		return
	}
	h.lines = slices.Delete(h.lines, i, i+1)
	l.fail(err)
	if l.sock.shutdown(); h.asleep {
		h.old = append(h.old, l.sock)
		h.ring()
	} else {
		l.sock.close()
	}
	l.lost(err)
}

// Begin begins a version of a group: what came under earlier ones is dropped, and what still comes of it.
func (h *Hub) Begin(group uint16, v id.Version) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.floors[group] = v
	for _, l := range h.lines {
		l.begin(h.stale)
	}
}

func (h *Hub) stale(n Name) bool { return n.Version.Compare(h.floors[n.Group]) < 0 }

// Ring has all that wait ask whether they are to stop.
func (h *Hub) Ring() { h.ring() }

func (h *Hub) ring() { h.poller.ring() }

// Wait waits until a message has ended, and returns its error, or until stopped returns one.
func (h *Hub) Wait(m *Message, stopped func() error) error {
	h.mu.Lock()
	over := m.over
	h.mu.Unlock()
	if over {
		return m.err
	}
	if err := h.Until(func() bool { return m.over }, stopped); err != nil {
		return err
	}
	return m.err
}

// Until waits until a condition holds, or stopped returns an error. Both are asked when something has happened on the lines, and after [Hub.Ring].
func (h *Hub) Until(done func() bool, stopped func() error) (err error) {
	moved := false
	over := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		moved = h.carry(false) || moved
		return h.over(done, stopped, &err)
	}
	for !look.For(over) {
		if !moved && h.sleep(done, stopped, &err) {
			break
		}
		moved = false
	}
	return err
}

// sleep waits until something has happened, unless the wait is over.
func (h *Hub) sleep(done func() bool, stopped func() error, err *error) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.carry(true)
	if h.over(done, stopped, err) {
		return true
	}
	if h.asleep {
		woken := h.woken
		h.others++
		h.mu.Unlock()
		<-woken
		h.mu.Lock()
		h.others--
		return false
	}
	h.asleep = true
	h.poller.reset()
	for _, l := range h.lines {
		l.polled = l.pending()
		h.poller.add(l.sock, l.polled)
	}
	h.mu.Unlock()
	h.poller.sleep()
	h.mu.Lock()
	h.asleep = false
	for _, s := range h.old {
		s.close()
	}
	h.old = h.old[:0]
	if h.closed {
		h.poller.close()
	}
	if h.others > 0 {
		close(h.woken)
		h.woken = make(chan struct{})
	}
	return false
}

// over reports whether a wait is over.
func (h *Hub) over(done func() bool, stopped func() error, err *error) bool {
	if done() {
		return true
	}
	if *err = stopped(); *err == nil && h.closed {
		*err = ErrClosed
	}
	return *err != nil
}

// carry reads and writes what the sockets have and take now, and reports whether that was anything. all includes lines on which no message is expected, and wants that could wait for
// company.
func (h *Hub) carry(all bool) (moved bool) {
	for i := 0; i < len(h.lines); i++ {
		l := h.lines[i]
		before := l.sentBytes + l.cameBytes
		var err error
		if all || l.wanted() {
			err = l.read()
		}
		if err == nil {
			err = h.send(l, all)
		}
		moved = moved || l.sentBytes+l.cameBytes > before
		if err != nil {
			h.remove(l, err)
			i--
		}
	}
	return moved
}

// write writes what the socket of a line takes now.
func (h *Hub) write(l *Line) {
	if err := h.send(l, false); err != nil {
		h.remove(l, err)
	}
}

// send writes, and wakes the goroutine that sleeps where it does not know that the socket has no room.
func (h *Hub) send(l *Line, all bool) error {
	err := l.write(all)
	if h.asleep && l.pending() && !l.polled {
		l.polled = true
		h.ring()
	}
	return err
}

// turns is how often a line is read in a row while it has more: others are to have their turn.
const turns = 4

func (l *Line) read() error {
	for range turns {
		direct, buf := l.input()
		n, err := l.sock.receive(direct, buf)
		if err == nil && n > 0 {
			err = l.came(n, direct)
		}
		if err != nil || n < len(direct)+len(buf) {
			return err
		}
	}
	return nil
}

func (l *Line) write(all bool) error {
	for {
		head, body := l.output(all)
		if len(head)+len(body) == 0 {
			return nil
		}
		n, err := l.sock.send(head, body)
		if err != nil || n == 0 {
			return err
		}
		if l.wrote(n); n < len(head)+len(body) {
			return nil
		}
	}
}

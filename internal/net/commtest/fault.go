package commtest

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/transport"
)

// FaultKind is what a [Fault] does.
type FaultKind uint8

// The kinds.
const (
	// FaultDrop closes the connection. Both sides see its end; links are made
	// again.
	FaultDrop FaultKind = 1 + iota
	// FaultDelay holds the bytes from there on back for a time.
	FaultDelay
	// FaultStall holds them back until the connection is closed, as a frozen
	// worker does; with a time, as one that thaws.
	FaultStall
	// FaultCut swallows them, as a broken cable does: the writer notices
	// nothing. No call between the two gets through while it lasts, and the
	// connection ends with it. Without a time it lasts.
	FaultCut
)

var faultNames = [...]string{FaultDrop: "drop", FaultDelay: "delay", FaultStall: "stall", FaultCut: "cut"}

// Fault is one thing that goes wrong once on the way from one worker to
// another: before a frame, counted from 1, or a byte, counted from 0, over all
// connections of the two in this direction.
type Fault struct {
	Kind     FaultKind
	From, To string // names given to [Faults.Transport]; "*" is any
	Frame    int    // 0: Byte says where
	Byte     int64
	For      time.Duration
}

// String renders the fault as "delay 0>1@frame:3 5ms" or "drop *>2@byte:4096".
func (f Fault) String() string {
	kind := "fault" + strconv.Itoa(int(f.Kind))
	if f.Kind > 0 && int(f.Kind) < len(faultNames) {
		kind = faultNames[f.Kind]
	}
	where := fmt.Sprintf("byte:%d", f.Byte)
	if f.Frame > 0 {
		where = fmt.Sprintf("frame:%d", f.Frame)
	}
	s := fmt.Sprintf("%s %s>%s@%s", kind, f.From, f.To, where)
	if f.For > 0 {
		s += " " + f.For.String()
	}
	return s
}

// FaultPlan is a list of faults; its String is what [ParseFaults] reads.
type FaultPlan []Fault

// String renders the faults with commas between them.
func (p FaultPlan) String() string {
	var parts []string
	for _, f := range p {
		parts = append(parts, f.String())
	}
	return strings.Join(parts, ", ")
}

// ParseFaults reads a plan and reports all faults of the text together.
func ParseFaults(text string) (FaultPlan, error) {
	var plan FaultPlan
	var faults []error
	for _, part := range strings.Split(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		f, err := parseFault(part)
		if err != nil {
			faults = append(faults, fmt.Errorf("comm: fault %q: %w", part, err))
		}
		plan = append(plan, f)
	}
	return plan, errors.Join(faults...)
}

func parseFault(text string) (f Fault, err error) {
	words := strings.Fields(text)
	if len(words) < 2 || len(words) > 3 {
		return f, errors.New(`want KIND FROM>TO@frame:N or @byte:N, and a duration if it has one`)
	}
	for k, name := range faultNames {
		if name != "" && name == words[0] {
			f.Kind = FaultKind(k)
		}
	}
	if f.Kind == 0 {
		return f, fmt.Errorf("%q is none of drop, delay, stall, cut", words[0])
	}
	pair, where, _ := strings.Cut(words[1], "@")
	from, to, ok := strings.Cut(pair, ">")
	if !ok || from == "" || to == "" {
		return f, fmt.Errorf("%q is not FROM>TO", pair)
	}
	f.From, f.To = from, to
	unit, number, _ := strings.Cut(where, ":")
	n, err := strconv.ParseInt(number, 10, 64)
	switch {
	case unit == "frame" && err == nil && n > 0 && n <= 1<<31-1:
		f.Frame = int(n)
	case unit == "byte" && err == nil && n >= 0:
		f.Byte = n
	default:
		return f, fmt.Errorf("%q is neither frame:N with N at least 1 nor byte:N", where)
	}
	if len(words) == 3 {
		if f.For, err = time.ParseDuration(words[2]); err != nil || f.For <= 0 {
			return f, fmt.Errorf("%q is no duration above 0", words[2])
		}
	} else if f.Kind == FaultDelay {
		return f, errors.New("a delay needs a duration")
	}
	return f, nil
}

// Faults carries out a plan on the transports of several workers. All workers
// that talk to each other must be wrapped by the same Faults.
type Faults struct {
	plan FaultPlan

	mu    sync.Mutex
	names map[string]string // by address
	pairs map[[2]string]*faultPair
	fired []Fault
}

// faultPair is one direction between two workers.
type faultPair struct {
	frames int
	bytes  int64
	fired  map[int]bool
	cut    bool
	over   chan struct{} // closed when the cut ends
}

// NewFaults returns a wrapper for a plan.
func NewFaults(plan FaultPlan) *Faults {
	return &Faults{plan: plan, names: make(map[string]string), pairs: make(map[[2]string]*faultPair)}
}

// Fired returns the faults that have happened, in order, with the names of
// the workers in place of "*".
func (f *Faults) Fired() FaultPlan {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append(FaultPlan(nil), f.fired...)
}

// Transport wraps a worker's transport. A name has at most 255 bytes.
func (f *Faults) Transport(name string, inner transport.Transport) transport.Transport {
	return &faultTransport{f: f, name: name[:min(len(name), 255)], inner: inner}
}

func (f *Faults) pair(from, to string) *faultPair {
	p := f.pairs[[2]string{from, to}]
	if p == nil {
		p = &faultPair{fired: make(map[int]bool)}
		f.pairs[[2]string{from, to}] = p
	}
	return p
}

type faultTransport struct {
	f     *Faults
	name  string
	inner transport.Transport
}

func (t *faultTransport) Listen(addr string) (transport.Listener, error) {
	l, err := t.inner.Listen(addr)
	if err != nil {
		return nil, err
	}
	t.f.mu.Lock()
	defer t.f.mu.Unlock()
	t.f.names[l.Addr()] = t.name
	return &faultListener{l, t}, nil
}

func (t *faultTransport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	for {
		t.f.mu.Lock()
		to := t.f.names[addr]
		var over chan struct{}
		for _, p := range []*faultPair{t.f.pair(t.name, to), t.f.pair(to, t.name)} {
			if p.cut {
				over = p.over
			}
		}
		t.f.mu.Unlock()
		if over != nil {
			select {
			case <-over:
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		c, err := t.inner.Dial(ctx, addr)
		if err != nil {
			return nil, err
		}
		// The other side learns who calls: one byte of length, and the name.
		if _, err := c.Write(append([]byte{byte(len(t.name))}, t.name...)); err != nil {
			c.Close()
			return nil, err
		}
		return newFaultConn(c, t, to), nil
	}
}

type faultListener struct {
	transport.Listener
	t *faultTransport
}

func (l *faultListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newFaultConn(c, l.t, ""), nil
}

// faultConn lets faults happen to what is written to it.
type faultConn struct {
	net.Conn
	t *faultTransport

	naming sync.Mutex
	to     string // "" on an accepted connection before its first read

	writing sync.Mutex
	head    []byte // of the frame whose header is under way
	body    int64  // bytes of payload until the next frame
	held    bool   // bytes are held back
	until   time.Time

	mu      sync.Mutex
	late    time.Time
	changed chan struct{} // closed and replaced when late changes
	once    sync.Once
	closed  chan struct{}
}

func newFaultConn(c net.Conn, t *faultTransport, to string) *faultConn {
	return &faultConn{Conn: c, t: t, to: to, changed: make(chan struct{}), closed: make(chan struct{})}
}

func (c *faultConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func (c *faultConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.late = t
	close(c.changed)
	c.changed = make(chan struct{})
	c.mu.Unlock()
	return c.Conn.SetWriteDeadline(t)
}

func (c *faultConn) SetDeadline(t time.Time) error {
	return cmp.Or(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// peer returns the other side's name, which an accepted connection reads
// first.
func (c *faultConn) peer() (string, error) {
	c.naming.Lock()
	defer c.naming.Unlock()
	if c.to == "" {
		var n [1]byte
		if _, err := io.ReadFull(c.Conn, n[:]); err != nil {
			return "", err
		}
		name := make([]byte, n[0])
		if _, err := io.ReadFull(c.Conn, name); err != nil {
			return "", err
		}
		c.to = string(name)
	}
	return c.to, nil
}

func (c *faultConn) Read(p []byte) (int, error) {
	if _, err := c.peer(); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c *faultConn) Write(p []byte) (n int, err error) {
	to, err := c.peer()
	if err != nil {
		return 0, err
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	for n < len(p) {
		if err := c.hold(); err != nil {
			return n, err
		}
		fault, k := c.next(to, p[n:])
		if fault != nil {
			if err := c.happen(to, *fault); err != nil {
				return n, err
			}
			continue
		}
		f := c.t.f
		f.mu.Lock()
		pair := f.pair(c.t.name, to)
		cut := pair.cut
		f.mu.Unlock()
		m := k
		if !cut {
			m, err = c.Conn.Write(p[n : n+k])
		}
		f.mu.Lock()
		if m > 0 && c.begins() {
			pair.frames++
		}
		pair.bytes += int64(m)
		f.mu.Unlock()
		c.advance(p[n : n+m])
		n += m
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// next returns the fault that is due before the first byte of p, or how many
// bytes come before the next one could be.
func (c *faultConn) next(to string, p []byte) (*Fault, int) {
	f := c.t.f
	f.mu.Lock()
	defer f.mu.Unlock()
	pair := f.pair(c.t.name, to)
	k := len(p)
	begins := c.begins()
	switch {
	case c.body > 0:
		k = int(min(int64(k), c.body))
	default:
		k = min(k, headerSize-len(c.head))
	}
	for i, fault := range f.plan {
		if pair.fired[i] || fault.From != "*" && fault.From != c.t.name || fault.To != "*" && fault.To != to {
			continue
		}
		due := fault.Frame == 0 && fault.Byte <= pair.bytes || fault.Frame > 0 && begins && fault.Frame <= pair.frames+1
		if due {
			pair.fired[i] = true
			fault.From, fault.To = c.t.name, to
			f.fired = append(f.fired, fault)
			return &fault, 0
		}
		if fault.Frame == 0 {
			k = int(min(int64(k), fault.Byte-pair.bytes))
		}
	}
	return nil, k
}

// begins reports whether the next byte is a frame's first.
func (c *faultConn) begins() bool { return len(c.head) == 0 && c.body == 0 }

// advance follows the frames through bytes that have been written; they lie
// within a header or a payload.
func (c *faultConn) advance(p []byte) {
	if c.body > 0 {
		c.body -= int64(len(p))
		return
	}
	if c.head = append(c.head, p...); len(c.head) == headerSize {
		c.body = int64(binary.LittleEndian.Uint32(c.head[4:]))
		c.head = c.head[:0]
	}
}

// happen lets a fault happen.
func (c *faultConn) happen(to string, fault Fault) error {
	switch fault.Kind {
	case FaultDrop:
		c.Close()
		return errors.New("comm: connection dropped by a fault plan")
	case FaultCut:
		c.cut(to, fault.For)
	default:
		c.held = true
		c.until = time.Time{}
		if fault.For > 0 {
			c.until = time.Now().Add(fault.For)
		}
	}
	return nil
}

// hold waits as long as bytes are held back.
func (c *faultConn) hold() error {
	timer := func(t time.Time) (<-chan time.Time, func() bool) {
		if t.IsZero() {
			return nil, func() bool { return false }
		}
		timer := time.NewTimer(time.Until(t))
		return timer.C, timer.Stop
	}
	for c.held {
		c.mu.Lock()
		late, changed := c.late, c.changed
		c.mu.Unlock()
		over, stopOver := timer(c.until)
		expired, stopExpired := timer(late)
		var err error
		select {
		case <-over:
			c.held = false
		case <-changed:
		case <-c.closed:
			err = net.ErrClosed
		case <-expired:
			err = os.ErrDeadlineExceeded
		}
		stopOver()
		stopExpired()
		if err != nil {
			return err
		}
	}
	return nil
}

// cut begins a cut, and ends it, and the connection with it, in time.
func (c *faultConn) cut(to string, d time.Duration) {
	f := c.t.f
	f.mu.Lock()
	defer f.mu.Unlock()
	pair := f.pair(c.t.name, to)
	pair.cut, pair.over = true, make(chan struct{})
	if d > 0 {
		time.AfterFunc(d, func() {
			f.mu.Lock()
			pair.cut = false
			close(pair.over)
			f.mu.Unlock()
			c.Close()
		})
	}
}

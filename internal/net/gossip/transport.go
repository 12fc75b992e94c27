package gossip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/platform"
)

const (
	// maxStreams bounds the streams that others have open to us. Streams of members are short, so a new one closes the oldest.
	maxStreams = 128
	// maxStream bounds the bytes that we read of a stream: the library keeps all before it can tell that a member sends them. The
	// state of MaxMembers members takes less.
	maxStream = 4 << 20
)

// A watch is the library's transport: it shows every packet to the ring, and
// closes every stream in the end.
type watch struct {
	memberlist.NodeAwareTransport // inside

	sent, received func(packet []byte)
	refusal        func(message []byte) bool // of this end, on a stream
	rejected       *auth.Tally

	packets chan *memberlist.Packet
	streams chan net.Conn
	closing chan struct{} // packets and streams are no longer read
	ended   chan struct{} // the transport inside no longer writes any
	done    sync.WaitGroup
	once    sync.Once // Shutdown

	others *auth.Lobby // streams that others opened

	mu   sync.Mutex
	open map[*stream]bool // nil once closed
}

// A stream is a connection that its watch knows.
type stream struct {
	net.Conn
	w    *watch
	left int // bytes that may be read

	others   bool // opened it
	answered bool // with another message than that theirs cannot be read
	failed   error
	closed   bool
}

var errLong = fmt.Errorf("ring: a stream of more than %d bytes", maxStream)

// Read implements [net.Conn].
func (s *stream) Read(p []byte) (int, error) {
	if s.left == 0 {
		s.failed = errLong
		return 0, errLong
	}
	n, err := s.Conn.Read(p[:min(len(p), s.left)])
	s.left -= n
	if err != nil {
		s.failed = err
	}
	return n, err
}

// Write implements [net.Conn]. The library writes a message at a time.
func (s *stream) Write(p []byte) (int, error) {
	if s.others && !s.w.refusal(p) {
		s.answered = true
	}
	return s.Conn.Write(p)
}

// Close implements [net.Conn]. The stream of a caller that got no answer is counted: what came was no message of a member, or came too late.
func (s *stream) Close() error {
	stays, going := s.w.forget(s)
	switch {
	case !s.others || s.closed || going:
	case !stays:
		s.w.rejected.Add(auth.Crowded, 1)
	case s.failed != nil && !s.answered:
		s.w.rejected.AddError(s.failed)
	case !s.answered:
		s.w.rejected.Add(auth.NoSecret, 1)
	}
	s.closed = true
	return s.Conn.Close()
}

// newWatch starts to watch inside; Shutdown stops it.
func newWatch(inside memberlist.NodeAwareTransport, sent, received func([]byte), refusal func([]byte) bool, rejected *auth.Tally) *watch {
	w := &watch{
		NodeAwareTransport: inside, sent: sent, received: received, refusal: refusal, rejected: rejected,
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn),
		closing: make(chan struct{}), ended: make(chan struct{}),
		open: make(map[*stream]bool), others: auth.NewLobby(maxStreams),
	}
	w.done.Go(w.forwardPackets)
	w.done.Go(w.forwardStreams)
	return w
}

// forwardPackets hands over packets that come in, until the transport inside has ended.
func (w *watch) forwardPackets() {
	for {
		select {
		case p := <-w.NodeAwareTransport.PacketCh():
			w.received(p.Buf)
			select {
			case w.packets <- p:
			case <-w.closing:
			}
		case <-w.ended:
			return
		}
	}
}

// forwardStreams does so with streams. It waits where too many are open, which is no reason for packets to wait.
func (w *watch) forwardStreams() {
	for {
		select {
		case c := <-w.NodeAwareTransport.StreamCh():
			if !w.others.Enter(c) {
				continue // it is closed
			}
			if c = w.track(c, true); c == nil {
				continue
			}
			select {
			case w.streams <- c:
			case <-w.closing:
				c.Close()
			}
		case <-w.ended:
			return
		}
	}
}

// track takes note of a connection. It closes it and returns nil if the watch has ended.
func (w *watch) track(c net.Conn, others bool) net.Conn {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		c.Close()
		return nil
	}
	s := &stream{Conn: c, w: w, left: maxStream, others: others}
	w.open[s] = true
	return s
}

// forget reports whether a stream that others opened had not been closed for newer ones, and whether the watch has ended.
func (w *watch) forget(s *stream) (stays, ended bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, s)
	select {
	case <-w.closing:
		ended = true
	default:
	}
	return w.others.Leave(s.Conn), ended
}

// PacketCh implements [memberlist.Transport].
func (w *watch) PacketCh() <-chan *memberlist.Packet { return w.packets }

// StreamCh implements [memberlist.Transport].
func (w *watch) StreamCh() <-chan net.Conn { return w.streams }

// WriteToAddress implements [memberlist.NodeAwareTransport].
func (w *watch) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	w.sent(b)
	return w.NodeAwareTransport.WriteToAddress(b, a)
}

// WriteTo implements [memberlist.Transport].
func (w *watch) WriteTo(b []byte, addr string) (time.Time, error) {
	return w.WriteToAddress(b, memberlist.Address{Addr: addr})
}

// DialAddressTimeout implements [memberlist.NodeAwareTransport].
func (w *watch) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	c, err := w.NodeAwareTransport.DialAddressTimeout(a, timeout)
	if err != nil {
		return nil, err
	}
	if c = w.track(c, false); c == nil {
		return nil, net.ErrClosed
	}
	return c, nil
}

// DialTimeout implements [memberlist.Transport].
func (w *watch) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return w.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// Shutdown implements [memberlist.Transport].
func (w *watch) Shutdown() error {
	var err error
	w.once.Do(func() {
		close(w.closing)
		w.others.Close()
		err = w.NodeAwareTransport.Shutdown() // may wait for us to take what it has read
		close(w.ended)
		w.done.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		for s := range w.open {
			s.Conn.Close()
		}
		w.open = nil
	})
	return err
}

// network is the library's transport over UDP and TCP, whose dialling ends with
// it.
type network struct {
	*memberlist.NetTransport
	from   net.Addr // where connections begin: where others reach us
	ctx    context.Context
	cancel context.CancelFunc
}

// listen opens the network at addr. With port 0 one of a range is chosen. The system chooses a port that is free for TCP; it may be
// taken for UDP, so that needs several attempts.
func listen(addr netip.AddrPort, in ports.Range) (*network, error) {
	var t *memberlist.NetTransport
	open := func(port int) (err error) {
		t, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{BindAddrs: []string{addr.Addr().String()}, BindPort: port, Logger: silent()})
		if err != nil && port != 0 && addr.Port() == 0 {
			err = fmt.Errorf("%w: %v", syscall.EADDRINUSE, err) // the library does not wrap it
		}
		return err
	}
	err := errors.New("no attempt")
	switch {
	case addr.Port() != 0:
		err = open(int(addr.Port()))
	default:
		for n := 0; err != nil && n < 10; n++ {
			err = in.Listen(open)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("ring: listen on %v: %w", addr, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &network{t, &net.TCPAddr{IP: addr.Addr().AsSlice()}, ctx, cancel}, nil
}

// DialAddressTimeout implements [memberlist.NodeAwareTransport].
func (n *network) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	d := net.Dialer{Timeout: timeout, LocalAddr: n.from, Control: platform.SmallSegments}
	return d.DialContext(n.ctx, "tcp", a.Addr)
}

// Shutdown implements [memberlist.Transport].
func (n *network) Shutdown() error {
	n.cancel()
	return n.NetTransport.Shutdown()
}

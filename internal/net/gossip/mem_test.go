package gossip

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// A lan is a network in memory, for a clock that is not the world's. Members
// can be cut off from it, which is what a frozen or unreachable one looks like to the rest.
type lan struct {
	mu    sync.Mutex
	ports map[string]*port
	cut   map[string]bool // by address
}

func newLAN() *lan { return &lan{ports: make(map[string]*port), cut: make(map[string]bool)} }

// A port is a member's transport.
type port struct {
	lan     *lan
	addr    netip.AddrPort
	packets chan *memberlist.Packet
	streams chan net.Conn
	end     chan struct{}
}

func (l *lan) plug() *port {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := &port{
		lan: l, addr: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(1000+len(l.ports))),
		packets: make(chan *memberlist.Packet, 256), streams: make(chan net.Conn), end: make(chan struct{}),
	}
	l.ports[p.addr.String()] = p
	return p
}

// sever cuts the address off, or heals that.
func (l *lan) sever(addr string, cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut[addr] = cut
}

func (l *lan) reach(from, to string) *port {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut[from] || l.cut[to] {
		return nil
	}
	return l.ports[to]
}

func (p *port) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return p.addr.Addr().AsSlice(), int(p.addr.Port()), nil
}

func (p *port) WriteTo(b []byte, addr string) (time.Time, error) {
	return p.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (p *port) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	now := time.Now()
	if to := p.lan.reach(p.addr.String(), a.Addr); to != nil {
		select {
		case to.packets <- &memberlist.Packet{Buf: append([]byte(nil), b...), From: net.UDPAddrFromAddrPort(p.addr), Timestamp: now}:
		default: // lost, as packets are
		}
	}
	return now, nil
}

func (p *port) PacketCh() <-chan *memberlist.Packet { return p.packets }

func (p *port) StreamCh() <-chan net.Conn { return p.streams }

func (p *port) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return p.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

func (p *port) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	to := p.lan.reach(p.addr.String(), a.Addr)
	if to == nil {
		select {
		case <-time.After(timeout):
		case <-p.end:
		}
		return nil, errors.New("no route")
	}
	ours, theirs := net.Pipe()
	select {
	case to.streams <- theirs:
		return ours, nil
	case <-to.end:
	case <-p.end:
	}
	return nil, errors.New("refused")
}

func (p *port) Shutdown() error {
	close(p.end)
	return nil
}

package gossip

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/timing"

	"github.com/hashicorp/memberlist"
)

// Config configures a [Ring]. Zero means the documented default.
type Config struct {
	// Self is what this member says about itself. There is no default.
	Self Identity

	// Job names the job: members of other jobs are ignored. At most 255 bytes. The default is "", which is a name, too.
	Job string

	// Listen is the IP address and port to gossip on, TCP and UDP, which the
	// others must be able to reach. Port 0 is one of the system's choice, which
	// [Ring.Addr] tells. Default 127.0.0.1:0; an address that is not loopback
	// needs a SecretKey.
	Listen string

	// Ports are those of which one is chosen if Listen has port 0. Default: the system chooses.
	Ports ports.Range

	// SecretKey encrypts and authenticates everything: 16, 24 or 32 bytes,
	// for AES-128, 192 or 256, the same for all members. Default: no
	// encryption.
	SecretKey []byte

	// Rejected counts the packets, and the connections, of others that have no SecretKey or another one, or say nothing. Default: none is
	// counted.
	Rejected *auth.Tally

	// Detect is the time within which a failure becomes evidence. There is no default.
	Detect time.Duration

	// Members is how many members the ring is expected to have, 2 to [MaxMembers]. With more it still works, but may take longer than
	// Detect. There is no default.
	Members int
}

// times returns the times that follow from the timeout.
func (c Config) times() timing.Gossip {
	return timing.GossipOf(c.Detect, c.Members)
}

// listen returns Listen, or its default.
func (c Config) listen() string { return cmp.Or(c.Listen, "127.0.0.1:0") }

// Validate reports all faults together.
func (c Config) Validate() error {
	var f faults.List
	for _, self := range c.Self.validate() {
		f.Add(fmt.Errorf("gossip.Config.Self.%w", self))
	}
	f.If(len(c.Job) > memberlist.LabelMaxSize, "gossip.Config.Job has %d bytes; it must have at most %d", len(c.Job), memberlist.LabelMaxSize)
	key := len(c.SecretKey) != 0
	f.If(key && memberlist.ValidateKey(c.SecretKey) != nil, "gossip.Config.SecretKey has %d bytes; it must have 16, 24 or 32", len(c.SecretKey))
	listen, err := netip.ParseAddrPort(c.listen())
	ip := listen.Addr()
	f.If(err != nil, "gossip.Config.Listen is %q; it must be an IP address and a port, like 127.0.0.1:0", c.Listen)
	f.If(ip.Zone() != "", "gossip.Config.Listen is %q; it must be without a zone, which other hosts do not know", c.Listen)
	f.If(ip.IsUnspecified(), "gossip.Config.Listen is %q; it must be the one address at which others reach this host", c.Listen)
	f.If(err == nil && !ip.IsLoopback() && !ip.IsUnspecified() && !key, "gossip.Config.Listen is %q; it must be a loopback address, or SecretKey be set", c.Listen)
	members := c.Members >= 2 && c.Members <= MaxMembers
	f.If(!members, "gossip.Config.Members is %d; it must be 2 to %d", c.Members, MaxMembers)
	f.If(members && c.times().Interval < timing.MinInterval, "gossip.Config.Detect is %v; with Members %d it must be at least %v, for probes every %v",
		c.Detect, c.Members, timing.MinGossip(c.Members), timing.MinInterval)
	return f.Err()
}

// BesideOf returns the Listen of a member whose process listens at an address already: any port of
// the same IP address, and the default for an address without one.
func BesideOf(addr string) string {
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return ""
	}
	return netip.AddrPortFrom(a.Addr(), 0).String()
}

// library returns the library's configuration, without delegates, transport
// and logger.
func (c Config) library() *memberlist.Config {
	t := c.times()
	m := memberlist.DefaultLANConfig()
	m.Name = c.Self.Name()
	m.Label = c.Job
	m.SecretKey = c.SecretKey
	m.BindPort = 0
	m.TCPTimeout = c.Detect
	m.ProbeInterval = t.Interval
	m.ProbeTimeout = t.Probe
	m.AwarenessMaxMultiplier = 2
	m.SuspicionMult = t.Refute
	m.SuspicionMaxTimeoutMult = 1 // the budget has no room to wait for others to agree
	m.GossipInterval = t.Probe
	m.RetransmitMult = 8             // with 4, one member in fifty does not hear a piece of news (e^-4)
	m.GossipToTheDeadTime = t.Dead   // a frozen member hears what was said of it
	m.PushPullInterval = t.FullState // repairs what lost packets left out
	m.EnableCompression = false      // packets are small, and this package reads them
	if addr := netip.MustParseAddrPort(c.listen()).Addr(); addr.IsLoopback() {
		m.CIDRsAllowed = []net.IPNet{
			{IP: net.IPv4(127, 0, 0, 0).To4(), Mask: net.CIDRMask(8, 32)},
			{IP: net.IPv6loopback, Mask: net.CIDRMask(128, 128)},
		}
	}
	return m
}

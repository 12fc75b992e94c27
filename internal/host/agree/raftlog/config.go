package raftlog

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/net/auth"
)

// Config says how to open a [Node].
type Config struct {
	// Dir is the node's own directory, made if it is not there. Nothing else
	// lies in it.
	Dir string
	// Host names the host, uniquely in the run and without "#". [agree.HostOf] finds it in the ID of the node's server.
	Host string

	// Listener is where other nodes reach this one; the node closes it.
	Listener net.Listener
	// Advertise is the address for others; "" means the listener's.
	Advertise string
	// Resolve returns where a server is now, "" where it does not know and the
	// address in the configuration counts; nil knows none. It is called by
	// several goroutines.
	Resolve func(id string) string
	// TLS authenticates both ends of a connection, and encrypts. It may be nil only where the listener is on the loopback
	// interface.
	TLS *tls.Config
	// Rejected counts the connections that were cut off before raft saw them; nil counts none.
	Rejected *auth.Tally
	// memory, for tests, is the network instead of Listener.
	memory interface {
		join(id string, timeout time.Duration) rpcTransport
		leave(id string)
	}

	// Join begins a log where Dir is empty or missing, as a new server that waits until the leader adds it.
	Join bool

	// Timeout is [timing.Policy].Log: by [timing.LogOf] it determines how fast a silent leader is replaced, which must take
	// well longer than the nodes wait for a CPU and for the disk.
	Timeout time.Duration

	// Logger takes what raft logs, one level lower than raft does; nil is nowhere.
	Logger *slog.Logger

	// Apply is told of each accepted entry, in order, with the state after it;
	// nil tells none. The entry is nil where the state came from a snapshot and is to
	// replace all that was heard before, which Open can do before it returns.
	// All that is in the log above the snapshot is told again at each start.
	Apply func(agree.Entry, agree.State)
}

// maxHost leaves room for what [agree.NewServerID] adds.
const maxHost = agree.MaxName - 32

// Validate reports all faults together, one a line.
func (c Config) Validate() error {
	var errs faults.List
	errs.If(c.Dir == "", "agree: Dir is empty: name the node's directory")
	errs.If(c.Host == "" || len(c.Host) > maxHost, "agree: Host has %d bytes: give 1 to %d", len(c.Host), maxHost)
	errs.If(agree.HostOf(c.Host) != c.Host, "agree: Host %q contains #: leave it out", c.Host)
	errs.If(c.Timeout < timing.Min, "agree: Timeout is %v: give at least %v", c.Timeout, timing.Min)
	errs.If((c.memory != nil) == (c.Listener != nil), "agree: Listener is nil or not the only network: give one")
	if c.Listener != nil {
		ip := net.IPv6unspecified
		a, ok := c.Listener.Addr().(*net.TCPAddr)
		errs.If(!ok, "agree: Listener is on %s: give one on TCP", c.Listener.Addr().Network())
		if ok && a.IP != nil {
			ip = a.IP
		}
		errs.If(!ip.IsLoopback() && c.TLS == nil, "agree: Listener %v is not on the loopback interface: give TLS", c.Listener.Addr())
		errs.If(ip.IsUnspecified() && c.Advertise == "", "agree: Listener %v has no address that others can dial: give Advertise", c.Listener.Addr())
	}
	return errs.Err()
}

// validateServers checks the servers of a new run.
func (c Config) validateServers(all []agree.Server) error {
	var errs faults.List
	errs.If(c.Join, "agree: Join is set for a new run: leave it out")
	errs.If(len(all) > agree.MaxServers, "agree: the run has %d servers: give at most %d", len(all), agree.MaxServers)
	voters, self := 0, false
	for i, s := range all {
		if s.Voter {
			voters++
		}
		self = self || s.ID == c.Host
		if err := validate(s); err != nil {
			errs.Add(fmt.Errorf("agree: servers[%d]: %w", i, err))
		}
		errs.If(slices.ContainsFunc(all[:i], func(o agree.Server) bool { return o.ID == s.ID }), "agree: servers[%d]: ID %q is there twice: give each server its own", i, s.ID)
		errs.If(s.Addr == "" && len(all) > 1 && c.memory == nil, "agree: servers[%d]: Addr is empty: give the address of %s", i, s.ID)
	}
	errs.If(voters == 0, "agree: the servers of a new run have no voter: set Voter for one server, or three or five")
	errs.If(!self, "agree: the servers of a new run lack %s: list this host too", c.Host)
	return errs.Err()
}

func validate(s agree.Server) error {
	if s.ID == "" || len(s.ID) > agree.MaxName {
		return fmt.Errorf("ID has %d bytes: give 1 to %d", len(s.ID), agree.MaxName)
	}
	if len(s.Addr) > agree.MaxName {
		return fmt.Errorf("Addr has %d bytes: give at most %d", len(s.Addr), agree.MaxName)
	}
	return nil
}

// raft returns raft's settings. With T = [timing.Log].Election, a follower misses the leader after T to 3T, or after [Node.Miss]. A candidate
// gets no vote of nodes that do not miss the leader yet, and tries again after T to 2T, or later, see [backoff]. A leader that does not hear of a
// majority for a little less than T steps down.
func (c Config) raft() *raft.Config {
	r := raft.DefaultConfig()
	t := timing.LogOf(c.Timeout)
	r.HeartbeatTimeout = t.Election
	r.ElectionTimeout = t.Election
	r.LeaderLeaseTimeout = t.Election * 9 / 10
	r.CommitTimeout = t.Commit
	r.MaxAppendEntries = 16 // of up to 16 MiB each
	r.ShutdownOnRemove = false
	r.SnapshotThreshold = 512
	r.TrailingLogs = 128
	r.SnapshotInterval = timing.Snapshot
	r.NoLegacyTelemetry = true
	r.Logger = newLogger(c.Logger)
	return r
}

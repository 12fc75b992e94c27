package raftlog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
)

// Node is one agent's part in the agreement.
type Node struct {
	config  Config
	id      string // of its server
	machine *machine
	raft    *raft.Raft
	files   files
	net     network

	progress *progress

	leadership atomic.Pointer[agree.Leadership]
	changes    chan agree.Leadership
	observed   chan raft.Observation
	led        chan uint64   // terms in which this node has become ready
	spread     chan struct{} // see nudge
	missed     chan struct{} // see Miss
	quit       chan struct{} // ends watch
	watching   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	closing chan struct{}
	pending sync.WaitGroup // proposals and changes of the configuration
	err     error          // of Close
	done    chan struct{}  // Close has ended
}

var _ agree.Log = (*Node)(nil)

// Create begins the log of a new run with these servers, the same list on each of their hosts, and opens it. A run calls it once
// on each host; from then on it is for [Open], which a host without its log must not avoid. A server that is to join later is not in the list.
//
// A single voter leads at once, without an election to wait for. Where Create or Open fails it closes the listener as well.
func Create(c Config, servers []agree.Server) (*Node, error) {
	return orClose(c, func() (*Node, error) {
		if err := errors.Join(c.Validate(), c.validateServers(servers)); err != nil {
			return nil, err
		}
		return c.start(func(settings *raft.Config) (files, error) { return createFiles(c.Dir, c.Host, settings) }, servers)
	})
}

// Open opens a log, or with [Config.Join] begins one that waits until the leader adds it. Errors are [agree.NoLogError],
// [agree.DamagedError], [agree.ErrInUse], or of the disk.
func Open(c Config) (*Node, error) {
	return orClose(c, func() (*Node, error) {
		if err := c.Validate(); err != nil {
			return nil, err
		}
		return c.start(func(settings *raft.Config) (files, error) {
			f, err := openFiles(c.Dir, settings)
			if none := (*agree.NoLogError)(nil); c.Join && errors.As(err, &none) {
				return createFiles(c.Dir, agree.NewServerID(c.Host), settings)
			}
			return f, err
		}, nil)
	})
}

func orClose(c Config, open func() (*Node, error)) (*Node, error) {
	n, err := open()
	if err != nil && c.Listener != nil {
		_ = c.Listener.Close() // perhaps a second time
	}
	return n, err
}

// start starts a node over its files, which begin with servers unless these are nil.
func (c Config) start(open func(*raft.Config) (files, error), servers []agree.Server) (*Node, error) {
	n := &Node{
		config: c, machine: newMachine(c.Apply),
		changes: make(chan agree.Leadership, 1), observed: make(chan raft.Observation, 1),
		led: make(chan uint64), spread: make(chan struct{}, 1), missed: make(chan struct{}, 1), quit: make(chan struct{}),
		closing: make(chan struct{}), done: make(chan struct{}),
	}
	n.leadership.Store(&agree.Leadership{})
	if err := n.open(open, servers); err != nil {
		return nil, err
	}
	n.raft.RegisterObserver(raft.NewObserver(n.observed, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	}))
	n.watching.Go(n.watch)
	n.hasten()
	return n, nil
}

func (n *Node) open(open func(*raft.Config) (files, error), servers []agree.Server) (err error) {
	c := n.config
	settings := c.raft()
	if n.files, err = open(settings); err != nil {
		return err
	}
	n.files.setRoomAside(c.Dir)
	n.id = n.files.server
	settings.LocalID = raft.ServerID(n.id)
	if host := agree.HostOf(n.id); host != c.Host {
		return errors.Join(fmt.Errorf("agree: %s holds the log of %s, not of %s", c.Dir, host, c.Host), n.files.close())
	}
	n.net = c.network(settings)
	fail := func(err error) error {
		return errors.Join(fmt.Errorf("agree: %s: %w", c.Dir, err), n.net.close(), n.files.close())
	}
	if servers != nil {
		err = raft.BootstrapCluster(settings, n.files.log, n.files.log, n.files.snapshots, n.net, c.configuration(servers))
		if err != nil {
			return fail(err)
		}
	}
	n.progress = newProgress(n.net)
	if n.raft, err = raft.NewRaft(settings, n.machine, n.files.cache, votes{n.files.log, n.quit}, n.files.snapshots, n.progress); err != nil {
		return fail(err)
	}
	return nil
}

// hasten makes a single voter a candidate now: no other node could send it a
// heartbeat.
func (n *Node) hasten() {
	f := n.raft.GetConfiguration()
	if f.Error() != nil {
		return
	}
	self, others := false, 0
	for _, s := range f.Configuration().Servers {
		if s.Suffrage != raft.Voter {
			continue
		}
		if string(s.ID) == n.id {
			self = true
		} else {
			others++
		}
	}
	if self && others == 0 {
		n.Stand()
	}
}

// Stand implements [agree.Log]. A leader that is alive is deposed. A node that lacks a committed entry
// is not elected, and of two that stand together both may fail; raft's own timers go on in any case.
func (n *Node) Stand() {
	request := &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{
		ProtocolVersion: raft.ProtocolVersionMax,
		ID:              []byte(n.id),
		Addr:            n.net.EncodePeer(raft.ServerID(n.id), n.net.LocalAddr()),
	}}
	// If it fails, the node becomes a candidate when raft's timer says so.
	_ = n.net.TimeoutNow(raft.ServerID(n.id), n.net.LocalAddr(), request, new(raft.TimeoutNowResponse))
}

// Miss implements [agree.Log]. A follower asks for votes before it begins a term, and followers that hear the leader give none. Afterwards
// it has no leader itself, so the second of two followers that miss the leader is elected.
func (n *Node) Miss() {
	select {
	case n.missed <- struct{}{}:
	default:
	}
}

// network is a transport with what has to be closed. With pre-votes, who was cut off and comes
// back deposes no leader that the others hear.
type network struct {
	rpcTransport
	close func() error
}

type rpcTransport interface {
	raft.Transport
	raft.WithPreVote
}

func (c Config) network(settings *raft.Config) network {
	id := string(settings.LocalID)
	if c.memory != nil {
		return network{c.memory.join(id, c.Timeout), func() error { c.memory.leave(id); return nil }}
	}
	s := newStream(c, id)
	nc := &raft.NetworkTransportConfig{Stream: s, Timeout: c.Timeout, MaxPool: 2, Logger: settings.Logger}
	if c.Resolve != nil {
		nc.ServerAddressProvider = resolver{c.Resolve}
	}
	t := raft.NewNetworkTransportWithConfig(nc)
	return network{t, func() error {
		err := s.Close()
		t.CloseStreams()
		return errors.Join(err, t.Close())
	}}
}

// State returns what this node knows to be agreed.
func (n *Node) State() agree.State { return *n.machine.state.Load() }

// Term returns the newest term this node knows.
func (n *Node) Term() uint64 { return n.raft.CurrentTerm() }

// Leadership returns what Changes sent last.
func (n *Node) Leadership() agree.Leadership { return *n.leadership.Load() }

// Changes returns a channel with the newest leadership, each at most once: a
// slow reader misses those between. It is closed by Close, and is for one reader.
func (n *Node) Changes() <-chan agree.Leadership { return n.changes }

// watch publishes leadership. It is the only sender of changes.
func (n *Node) watch() {
	defer close(n.changes)
	var ready uint64 // term, if this node leads
	settings := n.raft.ReloadableConfig()
	backoff := newBackoff(settings.ElectionTimeout)
	due := time.NewTimer(backoff.wait())
	defer due.Stop()
	for {
		select {
		case <-n.quit:
			return
		case <-due.C:
			settings.ElectionTimeout = backoff.next()
			_ = n.raft.ReloadConfig(settings) // it only refuses what is too short
			due.Reset(backoff.wait())
			continue
		case up := <-n.raft.LeaderCh():
			ready = 0
			if up {
				n.begin(n.lead)
			}
		case ready = <-n.led:
		case <-n.observed:
		case <-n.missed:
			// raft checks at once whether it has heard the leader when its timeout becomes shorter. Both settings are valid.
			usual := settings.HeartbeatTimeout
			settings.HeartbeatTimeout = n.config.raft().LeaderLeaseTimeout
			_ = n.raft.ReloadConfig(settings)
			settings.HeartbeatTimeout = usual
			_ = n.raft.ReloadConfig(settings)
			continue
		case <-n.spread:
			if len(n.State().Servers) > 1 {
				n.begin(func() { n.raft.Barrier(0) })
			}
			continue
		}
		_, id := n.raft.LeaderWithID()
		l := agree.Leadership{Term: n.raft.CurrentTerm(), Leader: string(id)}
		l.Ready = l.Leader == n.id && l.Term == ready
		if l == *n.leadership.Load() {
			continue
		}
		n.leadership.Store(&l)
		n.progress.wake()
		if backoff.heard(l.Leader != "") {
			due.Reset(backoff.wait())
		}
		select {
		case <-n.changes:
		default:
		}
		n.changes <- l
	}
}

// lead commits the first entry of a leadership. When it is applied here, so is
// all before it.
func (n *Node) lead() {
	data, err := agree.Encode(agree.Leader{ID: n.id})
	if err != nil {
		return // not for an ID that is valid
	}
	f := n.raft.Apply(data, 0)
	if f.Error() != nil {
		return // the leadership is lost already, which watch is told as well
	}
	select {
	case n.led <- f.Response().(verdict).term:
	case <-n.quit:
	}
}

// Broken implements [agree.Log]: an entry is on the disks of a majority before it is committed.
func (n *Node) Broken() <-chan struct{} { return nil }

// Sync implements [agree.Log].
func (n *Node) Sync() error { return nil }

// nudge has watch add a barrier to the log. Followers learn that an entry is
// committed with the next one or by raft's own timer, which is late for a plan.
func (n *Node) nudge() {
	select {
	case n.spread <- struct{}{}:
	default:
	}
}

// begin runs f in a goroutine that Close waits for; false if the node is closed.
func (n *Node) begin(f func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.pending.Go(f)
	return true
}

// Propose implements [agree.Log].
func (n *Node) Propose(ctx context.Context, e agree.Entry) (uint64, error) {
	if e == nil {
		return 0, &agree.RefusedError{Entry: "nil", Class: agree.ErrInvalid, Why: "there is no entry"}
	}
	if _, ok := e.(agree.Servers); ok {
		return 0, &agree.RefusedError{Entry: e.String(), Class: agree.ErrInvalid, Why: "it follows from the configuration"}
	}
	data, err := agree.Encode(e)
	if err != nil {
		return 0, &agree.RefusedError{Entry: e.String(), Class: agree.ErrInvalid, Why: err.Error()}
	}
	index, err := n.await(ctx, func() (raft.IndexFuture, func() error) {
		f := n.raft.Apply(data, 0)
		return f, func() error { return f.Response().(verdict).err }
	})
	if _, ok := e.(agree.Plan); ok && err == nil {
		n.nudge()
	}
	return index, err
}

// await asks raft for something and waits for the answer, the end of the
// context or of the node.
func (n *Node) await(ctx context.Context, ask func() (raft.IndexFuture, func() error)) (uint64, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("agree: not proposed: %w", err)
	}
	var index uint64
	answer := make(chan error, 1)
	if !n.begin(func() {
		f, response := ask()
		err := f.Error()
		if err == nil {
			index, err = f.Index(), response()
		}
		answer <- err
	}) {
		return 0, agree.ErrClosed
	}
	select {
	case err := <-answer:
		return index, n.typed(err)
	case <-ctx.Done():
		return 0, fmt.Errorf("%w: %w", agree.ErrUncertain, ctx.Err())
	case <-n.closing:
		return 0, agree.ErrClosed
	}
}

// typed puts raft's errors in our terms.
func (n *Node) typed(err error) error {
	var refusal *agree.RefusedError
	switch {
	case err == nil, errors.As(err, &refusal):
		return err
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		_, id := n.raft.LeaderWithID()
		s, ok := n.State().Server(string(id))
		if !ok {
			s.ID = string(id)
		}
		return &agree.NotLeaderError{Leader: s}
	case errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, raft.ErrAbortedByRestore):
		return fmt.Errorf("%w: %w", agree.ErrUncertain, err)
	case errors.Is(err, raft.ErrRaftShutdown):
		return agree.ErrClosed
	}
	return fmt.Errorf("agree: %w", err)
}

// Close ends the node and joins its goroutines. Further calls wait for the first.
func (n *Node) Close() error {
	n.mu.Lock()
	first := !n.closed
	n.closed = true
	n.mu.Unlock()
	if !first {
		<-n.done
		return n.err
	}
	close(n.closing)
	close(n.quit)
	n.watching.Wait()
	// While raft runs it answers all that is asked, at the latest when it has lost
	// its majority. What is committed as it ends it does not always answer.
	settled := n.settle()
	ended := n.raft.Shutdown()
	err := n.net.close()
	err = errors.Join(err, ended.Error(), n.files.close())
	if !settled {
		n.settle()
	}
	n.err = err
	close(n.done)
	return err
}

// settle waits for what is pending, for the budget at most.
func (n *Node) settle() bool {
	idle := make(chan struct{})
	go func() {
		n.pending.Wait()
		close(idle)
	}()
	timer := time.NewTimer(n.config.Timeout)
	defer timer.Stop()
	select {
	case <-idle:
		return true
	case <-timer.C:
		return false
	}
}

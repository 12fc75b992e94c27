package raftlog

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/agree"
)

// Node is one agent's part in the agreement.
type Node struct {
	config  Config
	machine *machine
	raft    *raft.Raft
	files   files
	net     network

	leadership atomic.Pointer[agree.Leadership]
	changes    chan agree.Leadership
	observed   chan raft.Observation
	led        chan uint64   // terms in which this node has become ready
	spread     chan struct{} // see nudge
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

// Open starts a node. A single voter leads at once, without an election to wait
// for. Where Open fails it closes the listener as well.
func Open(c Config) (*Node, error) {
	n, err := start(c)
	if err != nil && c.Listener != nil {
		_ = c.Listener.Close() // perhaps a second time
	}
	return n, err
}

func start(c Config) (*Node, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	n := &Node{
		config: c, machine: newMachine(c.Apply),
		changes: make(chan agree.Leadership, 1), observed: make(chan raft.Observation, 1),
		led: make(chan uint64), spread: make(chan struct{}, 1), quit: make(chan struct{}),
		closing: make(chan struct{}), done: make(chan struct{}),
	}
	n.leadership.Store(&agree.Leadership{})
	if err := n.open(); err != nil {
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

func (n *Node) open() (err error) {
	c := n.config
	settings := c.raft()
	if n.files, err = openFiles(c.Dir, settings); err != nil {
		return err
	}
	n.net = c.network(settings)
	fail := func(err error) error {
		return errors.Join(fmt.Errorf("agree: %s: %w", c.Dir, err), n.net.close(), n.files.close())
	}
	held, err := raft.HasExistingState(n.files.log, n.files.log, n.files.snapshots)
	if err != nil {
		return fail(err)
	}
	want := configuration(c.bootstrap(n.net.LocalAddr()))
	switch {
	case held && c.Recover:
		again := &recovery{newMachine(nil), servers(want)}
		err = raft.RecoverCluster(settings, again, n.files.log, n.files.log, n.files.snapshots, n.net, want)
	case c.Recover:
		err = errors.New("there is no log to recover")
	case !held && len(c.Bootstrap) > 0:
		err = raft.BootstrapCluster(settings, n.files.log, n.files.log, n.files.snapshots, n.net, want)
	}
	if err != nil {
		return fail(err)
	}
	if n.raft, err = raft.NewRaft(settings, n.machine, n.files.cache, votes{n.files.log, n.quit}, n.files.snapshots, n.net); err != nil {
		return fail(err)
	}
	return nil
}

// bootstrap returns the servers of a new job with their addresses.
func (c Config) bootstrap(own raft.ServerAddress) []agree.Server {
	all := make([]agree.Server, len(c.Bootstrap))
	for i, s := range c.Bootstrap {
		switch {
		case c.memory != nil:
			s.Addr = s.ID
		case s.Addr == "":
			s.Addr = string(own)
		}
		all[i] = s
	}
	return all
}

// recovery gives the recovered snapshot its new servers.
type recovery struct {
	*machine
	servers []agree.Server
}

func (r *recovery) Snapshot() (raft.FSMSnapshot, error) {
	s := *r.state.Load()
	s.Servers = r.servers
	return snapshot{s}, nil
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
		if string(s.ID) == n.config.ID {
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
		ID:              []byte(n.config.ID),
		Addr:            n.net.EncodePeer(raft.ServerID(n.config.ID), n.net.LocalAddr()),
	}}
	// If it fails, the node becomes a candidate when raft's timer says so.
	_ = n.net.TimeoutNow(raft.ServerID(n.config.ID), n.net.LocalAddr(), request, new(raft.TimeoutNowResponse))
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
	if c.memory != nil {
		return network{c.memory.join(c.ID, c.Timeout), func() error { c.memory.leave(c.ID); return nil }}
	}
	s := newStream(c)
	t := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: s, Timeout: c.Timeout, MaxPool: 2, Logger: settings.Logger, ServerAddressProvider: resolver{c.Resolve},
	})
	return network{t, func() error {
		err := s.Close()
		t.CloseStreams()
		return errors.Join(err, t.Close())
	}}
}

type resolver struct{ resolve func(id string) string }

var errUnresolved = errors.New("not known")

// ServerAddr implements raft.ServerAddressProvider; raft takes the address in
// the configuration after an error.
func (r resolver) ServerAddr(id raft.ServerID) (raft.ServerAddress, error) {
	if r.resolve != nil {
		if addr := r.resolve(string(id)); addr != "" {
			return raft.ServerAddress(addr), nil
		}
	}
	return "", errUnresolved
}

// files are what a node keeps in its directory: log.db and snapshots/.
type files struct {
	log       *raftboltdb.BoltStore
	cache     raft.LogStore // in front of log, with the newest entries in memory
	snapshots raft.SnapshotStore
}

func openFiles(dir string, settings *raft.Config) (files, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return files{}, fmt.Errorf("agree: %w", err)
	}
	log, err := raftboltdb.New(raftboltdb.Options{
		Path: filepath.Join(dir, "log.db"),
		// The free list is found again at start, which keeps it out of every commit.
		BoltOptions: &bbolt.Options{Timeout: timing.Lock, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType},
	})
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return files{}, fmt.Errorf("%w: %s", agree.ErrInUse, dir)
	}
	if err != nil {
		return files{}, fmt.Errorf("agree: %s: %w", filepath.Join(dir, "log.db"), err)
	}
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(dir, 2, settings.Logger)
	if err != nil {
		return files{}, errors.Join(fmt.Errorf("agree: %w", err), log.Close())
	}
	f := files{log: log, snapshots: snapshots}
	if f.cache, err = raft.NewLogCache(settings.MaxAppendEntries, log); err != nil {
		return files{}, errors.Join(err, f.close())
	}
	return f, nil
}

func (f files) close() error { return f.log.Close() }

// votes keeps the term and the vote of a node. They must be on disk before the node continues, and raft panics where they cannot be
// written: on a full disk the node waits. If it is closed meanwhile, the goroutine that waits ends.
type votes struct {
	raft.StableStore
	quit <-chan struct{}
}

func (v votes) Set(key, value []byte) error {
	return v.whenThereIsRoom(func() error { return v.StableStore.Set(key, value) })
}

func (v votes) SetUint64(key []byte, value uint64) error {
	return v.whenThereIsRoom(func() error { return v.StableStore.SetUint64(key, value) })
}

func (v votes) whenThereIsRoom(write func() error) error {
	for {
		err := write()
		if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
			return err
		}
		select {
		case <-time.After(timing.Disk):
		case <-v.quit:
			runtime.Goexit()
		}
	}
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
	for {
		select {
		case <-n.quit:
			return
		case up := <-n.raft.LeaderCh():
			ready = 0
			if up {
				n.begin(n.lead)
			}
		case ready = <-n.led:
		case <-n.observed:
		case <-n.spread:
			if len(n.State().Servers) > 1 {
				n.begin(func() { n.raft.Barrier(0) })
			}
			continue
		}
		_, id := n.raft.LeaderWithID()
		l := agree.Leadership{Term: n.raft.CurrentTerm(), Leader: string(id)}
		l.Ready = l.Leader == n.config.ID && l.Term == ready
		if l == *n.leadership.Load() {
			continue
		}
		n.leadership.Store(&l)
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
	data, err := agree.Encode(agree.Leader{ID: n.config.ID})
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

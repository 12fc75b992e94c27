package gossip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/soliton-train/soliton/internal/id"
)

var (
	// ErrClosed is the error for what a closed ring cannot do any more.
	ErrClosed = errors.New("ring: closed")

	// ErrNoMember is the class of errors of a Join that reached no member of
	// the ring: nobody is there, or it has another job or key.
	ErrNoMember = errors.New("ring: no member answered")
)

// maxQueued bounds the events nobody has taken yet.
const maxQueued = 1024

// Ring is a member of the gossip ring. Its methods may be called from any
// goroutine.
type Ring struct {
	config Config // with defaults
	name   string // of our life
	reader reader
	list   *memberlist.Memberlist

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	events chan Event
	queued chan struct{} // holds one token if queue or dropped may not be empty
	news   chan struct{} // holds one token if self may be newer than what we have told

	leaving sync.Mutex // held while list leaves or is shut down; before mu

	mu      sync.Mutex
	closed  bool
	self    Identity
	members map[string]*entry // by key: the newest life of each, ourselves included
	queue   []Event
	dropped int
}

// An entry is a member with what helps to judge further claims about it. The
// numbers are the library's incarnations.
type entry struct {
	Member
	heard     uint32 // newest with which it was said to be alive
	suspected uint32 // that of the suspicion
	goodbye   bool   // it says that it goes
	accuser   string // who says that it is dead, or suspects it
}

// Open makes a ring of one member, which others can join.
func Open(c Config) (*Ring, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c = c.withDefaults()
	n, err := listen(netip.MustParseAddrPort(c.Listen), libraryLogger(c.Logger))
	if err != nil {
		return nil, err
	}
	return open(c, n)
}

// open makes a ring over a transport, and closes that if it cannot.
func open(c Config, inside memberlist.NodeAwareTransport) (*Ring, error) {
	c = c.withDefaults()
	c.SecretKey = slices.Clone(c.SecretKey)
	r := &Ring{
		config: c, name: c.Self.Name(), self: c.Self,
		events: make(chan Event), queued: make(chan struct{}, 1), news: make(chan struct{}, 1),
		members: make(map[string]*entry),
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	var err error
	if r.reader, err = newReader(c.SecretKey); err != nil {
		return nil, errors.Join(fmt.Errorf("ring: %w", err), inside.Shutdown())
	}
	w := newWatch(inside,
		func(packet []byte) { r.reader.claims(packet, r.sent) },
		func(packet []byte) { r.reader.claims(packet, r.received) })
	m := c.library()
	m.Transport = w
	m.Logger = libraryLogger(c.Logger)
	m.Delegate, m.Events, m.Alive = hooks{r}, hooks{r}, hooks{r}
	if r.list, err = memberlist.Create(m); err != nil {
		return nil, errors.Join(fmt.Errorf("ring: %w", err), w.Shutdown())
	}
	r.tasks.Go(r.deliver)
	r.tasks.Go(r.tell)
	return r, nil
}

// Addr is our address in the ring, for others to join.
func (r *Ring) Addr() string { return r.list.LocalNode().Address() }

// Join makes one ring of ours and those of the given members. One that answers
// is enough; if none does the error is an [ErrNoMember]. It takes Config.Detect at
// most for each address. Joining again does no harm.
func (r *Ring) Join(ctx context.Context, addrs ...string) error {
	var faults []string
	joined := len(addrs) == 0
	for _, addr := range addrs {
		found, err := resolve(ctx, addr)
		if err == nil {
			err = r.await(ctx, func() error { return first(r.list.Join(found)) })
		}
		if err != nil && (ctx.Err() != nil || errors.Is(err, ErrClosed)) {
			return err
		}
		if err != nil {
			faults = append(faults, err.Error())
		}
		joined = joined || err == nil
	}
	if !joined {
		return fmt.Errorf("%w: %s", ErrNoMember, strings.Join(faults, "; "))
	}
	return nil
}

// resolve returns the addresses of a host and port.
func resolve(ctx context.Context, addr string) ([]string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	ips, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return nil, err
	}
	for i, ip := range ips {
		ips[i] = net.JoinHostPort(ip, port)
	}
	return ips, nil
}

// first makes one line of the library's list of errors.
func first(_ int, err error) error {
	if one := errors.Unwrap(err); one != nil {
		return one
	}
	return err
}

// await runs f, which ends in bounded time, and waits for it, the context or
// Close.
func (r *Ring) await(ctx context.Context, f func() error) error {
	ended := make(chan error, 1)
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return ErrClosed
	}
	r.tasks.Go(func() { ended <- f() })
	r.mu.Unlock()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.ctx.Done():
		return ErrClosed
	}
}

// SetPlan tells the others, soon, that we have applied a plan. A version that is not
// newer than the last one is left out.
func (r *Ring) SetPlan(v id.Version) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v.Compare(r.self.Plan) <= 0 {
		return
	}
	r.self.Plan = v
	token(r.news)
}

// Members returns the newest life of everyone the ring has heard of, with
// ourselves, agents before workers. Who is dead or has left stays until its place is
// needed.
func (r *Ring) Members() []Member {
	r.mu.Lock()
	all := make([]Member, 0, len(r.members))
	for _, e := range r.members {
		all = append(all, e.Member)
	}
	r.mu.Unlock()
	order(all)
	return all
}

// Events is the channel of all events about others, in the order in which they
// were learnt. Close closes it. Nothing waits for its reader: of events that are not
// taken some are dropped, which a [Missed] tells.
func (r *Ring) Events() <-chan Event { return r.events }

// Leave says goodbye, and returns when the others have been told or
// Config.Detect is over. After it, only Close makes sense.
func (r *Ring) Leave(ctx context.Context) error {
	return r.await(ctx, func() error {
		r.leaving.Lock()
		defer r.leaving.Unlock()
		if r.ctx.Err() != nil {
			return ErrClosed
		}
		if err := r.list.Leave(r.config.Detect); err != nil {
			return fmt.Errorf("ring: %w", err)
		}
		return nil
	})
}

// Close ends our membership without a word, as a crash does, and joins all
// goroutines but a probe of the library that is under way, which ends at its timeout and
// tells nobody. If a Leave is under way it waits for that.
func (r *Ring) Close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.leaving.Lock()
	if err := r.list.Shutdown(); err != nil {
		r.config.Logger.Warn("ring does not shut down", "error", err)
	}
	r.leaving.Unlock()
	r.tasks.Wait()
}

// tell hands our metadata to the library when they have changed: with the next round of gossip, so that what is
// news while a recovery goes on takes none of its time.
func (r *Ring) tell() {
	for {
		select {
		case <-r.news:
		case <-r.ctx.Done():
			return
		}
		select {
		case <-time.After(r.config.times().Probe):
		case <-r.ctx.Done():
			return
		}
		// The library queues the news at once and then waits until they were sent often
		// enough. The wait, which may fail, is only so that they
		// come no faster than they can be sent.
		_ = r.list.UpdateNode(r.config.times().Probe)
	}
}

// deliver hands over the events.
func (r *Ring) deliver() {
	defer close(r.events)
	for {
		select {
		case <-r.queued:
		case <-r.ctx.Done():
			return
		}
		r.mu.Lock()
		batch, dropped := r.queue, r.dropped
		r.queue, r.dropped = nil, 0
		r.mu.Unlock()
		if dropped > 0 {
			batch = append(batch, Event{Kind: Missed, Time: time.Now(), Dropped: dropped})
		}
		for _, e := range batch {
			select {
			case r.events <- e:
			case <-r.ctx.Done():
				return
			}
		}
	}
}

// emit queues an event. The caller holds mu.
func (r *Ring) emit(kind EventKind, e *entry, by string) {
	if e.Name() == r.name {
		return
	}
	if len(r.queue) < maxQueued {
		r.queue = append(r.queue, Event{Kind: kind, Member: e.Member, By: by, Time: time.Now()})
	} else {
		r.dropped++
	}
	token(r.queued)
}

func token(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// enter changes a member's state. The caller holds mu.
func (e *entry) enter(s State) {
	if e.State != s {
		e.State, e.Since = s, time.Now()
	}
}

// find returns the entry of the life with that name, or nil if it is unknown, older than the
// newest, or the ring closed. The caller holds mu.
func (r *Ring) find(name string) *entry {
	if e := r.members[lives(name)]; e != nil && e.Name() == name && !r.closed {
		return e
	}
	return nil
}

// admit judges a claim to be alive.
func (r *Ring) admit(name string, meta []byte) error {
	id, err := decodeIdentity(meta)
	if err != nil {
		return err
	}
	if id.Name() != name {
		return fmt.Errorf("its metadata are those of %s", id.Name())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e := r.members[id.key()]; {
	case e != nil && e.Incarnation > id.Incarnation:
		return fmt.Errorf("there is %s", e.Name())
	case e == nil && len(r.members) >= MaxMembers && r.oldestGone() == "":
		return fmt.Errorf("there are %d members", MaxMembers)
	}
	return nil
}

// oldestGone returns the key of the member that has been gone for longest, ""
// if there is none. The caller holds mu.
func (r *Ring) oldestGone() string {
	oldest := ""
	for key, e := range r.members {
		if e.State.Gone() && (oldest == "" || e.Since.Before(r.members[oldest].Since)) {
			oldest = key
		}
	}
	return oldest
}

// joined takes a member that is alive and was not before.
func (r *Ring) joined(n *memberlist.Node) {
	id, err := decodeIdentity(n.Meta)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.members[id.key()]
	if r.closed || old != nil && old.Incarnation > id.Incarnation {
		return
	}
	if old == nil && len(r.members) >= MaxMembers {
		delete(r.members, r.oldestGone())
	}
	e := &entry{Member: Member{Identity: id, Gossip: n.Address(), Since: time.Now()}}
	r.members[id.key()] = e
	r.emit(Joined, e, "")
}

// changed takes other metadata of a member.
func (r *Ring) changed(n *memberlist.Node) {
	id, err := decodeIdentity(n.Meta)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.find(n.Name)
	if e == nil {
		return
	}
	e.Identity = id
	e.enter(StateAlive)
	e.goodbye, e.accuser = false, ""
	r.emit(Changed, e, "")
}

// gone takes a member's end. The library does not say which, but there are only
// four ways to it: a packet with the member's goodbye, a packet with a death,
// the end of the time for a suspicion of our own, and else the goodbye came with an
// exchange of all states, since in that a death counts as a suspicion.
func (r *Ring) gone(n *memberlist.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.find(n.Name)
	if e == nil {
		return
	}
	kind, state, by := Left, StateLeft, ""
	if !e.goodbye && (e.accuser != "" || e.State == StateSuspect) {
		kind, state, by = Dead, StateDead, e.accuser
		if by == "" {
			by = r.name
		}
	}
	e.enter(state)
	e.goodbye, e.accuser = false, ""
	r.emit(kind, e, by)
}

// sent sees the claims we pass on: those that the library has accepted.
func (r *Ring) sent(c claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.find(c.Node)
	if e == nil || c.Node == r.name {
		return
	}
	switch {
	case c.kind == aliveType:
		r.alive(e, c)
	case c.kind == suspectType && e.State == StateAlive && c.Incarnation >= e.heard:
		e.suspected = c.Incarnation
		e.enter(StateSuspect)
		r.emit(Suspected, e, c.From)
	}
}

// received sees the claims of others, before the library judges them. It may lose
// what it should pass on: its queue confuses messages of the same length at times.
func (r *Ring) received(c claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.find(c.Node)
	if e == nil || e.State.Gone() || c.Incarnation < e.heard {
		return
	}
	switch {
	case c.kind == aliveType:
		r.alive(e, c)
	case c.kind == deadType && c.From == c.Node:
		e.goodbye = true
	default:
		e.accuser = c.From
	}
}

// alive takes a member's word, newer than what others say. The caller holds mu.
func (r *Ring) alive(e *entry, c claim) {
	if c.Incarnation <= e.heard {
		return
	}
	e.heard = c.Incarnation
	e.goodbye, e.accuser = false, ""
	if e.State == StateSuspect && c.Incarnation > e.suspected {
		e.enter(StateAlive)
		r.emit(Refuted, e, "")
	}
}

// hooks are what the library calls. It holds its own lock meanwhile, so they
// must not call it.
type hooks struct{ r *Ring }

// NodeMeta implements [memberlist.Delegate].
func (h hooks) NodeMeta(int) []byte {
	h.r.mu.Lock()
	defer h.r.mu.Unlock()
	return h.r.self.encode()
}

// NotifyMsg implements [memberlist.Delegate]: this ring has no such messages, and none below.
func (hooks) NotifyMsg([]byte) {}

// GetBroadcasts implements [memberlist.Delegate].
func (hooks) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState implements [memberlist.Delegate].
func (hooks) LocalState(bool) []byte { return nil }

// MergeRemoteState implements [memberlist.Delegate].
func (hooks) MergeRemoteState([]byte, bool) {}

// NotifyAlive implements [memberlist.AliveDelegate].
func (h hooks) NotifyAlive(n *memberlist.Node) error { return h.r.admit(n.Name, n.Meta) }

// NotifyJoin implements [memberlist.EventDelegate].
func (h hooks) NotifyJoin(n *memberlist.Node) { h.r.joined(n) }

// NotifyUpdate implements [memberlist.EventDelegate].
func (h hooks) NotifyUpdate(n *memberlist.Node) { h.r.changed(n) }

// NotifyLeave implements [memberlist.EventDelegate].
func (h hooks) NotifyLeave(n *memberlist.Node) { h.r.gone(n) }

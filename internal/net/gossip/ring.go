package gossip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/soliton-train/soliton/internal/net/auth"
)

var (
	// ErrClosed is the error for what a closed ring cannot do any more.
	ErrClosed = errors.New("ring: closed")

	// ErrNoMember is the class of errors of a Join that reached no member of the ring: none answers, or all have another job or key.
	ErrNoMember = errors.New("ring: no member answered")
)

// Ring is a member of the gossip ring. Its methods may be called from any goroutine.
type Ring struct {
	config Config
	name   string // of our life
	list   *memberlist.Memberlist

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	tasks   sync.WaitGroup
	changed chan struct{}

	mu      sync.Mutex
	closed  bool
	members map[string]*entry // by key: the newest life of each, ourselves included
}

// An entry is a member with what helps to judge further claims about it. The numbers are the library's incarnations.
type entry struct {
	Member
	heard     uint32 // newest with which it was said to be alive
	suspected uint32 // that of the suspicion
	accuser   string // the member that said last that it is suspected or dead
}

// Open makes a ring of one member, which others can join.
func Open(c Config) (*Ring, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	n, err := listen(netip.MustParseAddrPort(c.listen()), c.Ports)
	if err != nil {
		return nil, err
	}
	return open(c, n)
}

// silent is the library's logger: what it has to say shows in Members.
func silent() *log.Logger { return log.New(io.Discard, "", 0) }

// open makes a ring over a transport, and closes that if it cannot.
func open(c Config, inside memberlist.NodeAwareTransport) (*Ring, error) {
	c.SecretKey = slices.Clone(c.SecretKey)
	r := &Ring{config: c, name: c.Self.Name(), changed: make(chan struct{}, 1), members: make(map[string]*entry)}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	reader, err := newReader(c.SecretKey)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ring: %w", err), inside.Shutdown())
	}
	w := newWatch(inside,
		func(packet []byte) { reader.claims(packet, r.sent) },
		func(packet []byte) {
			if !reader.claims(packet, r.received) {
				c.Rejected.Add(auth.NoSecret, 1)
			}
		},
		func(message []byte) bool { return reader.refusal(message, c.Job) }, c.Rejected)
	m := c.library()
	m.Transport = w
	m.Logger = silent()
	m.Delegate, m.Events, m.Alive = hooks{r}, hooks{r}, hooks{r}
	if r.list, err = memberlist.Create(m); err != nil {
		return nil, errors.Join(fmt.Errorf("ring: %w", err), w.Shutdown())
	}
	return r, nil
}

// Addr returns our address in the ring, for others to join.
func (r *Ring) Addr() string { return r.list.LocalNode().Address() }

// Join makes one ring of ours and those of the given members. If none answers, the error is [ErrNoMember]; one answer is enough. It
// takes Config.Detect at most for each address. Joining again has no effect.
func (r *Ring) Join(ctx context.Context, addrs ...string) error {
	var faults []string
	joined := len(addrs) == 0
	for _, addr := range addrs {
		err := r.join(ctx, addr)
		if err != nil && (ctx.Err() != nil || errors.Is(err, ErrClosed)) {
			return err
		}
		if err != nil {
			faults = append(faults, cmp.Or(errors.Unwrap(err), err).Error()) // one line of the library's list
		}
		joined = joined || err == nil
	}
	if !joined {
		return fmt.Errorf("%w: %s", ErrNoMember, strings.Join(faults, "; "))
	}
	return nil
}

func (r *Ring) join(ctx context.Context, addr string) error {
	ended := make(chan error, 1)
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return ErrClosed
	}
	r.tasks.Go(func() {
		_, err := r.list.Join([]string{addr})
		ended <- err
	})
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

// Members returns the newest life of every member the ring has heard of, with ourselves, agents before workers. A dead member stays
// until its place is needed.
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

// Changed returns a channel that holds a value when Members may have changed since one was taken from it.
func (r *Ring) Changed() <-chan struct{} { return r.changed }

// Close ends our membership without a word, as a crash does, and joins all goroutines but a probe of the library that is under way,
// which ends at its timeout and no longer reaches the ring.
func (r *Ring) Close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	_ = r.list.Shutdown() // it cannot fail: the transport's Shutdown does not
	r.tasks.Wait()
}

// enter changes what is believed of a member. The caller holds mu.
func (r *Ring) enter(e *entry, s State, by string) {
	if e.State != s {
		e.State, e.Since = s, time.Now()
	}
	e.By = by
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// find returns the entry of the life with that name, or nil if it is unknown, older than the newest, or the ring closed. The caller
// holds mu.
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
	case e == nil && len(r.members) >= MaxMembers && r.oldestDead() == "":
		return fmt.Errorf("there are %d members", MaxMembers)
	}
	return nil
}

// oldestDead returns the key of the member that has been dead for longest, "" if none is. The caller holds mu.
func (r *Ring) oldestDead() string {
	oldest := ""
	for key, e := range r.members {
		if e.State == StateDead && (oldest == "" || e.Since.Before(r.members[oldest].Since)) {
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
		delete(r.members, r.oldestDead())
	}
	e := &entry{Member: Member{Identity: id, Since: time.Now()}}
	r.members[id.key()] = e
	r.enter(e, StateAlive, "")
}

// died takes a member's death: from a packet, which has been read as a claim, or at the end of the time for a suspicion of our own.
func (r *Ring) died(n *memberlist.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.find(n.Name); e != nil {
		r.enter(e, StateDead, cmp.Or(e.accuser, r.name))
		e.accuser = ""
	}
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
		r.enter(e, StateSuspect, c.From)
	}
}

// received sees the claims of others, before the library judges them. The library may fail to pass one on: its queue confuses
// messages of the same length at times.
func (r *Ring) received(c claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.find(c.Node)
	if e == nil || e.State == StateDead || c.Incarnation < e.heard {
		return
	}
	if c.kind == aliveType {
		r.alive(e, c)
	} else {
		e.accuser = c.From
	}
}

// alive takes a member's own claim, which counts more than older ones of others. The caller holds mu.
func (r *Ring) alive(e *entry, c claim) {
	if c.Incarnation <= e.heard {
		return
	}
	e.heard = c.Incarnation
	e.accuser = ""
	if e.State == StateSuspect && c.Incarnation > e.suspected {
		r.enter(e, StateAlive, "")
	}
}

// hooks are what the library calls. It holds its own lock meanwhile, so they must not call it.
type hooks struct{ r *Ring }

// NodeMeta implements [memberlist.Delegate].
func (h hooks) NodeMeta(int) []byte { return h.r.config.Self.encode() }

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

// NotifyUpdate implements [memberlist.EventDelegate]: the metadata of a life do not change.
func (hooks) NotifyUpdate(*memberlist.Node) {}

// NotifyLeave implements [memberlist.EventDelegate].
func (h hooks) NotifyLeave(n *memberlist.Node) { h.r.died(n) }

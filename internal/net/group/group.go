package group

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/line"
	"github.com/soliton-train/soliton/internal/timing"
)

// Group is an ordered list of members and a plan version over an endpoint's links. Operations run under the version they name, and
// fail with [comm.ErrVersion] when it is not the group's, or is replaced while they run. A version also ends when one of its
// operations fails on any member or a link between two of its members is lost, of which the others hear 50 ms later; from then on
// all its operations fail, until [Group.Edit].
type Group struct {
	e       *comm.Endpoint
	scope   *comm.Scope
	number  uint16
	scratch sync.Pool // of *[]float32, a segment each, for sums that arrive

	operations sync.Pool // of *operation, that have ended

	// Under the scope's lock.
	now    *edition // nil before the first Edit
	closed bool
}

// edition is one version of a group.
type edition struct {
	g       *Group
	version id.Version
	members []id.Session
	rank    int // ours
	abort   *comm.Receiving
	notice  []byte // that arrives through abort
	trees   treePlans
	near    bool  // all members are on our host
	place   Place // of the members; zero before the first operation that could use lines

	neighbours *neighbours // of such; nil before the first operation that uses them

	hub   *line.Hub    // of the lines; nil where there are none, and before the first operation that could use them
	lines []*line.Line // by rank; nil before that operation

	ended  chan struct{}
	notify *time.Timer // tells the others of a lost link; nil if none is lost
	// Set before ended is closed.
	err     error
	culprit int
	remote  bool
}

// New returns the group with this number, which is the same on all members, without members yet.
func New(e *comm.Endpoint, number uint16) (*Group, error) {
	g := &Group{e: e, number: number}
	var err error
	g.scope, err = comm.NewScope(e, number, g.lost)
	return g, err
}

// Version returns the present version, and whether operations can run on it.
func (g *Group) Version() (v id.Version, ok bool) {
	g.scope.Lock()
	defer g.scope.Unlock()
	if g.now == nil {
		return id.Version{}, false
	}
	return g.now.version, !comm.Closed(g.now.ended)
}

// Members returns the members in rank order, and our rank; nothing before the first Edit.
func (g *Group) Members() (members []id.Session, rank int) {
	g.scope.Lock()
	defer g.scope.Unlock()
	if g.now == nil {
		return nil, -1
	}
	return slices.Clone(g.now.members), g.now.rank
}

// Ended returns a channel that is closed when the present version ends, or nil before the first Edit.
func (g *Group) Ended() <-chan struct{} {
	g.scope.Lock()
	defer g.scope.Unlock()
	if g.now == nil {
		return nil
	}
	return g.now.ended
}

// Edit begins the next version with these members. We must be a member, and the endpoint must admit all others. Operations under
// earlier versions end with [comm.ErrVersion], and their messages on the way are dropped. Existing links are kept; missing ones are
// made, and when all are up, Edit returns how many are new, counted as [comm.Endpoint.Connect] does. When it ends with ctx before,
// the version is in force all the same: its operations wait for the links.
//
// A link between two members may have been lost before the edit while one of them notices it only afterwards. Messages of the new
// version may be lost with it, so that ends the new version, too; it takes one more Edit. Links with others do not matter.
func (g *Group) Edit(ctx context.Context, v id.Version, members []id.Session) (opened int, err error) {
	g.scope.Lock()
	ed, err := g.edit(v, members)
	g.scope.Unlock()
	if err == nil {
		opened, err = g.scope.Connect(ctx, ed.ended, members)
		if errors.Is(err, comm.ErrVersion) {
			err = ed.err
		}
	}
	if err != nil {
		return opened, &Error{Group: uint32(g.number), Version: v, Op: OpEdit, Rank: -1, Err: err}
	}
	return opened, nil
}

func (g *Group) edit(v id.Version, members []id.Session) (*edition, error) {
	self := g.e.Self()
	rank := slices.Index(members, self)
	switch {
	case g.closed || g.scope.Closed():
		return nil, comm.ErrClosed
	case v == id.Version{} || g.now != nil && v.Compare(g.now.version) <= 0:
		return nil, fmt.Errorf("%w: %v does not follow the present one", comm.ErrVersion, v)
	case rank < 0:
		return nil, fmt.Errorf("%w: worker %v is not among the members", comm.ErrNotMember, self)
	}
	for i, s := range members {
		if slices.Contains(members[:i], s) {
			return nil, fmt.Errorf("%w: worker %v is listed twice", comm.ErrUsage, s)
		}
		if s == self {
			continue
		}
		if err := g.scope.Admitted(s); err != nil {
			return nil, fmt.Errorf("%w: worker %v", err, s)
		}
	}
	g.leave(comm.ErrVersion)
	g.scope.Begin(v)
	ed := &edition{g: g, version: v, members: slices.Clone(members), rank: rank, ended: make(chan struct{}), notice: make([]byte, noticeSize)}
	ed.near = g.scope.Near(members)
	g.now = ed
	var err error
	ed.abort, err = g.scope.Expect(comm.AbortKey(g.number, v), ed.notice, ed.noticed)
	return ed, err
}

// Close ends the group; its operations fail with [comm.ErrClosed].
func (g *Group) Close() error {
	g.scope.Lock()
	defer g.scope.Unlock()
	g.leave(comm.ErrClosed)
	if !g.closed {
		g.closed = true
		g.scope.Begin(id.Version{Generation: math.MaxInt, N: math.MaxInt})
		g.scope.Close()
	}
	return nil
}

// leave leaves the present version for a reason of our own.
func (g *Group) leave(err error) {
	if g.now == nil {
		return
	}
	g.now.end(err, -1, false)
	if g.now.notify != nil {
		g.now.notify.Stop()
	}
}

// lost ends the present version if the session is a member, or the endpoint is closed.
func (g *Group) lost(s id.Session, err error) {
	if g.now == nil {
		return
	}
	if errors.Is(err, comm.ErrClosed) {
		g.leave(err)
	} else if rank := slices.Index(g.now.members, s); rank >= 0 {
		g.now.lost(err, rank)
	}
}

// lost ends the version because of a link. Where the member at its other end has died, the others find out by themselves, and have the next version
// before they need to be told.
func (ed *edition) lost(err error, rank int) {
	if comm.Closed(ed.ended) {
		return
	}
	ed.end(err, rank, true)
	ed.notify = time.AfterFunc(timing.Notice, func() {
		ed.g.scope.Lock()
		defer ed.g.scope.Unlock()
		if ed.g.now == ed && !ed.g.closed && !ed.g.scope.Closed() {
			ed.tell(rank)
		}
	})
}

// end ends the version for us.
func (ed *edition) end(err error, rank int, remote bool) {
	if comm.Closed(ed.ended) {
		return
	}
	ed.err, ed.culprit, ed.remote = err, rank, remote
	close(ed.ended)
	ed.g.scope.Withdraw(ed.abort, err)
	if ed.neighbours != nil {
		ed.neighbours.end()
	}
	if ed.hub != nil {
		ed.hub.Ring()
	}
}

// noticeSize is the size of an abort: the rank where the operation failed, or -1.
const noticeSize = 8

// fail ends the version for us and tells the other members.
func (ed *edition) fail(err error, rank int, remote bool) {
	if comm.Closed(ed.ended) {
		return
	}
	ed.end(err, rank, remote)
	ed.tell(rank)
}

// tell tells the other members where the version has failed.
func (ed *edition) tell(rank int) {
	notice := binary.LittleEndian.AppendUint64(nil, uint64(int64(rank)))
	for _, s := range ed.members {
		ed.g.scope.Notify(s, comm.AbortKey(ed.g.number, ed.version), notice)
	}
}

// noticed ends the version because another member says so.
func (ed *edition) noticed() {
	ed.g.scope.Lock()
	defer ed.g.scope.Unlock()
	if ed.abort.Filled() == nil {
		rank := int(int64(binary.LittleEndian.Uint64(ed.notice)))
		if rank >= len(ed.members) || rank < 0 {
			rank = -1
		}
		ed.end(comm.ErrAborted, rank, true)
	}
}

package agree

import (
	"cmp"
	"slices"
)

// View is what the leader knows of the hosts.
type View struct {
	Leader   string // its server
	TieBreak string // the host that votes where there are only two; "" is the one that does
	Hosts    []HostView
}

// HostView is what the leader knows of a server, or of one that is to be added. A server without one is neither linked nor lost.
type HostView struct {
	Server   Server
	Linked   bool // the leader hears it
	CaughtUp bool // it has all of the log but the newest entries
	Lost     bool // it has been silent for so long that it is not waited for
	Leaves   bool // it is there, and is to vote no longer
}

// A Change is one step between two sets of servers. Any majority of the voters before it shares a voter with any after it.
type Change struct {
	Kind   ChangeKind
	Server Server
}

// A ChangeKind says what happens to the server.
type ChangeKind int

// The kinds of changes.
const (
	AddNonVoter ChangeKind = iota + 1 // it gets the log
	Promote                           // a non-voter votes
	Demote                            // a voter votes no longer, and still gets the log
	Remove
)

// String implements [fmt.Stringer].
func (k ChangeKind) String() string {
	return [...]string{"none", "add", "promote", "demote", "remove"}[k]
}

// NextChange returns the change of the servers that comes next, if any. One host votes alone, and of two the one that breaks ties; of
// three or four hosts three vote, of more five. A lost voter is replaced by a non-voter that has caught up. Once three have voted
// there are never fewer, so a lost host that returns forms no majority with another; but for those that leave, which know it. One that
// leaves votes until the voters that the leader hears are a majority without it, and a leader that leaves until another one leads.
//
// The number of voters is even only between two changes: where no more voters are lost it stays odd until two can follow each other.
func NextChange(servers []Server, v View) (Change, bool) {
	r := newRoll(servers, v)
	if 2*(len(r.voters)-len(r.lost)) <= len(r.voters) {
		return Change{}, false // no majority could commit it
	}
	if c, ok := r.changeVoters(v); ok {
		return c, true
	}
	for _, h := range r.hosts { // a host that is there gets the log
		if h.Linked && !h.known && !h.Leaves {
			h.Server.Voter = false
			return Change{AddNonVoter, h.Server}, true
		}
	}
	for _, h := range r.hosts {
		if h.known && !h.Server.Voter && (h.Lost || h.Leaves) {
			return Change{Remove, h.Server}, true
		}
	}
	return Change{}, false
}

// Successor returns the voter that is to lead when the leader leaves: one that stays, so that two that leave do not hand the lead to and fro.
// Where none is left to stay, it is "", for any. It reports false as long as a host that stays is yet to vote, or to link with this leader, which may
// just have been elected.
func Successor(servers []Server, v View) (id string, ok bool) {
	r := newRoll(servers, v)
	waits := false
	for _, h := range r.hosts {
		switch {
		case h.Server.ID == v.Leader || h.Lost || h.Leaves:
		case h.Linked && h.known && h.Server.Voter:
			if id == "" || HostOf(h.Server.ID) == v.TieBreak {
				id = h.Server.ID
			}
		default:
			waits = true
		}
	}
	return id, id != "" || !waits
}

// A roll is the servers, and the hosts that are to become some, each by what becomes of it. Lists are ordered by ID.
type roll struct {
	hosts  []standing
	voters []standing
	lost   []standing // voters that are lost
	heard  int        // voters that the leader hears, itself among them
	stay   int        // voters that are not lost, and do not leave
	ready  []standing // to vote
	want   int        // voters
}

type standing struct {
	HostView
	known bool // it is a server
}

func (h standing) heardBy(leader string) bool { return h.Server.ID == leader || h.Linked && !h.Lost }

func newRoll(servers []Server, v View) roll {
	var r roll
	for _, s := range servers {
		h := HostView{Server: s}
		if i := slices.IndexFunc(v.Hosts, func(h HostView) bool { return h.Server.ID == s.ID }); i >= 0 {
			h = v.Hosts[i]
			h.Server = s
		}
		// Where another server of the host is there, this one has lost its log.
		h.Lost = s.ID != v.Leader && (h.Lost && !h.Linked || slices.ContainsFunc(v.Hosts, func(o HostView) bool {
			return o.Linked && o.Server.ID != s.ID && HostOf(o.Server.ID) == HostOf(s.ID)
		}))
		r.hosts = append(r.hosts, standing{h, true})
	}
	for _, h := range v.Hosts {
		if h.Linked && !slices.ContainsFunc(servers, func(s Server) bool { return s.ID == h.Server.ID }) {
			h.Lost = false
			r.hosts = append(r.hosts, standing{h, false})
		}
	}
	slices.SortFunc(r.hosts, func(a, b standing) int { return cmp.Compare(a.Server.ID, b.Server.ID) })
	there := 0
	for _, h := range r.hosts {
		if !h.Lost && !h.Leaves {
			there++
			if h.known && h.Server.Voter {
				r.stay++
			}
		}
		if h.known && h.Server.Voter && h.heardBy(v.Leader) {
			r.heard++
		}
		switch {
		case h.known && h.Server.Voter && h.Lost:
			r.lost = append(r.lost, h)
			r.voters = append(r.voters, h)
		case h.known && h.Server.Voter:
			r.voters = append(r.voters, h)
		case h.known && h.Linked && h.CaughtUp && !h.Lost && !h.Leaves:
			r.ready = append(r.ready, h)
		}
	}
	switch {
	case there > 4:
		r.want = 5
	case there > 2 || r.stay+len(r.lost) > 2:
		r.want = 3
	default:
		r.want = 1
	}
	return r
}

func (r roll) changeVoters(v View) (Change, bool) {
	n, lost := len(r.voters), len(r.lost)
	promote := func(h standing) (Change, bool) { return Change{Promote, h.Server}, true }
	if lost > 0 && n > max(r.want, 3) {
		return Change{Remove, r.lost[0].Server}, true
	}
	if short := r.want - r.stay; short > 0 && len(r.ready) > 0 {
		if r.stay < n || n%2 == 0 || len(r.ready) > 1 {
			return promote(r.ready[0])
		}
	}
	if lost > 0 && n > 3 && n%2 == 0 {
		return Change{Remove, r.lost[0].Server}, true // a voter fewer, and as large a majority of those that are there
	}
	tie := func(h standing) bool { return HostOf(h.Server.ID) == v.TieBreak }
	least := r.least(v.Leader, tie)
	if n > r.want || least.Leaves {
		switch {
		case least.Leaves && least.Server.ID == v.Leader:
			return Change{}, false // until another one leads
		case !least.heardBy(v.Leader) || 2*(r.heard-1) > n-1:
			return Change{Demote, least.Server}, true
		case lost > 0:
			return Change{Remove, r.lost[0].Server}, true // those that stay have no majority with it
		default:
			return Change{}, false // until it is known whether a silent one is lost
		}
	}
	if i := slices.IndexFunc(r.ready, tie); r.want == 1 && n == 1 && i >= 0 && !tie(r.voters[0]) {
		return promote(r.ready[i])
	}
	return Change{}, false
}

// least returns the voter that is missed least: one that leaves, the leader last of those. Of two others it is not the one that breaks
// ties; else it is not the leader, one that the leader does not hear before others, and the last.
func (r roll) least(leader string, tie func(standing) bool) standing {
	all := slices.Clone(r.voters)
	rank := func(h standing) int {
		switch {
		case h.Leaves && h.Server.ID != leader:
			return -2
		case h.Leaves:
			return -1
		case len(all) == 2 && tie(h):
			return 3
		case h.Server.ID == leader:
			return 2
		case h.Linked:
			return 1
		}
		return 0
	}
	slices.Reverse(all)
	return slices.MinFunc(all, func(a, b standing) int { return cmp.Compare(rank(a), rank(b)) })
}

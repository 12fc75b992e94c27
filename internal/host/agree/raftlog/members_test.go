package raftlog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/hashicorp/raft"

	"github.com/soliton-train/soliton/internal/host/agree"
)

// voters waits until the leader's voters are these.
func (c *cluster) voters(want ...string) {
	c.t.Helper()
	slices.Sort(want)
	c.eventually(fmt.Sprintf("the voters %v", want), func() bool {
		var got []string
		for _, s := range c.leader().State().Servers {
			if s.Voter {
				got = append(got, s.ID)
			}
		}
		return slices.Equal(got, want)
	})
}

// follow makes the changes that follow from which hosts are there, until none is left.
func (c *cluster) follow(among ...string) {
	c.t.Helper()
	c.eventually("the servers follow the hosts", func() bool {
		lead := c.leader(among...)
		servers := lead.State().Servers
		v := agree.View{Leader: lead.id}
		for _, s := range servers {
			_, linked := c.nodes[s.ID]
			v.Hosts = append(v.Hosts, agree.HostView{Server: s, Linked: linked, Lost: !linked, CaughtUp: s.ID == lead.id || lead.CaughtUp(s.ID)})
		}
		behind := false
		for id := range c.nodes {
			i := slices.IndexFunc(v.Hosts, func(h agree.HostView) bool { return h.Server.ID == id })
			if i < 0 {
				v.Hosts = append(v.Hosts, agree.HostView{Server: agree.Server{ID: id, Addr: id}, Linked: true})
			}
			behind = behind || i < 0 || !v.Hosts[i].CaughtUp
		}
		next, ok := agree.NextChange(servers, v)
		if !ok {
			return !behind
		}
		change := map[agree.ChangeKind]func(context.Context, string) error{
			agree.AddNonVoter: func(ctx context.Context, _ string) error { return lead.AddNonVoter(ctx, next.Server) },
			agree.Promote:     lead.Promote, agree.Demote: lead.Demote, agree.Remove: lead.Remove,
		}[next.Kind]
		var moved *agree.NotLeaderError
		err := change(c.t.Context(), next.Server.ID)
		if err != nil && !errors.As(err, &moved) && !errors.Is(err, agree.ErrUncertain) && !errors.Is(err, agree.ErrStale) {
			c.t.Fatalf("%v %s: %v", next.Kind, next.Server.ID, err)
		}
		return false
	})
}

// Hosts are lost and replaced one after the other, until none of the first ones is left.
func TestVotersAreReplaced(t *testing.T) {
	for _, voters := range []int{3, 5} {
		t.Run(fmt.Sprint(voters), func(t *testing.T) {
			c := newCluster(t)
			first := c.start(voters)
			c.commit(agree.Generation{N: 1})
			var others []string
			plans := 0
			for i, id := range first {
				c.close(id)
				others = append(others, c.join(fmt.Sprint("host-", i)).id)
				c.follow()
				c.voters(append(slices.Clone(first[i+1:]), others...)...)
				c.plans(plans+1, plans+2)
				plans += 2
			}
			c.agreed(plans, others...)
			if got := c.leader().State().Servers; len(got) != voters {
				t.Errorf("servers %v, want %d", got, voters)
			}
		})
	}
}

// Five hosts are left one after the other. As three have voted, three stay voters.
func TestVotersAreNotFewerThanThree(t *testing.T) {
	c := newCluster(t)
	c.start(1)
	c.commit(agree.Generation{N: 1})
	ids := []string{"a"}
	for i, want := range []int{1, 3, 3, 5} {
		ids = append(ids, c.join(fmt.Sprint("host-", i)).id)
		c.follow()
		count := 0
		for _, s := range c.leader().State().Servers {
			if s.Voter {
				count++
			}
		}
		if count != want {
			t.Errorf("of %d hosts %d vote, want %d", len(ids), count, want)
		}
	}
	c.plans(1, 3)
	c.agreed(3, ids...)
	c.close(ids[1])
	c.close(ids[3])
	c.follow()
	c.voters(ids[0], ids[2], ids[4])
	c.close(ids[4])
	c.plans(4, 5)
	c.follow()
	c.voters(ids[0], ids[2], ids[4])
	c.agreed(5, ids[0], ids[2])
}

// A node that was removed and returns with its log disturbs none: it stands for no election, and is told nothing.
func TestRemovedNodeReturns(t *testing.T) {
	c := newCluster(t)
	c.start(3)
	c.commit(agree.Generation{N: 1})
	c.plans(1, 2)
	c.agreed(2, "a", "b", "c")
	c.close("c")
	d := c.join("d").id
	c.follow()
	c.voters("a", "b", d)

	config := c.config("c")
	config.Apply = nil // it may know of fewer plans than it has
	var asked atomic.Bool
	for id := range c.nodes {
		c.nodes[id].raft.RegisterObserver(raft.NewObserver(nil, false, func(o *raft.Observation) bool {
			if r, ok := o.Data.(raft.RequestPreVoteRequest); ok && string(r.ID) == "c" {
				asked.Store(true)
			}
			return false
		}))
	}
	old := c.open(config)
	// The leader may just be trying to reach it with the rest of the log, which then says so.
	knows := func() bool {
		return !slices.ContainsFunc(old.raft.GetConfiguration().Configuration().Servers, func(s raft.Server) bool { return s.ID == "c" })
	}
	c.eventually("it has missed the leader, or knows that it is removed", func() bool { return asked.Load() || knows() })
	c.plans(3, 6, "a", "b", d)
	old.Stand() // for an election at once, without a pre-vote
	c.plans(7, 9, "a", "b", d)
	c.agreed(9, "a", "b", d)
	if old.Leadership().Ready {
		t.Errorf("the removed node leads: %+v", old.Leadership())
	}
	c.follow() // it is added again
	c.eventually("it has all plans", func() bool { return old.State().Newest == version(1, 9) })
	if s, ok := c.leader().State().Server("c"); !ok || s.Voter {
		t.Errorf("it is %+v, want a non-voter", s)
	}
}

func TestPromoteWaits(t *testing.T) {
	c := newCluster(t)
	c.start(1)
	c.commit(agree.Generation{N: 1})
	c.plans(1, maxLag+4)
	lead := c.leader()
	id := agree.NewServerID("b")
	for name, err := range map[string]error{
		"promote": lead.Promote(t.Context(), id), "demote": lead.Demote(t.Context(), id), "remove the last voter": lead.Remove(t.Context(), "a"),
		"demote the last voter": lead.Demote(t.Context(), "a"),
	} {
		if !errors.Is(err, agree.ErrInvalid) {
			t.Errorf("%s: %v, want %v", name, err, agree.ErrInvalid)
		}
	}
	if err := lead.AddNonVoter(t.Context(), agree.Server{ID: id, Addr: id}); err != nil { // no node answers to it
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	answers := make(chan error, 1)
	promote := func(ctx context.Context) { answers <- lead.Promote(ctx, id) }
	go promote(ctx)
	cancel()
	if err := <-answers; !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of its context: %v", err)
	}
	go promote(t.Context())
	if err := lead.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := <-answers; !errors.Is(err, agree.ErrInvalid) {
		t.Errorf("after the server is removed: %v, want %v", err, agree.ErrInvalid)
	}

	b := c.join("b").id
	if err := lead.AddNonVoter(t.Context(), agree.Server{ID: b, Addr: b}); err != nil {
		t.Fatal(err)
	}
	if err := lead.Promote(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	if newest := c.nodes[b].raft.LastIndex(); newest+maxLag < lead.raft.LastIndex() {
		t.Errorf("promoted with %d of %d entries", newest, lead.raft.LastIndex())
	}
	if err := lead.Promote(t.Context(), b); err != nil {
		t.Errorf("a voter: %v", err)
	}
	if err := lead.AddNonVoter(t.Context(), agree.Server{ID: id, Addr: id}); err != nil {
		t.Fatal(err)
	}
	go promote(t.Context())
	c.close("a")
	if err := <-answers; !errors.Is(err, agree.ErrClosed) {
		var moved *agree.NotLeaderError
		if !errors.As(err, &moved) {
			t.Errorf("after Close: %v", err)
		}
	}
}

// Of two changes that are made for one configuration, the second is refused.
func TestChangesDoNotMix(t *testing.T) {
	c := newCluster(t)
	c.start(1)
	c.commit(agree.Generation{N: 1})
	lead := c.leader()
	_, index, err := lead.files.configuration()
	if err != nil || index == 0 {
		t.Fatal(index, err)
	}
	if err := lead.AddNonVoter(t.Context(), agree.Server{ID: "x", Addr: "x"}); err != nil {
		t.Fatal(err)
	}
	if f := lead.raft.AddNonvoter("y", "y", index, 0); f.Error() == nil {
		t.Error("raft made a change for an old configuration")
	}
	servers, now, err := lead.files.configuration()
	if err != nil || now <= index || len(servers.Servers) != 2 {
		t.Errorf("configuration %v at %d, %v", servers, now, err)
	}
	if err := lead.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	if err := lead.files.log.DeleteRange(1, lead.raft.LastIndex()-1); err != nil {
		t.Fatal(err)
	}
	if _, kept, err := lead.files.configuration(); err != nil || kept != now {
		t.Errorf("out of a snapshot: configuration at %d, %v; want %d", kept, err, now)
	}
}

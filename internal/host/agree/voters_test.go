package agree

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// parse reads servers and the leader's view: "a" votes, "b." does not vote and has caught up, "c," has not, "d+" is to be added; a lost
// one has "!", a silent one "?", and one that leaves "-". The first one leads.
func parse(text string) (servers []Server, v View) {
	for i, word := range strings.Fields(text) {
		id := strings.TrimRight(word, ".,+!?-")
		h := HostView{Server: Server{ID: id}, Linked: !strings.ContainsAny(word, "!?"), Lost: strings.Contains(word, "!"), Leaves: strings.Contains(word, "-")}
		h.CaughtUp = h.Linked && !strings.ContainsAny(word, ",+")
		if !strings.Contains(word, "+") {
			servers = append(servers, Server{ID: id, Voter: !strings.ContainsAny(word, ".,")})
		}
		v.Hosts = append(v.Hosts, h)
		if i == 0 {
			v.Leader = id
		}
	}
	return servers, v
}

func TestNextChange(t *testing.T) {
	for _, c := range []struct{ servers, tie, want string }{
		{"a", "", ""},
		{"a b+", "", "add b"},
		{"a b+-", "", ""},
		{"a- b.", "", "promote b"},
		{"a- b", "", ""}, // until b leads
		{"b a-", "", "demote a"},
		{"b a-", "a", "demote a"},
		{"b a.-", "", "remove a"},
		{"a b c-", "", "demote c"},
		{"a- b c", "", ""},
		{"a b- c d.", "", "promote d"},
		{"a b- c d", "", "demote b"},
		{"a b- c! d", "", "remove c"},
		{"a b- c!", "", "remove c"}, // first: a and c would need both
		{"a b-", "", "demote b"},
		{"a b- c?", "", ""}, // until it is known whether c is lost
		{"a b- c? d.", "", "promote d"},
		{"a b- c d,", "", "demote b"},
		{"a b- c! d,", "", "remove c"},
		{"a- b- c!", "", "remove c"},
		{"b- a-", "", "demote a"},
		{"a b- c! d! e", "", "remove c"},
		{"a b- c- d! e!", "", "remove d"},
		{"a b.", "", ""},
		{"a b.", "a", ""},
		{"a b.", "b", "promote b"},
		{"a b,", "b", ""},
		{"a b", "b", "demote a"},
		{"b a.", "b", ""},
		{"a b", "", "demote b"},
		{"a b c,", "", ""},
		{"a b c.", "", "promote c"},
		{"a b c.!", "", "demote b"},
		{"a b! c.", "", ""}, // a is no majority
		{"a b. c,", "", ""},
		{"a b. c.", "", "promote b"},
		{"a b c", "", ""},
		{"a b c d+", "", "add d"},
		{"a b c d.", "", ""},
		{"a b c!", "", ""}, // three have voted
		{"a b c?", "", ""},
		{"a b c! d,", "", ""},
		{"a b c! d.", "", "promote d"},
		{"a b c! d", "", "remove c"},
		{"a b c? d.", "", ""},
		{"a b c d.!", "", "remove d"},
		{"a b c! d+", "", "add d"},
		{"a b c! d. e.", "", "promote d"},
		{"a b c d. e,", "", ""},
		{"a b c d. e.", "", "promote d"},
		{"a b c d e.", "", "promote e"},
		{"a b c d e,", "", ""},
		{"a b c d e.!", "", "demote d"},
		{"d a b c", "", "demote c"},
		{"a b? c d", "", "demote b"},
		{"a b c! d e, f,", "", "remove c"}, // 3 of 4 that are there would all be needed
		{"a b c d e", "", ""},
		{"a b c d e!", "", "remove e"},
		{"a b c! d! e", "", "remove c"},
		{"a b c d! e f,", "", ""},
		{"a b c d! e f.", "", "promote f"},
		{"a b c d! e f", "", "remove d"},
		{"a b c! d! e f. g.", "", "promote f"},
		{"a b c! d! e f g.", "", "remove c"},
		{"a b! c! d. e.", "", ""},
		{"a b c d e f. g.!", "", "remove g"},
		{"a b c? c#1+", "", "add c#1"},
		{"a b c? c#1.", "", "promote c#1"}, // c is lost: the host has another log
		{"a b c? c#1", "", "remove c"},
	} {
		servers, v := parse(c.servers)
		v.TieBreak = c.tie
		got := ""
		if change, ok := NextChange(servers, v); ok {
			got = fmt.Sprint(change.Kind, " ", change.Server.ID)
		}
		if got != c.want {
			t.Errorf("%s, tie-break %q: %q, want %q", c.servers, c.tie, got, c.want)
		}
	}
}

func TestSuccessor(t *testing.T) {
	for _, c := range []struct {
		servers, tie, want string
		ok                 bool
	}{
		{"a- b c-", "", "b", true},
		{"b- a- c", "", "c", true},
		{"a- b c", "c", "c", true},
		{"a- b- d.", "", "", false}, // until d votes
		{"a- b- d,", "", "", false},
		{"a- b- d+", "", "", false},
		{"a- d. b", "", "b", true},
		{"a- b- d!", "", "", true}, // all leave, or are lost
		{"a- b? c", "", "c", true},
		{"a- b- c?", "", "", false}, // until c links, or is lost: this leader may be new
	} {
		servers, v := parse(c.servers)
		v.TieBreak = c.tie
		if id, ok := Successor(servers, v); id != c.want || ok != c.ok {
			t.Errorf("%s: %q, %v, want %q, %v", c.servers, id, ok, c.want, c.ok)
		}
	}
}

// A cast is hosts that come and go, and the servers that follow.
type cast struct {
	servers []Server
	hosts   []HostView
	logs    int  // lost
	three   bool // voted
	left    bool // a host leaves, or has left
	tie     string
}

func (c *cast) voters() (all []Server) {
	for _, s := range c.servers {
		if s.Voter {
			all = append(all, s)
		}
	}
	return all
}

func (c *cast) linked(id string) bool {
	return slices.ContainsFunc(c.hosts, func(h HostView) bool { return h.Server.ID == id && h.Linked })
}

func (c *cast) leaves(id string) bool {
	return slices.ContainsFunc(c.hosts, func(h HostView) bool { return h.Server.ID == id && h.Leaves })
}

// view is that of a leader, if the voters could have one: of one that stays, if one does.
func (c *cast) view() (v View, ok bool) {
	all := c.voters()
	there := 0
	for _, s := range all {
		if c.linked(s.ID) {
			if v.Leader == "" || !c.leaves(s.ID) {
				v.Leader = s.ID
			}
			there++
		}
	}
	v.Hosts, v.TieBreak = c.hosts, c.tie
	return v, 2*there > len(all)
}

// change makes the next change, and reports what is wrong with it.
func (c *cast) change(t *rapid.T) bool {
	v, ok := c.view()
	if !ok {
		return false
	}
	next, ok := NextChange(c.servers, v)
	if !ok {
		return false
	}
	t.Logf("%v %s", next.Kind, next.Server.ID)
	before, want := c.voters(), newRoll(c.servers, v).want
	i := slices.IndexFunc(c.servers, func(s Server) bool { return s.ID == next.Server.ID })
	servers := slices.Clone(c.servers)
	switch next.Kind {
	case AddNonVoter:
		if i >= 0 || next.Server.Voter || !c.linked(next.Server.ID) {
			t.Fatal("it cannot be added")
		}
		servers = append(servers, next.Server)
	case Promote:
		j := slices.IndexFunc(c.hosts, func(h HostView) bool { return h.Server.ID == next.Server.ID })
		if i < 0 || servers[i].Voter || j < 0 || !c.hosts[j].CaughtUp || !c.hosts[j].Linked || c.hosts[j].Leaves {
			t.Fatal("it cannot be promoted")
		}
		servers[i].Voter = true
	case Demote:
		if i < 0 || !servers[i].Voter {
			t.Fatal("it does not vote")
		}
		servers[i].Voter = false
	case Remove:
		if i < 0 || c.linked(next.Server.ID) && (servers[i].Voter || !c.leaves(next.Server.ID)) {
			t.Fatal("it cannot be removed")
		}
		if servers[i].Voter && len(before)%2 == 1 && len(before) <= want && !c.left {
			t.Fatalf("a lost voter of %d is removed before its replacement is there", len(before))
		}
		servers = slices.Delete(servers, i, i+1)
	}
	former := c.servers
	c.servers = servers
	after := c.voters()
	either := len(before)
	for _, s := range after {
		if !slices.ContainsFunc(before, func(o Server) bool { return o.ID == s.ID }) {
			either++
		}
	}
	if len(before)/2+1+len(after)/2+1 <= either {
		t.Fatalf("majorities of %v and %v may be disjoint", before, after)
	}
	if _, ok := c.view(); !ok && next.Kind != Promote {
		t.Fatalf("the voters %v have no majority after it", after)
	} else if !ok {
		c.servers = former // it cannot be committed
		return false
	}
	c.three = c.three || len(after) >= 3
	if c.three && len(after) < 3 && !c.left {
		t.Fatal("fewer than three vote")
	}
	return true
}

func TestVotersComeAndGo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &cast{servers: []Server{{ID: "a", Voter: true}}, hosts: []HostView{{Server: Server{ID: "a"}, Linked: true, CaughtUp: true}}}
		c.tie = rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "tie-break")
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			if !rapid.Bool().Draw(t, "event") {
				c.change(t)
				continue
			}
			i := rapid.IntRange(0, min(len(c.hosts), 7)).Draw(t, "host")
			if i >= len(c.hosts) {
				c.hosts = append(c.hosts, HostView{Server: Server{ID: string(rune('a' + i))}, Linked: true})
				continue
			}
			h := &c.hosts[i]
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0: // silent
				h.Linked, h.CaughtUp = false, false
			case 1:
				h.Lost = !h.Linked
			case 2: // returns
				h.Linked, h.Lost = true, false
			case 3:
				h.CaughtUp = h.Linked
			case 4: // returns without its log
				if alone := len(c.voters()) == 1 && c.voters()[0].ID == h.Server.ID; !alone {
					c.logs++
					*h = HostView{Server: Server{ID: fmt.Sprintf("%s#%d", HostOf(h.Server.ID), c.logs)}, Linked: true}
				}
			case 5:
				h.Leaves, c.left = true, true
			}
			t.Logf("%+v", *h)
		}
		there := 0
		for i := range c.hosts { // quiet: who is not there is lost, and all others catch up
			h := &c.hosts[i]
			h.Lost, h.CaughtUp = !h.Linked, h.Linked
			if h.Linked && !h.Leaves {
				there++
			}
		}
		for _, s := range c.servers {
			if !slices.ContainsFunc(c.hosts, func(h HostView) bool { return h.Server.ID == s.ID }) {
				c.hosts = append(c.hosts, HostView{Server: s, Lost: true})
			}
		}
		if _, ok := c.view(); !ok {
			return // it holds until a majority is back
		}
		for changes := 0; c.change(t); changes++ {
			if changes == 100 {
				t.Fatal("it never ends")
			}
		}
		want := 1
		switch {
		case there > 4:
			want = 5
		case there > 2 || c.three:
			want = 3
		}
		all := c.voters()
		if c.left {
			c.stays(t)
			return
		}
		if len(all) != want {
			t.Fatalf("%d hosts, voters %v; want %d", there, all, want)
		}
		for _, s := range c.servers {
			if !c.linked(s.ID) && (!s.Voter || there >= 3) {
				t.Fatalf("%s is lost and stays: %v", s.ID, c.servers)
			}
		}
		for _, h := range c.hosts {
			if h.Linked && !slices.ContainsFunc(c.servers, func(s Server) bool { return s.ID == h.Server.ID }) {
				t.Fatalf("%s is not in %v", h.Server.ID, c.servers)
			}
			if h.Linked && want == 1 && HostOf(h.Server.ID) == c.tie && all[0].ID != h.Server.ID {
				t.Fatalf("%s votes, not the host that breaks ties", all[0].ID)
			}
		}
	})
}

// stays checks what is left where hosts have left: the voters could always have a leader, so none that leaves is needed any more, but
// one that leads for want of others.
func (c *cast) stays(t *rapid.T) {
	v, ok := c.view()
	if !ok {
		t.Fatalf("the voters %v have no majority", c.voters())
	}
	for _, h := range c.hosts {
		there := slices.ContainsFunc(c.servers, func(s Server) bool { return s.ID == h.Server.ID })
		if h.Leaves && there && h.Linked && h.Server.ID != v.Leader {
			t.Fatalf("%s cannot leave %v", h.Server.ID, c.servers)
		}
		if h.Linked && !h.Leaves && !there {
			t.Fatalf("%s is not in %v", h.Server.ID, c.servers)
		}
	}
}

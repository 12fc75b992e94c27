package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/transport"
)

func threeHosts() *Config {
	c := &Config{Workers: 3, Apart: true}
	for i, name := range []string{"a", "b", "c"} {
		c.Hosts = append(c.Hosts, Addr{Name: name, Voter: true, Agree: name + ":1", Link: name + ":2", Workers: []int{i}})
	}
	return c
}

// Hosts that have entered come behind the first ones, in the order of the log; one that was there keeps its position.
func TestHosts(t *testing.T) {
	c := threeHosts()
	c.agreed = func() agree.State {
		return agree.State{
			Members: []agree.Member{{Name: "d", Agree: "d:1", Link: "d:2", Workers: 2}, {Name: "b", Agree: "b:3", Link: "b:4", Workers: 1}},
			Servers: []agree.Server{{ID: "a", Voter: true}, {ID: "b#x", Voter: true}, {ID: "c"}, {ID: "d#y", Voter: true}},
		}
	}
	got := fmt.Sprint(c.hosts())
	if want := "[{a true a:1 a:2 [0] 0} {b true b:3 b:4 [1] 1} {c true c:1 c:2 [2] 0} {d false d:1 d:2 [] 2}]"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := c.voters(); !slices.Equal(got, []string{"a", "b", "d"}) {
		t.Errorf("voters %v", got)
	}
	if c.host("d") != 3 || c.host("e") != -1 || c.Hosts[1].Link != "b:2" {
		t.Error("positions are wrong, or the first hosts have changed")
	}
}

// A host gets the name that it wants, that of a host that is lost, or another one; while it is not known whether the host of its name
// lives, it asks again.
func TestEnters(t *testing.T) {
	now := time.Unix(1000, 0)
	r := newRoster(threeHosts(), now, func(int) (time.Time, bool) { return now, false })
	for i := range 2 {
		if _, err := r.linked(now, hostLinked{host: i, server: r.addrs[i].Name, out: new(sent)}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(name, agree, want string) {
		t.Helper()
		if got := r.enters(Addr{Name: name, Agree: agree, Link: agree + "2", Starts: 2}); fmt.Sprintf("%s %d %v", got.host.Name, got.known, got.refused) != want {
			t.Errorf("%s: %+v, want %s", name, got, want)
		}
	}
	check("d", "d:1", "d -1 false")
	check("a", "x:1", "a-2 -1 false")
	check("c", "x:1", " -1 true") // it has had no link yet
	r.lose(2, false)
	check("c", "x:1", "c -1 false")
	if i := r.entered(Addr{Name: "c", Agree: "x:1", Link: "x:12", Starts: 2}); i != 2 {
		t.Errorf("its place is %d", i)
	}
	check("c", "x:1", " 2 false") // it did not hear the answer
	i := r.entered(Addr{Name: "d", Agree: "d:1", Link: "d:12", Starts: 3})
	if i != 3 || len(r.hosts) != 4 {
		t.Fatalf("its place is %d of %d", i, len(r.hosts))
	}
	check("d", "y:1", "d-2 -1 false") // another one, in the same moment
	for host, want := range map[int]session.HostBack{2: {Host: "c", Workers: 2}, 3: {Host: "d", Workers: 3}} {
		events, err := r.linked(now, hostLinked{host: host, server: "s", out: new(sent)})
		if err != nil || len(events) != 1 || events[0] != want {
			t.Errorf("host %d: %v, %v", host, events, err)
		}
	}
	v := r.view("a", "b")
	if got := fmt.Sprintf("%s %s %v %v", v.Leader, v.TieBreak, v.Hosts[2], v.Hosts[3]); got != "a b {s at x:1 true false false false} {s at d:1 true false false false}" {
		t.Errorf("the view is %s", got)
	}
	r.lose(3, false)
	check("d", "y:1", "d -1 false")
}

// A host that led and was silent for too long is lost as soon as another one leads; any other one has some time to connect.
func TestMissedBeforeThisLeadership(t *testing.T) {
	now := time.Unix(1000, 0)
	c := threeHosts()
	c.Settings.Detect = time.Second
	r := newRoster(c, now, func(host int) (time.Time, bool) { return now.Add(-1100 * time.Millisecond), host == 1 })
	r.tick(now, 0, "")
	if r.hosts[0].lost || !r.hosts[1].lost || r.hosts[2].lost {
		t.Errorf("lost: %v, %v, %v, want the second alone", r.hosts[0].lost, r.hosts[1].lost, r.hosts[2].lost)
	}
}

// A host that is asked to leave before the run has taken it in, since no host answers, leaves at once.
func TestLeavesBeforeItEnters(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	h := &Host{c: Config{Hosts: []Addr{{Name: "a", Link: silent.Addr().String()}}, Enters: &Addr{Name: "b"}, Link: silent}, leave: make(chan struct{}, 1)}
	secure, err := transport.TLSFromSecret(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- h.enter(t.Context(), secure) }()
	h.Leave()
	if err := <-ended; !errors.Is(err, ErrLeft) {
		t.Error(err)
	}
}

// A new leader starts the workers of a host that has entered and has none yet, and of no other.
func TestEnteredUnderAnotherLeader(t *testing.T) {
	c := threeHosts()
	c.agreed = func() agree.State {
		return agree.State{Members: []agree.Member{{Name: "d", Agree: "d:1", Link: "d:2", Workers: 2}}}
	}
	now := time.Unix(1000, 0)
	r := newRoster(c, now, func(int) (time.Time, bool) { return now, false })
	r.inherit(c, nil)
	events, err := r.linked(now, hostLinked{host: 3, out: new(sent)})
	if err != nil || len(events) != 1 || events[0] != (session.HostBack{Host: "d", Workers: 2}) {
		t.Errorf("%v, %v", events, err)
	}
}

// A host is stranded when the machines of so many others refuse connections that there can be no majority, and not while one of them
// might only be silent.
func TestStranded(t *testing.T) {
	live, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	c := threeHosts()
	c.Link = live
	c.Hosts[1].Link, c.Hosts[2].Link = live.Addr().String(), gone.Addr().String()
	if err := c.isStranded(context.Background()); err != nil {
		t.Errorf("with one of two: %v", err)
	}
	live.Close()
	var stranded *StrandedError
	if err := c.isStranded(context.Background()); !errors.As(err, &stranded) || *stranded != (StrandedError{2, 3}) {
		t.Errorf("with none of two: %v", err)
	}
	c.Hosts, c.Self = append(c.Hosts[1:], Addr{Name: "d"}), 2
	for i := range c.Hosts {
		c.Hosts[i].Voter = false
	}
	c.Enters = &c.Hosts[2]
	if err := c.isStranded(context.Background()); err == nil {
		t.Error("one that enters a run that has ended is not stranded")
	}
}

// A host that votes is gone where another machine, or the same one with a new log, has its name, unless its own server still answers.
func TestStrandedByNames(t *testing.T) {
	live, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	here, dead := live.Addr().String(), gone.Addr().String()
	server := func(id, addr string) agree.Server {
		return agree.Server{ID: id, Addr: addr, Voter: !strings.Contains(id, "#")}
	}
	for name, c := range map[string]struct {
		servers  []agree.Server
		stranded bool
	}{
		"all are there":                {[]agree.Server{server("a", here), server("b", here), server("c", "own")}, false},
		"another machine, the same":    {[]agree.Server{server("a", dead), server("a#1", here), server("b", dead), server("c", "own")}, true},
		"the first one still answers":  {[]agree.Server{server("a", here), server("b", dead), server("c", "own")}, false},
		"a new log at the old address": {[]agree.Server{server("a", here), server("a#1", here), server("b", dead), server("c", "own")}, true},
	} {
		t.Run(name, func(t *testing.T) {
			is := &Config{Apart: true, Link: live, Self: 2, agreed: func() agree.State { return agree.State{Servers: c.servers} }}
			for i, h := range []string{"a", "b", "c"} {
				is.Hosts = append(is.Hosts, Addr{Name: h, Agree: []string{here, here, "own"}[i], Link: here})
			}
			if err := is.isStranded(t.Context()); (err != nil) != c.stranded {
				t.Error(err)
			}
		})
	}
}

// A member travels whole.
func TestMember(t *testing.T) {
	a := Addr{Name: "a", Agree: "a:1", Link: "a:2", Workers: []int{1}, Starts: 3}
	if got := addrOf(memberOf(a)); fmt.Sprint(got) != fmt.Sprint(a) || memberOf(a).First == nil {
		t.Errorf("%+v", got)
	}
}

package host

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/reach"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/timing"
)

// What a relay tells a new leader of its worker.
func TestAccount(t *testing.T) {
	r := &relay{locals: []*local{{
		who: id.Session{Worker: 3}, hello: control.Hello{}, ready: control.Ready{}, done: control.Done{}, closed: true, exit: &control.Exited{Worker: 3, Text: "x"},
	}}}
	r.locals[0].steps = append(r.locals[0].steps, control.Step{Plan: 1, Step: 1}, control.Step{Plan: 1, Step: 2}, control.Step{Plan: 2, Step: 3},
		control.Step{Plan: 4, Step: 1}, control.Step{Plan: 4, Step: 2})
	for _, c := range []struct {
		since control.Lead
		want  string
	}{
		{control.Lead{}, "h r 1.1 1.2 2.3 4.1 4.2 d closed exited told"},
		{control.Lead{Plan: 2, Step: 3}, "h r 4.1 4.2 d closed exited told"},
		{control.Lead{Plan: 3, Step: 9}, "h r 4.1 4.2 d closed exited told"},
		{control.Lead{Plan: 4, Step: 2}, "h r 4.2 d closed exited told"},
	} {
		q := newQueue[control.Message]()
		r.account(q, c.since)
		q.close()
		got := ""
		for m, ok := q.take(context.Background()); ok; m, ok = q.take(context.Background()) {
			switch m := m.(type) {
			case relayed:
				switch said := m.Message.(type) {
				case control.Step:
					got += fmt.Sprintf("%d.%d ", said.Plan, said.Step)
				case control.Hello:
					got += "h "
				case control.Ready:
					got += "r "
				case control.Done:
					got += "d "
				}
			case closed:
				got += "closed "
			case control.Exited:
				got += "exited "
			case control.Told:
				got += "told"
			}
		}
		if got != c.want {
			t.Errorf("since %+v: %s, want %s", c.since, got, c.want)
		}
	}
}

// sent is an outbox that keeps what is put into it, as text.
type sent struct{ list []string }

func (s *sent) put(m control.Message) {
	if r, ok := m.(relayed); ok {
		s.list = append(s.list, fmt.Sprintf("%T to %v", r.Message, r.worker))
		return
	}
	s.list = append(s.list, fmt.Sprintf("%+v", m))
}
func (s *sent) empty() bool { return true }

// told returns events as text.
func told(events []session.Event) (all []string) {
	for _, e := range events {
		switch e := e.(type) {
		case session.ConnClosed:
			all = append(all, fmt.Sprintf("closed %d", e.Worker))
		case session.WorkerExited:
			all = append(all, fmt.Sprintf("exited %d: %s", e.Worker, e.Status.Text))
		case session.Received:
			all = append(all, fmt.Sprintf("%d said %T", e.Worker, e.Message))
		case session.HostBack:
			all = append(all, e.Host+" is back")
		default:
			all = append(all, fmt.Sprintf("%T", e))
		}
	}
	return all
}

func expect(t *testing.T, what string, got, want any) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// The story of a host that is lost and comes back, as its leader keeps it.
func TestRoster(t *testing.T) {
	now := time.Unix(1000, 0)
	c := Config{Hosts: []Addr{{Name: "a", Workers: []int{0}}, {Name: "b", Workers: []int{1, 2}}}}
	c.Detect = time.Second
	c = c.withDefaults()
	r := newRoster(&c, now, func(int) (time.Time, bool) { return now, false })
	r.fresh = true
	a, b := &sent{}, &sent{}
	for host, out := range []*sent{a, b} {
		events, err := r.linked(now, hostLinked{host: host, out: out})
		expect(t, "a first link", fmt.Sprint(told(events), err), "[] <nil>")
	}
	if _, err := r.linked(now, hostLinked{host: 1, out: &sent{}}); !errors.Is(err, errLinkedTwice) {
		t.Errorf("a second link: %v", err)
	}
	one := id.Session{Worker: 1}
	// The leadership starts over. The account that the new link begins with is for the next one: to this one every worker
	// would say hello twice.
	expect(t, "the account of a second link", told(r.said(hostSaid{1, now, relayed{control.Hello{}, one}})), "[]")
	r.hosts[1].twice = false
	expect(t, "a message", told(r.said(hostSaid{1, now, relayed{control.Hello{}, one}})), "[1 said control.Hello]")
	expect(t, "a message of another host's worker", told(r.said(hostSaid{0, now, relayed{control.Hello{}, one}})), "[]")
	expect(t, "its host", a.list, "[{Worker:1 Incarnation:0 Stacks:false}]") // has to end it
	expect(t, "an end", told(r.said(hostSaid{1, now, control.Exited{Worker: 1, Text: "x"}})), "[exited 1: x]")
	expect(t, "an end again", told(r.said(hostSaid{1, now, control.Exited{Worker: 1, Text: "x"}})), "[]")

	// It is silent for too long, and this host was not listening itself; then it really is.
	now = now.Add(10 * time.Second)
	events, probe := r.tick(now, 251*time.Millisecond, "")
	expect(t, "a late tick", fmt.Sprint(told(events), probe), "[] []")
	now = now.Add(time.Second)
	if events, probe = r.tick(now, 0, ""); events != nil || len(probe) != 1 || probe[0].host != 1 {
		t.Errorf("lost early: %v, or not probed: %v", told(events), probe)
	}
	if _, again := r.tick(now, 0, ""); again != nil {
		t.Errorf("probed twice at a time: %v", again)
	}
	expect(t, "its machine answers", told(r.probed(probe[0])), "[]")
	now = now.Add(100 * time.Millisecond)
	r.crowd = 33
	if events, _ = r.tick(now, 0, ""); events != nil {
		t.Errorf("lost on a crowded machine: %v", told(events))
	}
	r.crowd = 0
	r.said(hostSaid{1, now.Add(-1001 * time.Millisecond), control.Beat{Crowd: 33}})
	if events, _ = r.tick(now, 0, ""); events != nil {
		t.Errorf("lost although its machine is crowded: %v", told(events))
	}
	r.said(hostSaid{1, now.Add(-1001 * time.Millisecond), control.Beat{Crowd: timing.Crowd(math.NaN())}})
	expect(t, "its machine answered", told(r.probed(probe[0])), "[]")
	for _, only := range []time.Duration{0, 8 * time.Second} { // its workers alone can continue the run
		if events, _ = r.tick(now.Add(only), 0, "b"); events != nil {
			t.Errorf("the last host is lost after %v more: %v", only, told(events))
		}
		r.hosts[1].probes.End()
	}
	events, _ = r.tick(now, 0, "")
	expect(t, "a silent host", told(events), "[closed 1 closed 2 exited 2: b was lost]")
	r.send(1, control.Stop{}) // not to be sent
	expect(t, "words of a lost host", told(r.said(hostSaid{1, now, relayed{control.Hello{}, id.Session{Worker: 2}}})), "[]")
	place, started := r.place(plan.Worker{ID: 1, Incarnation: 1, Host: "b"})
	expect(t, "where it starts", fmt.Sprintln(place, started.Worker.Host, started.Err), "3 a <nil>\n")
	r.begin(place)
	expect(t, "messages to a", a.list[1:], "[{Worker:1 Incarnation:1}]")

	back := &sent{}
	events, err := r.linked(now, hostLinked{host: 1, out: back})
	expect(t, "it links again", fmt.Sprint(told(events), err), "[b is back] <nil>")
	expect(t, "its workers end", back.list, "[{Worker:1 Incarnation:0 Stacks:false} {Worker:2 Incarnation:0 Stacks:false}]")

	// Its link ends, and its machine says that nothing listens there.
	r.unlinked(now, hostUnlinked{1, b}) // an older one
	r.unlinked(now, hostUnlinked{1, back})
	if events, probe = r.tick(now.Add(time.Millisecond), 0, ""); events != nil || len(probe) != 1 || probe[0].host != 1 {
		t.Errorf("%v, probes %v", told(events), probe)
	}
	r.probed(hostProbed{1, probe[0].since, reach.Silent})
	if !r.hosts[1].lost {
		t.Error("it is not lost")
	}
}

// A worker is started again on a host that is found to be lost before anything else happens: the session knows all whose loss it
// hears of.
func TestLostWithNewPlace(t *testing.T) {
	now := time.Now()
	c := Config{Hosts: []Addr{{Name: "a", Workers: []int{0}}, {Name: "b", Workers: []int{1, 2}}}}
	c.Respawn = true
	c = c.withDefaults()
	l := &lead{c: &c, events: newQueue[any]()}
	hosts := newRoster(&c, now, func(int) (time.Time, bool) { return now, false })
	r := newRun(l, Console{}, nil, hosts, session.New(session.Config{Settings: c.Settings, Workers: 3, CanStart: true}, hosts.workers()))
	for host := range c.Hosts {
		events, err := hosts.linked(now, hostLinked{host: host, out: &sent{}})
		expect(t, "a first link", fmt.Sprint(told(events), err), "[] <nil>")
	}
	r.apply(r.s.Begin(now))
	r.steps(hosts.said(hostSaid{1, now, control.Exited{Worker: 1, Code: -1, Text: "killed"}}))
	r.steps(hosts.said(hostSaid{1, now, closedOf(id.Session{Worker: 1}, nil)}))
	expect(t, "who is started again", hosts.members[len(hosts.members)-1].who, id.Session{Worker: 1, Incarnation: 1})
	r.steps(hosts.lose(1, false))
	if len(hosts.members) != 5 || r.s.Over() { // worker 2 is started elsewhere; the next start of worker 1 has to wait
		t.Errorf("members %+v", hosts.members)
	}
}

// A leader that wants a worker to begin which another leader wanted before, and which has ended since, hears that again: it knew of no such
// worker when it was told.
func TestRelayTellsEndAgain(t *testing.T) {
	out := &sent{}
	l := newLocal(id.Session{Worker: 1, Incarnation: 1})
	l.closed, l.exit = true, &control.Exited{Worker: 1, Incarnation: 1, Text: "x"}
	r := &relay{c: &Config{}, locals: []*local{l}, out: out}
	if err := r.hear(control.Begin{Worker: 1, Incarnation: 1}); err != nil || len(out.list) != 2 || len(r.locals) != 1 {
		t.Errorf("%v, %q", err, out.list)
	}
}

// A fenced worker's process goes on as the next session from its next Hello on; what it says before is dropped, also for other leaders.
func TestRelayFences(t *testing.T) {
	out := &sent{}
	old := id.Session{Worker: 1}
	next := id.Session{Worker: 1, Incarnation: 1}
	begin := func() (*relay, *local) {
		out.list = nil
		worker := spawn.InProcess(func(context.Context, net.Conn) {})
		t.Cleanup(func() { spawn.End(worker) })
		l := newLocal(old)
		l.worker = worker
		return &relay{c: &Config{}, locals: []*local{l}, out: out}, l
	}
	fence := control.Fence{Worker: 1, Next: 1}
	r, l := begin()
	r.said(l, control.Hello{})
	if err := r.hear(fence); err != nil {
		t.Fatal(err)
	}
	for _, m := range []control.Message{control.Step{}, control.Hello{Incarnation: 1}, control.Ready{}} {
		l = r.said(l, m)
	}
	expect(t, "messages", out.list, "[control.Hello to 1.0 control.Hello to 1.1 control.Ready to 1.1]")
	if m, _ := r.find(next).to.take(context.Background()); m != fence {
		t.Errorf("the process is told %v", m)
	}
	if err := r.hear(control.Kill{Worker: 1}); err != nil || r.find(next).worker == nil {
		t.Error("the next session is ended with the old one")
	}
	q := newQueue[control.Message]()
	r.account(q, control.Lead{})
	q.close()
	var all []string
	for m, ok := q.take(context.Background()); ok; m, ok = q.take(context.Background()) {
		switch m := m.(type) {
		case relayed:
			all = append(all, fmt.Sprintf("%v: %T", m.worker, m.Message))
		case control.Exited:
			all = append(all, fmt.Sprintf("%d.%d exited", m.Worker, m.Incarnation))
		}
	}
	expect(t, "the account", all, "[1.0: control.Hello 1.0 exited 1.1: control.Hello 1.1: control.Ready]")

	// It had exited when the leader fenced it: the next session has exited.
	r, l = begin()
	l.exit = &control.Exited{Worker: 1, Text: "x"}
	if err := r.hear(fence); err != nil || r.find(next).exit == nil || r.find(next).exit.Incarnation != 1 {
		t.Errorf("%v, %+v", err, r.find(next))
	}
}

// The program of many workers is read once, and again when it has changed.
func TestProgramIsReadOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	written := time.Unix(1700000000, 0)
	write := func(content string, at time.Time) {
		t.Helper()
		if err := errors.Join(os.WriteFile(path, []byte(content), 0o600), os.Chtimes(path, at, at)); err != nil {
			t.Fatal(err)
		}
	}
	hash := func(content string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(content))) }
	var p program
	if got := p.sum(path); got != "" {
		t.Errorf("of no file: %q", got)
	}
	write("one", written)
	if got := p.sum(path); got != hash("one") {
		t.Errorf("%q", got)
	}
	write("two", written) // which nothing tells
	if got := p.sum(path); got != hash("one") {
		t.Errorf("it was read again: %q", got)
	}
	write("two", written.Add(time.Second))
	if got := p.sum(path); got != hash("two") {
		t.Errorf("changed: %q", got)
	}
	write("other", written.Add(time.Second))
	if got := p.sum(path); got != hash("other") {
		t.Errorf("longer: %q", got)
	}
}

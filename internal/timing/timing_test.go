package timing

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write docs/timing.md")

// A row documents a time: what it is, how it follows from --detect, and what it must exceed and why.
type row struct {
	name    string
	what    string
	rule    string
	value   func(p Policy) time.Duration
	exceeds []than
}

// than is a time that the one of the row must exceed, or at least be equal to.
type than struct {
	name  string
	times float64 // 0 means 1
	equal bool
	why   string
}

func fixed(d time.Duration) func(Policy) time.Duration {
	return func(Policy) time.Duration { return d }
}

var rows = []row{
	{"Detect", "a failed worker or host is out of the plan", "--detect, at least 300 ms", func(p Policy) time.Duration { return p.Detect }, []than{
		{"Heartbeat", 3, true, "two late heartbeats in a row are no failure"},
	}},
	{"Heartbeat", "between two heartbeats", "fixed", fixed(Heartbeat), nil},
	{"Silence", "a silent worker or host counts as failed", "3/4 Detect", func(p Policy) time.Duration { return p.Silence }, []than{
		{"Heartbeat", 2, true, "one late heartbeat is no failure"},
		{"Late", 1, false, "a short stop of the observer is no silence"},
	}},
	{"StartSilence", "Silence before training", "10 Silence", func(p Policy) time.Duration { return p.StartSilence }, []than{
		{"Silence", 1, false, "reading data may occupy a machine"},
	}},
	{"Doubt", "the gossip ring suspects a worker before SuspectSilence applies", "1/4 Detect", func(p Policy) time.Duration { return p.Doubt }, []than{
		{"Watch", 1, false, "the agent looks at it meanwhile"},
	}},
	{"SuspectSilence", "a silent worker that the ring suspects counts as failed", "1/2 Detect, at least 5 Heartbeat, at most Silence", func(p Policy) time.Duration { return p.SuspectSilence }, []than{
		{"Heartbeat", 2, true, "one late heartbeat is no failure"},
		{"Doubt", 1, false, "the suspicion comes first"},
	}},
	{"Watch", "between two looks for silent workers", "1/16 Detect", func(p Policy) time.Duration { return p.Watch }, nil},
	{"Late", "a look so late forgives all silence, because the observer was stopped", "1/4 Detect", func(p Policy) time.Duration { return p.Late }, []than{
		{"Watch", 2, false, "a look that comes one period late is normal"},
	}},
	{"LinkWatch", "between two looks of a host for the leader", "1/16 Silence", func(p Policy) time.Duration { return p.LinkWatch }, nil},
	{"LinkLate", "Late of a host that looks for the leader", "1/4 Silence", func(p Policy) time.Duration { return p.LinkLate }, []than{
		{"LinkWatch", 2, false, "a look that comes one period late is normal"},
	}},
	{"Fence", "a worker commits without a heartbeat of its agent", "Detect", func(p Policy) time.Duration { return p.Fence }, []than{
		{"Silence", 1, false, "a worker that its agent still counts as alive commits"},
	}},
	{"Query", "workers answer a query", "1/2 Detect", func(p Policy) time.Duration { return p.Query }, []than{
		{"Heartbeat", 1, false, "a worker that heartbeats has had time to answer"},
	}},
	{"LinkGrace", "the controller waits for the failure that explains a broken link", "1/10 Detect", func(p Policy) time.Duration { return p.LinkGrace }, []than{
		{"Redial", 2, true, "the ends have tried to dial again"},
	}},
	{"LinkDown", "a link is down before one of its ends is evicted", "Detect", func(p Policy) time.Duration { return p.LinkDown }, []than{
		{"Silence", 1, false, "a failed end is found as failed"},
		{"LinkGrace", 1, false, "a recovery has tried to repair the link"},
	}},
	{"Cause", "the end of a run waits for the failure that explains an error", "Reap + Detect", func(p Policy) time.Duration { return p.Cause }, []than{
		{"Detect", 1, false, "a frozen worker fails by then"},
		{"Reap", 1, false, "a killed worker exits by then"},
	}},
	{"Host", "Detect for hosts", "Detect; 1 h if it is 0", func(p Policy) time.Duration { return p.Host }, nil},
	{"HostLink", "a host is without a connection to the leader", "Host", func(p Policy) time.Duration { return p.HostLink }, []than{
		{"Retry", 10, true, "the host has tried to connect many times"},
		{"Probe", 2, true, "the leader has probed the machine"},
	}},
	{"Welcome", "hosts connect to a new leader", "1/4 Host, at least 500 ms", func(p Policy) time.Duration { return p.Welcome }, []than{
		{"Retry", 10, true, "the host has tried to connect many times"},
	}},
	{"Greet", "a connection proves that it knows the secret", "Host, at least 1 s", func(p Policy) time.Duration { return p.Greet }, nil},
	{"Candidacy", "between two candidacies of a host", "1/2 Host", func(p Policy) time.Duration { return p.Candidacy }, []than{
		{"Stagger", 2, true, "another host has its turn"},
	}},
	{"Ring", "the gossip ring reports a failure", "2 Detect", func(p Policy) time.Duration { return p.Ring }, []than{
		{"MinGossip", 1, true, "probes of 16 members are not closer than 10 ms"},
	}},
	{"MinGossip", "the shortest Ring of 16 members", "fixed", fixed(MinGossip(16)), nil},
	{"RingForm", "the gossip ring forms", "10 Detect", func(p Policy) time.Duration { return p.RingForm }, []than{
		{"Ring", 2, true, "a member that fails meanwhile is known"},
	}},
	{"Log", "timeout of the replicated log", "3 Detect, at least 3 s", func(p Policy) time.Duration { return p.Log }, nil},
	{"Election", "a follower waits for a leader", "1/9 Log", func(p Policy) time.Duration { return LogOf(p.Log).Election }, []than{
		{"Commit", 1, false, "followers know what is committed"},
		{"Stagger", 2, true, "a vote ends before the next candidacy"},
		{"Heartbeat", 3, true, "a leader on a busy machine is late now and then, and stays"},
	}},
	{"Commit", "followers learn what is committed", "1/30 Log", func(p Policy) time.Duration { return LogOf(p.Log).Commit }, nil},
	{"Hello", "a worker process calls trainer.Main", "fixed", fixed(Hello), nil},
	{"Reap", "a killed worker exits", "fixed", fixed(Reap), []than{{"Zombie", 2, true, "reaping comes after the delay"}}},
	{"Zombie", "a dead process stays a zombie", "fixed", fixed(Zombie), nil},
	{"Hold", "a run with too few workers waits for others; all workers may be silent together", "fixed", fixed(Hold), []than{
		{"Hello", 2, true, "a worker that is started now arrives"},
		{"RespawnMax", 2, true, "a worker is started meanwhile"},
	}},
	{"RespawnPause", "pause before a worker is started again whose last replacement committed no step", "fixed", fixed(RespawnPause), nil},
	{"RespawnMax", "longest pause before a worker is started again", "fixed", fixed(MaxRespawns * RespawnPause), []than{{"RespawnPause", 1, false, "the pause grows"}}},
	{"Probe", "between two looks at hosts without a connection", "fixed", fixed(Probe), nil},
	{"Retry", "between two attempts to reach the leader", "fixed", fixed(Retry), nil},
	{"Stagger", "between the candidacies of two hosts", "fixed", fixed(Stagger), nil},
	{"Lock", "a host waits for the lock of its log", "fixed", fixed(Lock), nil},
	{"Snapshot", "between two checks for a snapshot of the log", "fixed", fixed(Snapshot), nil},
	{"Redial", "pause before a link is dialled again", "fixed", fixed(Redial), nil},
	{"RedialMax", "longest pause before a link is dialled again", "fixed", fixed(MaxRedials * Redial), []than{{"Redial", 1, false, "the pause grows"}}},
	{"Handshake", "from a new link to its welcome", "fixed", fixed(Handshake), []than{{"RedialMax", 1, false, "both ends have dialled"}}},
	{"KeepAlive", "idle time after which TCP probes a connection", "fixed", fixed(KeepAlive), []than{{"Heartbeat", 10, true, "heartbeats keep a connection busy"}}},
	{"Boundary", "from a recovery to the next boundary plan", "fixed", fixed(Boundary), nil},
	{"Balance", "from a measurement to the next look at all", "fixed", fixed(Balance), []than{{"Boundary", 1, false, "a recovery comes first"}}},
}

// legal are failure-detection timeouts between the shortest and a day.
func legal() (list []time.Duration) {
	for d := Min; d <= Max; d += max(time.Millisecond, d/97) {
		list = append(list, d)
	}
	return append(list, Default, time.Hour)
}

func TestRelations(t *testing.T) {
	byName := make(map[string]row)
	for _, r := range rows {
		byName[r.name] = r
	}
	for _, d := range legal() {
		p := Of(d)
		for _, r := range rows {
			for _, x := range r.exceeds {
				o, ok := byName[x.name]
				if !ok {
					t.Fatalf("%s must exceed %s, which has no row", r.name, x.name)
				}
				least := time.Duration(max(x.times, 1) * float64(o.value(p)))
				if got := r.value(p); got < least || got == least && !x.equal {
					t.Fatalf("with --detect %v, %s is %v and must exceed %v: %s", d, r.name, got, least, x.why)
				}
			}
		}
		// What a chain of them promises.
		if got := p.Silence + p.Watch; got >= d {
			t.Fatalf("with --detect %v, a silent worker is found after %v", d, got)
		}
		if got := LogOf(p.Log).Election * 3; d >= time.Second && got > d {
			t.Fatalf("with --detect %v, a leader is missed after %v", d, got)
		}
	}
}

func TestNoDetection(t *testing.T) {
	p := Of(0)
	if p.Watch != 0 || p.Query != 0 || p.Fence != 0 || p.Host != time.Hour {
		t.Errorf("%+v", p)
	}
}

// TestEveryFieldHasARow: the table is complete.
func TestEveryFieldHasARow(t *testing.T) {
	has := make(map[string]bool)
	for _, r := range rows {
		if has[r.name] {
			t.Errorf("two rows for %s", r.name)
		}
		has[r.name] = true
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[Policy](), reflect.TypeFor[Log]()} {
		for i := range typ.NumField() {
			if n := typ.Field(i).Name; !has[n] {
				t.Errorf("no row for %s.%s", typ.Name(), n)
			}
		}
	}
}

const page = `# Timing

One setting gives every timeout of a run: ` + "`--detect`" + `, the failure-detection timeout (default 1 s, at least 300 ms, three
heartbeats). A failed worker or host is out of the plan within it. A longer timeout suits machines that are short of processors,
where processes pause for long; a shorter one finds frozen processes sooner. The exit of a process is found at once, whatever the
timeout is. With ` + "`Detect: 0`" + ` (only in Go programs that embed the trainer) silence is no failure.

Nothing else below can be set by users. ` + "`internal/timing`" + ` computes all values, and its tests check the relations in the last column
for all legal timeouts. To update this page: ` + "`go test ./internal/timing -update`" + `.

| name | for how long | value | with 1 s | must exceed |
|---|---|---|---|---|
`

func TestPage(t *testing.T) {
	var b strings.Builder
	b.WriteString(page)
	p := Of(Default)
	for _, r := range rows {
		var must []string
		for _, x := range r.exceeds {
			name := x.name
			if x.times > 1 {
				name = fmt.Sprintf("%.0f %s", x.times, x.name)
			}
			must = append(must, name+": "+x.why)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %v | %s |\n", r.name, r.what, r.rule, r.value(p), strings.Join(must, "; "))
	}
	b.WriteString(`
The gossip ring derives its own times from Ring and the number of members: with n members it probes every
Ring / (6 + 3 max(1, log10 n)), a probe is unanswered after half of that, and a suspected member has three intervals (times
log10 n above ten members) to refute the suspicion.
`)
	const file = "../../docs/timing.md"
	if *update {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil || string(got) != b.String() {
		t.Errorf("docs/timing.md is not up to date (%v): go test ./internal/timing -update", err)
	}
}

func TestDetector(t *testing.T) {
	t0 := time.Unix(1000, 0)
	at := func(d time.Duration) time.Time { return t0.Add(d) }
	ms := time.Millisecond
	p := Of(time.Second)
	for _, c := range []struct {
		name     string
		d        Detector
		h        History
		now      time.Duration
		lateness time.Duration
		failed   bool
		next     History
	}{
		{"not heard yet", p.Worker(true), History{}, time.Hour, 0, false, History{}},
		{"silent as long as it may be", p.Worker(true), History{Heard: t0}, 750 * ms, 0, false, History{Heard: t0}},
		{"silent for too long", p.Worker(true), History{Heard: t0}, 751 * ms, 0, true, History{Heard: t0}},
		{"before training", p.Worker(false), History{Heard: t0}, 7500 * ms, 0, false, History{Heard: t0}},
		{"before training, suspected", p.Worker(false), History{t0, at(1)}, 7500 * ms, 0, false, History{t0, at(1)}},
		{"the observer was stopped", p.Worker(true), History{t0, at(1)}, 5000 * ms, 251 * ms, false, History{Heard: at(5000 * ms)}},
		{"a look a little late", p.Worker(true), History{Heard: t0}, 751 * ms, 250 * ms, true, History{Heard: t0}},
		{"suspected for long enough", p.Worker(true), History{t0, at(100 * ms)}, 501 * ms, 0, true, History{t0, at(100 * ms)}},
		{"suspected too recently", p.Worker(true), History{t0, at(300 * ms)}, 501 * ms, 0, false, History{t0, at(300 * ms)}},
		{"heard since the suspicion", p.Worker(true), History{at(200 * ms), at(100 * ms)}, 800 * ms, 0, false, History{at(200 * ms), at(100 * ms)}},
		{"a host without a connection", p.Unlinked(false, Hello), History{Heard: t0}, 1001 * ms, 0, true, History{Heard: t0}},
		{"a host before its first connection", p.Unlinked(true, Hello), History{Heard: t0}, 20 * time.Second, 0, false, History{Heard: t0}},
		{"a host with a connection", p.Follower(), History{Heard: t0}, 751 * ms, 250 * ms, true, History{Heard: t0}},
		{"the leader, for a host that was stopped", p.Leader(), History{Heard: t0}, 751 * ms, 188 * ms, false, History{Heard: at(751 * ms)}},
		{"the agent, for a worker that was frozen", p.Agent(), History{Heard: t0}, time.Hour, time.Hour, true, History{Heard: t0}},
		{"the agent in time", p.Agent(), History{Heard: t0}, 1000 * ms, 0, false, History{Heard: t0}},
	} {
		failed, next := c.d.Suspect(c.h, at(c.now), c.lateness)
		if failed != c.failed || next != c.next {
			t.Errorf("%s: %v, %+v, want %v, %+v", c.name, failed, next, c.failed, c.next)
		}
	}
}

func TestGossip(t *testing.T) {
	if g := GossipOf(9*time.Second, 10); g.Interval != time.Second || g.Probe != 500*time.Millisecond || g.Dead != 270*time.Second || g.FullState != 27*time.Second {
		t.Errorf("%+v", g)
	}
	for members := 2; members < 2000; members += 7 {
		least := MinGossip(members)
		if got := GossipOf(least, members).Interval; got < MinInterval {
			t.Errorf("%d members with %v probe every %v", members, least, got)
		}
	}
}

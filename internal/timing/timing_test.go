package timing

import (
	"flag"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
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
	{"Detect", "a worker or host that was heard regularly misses heartbeats and counts as failed", "--detect, at least 300 ms", func(p Policy) time.Duration { return p.Detect }, []than{
		{"Heartbeat", 3, true, "two late heartbeats in a row are no failure"},
		{"Late", 1, false, "a short stop of the observer is no failure of others"},
	}},
	{"Heartbeat", "between two heartbeats", "fixed", fixed(Heartbeat), nil},
	{"HostHeartbeat", "between two heartbeats of hosts", "1/2 Heartbeat", fixed(HostHeartbeat), nil},
	{"MinSuspect", "a host that was heard regularly misses heartbeats, and its machine is probed", "2 HostHeartbeat", fixed(MinSuspect), nil},
	{"Suspect", "the same, however irregularly it was heard", "1/4 Host, at least MinSuspect", func(p Policy) time.Duration { return max(p.Suspect, MinSuspect) }, nil},
	{"Halt", "the process of a worker is stopped by a signal before the run continues without it", "fixed", fixed(Halt), nil},
	{"Still", "no thread of a silent process runs before it counts as frozen", "2 Heartbeat", fixed(Still), []than{
		{"Heartbeat", 1, false, "one of them is due to send a heartbeat"},
	}},
	{"ReliefGain", "by how much sooner a step ends at least for others to take over what a late worker has not begun", "fixed", fixed(ReliefGain), nil},
	{"ReliefLeast", "a worker that is late again has less to do", "fixed", fixed(ReliefLeast), nil},
	{"ReliefMost", "the same, which doubles each time, at most", "fixed", fixed(ReliefMost), []than{{"ReliefLeast", 1, false, "it doubles"}}},
	{"ReliefAgain", "after that the worker is late for the first time once more", "fixed", fixed(ReliefAgain), nil},
	{"Turn", "Pause becomes longer for each thread that waits for a processor, per processor", "fixed", fixed(Turn), nil},
	{"Longest", "Detect at most, where heartbeats and looks are late, and always before training", "10 Detect", func(p Policy) time.Duration { return p.Longest }, []than{
		{"Detect", 1, false, "reading data may occupy a machine"},
	}},
	{"Pause", "a silence beyond the measured intervals is no failure", "1/4 Detect", func(p Policy) time.Duration { return p.Pause }, []than{
		{"Watch", 1, false, "a look that comes one period late is normal"},
	}},
	{"Deviation", "the least deviation of intervals", "1/50 Detect", func(p Policy) time.Duration { return p.Deviation }, nil},
	{"Runs", "the host of a silent worker has found its process running, or waiting for a processor, and that counts", "1/2 Detect", func(p Policy) time.Duration { return p.Runs }, []than{
		{"Heartbeat", 1, false, "the host looks twice in that time"},
	}},
	{"Spare", "such a worker is silent beyond what counts for others", "2 Detect", func(p Policy) time.Duration { return p.Spare }, []than{
		{"Runs", 2, true, "that its process does not run any more is found in time"},
	}},
	{"Watch", "between two looks for silent workers", "1/16 Detect", func(p Policy) time.Duration { return p.Watch }, nil},
	{"Late", "a look so late forgives all silence, because the observer was stopped", "1/4 Detect", func(p Policy) time.Duration { return p.Late }, []than{
		{"Watch", 2, false, "a look that comes one period late is normal"},
	}},
	{"LinkWatch", "between two looks of a host for the leader", "1/50 Host", func(p Policy) time.Duration { return p.LinkWatch }, nil},
	{"LinkLate", "Late of a host that looks for the leader", "1/4 Host", func(p Policy) time.Duration { return p.LinkLate }, []than{
		{"LinkWatch", 2, false, "a look that comes one period late is normal"},
	}},
	{"Fence", "a worker commits without a heartbeat of its agent", "Detect", func(p Policy) time.Duration { return p.Fence }, []than{
		{"Detect", 1, true, "a worker that its agent hears in time commits"},
	}},
	{"Grace", "a worker that missed heartbeats is stopped before it is killed, or the last host with workers before it is lost", "10 Detect", func(p Policy) time.Duration { return p.Grace }, []than{
		{"Detect", 1, false, "its process has time to continue"},
	}},
	{"Query", "workers answer a query, since it or the last answer", "Detect, as much longer as Detect becomes", func(p Policy) time.Duration { return p.Query }, []than{
		{"Heartbeat", 1, false, "a worker that heartbeats has had time to answer"},
		{"Detect", 1, true, "a failed worker is found as failed"},
	}},
	{"LinkGrace", "the controller waits for the failure that explains a broken link", "1/10 Detect", func(p Policy) time.Duration { return p.LinkGrace }, []than{
		{"Redial", 2, true, "the ends have tried to dial again"},
	}},
	{"LinkDown", "a link is down before one of its ends is evicted", "3/2 Detect, as much longer as Detect becomes", func(p Policy) time.Duration { return p.LinkDown }, []than{
		{"Detect", 1, false, "a failed end is found as failed"},
		{"LinkGrace", 1, false, "a recovery has tried to repair the link"},
	}},
	{"Cause", "the end of a run waits for the failure that explains an error", "Reap + Detect", func(p Policy) time.Duration { return p.Cause }, []than{
		{"Detect", 1, false, "a frozen worker fails by then"},
		{"Reap", 1, false, "a killed worker exits by then"},
	}},
	{"Host", "Detect for hosts", "Detect; 1 h if it is 0", func(p Policy) time.Duration { return p.Host }, nil},
	{"Answer", "the machine of a suspected host answers a probe", "1/10 Host, at least 100 ms", func(p Policy) time.Duration { return p.Answer }, []than{
		{"Probe", 4, true, "there are several attempts, and others have been asked"},
	}},
	{"Settle", "an observer waits for answers that are there", "fixed", fixed(Settle), nil},
	{"HostLink", "a host is without a connection to the leader", "Host", func(p Policy) time.Duration { return p.HostLink }, []than{
		{"Retry", 10, true, "the host has tried to connect many times"},
		{"Probe", 2, true, "the leader has probed the machine"},
	}},
	{"Welcome", "hosts connect to a new leader, but for one that led and was missed for Detect", "1/4 Host, at least 500 ms", func(p Policy) time.Duration { return p.Welcome }, []than{
		{"Retry", 10, true, "the host has tried to connect many times"},
	}},
	{"Greet", "a connection proves that it knows the secret", "Host, at least 1 s", func(p Policy) time.Duration { return p.Greet }, nil},
	{"Candidacy", "between two candidacies of a host", "1/2 Host", func(p Policy) time.Duration { return p.Candidacy }, []than{
		{"Stagger", 2, true, "another host has its turn"},
	}},
	{"Ring", "the gossip ring reports a failure", "2 Detect, longer where many members share a processor", func(p Policy) time.Duration { return p.Ring }, []than{
		{"MinGossip", 1, true, "probes of 16 members are not closer than 10 ms"},
	}},
	{"MinGossip", "the shortest Ring of 16 members", "fixed", fixed(MinGossip(16)), nil},
	{"RingForm", "the gossip ring forms", "10 Detect, at least 5 Ring", func(p Policy) time.Duration { return p.RingForm }, []than{
		{"Ring", 2, true, "a member that fails meanwhile is known"},
	}},
	{"Log", "timeout of the replicated log", "3 Detect, at least 3 s", func(p Policy) time.Duration { return p.Log }, nil},
	{"Election", "a follower waits for a leader", "1/4 Log", func(p Policy) time.Duration { return LogOf(p.Log).Election }, []than{
		{"Commit", 1, false, "followers know what is committed"},
		{"Stagger", 2, true, "a vote ends before the next candidacy"},
		{"Heartbeat", 3, true, "a leader on a busy machine is late now and then, and stays"},
	}},
	{"Commit", "followers learn what is committed", "1/30 Log", func(p Policy) time.Duration { return LogOf(p.Log).Commit }, nil},
	{"Hello", "a worker process calls trainer.Main", "fixed", fixed(Hello), nil},
	{"Reap", "a killed worker exits", "fixed", fixed(Reap), []than{{"Zombie", 2, true, "reaping comes after the delay"}}},
	{"Call", "a call of user code returns before its worker is evicted; before training 10 Call", "--call-timeout, at least 5 times the longest such call", fixed(Call), []than{
		{"Report", 5, true, "people know of it long before"},
		{"Stacks", 2, true, "writing stacks takes little more"},
	}},
	{"Suspend", "a call of user code returns for which all other workers wait in a step, before the run continues without its worker", "Detect, at least 10 times the longest such call, or 10 Heartbeat; SampleRetries more for a sample", func(p Policy) time.Duration { return p.Suspend(0) }, []than{
		{"Detect", 1, true, "it need not be sooner than for a process that is frozen"},
	}},
	{"Report", "a call of user code returns before it is reported, or before a run that is to stop gives it up", "1/5 Call", func(Policy) time.Duration {
		report, _ := CallLimits(Call, 0, true)
		return report
	}, []than{{"Heartbeat", 10, true, "heartbeats show that it is still the same call"}}},
	{"Stacks", "an evicted worker writes its stacks before it is killed", "fixed", fixed(Stacks), nil},
	{"Zombie", "a dead process stays a zombie", "fixed", fixed(Zombie), nil},
	{"Records", "the files of the run directory are behind while a recovery is under way", "fixed", fixed(Records), nil},
	{"Hold", "a run with too few workers waits for others; all workers may be silent together", "fixed", fixed(Hold), []than{
		{"Hello", 2, true, "a worker that is started now arrives"},
		{"RespawnMax", 2, true, "a worker is started meanwhile"},
	}},
	{"RespawnStart", "a lost worker is started again", "fixed", fixed(RespawnStart), nil},
	{"RespawnPause", "pause before a worker is started again whose last replacement committed no step", "fixed", fixed(RespawnPause), nil},
	{"RespawnMax", "longest pause before a worker is started again", "fixed", fixed(MaxRespawns * RespawnPause), []than{{"RespawnPause", 1, false, "the pause grows"}}},
	{"Drain", "a host that is to leave waits for its workers to leave", "fixed", fixed(Drain), []than{
		{"Stacks", 2, false, "writing stacks takes little of it"},
	}},
	{"Disk", "between two attempts to write to a full disk", "fixed", fixed(Disk), nil},
	{"DirReturns", "for a run directory that is not there when a host takes over, or at a rollback", "fixed", fixed(DirReturns), nil},
	{"ArchiveEnd", "the end of a run waits for its last checkpoint to reach the target", "fixed", fixed(ArchiveEnd), nil},
	{"Probe", "between two looks at hosts without a connection", "fixed", fixed(Probe), nil},
	{"Retry", "between two attempts to reach the leader", "fixed", fixed(Retry), nil},
	{"Stagger", "between the candidacies of two hosts", "fixed", fixed(Stagger), nil},
	{"Lock", "a host waits for the lock of its log", "fixed", fixed(Lock), nil},
	{"Rejections", "between two lines of events.jsonl about connections that one agent or worker rejects", "1 s, doubled to", fixed(Rejections), nil},
	{"Logs", "a host answers another one about its logs; the leader gathers those of all hosts at the end of a run", "fixed", fixed(Logs), nil},
	{"Snapshot", "between two checks for a snapshot of the log", "fixed", fixed(Snapshot), nil},
	{"Redial", "pause before a link is dialled again", "fixed", fixed(Redial), nil},
	{"RedialMax", "longest pause before a link is dialled again", "fixed", fixed(MaxRedials * Redial), []than{{"Redial", 1, false, "the pause grows"}}},
	{"Notice", "a link of a group is lost before the members that have not lost one are told", "fixed", fixed(Notice), nil},
	{"Handshake", "from a new link to its welcome; until failing to dial a worker is told, where there never was a link", "fixed", fixed(Handshake), []than{{"RedialMax", 1, false, "both ends have dialled"}}},
	{"KeepAlive", "idle time after which TCP probes a connection", "fixed", fixed(KeepAlive), []than{{"Heartbeat", 10, true, "heartbeats keep a connection busy"}}},
	{"Unanswered", "without an answer to what was sent until TCP ends a link", "fixed", fixed(Unanswered), []than{{"RedialMax", 10, true, "TCP has sent it many times"}}},
	{"SSHConnect", "ssh connects to a machine of --hosts", "fixed", fixed(SSHConnect), nil},
	{"SSHAlive", "between two probes of a silent connection of ssh, which ends after three without an answer", "fixed", fixed(SSHAlive), nil},
	{"Lookup", "the address of a host name is looked up", "fixed", fixed(Lookup), nil},
	{"SampleRetry", "pause before a sample is read again", "fixed", fixed(SampleRetry), nil},
	{"SampleRetries", "all pauses before a sample counts as unreadable", "fixed", fixed(SampleRetries()), []than{{"SampleRetry", 1, false, "the pause grows"}}},
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
		if got := p.Worker(true).Limit(Intervals{}); got != d {
			t.Fatalf("with --detect %v, a worker with regular heartbeats is found after %v", d, got)
		}
		if got := p.Detect + p.Watch; got >= p.LinkDown {
			t.Fatalf("with --detect %v, a silent worker is found after %v, and its link evicts after %v", d, got, p.LinkDown)
		}
		if got := LogOf(p.Log).Election + 2*HostHeartbeat; d >= time.Second && got > d {
			t.Fatalf("with --detect %v, the log looks for the leader only if it is silent for %v", d, got)
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
heartbeats). A worker or host whose heartbeats were regular counts as failed when they have been missing for so long, and none is
evicted earlier. The exit of a process is found at once, whatever the timeout is. With ` + "`Detect: 0`" + ` (only in Go programs that embed the
trainer) missed heartbeats are no failure. A worker whose process a signal
has stopped, as the system tells, is out of the plan after Halt, and joins again when it is continued.

A worker's host looks at the threads of its process, where the system shows them, when a heartbeat is late by half of Heartbeat, and then
every half of Heartbeat. Where none of them runs for Still, the process is frozen (a debugger, the freezer of a control group of version 2), and the worker is out of the plan as if a signal had stopped it. Where
one runs, has run, or waits for a processor, nothing is wrong with it that a recovery would make good: it may be silent for Spare longer than what follows says, and
an answer to a query may take as much longer.

Suspicion is by accrual (Hayashibara et al., 2004): a silence counts against the intervals at which the worker was heard before. With
their mean m and their deviation s over some 32 heartbeats, s at least Deviation, the suspicion of a silence t is
φ = (1 + (t - Pause - c - m) / s) / ln 10, where c is Turn times the crowd, and the worker counts as failed at φ = 8. The intervals are taken as exponentially distributed
beyond their mean, because the pauses of a busy machine have a long tail. The same limit is computed from the intervals of all workers of the
machine together, and from how late the agent itself looks; the greatest of the three and of Detect counts, up to Longest. The crowd is
the number of threads that wait for each processor of the leader's machine at this moment, as far as the system tells: heartbeats
that were regular until now say nothing of the processes that others have just started. So on a machine
that is short of processors the timeout becomes longer by itself, for unanswered queries and broken links as well, and a frozen worker
is found later: with 16 runnable threads on two processors after 1 s still, with 68 after 1.7 s. Where none of several workers is heard for longer than Pause, the machine or the whole run is stopped, and
that time counts for none of them, up to Hold.

Hosts are judged by the same detector, with the crowds of both machines. A host whose machine is off or cut off is lost sooner. At φ = 3, after
MinSuspect to Suspect, it is suspected. The leader, or for the leader each follower that votes, then dials its machine several times within
Answer, and asks the other hosts that vote to do the same. The operating system answers, however busy or frozen the processes are, so a false suspicion
costs a connection. Where a majority of those that vote, the observer among them, gets no answer, and no other host gets one, the host is lost, or the
leader succeeded. An observer waits for Settle before it concludes, and again while that takes longer than it should, so that a stopped one finds the answers.
With two hosts one observer is left, which decides nothing, and Detect counts. A leader that answers, and was not heard for Detect, is succeeded if a
majority of those that vote does not hear it.

` + "`--call-timeout`" + ` (default 1 min, 0 for never) sets Call. Time in which the process waits for a processor does not count, but
for a tenth of it. Nothing else below can be set by users. ` + "`internal/timing`" + ` computes all values, and its tests check the relations in the last column
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
A candidate waits for votes for Election to 2 Election. While no leader is known, that doubles after three times as long each time, up to
16 Election; once a leader has stayed for 30 Election it is the usual time again.

The gossip ring derives its own times from Ring and the number of members: with n members it probes every
Ring / (6 + 3 max(1, log10 n)), a probe is unanswered after half of that, and a suspected member has three intervals (times
log10 n above ten members) to refute the suspicion. Where a machine has m members and p processors, and m / p is 8 or more, Ring is
m / (4 p) times as long, rounded down.
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
		{"silent as long as it may be", p.Worker(true), History{Heard: t0}, 1000 * ms, 0, false, History{Heard: t0}},
		{"silent for too long", p.Worker(true), History{Heard: t0}, 1001 * ms, 0, true, History{Heard: t0}},
		{"silent while all were", p.Worker(true), History{Heard: t0, excused: 2 * ms}, 1001 * ms, 0, false, History{Heard: t0, excused: 2 * ms}},
		{"before training", p.Worker(false), History{Heard: t0}, 10000 * ms, 0, false, History{Heard: t0}},
		{"before training, for too long", p.Worker(false), History{Heard: t0}, 10001 * ms, 0, true, History{Heard: t0}},
		{"the observer was stopped", p.Worker(true), History{Heard: t0, excused: 1}, 5000 * ms, 251 * ms, false, History{Heard: at(5000 * ms)}},
		{"a look a little late", p.Worker(true), History{Heard: t0}, 1001 * ms, 250 * ms, true, History{Heard: t0}},
		{"a host without a connection", p.Unlinked(false, Hello), History{Heard: t0}, 1001 * ms, 0, true, History{Heard: t0}},
		{"a host before its first connection", p.Unlinked(true, Hello), History{Heard: t0}, 20 * time.Second, 0, false, History{Heard: t0}},
		{"a host with a connection", p.Follower(), History{Heard: t0}, 1001 * ms, 250 * ms, true, History{Heard: t0}},
		{"the leader, for a host that was stopped", p.Leader(), History{Heard: t0}, 1001 * ms, 251 * ms, false, History{Heard: at(1001 * ms)}},
		{"the agent, for a worker that was frozen", p.Agent(), History{Heard: t0}, time.Hour, time.Hour, true, History{Heard: t0}},
		{"the agent in time", p.Agent(), History{Heard: t0}, 1000 * ms, 0, false, History{Heard: t0}},
	} {
		failed, next := c.d.Suspect(c.h, at(c.now), c.lateness)
		if failed != c.failed || next != c.next {
			t.Errorf("%s: %v, %+v, want %v, %+v", c.name, failed, next, c.failed, c.next)
		}
	}
}

// observer watches workers as an agent does: it looks every Watch, and hears a worker at the given times.
type observer struct {
	d       Detector
	looks   Looks
	workers []*History
}

// watch looks for silent workers until a time, and returns the ones that it takes as failed, with when.
func (o *observer) watch(until time.Duration, heard [][]time.Duration) map[int]time.Duration {
	at := func(d time.Duration) time.Time { return time.Unix(1000, 0).Add(d) }
	failed, next := make(map[int]time.Duration), make([]int, len(heard))
	o.workers = nil
	for range heard {
		o.workers = append(o.workers, &History{Heard: at(0)})
	}
	for now := time.Duration(0); now <= until; now += Of(Default).Watch {
		var alive []*History
		var intervals []Intervals
		for w, h := range o.workers {
			for ; next[w] < len(heard[w]) && heard[w][next[w]] <= now; next[w]++ {
				h.Hear(at(heard[w][next[w]]), Heartbeat)
			}
			if _, dead := failed[w]; !dead {
				alive, intervals = append(alive, h), append(intervals, h.Intervals)
			}
		}
		o.looks.Look(o.d, at(now), 0, alive)
		for w, h := range o.workers {
			if _, dead := failed[w]; dead {
				continue
			}
			var is bool
			if is, *h = o.d.Suspect(*h, at(now), 0, Pool(intervals), o.looks.Intervals); is {
				failed[w] = now
			}
		}
	}
	return failed
}

// every returns the times of heartbeats at the intervals, in milliseconds, repeated until a time.
func every(until time.Duration, intervals ...int) (heard []time.Duration) {
	for i, now := 0, time.Duration(0); ; i++ {
		if now += time.Duration(intervals[i%len(intervals)]) * time.Millisecond; now > until {
			return heard
		}
		heard = append(heard, now)
	}
}

// TestLateIsNotFailed: heartbeats as workers on a machine with many more processes than processors have them. A fixed limit
// of three quarters of the timeout, and one of the timeout, evict live workers.
func TestLateIsNotFailed(t *testing.T) {
	late := []int{
		104, 98, 131, 240, 96, 180, 310, 102, 420, 88, 150, 512, 97, 260, 640, 101, 110, 380, 720, 95, 130, 560, 99, 810, 104, 205, 470, 930,
		100, 330, 610, 102, 760, 120, 440, 1080, 98, 290, 530, 1210, 103, 380, 860, 125, 990, 210, 1340, 96, 450, 700, 1120, 101, 350, 1480,
	}
	until := time.Minute
	var heard [][]time.Duration
	for w := range 8 {
		heard = append(heard, every(until, append(late[7*w%len(late):len(late):len(late)], late[:7*w%len(late)]...)...))
	}
	fixed := Detector{Least: Default * 3 / 4, Most: Default * 3 / 4}
	for _, c := range []struct {
		name   string
		d      Detector
		failed int
	}{
		{"three quarters of the timeout", fixed, 8},
		{"the timeout", regular(Default, 0), 8},
		{"accrual", Of(Default).Worker(true), 0},
	} {
		if failed := (&observer{d: c.d}).watch(until, heard); len(failed) != c.failed {
			t.Errorf("%s: %d of 8 live workers failed: %v", c.name, len(failed), failed)
		}
	}
	// A worker that freezes on the same machine is still found.
	frozen := slices.Clone(heard)
	frozen[3] = every(until/2, late...)
	failed := (&observer{d: Of(Default).Worker(true)}).watch(until, frozen)
	if at := failed[3] - until/2; len(failed) != 1 || at > Of(Default).Longest+Of(Default).Watch {
		t.Errorf("of one frozen worker: %v", failed)
	}
}

// TestCrowd: the limit is longer at once where many threads wait for processors, although all heartbeats were in time so far. The
// threads of the training itself leave it as it is.
func TestCrowd(t *testing.T) {
	for _, c := range []struct {
		threads, processors int
		least, most         time.Duration
	}{
		{0, 2, Default, Default}, // unknown
		{1, 2, Default, Default},
		{16, 2, Default, Default},
		{128, 16, Default, Default},
		{68, 2, 1600 * time.Millisecond, 1800 * time.Millisecond},
		{68, 1, 2500 * time.Millisecond, 3 * time.Second},
		{68, 16, Default, Default},
		{math.MaxInt, 1, 10 * Default, 10 * Default},
		{5, 0, Default, Default},
	} {
		limit := Of(Default).Worker(true).In(Crowd(0).Next(c.threads, c.processors)).Limit(Intervals{})
		if limit < c.least || limit > c.most {
			t.Errorf("%d threads on %d processors: %v, want %v to %v", c.threads, c.processors, limit, c.least, c.most)
		}
	}
	var c Crowd
	c = c.Next(68, 2)
	if quiet := c.Next(1, 2); quiet < c/2 || quiet >= c {
		t.Errorf("%v after one quiet look, %v before", quiet, c)
	}
	for range 100 {
		c = c.Next(1, 2)
	}
	if got := Of(Default).Worker(true).In(c).Limit(Intervals{}); got != Default {
		t.Errorf("limit %v after many quiet looks", got)
	}
}

// TestCrowdNeverShortens: neither more waiting threads nor a crowd at all makes a limit shorter, or longer than Most.
func TestCrowdNeverShortens(t *testing.T) {
	var late Intervals
	for i := range 40 {
		late.Add(Heartbeat * time.Duration(1+i%5))
	}
	for _, detect := range legal() {
		p := Of(detect)
		for _, d := range []Detector{p.Worker(true), p.Worker(false), p.Follower(), p.Leader(), p.Unlinked(false, Hello), p.Agent()} {
			for _, intervals := range [][]Intervals{nil, {{}}, {late}, {{}, late}} {
				before := d.Limit(intervals...)
				for _, c := range []Crowd{0, 0.01, 1, 7, 33, 1000, 1e18} {
					limit := d.In(c).Limit(intervals...)
					if limit < before || limit > d.Most || c == 0 && limit != before {
						t.Fatalf("with --detect %v and a crowd of %v: %v, with fewer %v", detect, c, limit, before)
					}
					before = limit
				}
			}
		}
	}
}

// TestFrozenIsFound: on an idle machine, one frozen worker, or most of them, is found within the timeout and one look.
func TestFrozenIsFound(t *testing.T) {
	p := Of(Default)
	until := 20 * time.Second
	for _, frozen := range []int{1, 3} {
		heard := [][]time.Duration{every(until, 99, 101, 104, 96), every(until, 100), every(until, 100), every(until, 100)}
		for w := range frozen {
			heard[3-w] = every(10*time.Second, 99, 101, 95, 105)
		}
		failed := (&observer{d: p.Worker(true)}).watch(until, heard)
		if len(failed) != frozen {
			t.Fatalf("%d frozen, and %v failed", frozen, failed)
		}
		for w, at := range failed {
			if silent := at - 10*time.Second; silent < p.Detect || silent > p.Detect+2*p.Watch {
				t.Errorf("worker %d of %d frozen is found after %v", w, frozen, silent)
			}
		}
	}
}

// TestAllStopped: a time in which no worker was heard counts for none of them, however they wake up. A lone worker has
// no other to compare with.
func TestAllStopped(t *testing.T) {
	p := Of(Default)
	until := 20 * time.Second
	var heard [][]time.Duration
	for w := range 4 {
		times := every(5*time.Second, 100)
		for _, at := range every(until-8*time.Second, 100) {
			times = append(times, 8*time.Second+time.Duration(w)*200*time.Millisecond+at)
		}
		heard = append(heard, times)
	}
	if failed := (&observer{d: p.Worker(true)}).watch(until, heard); len(failed) > 0 {
		t.Errorf("failed: %v", failed)
	}
	if failed := (&observer{d: p.Worker(true)}).watch(until, heard[:1]); len(failed) != 1 {
		t.Errorf("a lone worker: %v", failed)
	}
}

// TestSlowObserver: an observer whose looks are late waits for longer.
func TestSlowObserver(t *testing.T) {
	var l Looks
	d, now := Of(Default).Worker(true), time.Unix(1000, 0)
	for i := range 100 {
		now = now.Add(time.Second)
		l.Look(d, now, time.Duration(i%4)*80*time.Millisecond, nil)
	}
	if got := d.Limit(l.Intervals); got < 3*d.Least/2 || got > d.Most {
		t.Errorf("limit %v", got)
	}
	for range 500 {
		l.Look(d, now, 0, nil)
	}
	if got := d.Limit(l.Intervals); got != d.Least {
		t.Errorf("limit %v after looks in time", got)
	}
}

// TestIntervals: several messages at a time are one heartbeat, and the suspicion is that of the doc.
func TestIntervals(t *testing.T) {
	var h History
	now := time.Unix(1000, 0)
	for range 200 {
		now = now.Add(300 * time.Millisecond)
		for range 5 {
			h.Hear(now, Heartbeat)
			now = now.Add(time.Millisecond)
		}
	}
	d := Of(Default).Worker(true)
	if mean := Heartbeat.Seconds() + h.Intervals.late; math.Abs(mean-0.3) > 0.01 {
		t.Errorf("mean %v s", mean)
	}
	s, mean := d.Deviation.Seconds(), Heartbeat.Seconds()+h.Intervals.late
	limit := (d.Every + d.Pause + h.Intervals.limit(d.Deviation, Phi)).Seconds()
	if phi := (1 + (limit-d.Pause.Seconds()-mean)/s) / math.Ln10; math.Abs(phi-Phi) > 0.01 {
		t.Errorf("suspicion %v at the limit", phi)
	}
	for _, silence := range []time.Duration{0, -time.Hour, 1000 * time.Hour} {
		h.Hear(now.Add(silence), Heartbeat)
		if got := d.Limit(h.Intervals); got < d.Least || got > d.Most {
			t.Errorf("limit %v after a silence of %v", got, silence)
		}
	}
}

// TestSuspicion: a host is suspected after two heartbeats if it was heard regularly, later if it was not, and never without detection.
func TestSuspicion(t *testing.T) {
	t0 := time.Unix(1000, 0)
	for _, c := range []struct {
		name        string
		detect      time.Duration
		intervals   []int // milliseconds
		least, most time.Duration
	}{
		{"regular, and met a short time ago", Default, []int{50}, MinSuspect, 120 * time.Millisecond},
		{"regular", Default, []int{50, 51, 49, 50}, MinSuspect, 120 * time.Millisecond},
		{"on a busy machine", Default, []int{50, 62, 50, 75, 55, 90, 50}, 125 * time.Millisecond, 200 * time.Millisecond},
		{"on a machine short of processors", Default, []int{50, 150, 60, 310, 50, 90, 400}, Default / 4, Default / 4},
		{"with a short timeout", Min, []int{50, 51, 49, 50}, MinSuspect, 110 * time.Millisecond},
		{"without detection", 0, []int{50, 51, 49, 50}, time.Hour, time.Hour},
	} {
		met := time.Minute
		if len(c.intervals) == 1 {
			met = time.Second
		}
		h, heard := History{}, every(met, c.intervals...)
		for _, at := range heard {
			h.Hear(t0.Add(at), HostHeartbeat)
		}
		d := Of(c.detect).Suspicion()
		if got := d.Limit(h.Intervals); got < c.least || got > c.most {
			t.Errorf("%s: suspected after %v, want %v to %v", c.name, got, c.least, c.most)
		}
		last := t0.Add(heard[len(heard)-1])
		if suspected, _ := d.Suspect(h, last.Add(c.most+time.Millisecond), 0); !suspected {
			t.Errorf("%s: not suspected after %v", c.name, c.most)
		}
		// An observer that is in time, as one of its looks every 20 ms shows, changes nothing of that.
		var looks Looks
		for i := range 100 {
			looks.Look(Of(c.detect).Leader(), t0.Add(time.Duration(i)*Of(c.detect).LinkWatch), 0, nil)
		}
		if suspected, _ := d.Suspect(h, last.Add(c.most+time.Millisecond), 0, looks.Intervals); !suspected {
			t.Errorf("%s: an observer that is in time does not suspect after %v", c.name, c.most)
		}
		if suspected, _ := d.Suspect(h, last.Add(c.most), time.Hour); suspected {
			t.Errorf("%s: suspected by an observer that was stopped", c.name)
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

func TestRingOf(t *testing.T) {
	p := Of(time.Second)
	for _, c := range []struct {
		members, processors int
		want                time.Duration
	}{
		{9, 2, p.Ring},
		{15, 2, p.Ring},
		{16, 2, 2 * p.Ring},
		{65, 2, 8 * p.Ring},
		{65, 64, p.Ring},
		{9, 0, 2 * p.Ring}, // unknown: one
	} {
		if got := p.RingOf(c.members, c.processors); got != c.want {
			t.Errorf("%d members on %d processors: %v, want %v", c.members, c.processors, got, c.want)
		}
	}
}

// Package timing is the policy of timeouts: [Of] gives every timeout, interval and
// grace period of a run from one setting, the failure-detection timeout (--detect).
// [Detector] is the one detector of missed heartbeats.
//
// docs/timing.md lists all values and which must exceed which. A test checks these
// relations for all legal timeouts and that the page is up to date.
//
// The package is a leaf without clock or goroutine: time is a parameter.
package timing

import (
	"math"
	"time"
)

// What does not depend on the failure-detection timeout.
const (
	// Heartbeat is the time between two heartbeats, of a worker to its agent and between hosts.
	Heartbeat = 100 * time.Millisecond
	// HostHeartbeat is the time between two heartbeats of hosts.
	HostHeartbeat = Heartbeat / 2
	// MinSuspect is the silence after which a host that was heard regularly is suspected, and its machine probed: two heartbeats.
	MinSuspect = 2 * HostHeartbeat
	// Settle is how long an observer waits for answers that are there already. One that waits for twice as long waits again: it
	// was short of processors, or stopped.
	Settle = 20 * time.Millisecond
	// Turn is how much longer a silence may last for each thread that waits for a processor beside the silent peer; see [Crowd].
	// A process that is short of processors needs its turn several times until it sends a heartbeat: to wake up, for the lock that
	// a thread of it holds that waits as well, and for the garbage collector.
	Turn = 30 * time.Millisecond
	// ReliefGain is by how much sooner a step must be expected to end for a late worker to be relieved in it: several times what the plan
	// for that costs.
	ReliefGain = 50 * time.Millisecond
	// ReliefAgain is how long after the end of a relief a worker that is late is late again. Then the next relief stays for ReliefLeast,
	// and each further one twice as long as the one before, up to ReliefMost.
	ReliefAgain, ReliefLeast, ReliefMost = 10 * time.Second, time.Second, time.Minute
	// Halt is how long the process of a worker may be stopped by a signal before the run continues without it.
	Halt = 30 * time.Millisecond
	// Still is for how long no thread of a silent process runs before it counts as frozen. One that sends heartbeats wakes up at each; on a
	// virtual machine whose host has no processor for it, up to 0.2 s late.
	Still = 2 * Heartbeat
	// Default is the default failure-detection timeout.
	Default = time.Second
	// Min is the shortest failure-detection timeout: three heartbeats, so that two in a row may be late.
	Min = 3 * Heartbeat
	// Max is the longest failure-detection timeout.
	Max = 24 * time.Hour

	// Hello is how long a worker process may take to call trainer.Main.
	Hello = 30 * time.Second
	// Reap is how long an agent waits for the exit of a worker that it has killed, or that has closed its connection.
	Reap = time.Second
	// Call is the default of --call-timeout, which bounds how long a call of user code may take; see [CallLimits].
	Call = time.Minute
	// Stacks is how long a worker may take to write its stacks before it is killed.
	Stacks = 2 * time.Second
	// Zombie is how long a dead process stays a zombie: reaping it takes milliseconds of a processor that a recovery needs.
	Zombie = 50 * time.Millisecond
	// Records is how long the files of the run directory may be behind while a recovery is under way.
	Records = 100 * time.Millisecond
	// Hold is how long a run with too few workers waits for others to join, and how long all workers may be silent together.
	Hold = 2 * time.Minute
	// Drain is how long a host that is to leave a run waits for its workers to have left. Schedulers kill what has not ended
	// after 30 seconds.
	Drain = 20 * time.Second
	// RespawnStart is how long after its loss a worker is started again: when the recovery is over, which the start of a process
	// would slow down.
	RespawnStart = 50 * time.Millisecond
	// RespawnPause is the pause before a worker is started again whose last replacement committed no step. It doubles with
	// every further one, up to MaxRespawns times itself.
	RespawnPause = 500 * time.Millisecond
	MaxRespawns  = 64

	// ArchiveEnd is how long the end of a run waits for its last checkpoint to reach the target of --checkpoints.
	ArchiveEnd = 5 * time.Minute

	// Disk is the time between two attempts to write to a full disk.
	Disk = time.Second
	// DirReturns is how long a host that takes over, or a rollback, waits for a run directory that is not there.
	DirReturns = 10 * time.Second

	// Probe is the time between two looks at hosts without a connection.
	Probe = 20 * time.Millisecond
	// Retry is the time between two attempts to reach the leader.
	Retry = 10 * time.Millisecond
	// Stagger is the time between the candidacies of two hosts, so that their elections do not collide.
	Stagger = 60 * time.Millisecond
	// Lock is how long a host waits for the lock of its log.
	Lock = time.Second
	// Snapshot is the time between two checks whether the log needs a snapshot.
	Snapshot = 30 * time.Second
	// Rejections is the longest time between two lines of events.jsonl about connections that one agent or worker rejects.
	Rejections = time.Minute
	// Logs bounds asking another host for logs, and gathering those of all hosts at the end of a run.
	Logs = 2 * time.Second

	// Redial is the pause after a link ends and after the first failed attempt to dial it. It doubles with every
	// further failure, up to MaxRedials times itself.
	Redial     = 10 * time.Millisecond
	MaxRedials = 32
	// Notice is how long after a link is lost the other members of a group are told: they find out by themselves where a member has died.
	Notice = 5 * Redial
	// Tend is the interval in which an endpoint reads lines while no collective waits: well below Unanswered, after which TCP takes a peer that reads nothing for dead.
	Tend = time.Second
	// Handshake bounds the time from a new connection to its welcome, and for each part of a checkpoint between hosts. It is how long dialling
	// a worker fails before that is told, where there never was a link.
	Handshake = 5 * time.Second
	// KeepAlive is the idle time after which TCP probes a connection.
	KeepAlive = 15 * time.Second
	// Unanswered is how long the other end of a link may leave unanswered what was sent before TCP ends the link, which is then opened
	// again: as where large packets vanish on the way, and heartbeats pass.
	Unanswered = 10 * time.Second
	// SSHConnect is how long the launcher's ssh tries to connect, and SSHAlive how often it probes a silent connection, which ends
	// after three probes without an answer.
	SSHConnect = 10 * time.Second
	SSHAlive   = 5 * time.Second
	// Lookup bounds looking up the address of a host name.
	Lookup = 2 * time.Second

	// SampleRetry is the pause after the first failed attempt to read a sample. It grows by SampleGrowth with every further
	// one, until there have been SampleTries.
	SampleRetry  = 10 * time.Millisecond
	SampleGrowth = 5
	SampleTries  = 5

	// Boundary is the time from a recovery to the next boundary plan: losses close together give one plan.
	Boundary = 10 * time.Millisecond
	// Balance is the time from a measurement to the next look at all of them.
	Balance = 200 * time.Millisecond
)

// Policy holds the times that follow from a failure-detection timeout.
type Policy struct {
	// Detect is the failure-detection timeout: a worker or host that was heard regularly counts as failed when it has missed
	// heartbeats for so long, and no worker or host fails earlier. 0 means that missed heartbeats are no failure.
	Detect time.Duration

	// Longest is what Detect becomes at most where everything is late, and what it is before training, when reading data
	// may occupy the machine.
	Longest time.Duration
	// Pause is the silence that a detector allows beyond the intervals that it has measured.
	Pause time.Duration
	// Deviation is the least deviation that a detector takes intervals to have.
	Deviation time.Duration
	// Runs is how long it counts that the host of a silent worker has found its process running, or waiting for a processor.
	Runs time.Duration
	// Spare is how much longer such a worker may be silent than others.
	Spare time.Duration
	// Watch is the time between two looks for silent workers.
	Watch time.Duration
	// Late is how late a look may come. An observer that is later was stopped itself and forgives all silence.
	Late time.Duration
	// LinkWatch and LinkLate are Watch and Late of a host that looks at its connection to the leader.
	LinkWatch, LinkLate time.Duration

	// Fence is how long a worker may commit without a heartbeat from its agent. Others evict it after Detect, or sooner where its
	// machine is off or cut off: there it may pass one commit more, for which it needs what all others sent for that step, so it
	// has the same bits.
	Fence time.Duration
	// Grace is how long a worker that was fenced may be stopped before it is killed.
	Grace time.Duration
	// Query is how long workers may take to answer a query, since it or the last answer. It becomes longer as Detect does.
	Query time.Duration
	// LinkGrace is how long the controller waits after a broken link for the failure that explains it.
	LinkGrace time.Duration
	// LinkDown is how long a link between two live workers may be down before one of them is evicted. It becomes longer
	// as Detect does.
	LinkDown time.Duration
	// Cause is how long the end of a run waits for the failure that explains an error.
	Cause time.Duration

	// Host is Detect for the hosts of a run, an hour if silence is no failure.
	Host time.Duration
	// Suspect is the longest silence after which a host is suspected, however irregularly it was heard, and Answer how long its machine
	// may take then to answer a probe.
	Suspect, Answer time.Duration
	// HostLink is how long a host may have no connection to the leader.
	HostLink time.Duration
	// Welcome is how long hosts may take to connect to a new leader.
	Welcome time.Duration
	// Greet is how long a connection may take to prove that it knows the secret of the run.
	Greet time.Duration
	// Candidacy is the time between two candidacies of a host.
	Candidacy time.Duration

	// Ring is the failure-detection timeout of the gossip ring, whose members share the processor with training.
	// Only its first suspicion counts, which comes much sooner. See RingOf.
	Ring time.Duration
	// RingForm is how long the ring may take to form before the run notes it. It becomes longer as Ring does.
	RingForm time.Duration
	// Log is the timeout of the replicated log, which [LogOf] divides.
	Log time.Duration
}

// Of returns the policy of a failure-detection timeout, which is 0 or at least [Min].
func Of(detect time.Duration) Policy {
	host := detect
	if detect == 0 {
		host = time.Hour
	}
	return Policy{
		Detect: detect, Longest: 10 * detect, Pause: detect / 4, Deviation: detect / 50,
		Runs: detect / 2, Spare: 2 * detect, Watch: detect / 16, Late: detect / 4,
		LinkWatch: host / 50, LinkLate: host / 4,

		Fence: detect, Grace: 10 * detect, Query: detect, LinkGrace: detect / 10, LinkDown: detect * 3 / 2, Cause: Reap + detect,

		Host: host, Suspect: host / 4, Answer: max(host/10, MinSuspect), HostLink: host, Welcome: max(host/4, 500*time.Millisecond), Greet: max(host, time.Second), Candidacy: host / 2,

		Ring: 2 * detect, RingForm: 10 * detect, Log: 3 * max(detect, time.Second),
	}
}

// RingShare is how many members of the gossip ring may share a processor before the ring becomes slower.
const RingShare = 4

// RingOf returns the failure-detection timeout of a ring that has so many members on each machine. Where more than RingShare of them
// share a processor, it grows with their number. Otherwise members that wait for a processor would suspect each other wrongly all
// the time, and passing that on would keep the processors busier still.
func (p Policy) RingOf(members, processors int) time.Duration {
	return p.Ring * time.Duration(max(1, members/(RingShare*max(1, processors))))
}

const (
	callFactor  = 5  // how many times as long as the longest one that returned a call may take
	startFactor = 10 // how many times as long as in training a call before it may take: it may read all data
	// suspendFactor is how many times as long as the longest one a call for which all wait may take.
	suspendFactor = 10
)

// CallLimits returns after how long a call of user code is reported, and after how long its worker is evicted. timeout is the
// least of the second, or below 0 if no worker is to be evicted; longest is how long such a call has taken so far.
func CallLimits(timeout, longest time.Duration, training bool) (report, evict time.Duration) {
	evict = Call
	if timeout > 0 {
		evict = timeout
	}
	evict = max(evict, callFactor*longest)
	report = evict / callFactor
	switch {
	case timeout < 0:
		evict = math.MaxInt64
	case !training:
		evict *= startFactor
	}
	return report, evict
}

// SampleRetries returns how long the pauses are in all before a sample counts as unreadable.
func SampleRetries() (all time.Duration) {
	pause := SampleRetry
	for range SampleTries - 1 {
		all += pause
		pause *= SampleGrowth
	}
	return all
}

// Suspend returns how long a call of user code takes before the run continues without its worker, where all others wait for it in a step;
// longest is how long such a call has taken so far, 0 for less than a heartbeat.
func (p Policy) Suspend(longest time.Duration) time.Duration {
	return max(p.Detect, suspendFactor*max(longest, Heartbeat))
}

// Log holds the times of the replicated log.
type Log struct {
	// Election is how long a follower waits for a leader, and a leader for a majority. hashicorp/raft looks every
	// Election to 2 Election and sends heartbeats every Election/10 to Election/5, so a leader is missed after
	// Election to 3 Election. A host that has not heard the leader for Detect, which is longer than Election, has it look then. A machine
	// short of processors stops a process for longer than 300 ms now and then, and a leader that gives up for that interrupts a run, so
	// Election is as long as that allows.
	Election time.Duration
	// Commit bounds the time until followers know what is committed.
	Commit time.Duration
}

// LogOf returns the times of a replicated log with a timeout, see [Policy].Log.
func LogOf(timeout time.Duration) Log { return Log{Election: timeout / 4, Commit: timeout / 30} }

// Gossip holds the times of the gossip ring.
type Gossip struct {
	Interval  time.Duration // between two probes of a member
	Probe     time.Duration // after which a direct probe counts as unanswered
	Refute    int           // intervals that a suspected member has to refute the suspicion
	Dead      time.Duration // for which the ring still talks to a dead member
	FullState time.Duration // between two full exchanges of state
}

// MinInterval is the shortest [Gossip].Interval. With a shorter one the ring would take pauses of a scheduler for failures.
const MinInterval = 10 * time.Millisecond

const (
	// refute is how many intervals a member has to refute a suspicion, times the decimal
	// logarithm of the members above ten, because the suspicion must reach it first.
	refute = 3
	// beside is the rest of the timeout in intervals: three until some member probes the failed one (95 of 100
	// failures, as every member probes one other per interval), one for the probe, one for a prober that doubts
	// itself and waits twice as long, and one for the news to spread.
	beside = 6
)

// GossipOf returns the times with which a ring of a number of members reports a failure within detect.
func GossipOf(detect time.Duration, members int) Gossip {
	interval := time.Duration(float64(detect) / gossipIntervals(members))
	return Gossip{Interval: interval, Probe: interval / 2, Refute: refute, Dead: 30 * detect, FullState: 3 * detect}
}

// MinGossip returns the shortest failure-detection timeout of a ring.
func MinGossip(members int) time.Duration {
	return time.Duration(math.Ceil(gossipIntervals(members)*1e3)) * MinInterval / 1e3
}

func gossipIntervals(members int) float64 {
	return beside + refute*max(1, math.Log10(float64(members)))
}

// Respawn returns the pause before a worker is started whose replacements, so many in a row, have committed no step.
func Respawn(replacements int) time.Duration {
	if replacements == 0 {
		return 0
	}
	doublings := min(replacements-1, 30)
	return min(RespawnPause<<doublings, MaxRespawns*RespawnPause)
}

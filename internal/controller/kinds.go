package controller

// Cause says why a plan is made.
type Cause uint8

// The causes. Their texts are those of plans.jsonl and of traces.
const (
	CauseLost      Cause = 1 + iota // workers failed
	CauseRestart                    // a shard has no holder left, or a rollback is unfinished
	CauseUnchanged                  // all workers of the plan live: only the leader or a worker outside of the plan was lost
	CauseLink                       // a link broke, and both of its ends live
	CauseLate                       // a worker is late in a step, and others take over what it has not begun
	CauseInherited                  // an earlier leader agreed on it
	CauseLeave
	CauseJoin
	CauseProtect
	CauseRebalance
)

var causeNames = [...]string{"", "lost", "restart", "kept", "link", "late", "agreed", "leave", "join", "protect", "rebalance"}

// String returns the cause's name in plans.jsonl.
func (c Cause) String() string { return causeNames[c] }

// Evidence says how a failure was detected, and with it from when its time counts.
type Evidence uint8

// Kinds of evidence. The zero value is that of a recovery without a failure: a new leader has begun it.
const (
	Reaped  Evidence = 1 + iota // the agent reaped the process
	Silent                      // heartbeats were missed, and the agent killed the worker
	Stamped                     // the injected fault recorded its time
	Broken                      // a link broke, and no worker failed
	Halted                      // the system told that a signal has stopped the process, and the agent fenced the worker
	HostOut                     // the agent of the worker's host has exited or misses heartbeats
)

var evidenceNames = [...]string{"", "reap", "silence", "kill", "link", "stop", "host"}

// String returns the evidence's name in events.jsonl and summary.json.
func (e Evidence) String() string { return evidenceNames[e] }

// Timer names a timer of the shell.
type Timer uint8

// The timers.
const (
	QueryTimer Timer = 1 + iota // for answers
	LinkTimer                   // for the failure of a worker behind a broken link, and then for the link
	HoldTimer                   // for more workers
	WishTimer                   // for the next boundary plan after a recovery
	LookTimer                   // for the next look at what was measured
	RestTimer                   // for the end of a plan that relieved a late worker
)

var timerNames = [...]string{"", "query", "link", "hold", "wish", "look", "rest"}

// String returns the timer's name.
func (t Timer) String() string { return timerNames[t] }

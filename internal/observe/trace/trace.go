// Package trace defines the spans of a run, which are stretches of time with a name
// and a cause, and its measures. It knows their form and their attributes; package
// telemetry brings them out of the process, and the commands read them from traces.jsonl.
//
// The identity of a span is a hash of the run's identity and of what the span is about, so all who know these
// agree on it: the agent that asks, the worker that answers, and the successor of either.
package trace

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"
)

type (
	// ID names a trace; zero is none.
	ID [16]byte
	// SpanID names a span of a trace; zero is none.
	SpanID [8]byte
)

func (t ID) String() string     { return hex.EncodeToString(t[:]) }
func (s SpanID) String() string { return hex.EncodeToString(s[:]) }

// Context is a place in a trace, which others can go on from.
type Context struct {
	Trace ID
	Span  SpanID
}

// String returns the context as W3C's traceparent header has it, "" for none.
func (c Context) String() string {
	if c == (Context{}) {
		return ""
	}
	return fmt.Sprintf("00-%v-%v-01", c.Trace, c.Span)
}

// ErrContext is the error for text that is no context.
var ErrContext = errors.New("not a trace context")

// ParseContext reads what [Context.String] writes.
func ParseContext(s string) (c Context, err error) {
	if s == "" {
		return c, nil
	}
	parts := strings.Split(s, "-")
	if len(parts) != 4 || parts[0] != "00" || len(parts[1]) != 32 || len(parts[2]) != 16 || len(parts[3]) != 2 {
		return c, ErrContext
	}
	_, err1 := hex.Decode(c.Trace[:], []byte(parts[1]))
	_, err2 := hex.Decode(c.Span[:], []byte(parts[2]))
	if err1 != nil || err2 != nil || c.Trace == (ID{}) || c.Span == (SpanID{}) {
		return Context{}, ErrContext
	}
	return c, nil
}

// Run is the identity of a run, from which those of its spans are made.
type Run [32]byte

// RunOf makes the identity of a run from what distinguishes it.
func RunOf(job string, started time.Time) Run {
	return sha256.Sum256(fmt.Appendf(nil, "%s %d", job, started.UnixNano()))
}

// Root returns the root of the trace about something: a step, or the ballot of a recovery.
func (r Run) Root(kind string, numbers ...uint64) (c Context) {
	b := append(append([]byte{}, r[:]...), kind...)
	for _, n := range numbers {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	sum := sha256.Sum256(b)
	copy(c.Trace[:], sum[:])
	copy(c.Span[:], sum[16:])
	return c
}

// Agent is the Span.Worker of what the agent did itself.
const Agent = -1

// Span is a stretch of time.
type Span struct {
	Context        // its own; a zero Span is any that is free
	Parent  SpanID // zero for a root

	Name                string
	Worker, Incarnation int // of the worker; Agent for the agent
	Start, End          time.Time
	Attrs               []Attr
	Links               []Link
	Error               string // what went wrong, "" if nothing did
}

// Link says that a span has to do with another one.
type Link struct {
	Context
	Why string
}

// Interrupted is the Why of a link from a recovery to the one that its fault interrupted.
const Interrupted = "interrupted recovery"

// Attr is a property of a span: a string, an int, a float64 or a bool.
type Attr struct {
	Key   string
	Value any
}

// Measure is one of StepDone, WorkerStep, Traffic, Collective, RecoveryDone, MirrorLag and Device.
type Measure interface{ measure() }

type (
	// StepDone is a committed step.
	StepDone struct {
		Step    int
		Seconds float64
		Tokens  int64
		Loss    float64
		Workers int
		Plan    uint64
	}

	// WorkerStep is what a worker's step was made of, in seconds.
	WorkerStep struct {
		Worker int
		// Of the step, so much went by computing; the rest is its bubble.
		Seconds, Compute float64
		// Bytes of the operands of reductions, and of exchanges.
		Reduced, Exchanged int64
	}

	// Traffic is what a worker has sent to another one so far.
	Traffic struct {
		From, To int
		Bytes    int64
	}

	// Collective is an operation of a group that has ended on a worker.
	Collective struct {
		Name    string
		Seconds float64
	}

	// RecoveryDone is a recovery, with its phases in seconds in their order.
	RecoveryDone struct {
		Seconds    float64
		Phases     [len(Phases)]float64
		Rollback   bool
		Recomputed int
	}

	// MirrorLag is the number of steps since some shard has fewer mirrors than it should; 0 where
	// all have theirs.
	MirrorLag struct{ Steps int }

	// Device is the clock of a device at the moment, and what it has drawn since the run looks after it.
	Device struct {
		Name     string
		Kind     string // cpu or gpu
		Hertz    float64
		Joules   float64
		Emulated bool // it does not exist
	}
)

func (StepDone) measure()     {}
func (WorkerStep) measure()   {}
func (Traffic) measure()      {}
func (Collective) measure()   {}
func (RecoveryDone) measure() {}
func (MirrorLag) measure()    {}
func (Device) measure()       {}

// Phases are the phases of a recovery in their order; a span of each is a child of the recovery's.
var Phases = [...]string{"detect", "query", "plan", "agree", "edit", "resume"}

// Names of spans beside the phases.
const (
	Recovery   = "recovery"  // the root of a recovery's trace
	Relief     = "relief"    // the same without a loss: others take over what a late worker has not begun
	Last       = "last task" // what a dead worker was doing
	Step       = "step"      // the root of a step's trace, and each worker's part of it
	Answer     = "answer"    // a worker answers a query
	Forward    = "forward"
	Backward   = "backward"
	Reduce     = "reduce"
	Check      = "check"    // before a commit: digests and norms
	Commit     = "commit"   // the exchange of a commit
	Exchange   = "exchange" // any other one
	Update     = "update"
	Gather     = "gather"
	Load       = "load"     // samples are read, before a forward pass
	Transfer   = "transfer" // of a boundary tensor: until its producer has handed it to the network
	Arrive     = "arrive"   // a boundary tensor is here
	Checkpoint = "checkpoint"
	Migration  = "migration"
	Evaluate   = "evaluate"
	Stage      = "stage"       // what a worker did of a stage in a step: from its first pass to its last
	Change     = "plan change" // from the proposal of a boundary plan until it is live
)

// Keys of attributes.
const (
	KeyStep       = "soliton.step"
	KeyPlan       = "soliton.plan.version"
	KeyStage      = "soliton.stage"
	KeyMicro      = "soliton.micro_batch"
	KeyLayer      = "soliton.layer"
	KeyPeer       = "soliton.peer"
	KeyBytes      = "soliton.bytes"
	KeyCause      = "soliton.recovery.cause"
	KeyBallots    = "soliton.recovery.ballots"
	KeyLost       = "soliton.recovery.workers_lost"
	KeyAgain      = "soliton.recovery.recomputed_micro_batches"
	KeyOpened     = "soliton.recovery.links_opened"
	KeyRollback   = "soliton.recovery.rollback"
	KeyDiedAt     = "soliton.recovery.died_at"
	KeySuperseded = "soliton.recovery.superseded" // by another fault, before it had ended
	KeyBefore     = "soliton.plan.version_before"
	KeyWorkers    = "soliton.workers"
	KeyTokens     = "soliton.tokens"
	KeyLoss       = "soliton.loss"
	KeyRunning    = "soliton.running"
	KeyWorker     = "soliton.worker.id"
	KeyIncarnated = "soliton.worker.incarnation"
	KeyDirection  = "soliton.direction"
	KeyLane       = "soliton.lane"
	KeyParameters = "soliton.migration.parameters"
	KeySources    = "soliton.migration.sources"
	KeyDropped    = "soliton.dropped_spans"
)

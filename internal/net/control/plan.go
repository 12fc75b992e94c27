package control

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Query seals the worker and asks what it knows. A worker that has answered a higher ballot does not answer.
type Query struct {
	Ballot id.Ballot
	Trace  string // the recovery's place in its trace, as traceparent; "" for none
}

// Answer is the answer to a [Query].
type Answer struct {
	Ballot id.Ballot
	Report Report
}

// Report is what a sealed worker knows. Until it applies a plan of the query's ballot or a higher one, the worker passes no
// point, frees nothing, begins no task and answers no lower ballot; running tasks finish.
type Report struct {
	// Plan is the version under which the worker works on what follows Passed.
	Plan   id.Version `json:"plan"`
	Passed id.Point   `json:"passed"`
	// Result is the outcome of the exchange of Passed, with which other workers can pass, too; nil at the beginning of the run.
	Result []byte `json:"result,omitempty"`

	// Holds is the newest plan that the worker has applied: it has all state that this plan assigns to it. Zero for a worker
	// that is still to join.
	Holds id.Version `json:"holds"`
	// Filled are ranges whose state is here although Holds does not assign it: a Fill has brought it, or the worker has held it
	// until this step.
	Filled []Filled `json:"filled,omitempty"`

	// Works are the pairs assigned to the worker in the step that follows Passed; none outside a step.
	Works []graph.Status `json:"works,omitempty"`
	// Complete are the ranges that the worker owns or mirrors and whose gradient of that step is complete here.
	Complete []id.Range `json:"complete,omitempty"`
}

// Filled is a range whose state is here, and the step that the state is of.
type Filled struct {
	id.Range
	Step int `json:"step"`
}

// Peer is a worker of a plan and the address at which other workers reach it.
type Peer struct {
	plan.Worker
	Addr string `json:"addr"`
}

// Order makes a worker apply a plan.
//
// An order with a ballot ends a recovery: the worker passes the point Passed with Result if it has not, continues under the
// plan, and is no longer sealed. An order without a ballot brings a boundary plan, which goes live after the first commit for
// which all workers have received it; a worker outside the plan applies it like the others and then waits for [Release]. A
// worker whose [Start] does not say Joins begins with its first order, from the point Passed.
type Order struct {
	Ballot id.Ballot `json:"ballot"`
	Plan   plan.Plan `json:"plan"`
	Peers  []Peer    `json:"peers"` // the workers of the plan

	Passed id.Point `json:"passed"`
	Result []byte   `json:"result,omitempty"`

	// Epoch is the N of the plan of the newest rollback, 0 before one: steps that run again after a rollback are other steps to
	// the data plane.
	Epoch int `json:"epoch,omitempty"`

	// Rollback says that a shard has lost all holders: all workers discard their state and resume from the checkpoint of step
	// Passed.Step in the run directory From, or from the job's own beginning if From is "". A first order has From if it
	// resumes a run that had ended.
	Rollback bool   `json:"restart,omitempty"`
	From     string `json:"from,omitempty"`

	Trace string `json:"trace,omitempty"` // the plan's place in its trace, as traceparent; "" for none

	body []byte // by Share
}

// Fill asks for ranges to be copied in the background to workers that will hold them under a coming plan. A new fill withdraws
// the one before.
//
// At its next commit the source of a transfer copies the range, and from then on also sends the gradient of every step; the
// destination replays them. That continues until a plan goes live or another Fill comes. A destination that has received
// everything, or is not getting nearer to the newest step, says so with [Level].
type Fill struct {
	ID        id.Fill         `json:"id"`
	Peers     []Peer          `json:"peers"` // to be admitted: the workers of the plan, and joiners
	Transfers []plan.Transfer `json:"transfers,omitempty"`

	body []byte // by Share
}

// Share returns the order with its encoding, which its copies share: the same order goes to all workers. It is not to be
// changed afterwards. The error is of class [ErrFrameSize] if the order is too large to travel within another message.
func (o Order) Share() (Order, error) {
	var err error
	o.body, err = share(o)
	return o, err
}

// Share does for a fill what [Order.Share] does for an order.
func (f Fill) Share() (Fill, error) {
	var err error
	f.body, err = share(f)
	return f, err
}

// Encode returns the form of an order in the agents' log.
func (o Order) Encode() ([]byte, error) { return marshal(o) }

// ParseOrder reads what [Order.Encode] returns. It does not validate the plan.
func ParseOrder(b []byte) (o Order, err error) {
	if err := unmarshal(b, &o); err != nil {
		return Order{}, fmt.Errorf("%w: order: %v", ErrFormat, err)
	}
	return o, nil
}

// Applied says that the worker has applied the plan of an [Order], and has a task of it running or ready, or none left. For a
// boundary plan the worker says so when the plan is live.
type Applied struct {
	Ballot  id.Ballot // of the order
	Version id.Version
	Opened  int // links that were opened for it
	// Edit is the time from the order's arrival, or from the commit that made a boundary plan live, until the plan was applied.
	// Resume is the time from then until a task was running or ready, or none was left.
	// Update is the part of Edit until the shards here were updated by the step that was committed before.
	Edit, Resume, Update time.Duration
}

// LinkLost says that the link to a peer is down, which is evidence about the link and not yet about either end.
type LinkLost struct {
	Peer id.Session
}

// Level says that the worker has all that a [Fill] brings it, as of a step: one of the newest, unless its links are slower than training.
type Level struct {
	ID   id.Fill
	Step int
}

func (Query) kind() string    { return "query" }
func (Answer) kind() string   { return "answer" }
func (Order) kind() string    { return "order" }
func (Applied) kind() string  { return "applied" }
func (Fill) kind() string     { return "fill" }
func (Level) kind() string    { return "level" }
func (LinkLost) kind() string { return "link-lost" }

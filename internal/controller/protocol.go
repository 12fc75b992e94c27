package controller

import (
	"fmt"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/wire"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Report is a sealed worker's answer to a query. Until it applies a plan of
// that ballot or a higher one, the worker passes no point, frees nothing, begins
// no task and answers no lower ballot; tasks that were running finish.
type Report struct {
	// Plan is the version under which the worker works on what follows Passed.
	Plan   id.Version `json:"plan"`
	Passed id.Point   `json:"passed"`
	// Result is what was said in the exchange of Passed, with which others can
	// pass, too; nil at the beginning of the run.
	Result []byte `json:"result,omitempty"`

	// Holds is the newest plan that the worker has applied: it has the state of all that
	// this one gives it. None of a worker that is yet to join.
	Holds id.Version `json:"holds"`
	// Filled are ranges that a Fill has brought.
	Filled []Filled `json:"filled,omitempty"`

	// Works are the pairs assigned to the worker in the step that follows
	// Passed; none where it is not in a step.
	Works []graph.Status `json:"works,omitempty"`
	// Complete are the ranges that the worker owns or mirrors whose gradient
	// of that step is complete here.
	Complete []id.Range `json:"complete,omitempty"`
}

// Filled is a range whose state has come in the background, and the step it is of.
type Filled struct {
	id.Range
	Step int `json:"step"`
}

// Peer is a worker of a plan and where others reach it.
type Peer struct {
	plan.Worker
	Addr string `json:"addr"`
}

// Order makes a worker apply a plan.
//
// One with a ballot is the end of a recovery: the worker passes the point
// Passed with Result, if it has not, goes on under the plan, and is not sealed
// any more. One without is a boundary plan: it goes live after the first
// commit for which all workers have received it. A worker that is not in it
// applies it like the others, and then does nothing more than to wait for
// control.Release.
type Order struct {
	Ballot id.Ballot `json:"ballot"`
	Plan   plan.Plan `json:"plan"`
	Peers  []Peer    `json:"peers"` // the workers of the plan

	Passed id.Point `json:"passed"`
	Result []byte   `json:"result,omitempty"`

	// Epoch is the N of the plan of the newest restart, 0 before one: steps that
	// run again after a restart are other steps to the network.
	Epoch int `json:"epoch,omitempty"`

	// Restart says that a shard has no holder left: all state is given up, and
	// the run goes on from the checkpoint of step Passed.Step in the run directory
	// From, or from the job's own beginning if that is "". A first order has From where a run
	// goes on that had ended.
	Restart bool   `json:"restart,omitempty"`
	From    string `json:"from,omitempty"`
}

// Fill asks for ranges to be copied to workers that will hold them under a
// plan that is to come. A new one withdraws the one before.
//
// At its next commit the source of a transfer copies the range, and from then
// on sends the gradient of every step, too; the destination replays them.
// That goes on until a plan is live, or another Fill comes. When all that a
// destination is to have has arrived, it says so (control.Level).
type Fill struct {
	ID        id.Fill         `json:"id"`
	Peers     []Peer          `json:"peers"` // all to be admitted: the workers of the plan, and joiners
	Transfers []plan.Transfer `json:"transfers,omitempty"`
}

// Encode returns the wire form.
func (f Fill) Encode() ([]byte, error) { return wire.Marshal(f) }

// ParseFill reads the wire form. Its ranges are not checked against a plan.
func ParseFill(b []byte) (f Fill, err error) {
	if err := wire.Unmarshal(b, &f); err != nil {
		return Fill{}, fmt.Errorf("elastic: fill: %w", err)
	}
	return f, nil
}

// Encode returns the wire form.
func (r Report) Encode() ([]byte, error) { return wire.Marshal(r) }

// Encode returns the wire form.
func (o Order) Encode() ([]byte, error) { return wire.Marshal(o) }

// ParseReport reads the wire form. What it says is not checked against a plan.
func ParseReport(b []byte) (r Report, err error) {
	if err := wire.Unmarshal(b, &r); err != nil {
		return Report{}, fmt.Errorf("elastic: report: %w", err)
	}
	return r, nil
}

// ParseOrder reads the wire form. The plan in it is not validated.
func ParseOrder(b []byte) (o Order, err error) {
	if err := wire.Unmarshal(b, &o); err != nil {
		return Order{}, fmt.Errorf("elastic: order: %w", err)
	}
	return o, nil
}

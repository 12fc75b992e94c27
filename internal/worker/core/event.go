package core

import (
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Event is something that has happened to the worker: a message of its host or of a peer, or the end of a duty. It is a
// [control.Query], [control.Order] or [control.Fill], or one of the types of this file but Record.
type Event any

// What the host and the program ask for.
type (
	// LinkLost says that the link to a session broke, so what was sent to it may be lost.
	LinkLost struct{ Session id.Session }
	// Hold keeps the worker from entering exchanges, or lets it enter them again.
	Hold struct{ On bool }
	// Ask begins the operation that ends at a point. There is one at a time.
	Ask struct {
		Point id.Point
		// Micros is the number of micro-batches of an evaluation.
		Micros int
		// Words is how many bytes the collector says in the exchange after the collection of the state, and a worker of each
		// micro-batch of an evaluation.
		Words int
	}
	// Abandon ends the worker's part with an error.
	Abandon struct{ Err error }
)

// What comes of duties.
type (
	// Received says that a message that was expected is in its buffer.
	Received struct {
		Ticket Ticket
		From   id.Session
		Bytes  int
		// Data is the content, of a message into no buffer, or the first number of a base.
		Data []byte
		// Duplicate: the message came before; the buffer was not touched.
		Duplicate bool
	}
	// OpDone ends an operation of a group: [Edit], [Reduce] or [Exchange].
	OpDone struct {
		Op     Op
		Opened int    // links that an edit made
		All    []byte // what all workers said in an exchange
		Broken bool   // links or members changed: the next plan repairs that
		Err    error  // anything else that failed
	}
	// Compared ends [Compare].
	Compared struct {
		Attempt key.Attempt
		Tensor  key.Tensor
		Same    bool
	}

	// PassDone ends [Run].
	PassDone struct {
		Task graph.Task
		// Made is the shape of the boundary tensor that the pass made, nil if none.
		Made []int
		// Within are the shapes of the outputs of the stage's layers but the last, if they were asked for.
		Within [][]int
	}
	// GradientDone says that the gradient of a micro-batch is in the sums of a layer.
	GradientDone struct{ Layer, Micro int }
	// HandedOver ends [HandOver].
	HandedOver struct{ Stage int }
	// Said ends [Say]. The record lacks what the core knows.
	Said struct {
		Record  Record
		Checked []byte // of blocks
	}
	// Answered ends [Operate].
	Answered struct {
		Said   []byte
		Broken bool
	}
	// Prepared ends [Prepare].
	Prepared struct {
		Stages [][2]int
		Ranges []id.Range
	}
	// FirstMade ends [First].
	FirstMade struct{ Layer int }
	// Replayed ends [Replay].
	Replayed struct{}
	// CaughtUp ends [CatchUp].
	CaughtUp struct{ Range id.Range }
	// ShardUpdated says that a range that is held here has its new parameters, in an [Update]. Plans may have been applied since that began.
	ShardUpdated struct{ Range id.Range }
	// Copied says which of the transfers of a [CopyBases] or an [Update] have a base now.
	Copied struct{ Transfers []Transfer }
	// BasesCopied ends [CopyBases].
	BasesCopied struct{}
	// BaseSent says that the base of a transfer is sent, or will not be.
	BaseSent struct{ Transfer Transfer }
	// Repeated ends [Repeat]. Stopped: before its end.
	Repeated struct{ Stopped bool }
	// Updated ends [Update].
	Updated struct{}
	// Failed says that a duty could not be done.
	Failed struct {
		Err   error
		Task  bool // a task of the computing goroutine
		Panic bool // a panic, which ends the worker's part in any case
	}
)

// Record is what a worker says in a commit. All records have one size but for the sums of losses and the digests of spot
// checks, whose numbers follow from the plan and the step.
type Record struct {
	Squares zero.Fixed // of the gradients of the owned shards
	LR      float64
	Suspect int        // a layer from which on the output is not finite, -1 if there is none
	Spoiled int        // a layer whose gradient is not finite, -1 if there is none
	Newest  id.Version // of the plans that have come
	Stop    string
	Saving  Saving
	Losses  []LossSum
	// Spot are the digests of a spot check: of a worker that runs and repeats the pair, first those of the first run.
	Spot []uint32
}

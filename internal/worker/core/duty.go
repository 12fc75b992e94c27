package core

import (
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Duty is something that the shell must do. A duty that takes time is begun, and its end is an [Event].
type Duty any

// Ticket names an expected message. It is not used again.
type Ticket uint64

// Op names an operation of a group. It is not used again.
type Op uint64

// Content says which memory a message is about.
type Content uint8

// The contents.
const (
	Words       Content = iota // none: the event or the duty has the bytes
	Boundary                   // a boundary tensor
	Gradient                   // the complete gradient of a range
	Parameters                 // the parameters of a range, where the layer reads them
	RepairBlock                // an array of a block
	BaseState                  // the state of a range, for a transfer
	Increment                  // the gradient of a range, for a transfer
)

// Buffer names memory of the shell.
type Buffer struct {
	Content Content
	Tensor  key.Tensor
	Range   id.Range // of the shard, or of the transfer
	Block   id.Range // of a RepairBlock
	Array   int      // of a RepairBlock: the parameters, then each moment; of an Increment: 0 or 1
}

// Transfer is a range on its way to a worker that will hold it.
type Transfer struct {
	Fill  id.Fill
	Range id.Range
	To    id.Session
}

// Messages and groups.
type (
	// Admit makes these peers the members of the network, and evicts all others.
	Admit struct{ Peers []comm.Peer }
	// Expect receives a message: into the buffer, or, of Words, at most Size bytes for the event. Dims is the shape of a
	// boundary tensor. The end is [Received]; a message that fails has none.
	Expect struct {
		Ticket Ticket
		Key    comm.Key
		Into   Buffer
		Size   int
		Dims   []int
	}
	// Cancel gives an expected message up. When Wait is set the memory is the worker's again before the next duty.
	Cancel struct {
		Ticket Ticket
		Wait   bool
	}
	// Send posts a message: the buffer, or Data. It is never waited for.
	Send struct {
		To       id.Session
		Key      comm.Key
		From     Buffer
		Data     []byte
		Priority comm.Priority
	}
	// SendFill posts a message of a transfer: its base, its gradient (out of the shard Source), or Data.
	SendFill struct {
		Transfer Transfer
		Key      comm.Key
		Content  Content
		Source   id.Range
		Data     []byte
	}
	// Attest sends the digest of a boundary tensor.
	Attest struct {
		To     id.Session
		Key    comm.Key
		Tensor key.Tensor
	}
	// Edit edits the groups in place, one after the other.
	Edit struct {
		Op      Op
		Version id.Version
		Groups  []GroupEdit
	}
	// Reduce brings the gradient of a layer to the workers that reduce its shards.
	Reduce struct {
		Op    Op
		Group uint16
		Call  group.Call
		Layer int
		Tree  group.Tree
		Mine  []id.Range // by shard of the tree; empty where another worker reduces it
	}
	// Exchange lets every worker know what all of them say. Parts are the borders of what each says, Rank is ours.
	Exchange struct {
		Op    Op
		Point id.Point
		Call  group.Call
		Parts []int
		Rank  int
		Said  []byte
	}
	// CancelOps cancels all operations of groups.
	CancelOps struct{}
)

// GroupEdit is a group and its members.
type GroupEdit struct {
	ID      uint16
	Members []id.Session
}

// Tasks of the computing goroutines: there is one at a time, but for those that name a lane, which run side by side, one in each, and Replay,
// CatchUp, CopyBases and First, one of which runs at a time, beside passes.
type (
	// Run runs a pass. Spare says that it may give way to others on the machine; see [graph.Queue.Spare]. Learn asks for the shapes within the stage. Last says that no other
	// backward pass of the stage is to begin here: the pass hands over all gradients, and passes before it may keep theirs. Soon says that
	// no more of them are left than there are lanes, so each layer that is done is told at once. Digests is how many
	// the passes of the pair make of a spot check, for the record of the commit; 0 if there is none.
	Run struct {
		Lane          int
		Task          graph.Task
		Step, Digests int
		Spare         bool
		Learn         bool
		Last, Soon    bool
	}
	// HandOver brings the gradients that passes of a stage have kept into the sums: the pass that was to be the last one is now
	// another worker's.
	HandOver struct{ Stage int }
	// Repeat runs both passes of a pair once more and keeps nothing of them but so many digests, for the record of the commit.
	Repeat struct {
		Pair          graph.Pair
		Step, Digests int
	}
	// StopRepeat ends it where it can.
	StopRepeat struct{}
	// Say checks all blocks and makes the record of a commit. Nodes are those of the sums of losses.
	Say struct {
		Step    int
		Tainted bool
		Nodes   []tree.Node
	}
	// Operate does the work of an operation other than a step.
	Operate struct {
		Point  id.Point
		Repair int
	}
	// StopOperate cancels it, or a Say.
	StopOperate struct{}
	// Prepare makes stages, and shards as they are where the run begins; the parameters of the stages, too, but where First makes them.
	Prepare struct {
		Stages [][2]int
		Ranges []id.Range
	}
	// First makes the first values of a layer that is served here, if Config.Beside is set. Its gate is shut meanwhile.
	First struct{ Layer int }
	// Replay applies an update to the state that a transfer brings.
	Replay struct {
		Range     id.Range
		Update    zero.Update
		Increment int // the buffer of its gradient
	}
	// CatchUp does so to a shard that is Late, and puts its parameters where the layer reads them, if it is served.
	CatchUp struct {
		Range     id.Range
		Update    zero.Update
		Increment int
	}
	// CopyBases copies bases for transfers, of the state after the update of a step.
	CopyBases struct {
		Step   int
		Copies []Copy
	}
	// StopCopies ends the copying of bases after the array that it is at: those that are not whole are not made. A plan waits for it.
	StopCopies struct{}
	// Update applies a committed update to all shards, copies bases for transfers, and, if Save is set, makes the worker's part
	// of a checkpoint; Stopped says that nothing changes the state afterwards. Parameters of layers that the worker does not
	// serve are given up before.
	Update struct {
		Update  zero.Update
		Copies  []Copy
		Save    bool
		Stopped bool
	}
)

// Copy is a transfer whose base is to be copied out of a shard.
type Copy struct {
	Transfer
	Source id.Range
}

// What to do with memory.
type (
	// Begin begins a step, and leaves all keys of steps before Word behind.
	Begin struct{ Word uint64 }
	// Clear gives up all memory of the step.
	Clear struct{}
	// Keep keeps the boundary tensor that a pass has just made. Cancel is the message that was expected in its place, if any.
	Keep struct {
		Tensor key.Tensor
		Cancel Ticket
	}
	// Compare compares a boundary tensor that is here with a digest, or, if that is nil, with the one that a pass has just made,
	// which is given up. The answer is [Compared].
	Compare struct {
		Attempt key.Attempt
		Tensor  key.Tensor
		Digest  []byte
	}
	// Total takes the gradients of ranges of a layer out of the sums of the worker, which are all of them.
	Total struct {
		Layer  int
		Ranges []id.Range
	}
	// Gate makes passes wait for the parameters of a layer, or, if Open is set, says that all are there.
	Gate struct {
		Layer int
		Open  bool
	}
	// Found makes the state of a range out of the base that has come.
	Found struct{ Range id.Range }
	// Forget gives up the state that transfers brought, and, if Sends is set, cancels what was posted by SendFill.
	Forget struct{ Sends bool }
	// Restore puts a repaired block in its place, in the shard Range or, if Held is false, in the layer alone.
	Restore struct {
		Range, Block id.Range
		Arrays       int
		Held         bool
	}
	// Apply goes over to a plan.
	Apply struct {
		Plan *plan.Plan
		// Initial: the plan begins where the run begins, with what Prepare made.
		Initial bool
		Drop    []int // stages that are not served any more
		Serve   []int // stages that are served from now on
		Fresh   []int // layers that were not served before
		Stale   []int // layers that are not served any more
		Shards  []NewShard
		Gone    []id.Range // held no more; their state is kept until the next commit
	}
)

// NewShard is a range that the worker has a part in from now on.
type NewShard struct {
	Range id.Range
	From  Origin
	// Transfers are the ranges of transfers that are of the step passed.
	Transfers []id.Range
}

// Origin says where the state of a shard comes from.
type Origin uint8

// The origins.
const (
	Stateless Origin = iota // it has a gradient only
	Preset                  // Prepare made it
	Derived                 // as the run begins: its parameters are those of its layer, which is served here, once they are made, and its moments are zeros
	Assembled               // it is put together from what is here
	Late                    // it is what a transfer brings, of the step before the one passed: CatchUp follows
)

// What others are told, besides a [control.Answer], a [control.Applied] without times, a [control.Level] and a [control.Repaired].
type (
	// Mark takes the time: an order has come, or (Live) its plan is applied.
	Mark struct{ Live bool }
	// Conclude ends an operation other than a step: it reads what all workers said.
	Conclude struct{ Said [][]byte }
	// End ends the operation.
	End struct {
		Result Result // of a step
		Err    error
	}
)

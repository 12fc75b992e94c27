// Package key makes the names of everything that workers send each other as tensors and exchanges: the keys of messages and the
// calls of groups. No other file of a worker fills in a [comm.Key].
//
// A key says what the data are, and only that of an attestation who sends them. So a second copy is dropped and a worker that takes over may send what
// another one was to send. Two messages whose content may differ have different keys. That is why most keys carry an [Attempt]:
// a step that is executed again, after a restart from a checkpoint or after a repair, is another step to the network.
//
// # Messages
//
//	constructor   from → to                                  when                          lives until
//	Boundary      runner of a pass → runner of its           when a pass is done, and      the commit after next
//	              neighbour stage's, and the worker that     again after a re-route
//	              repeats it in a spot check
//	Attestation   worker that recomputes a boundary tensor   in a step with a recovery,    the commit after next
//	              → worker that has the lost worker's copy   with digests on
//	Gradient      reducer of a shard → owner, mirrors        when the gradient of the      the commit after next
//	              (ZeRO 1: all workers of the stage)         shard is complete
//	Params        owner of a shard → workers of its stage    after the update of a step    the commit after next
//	              without a replica
//	Block         replica of a shard → workers whose copy    after an exchange that        the commit after next
//	              of a block was altered                     found an altered block
//	Evaluation    runner of a stage → runner of the next     in an evaluation; its         the next commit
//	                                                         EvaluationShape is first
//	Collected     owner of a shard → plan.Plan.Collector     at the end of the run         the end
//	Base          source of a transfer → destination         after the first commit of     the next Fill
//	                                                         a Fill
//	Increment     source of a transfer → destination         when a gradient is complete   the next Fill
//	Applied       source of a transfer → destination         at each commit of a Fill      the next Fill
//	Shape         any worker → any worker                    once for a layer and pair     the end
//	Live          worker of a plan → worker that joins       when its first plan goes      the end
//	                                                         live
//
// # Group operations
//
//	Reduction     workers of a stage: the gradient of a layer, under the version of the plan
//	Exchange      all workers of the plan: what each says at a point, under the version of the plan
//
// # Bounds
//
// An attempt is one 64-bit word in keys, see [Attempt.Word]: the epoch has 23 bits, the step 32, the repair 8.
// [MaxRepair] is the last repair; the value after it names what comes after a commit. Numbers of plans have 23 bits in
// [Increment]. The term of a fill has 63 bits, its number 31. Layers, micro-batches and boundaries have 31 bits.
package key

import (
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// MaxRepair bounds the repairs between two points.
const MaxRepair = 250

// afterCommit is the repair in names of what follows the commit of a step.
const afterCommit = 1<<8 - 1

// forever is the step of messages that do not end with one.
const forever = 1<<64 - 1

// beyond is a step later than all others. Keys of a fill add its term.
const beyond = 1 << 63

// Attempt names one execution of a step.
type Attempt struct {
	Epoch  int // of the run: counts restarts from a checkpoint, see [controller.Order]
	Step   int
	Repair int // of the point before the step
}

// After returns the name of what follows the commit of a step: no repair changes it any more.
func After(epoch, step int) Attempt { return Attempt{epoch, step, afterCommit} }

// Word returns the attempt as one number, which grows from attempt to attempt. [comm.Endpoint.Advance] takes it, too.
func (a Attempt) Word() uint64 {
	return uint64(a.Epoch)<<40 | uint64(a.Step)<<8 | uint64(a.Repair)
}

// Tensor names a boundary tensor of a step: what crosses from stage Boundary-1 to Boundary, or back.
type Tensor struct {
	Boundary, Micro int
	Back            bool
}

// Consumer returns the pair that waits for the tensor.
func (t Tensor) Consumer() graph.Pair {
	if t.Back {
		return graph.Pair{Stage: t.Boundary - 1, Micro: t.Micro}
	}
	return graph.Pair{Stage: t.Boundary, Micro: t.Micro}
}

// Producer returns the pair that makes the tensor.
func (t Tensor) Producer() graph.Pair {
	if t.Back {
		return graph.Pair{Stage: t.Boundary, Micro: t.Micro}
	}
	return graph.Pair{Stage: t.Boundary - 1, Micro: t.Micro}
}

func (t Tensor) dir() uint8 {
	if t.Back {
		return comm.Backward
	}
	return comm.Forward
}

// Boundary names a boundary tensor.
func Boundary(a Attempt, t Tensor) comm.Key {
	return comm.Key{Kind: comm.KindBoundary, Step: a.Word(), Layer: int32(t.Boundary), Micro: int32(t.Micro), Dir: t.dir()}
}

// Attestation names the digest of a boundary tensor as a worker has made it: another one may have read another sample.
func Attestation(a Attempt, t Tensor, by id.Session) comm.Key {
	k := Boundary(a, t)
	k.Lo, k.Hi = int64(by.Worker), 1+int64(by.Incarnation) // that of the tensor is 0
	return k
}

// The directions of the boundary tensors of an evaluation, and of their shapes.
const (
	evaluation uint8 = 2 + iota
	evaluationShape
)

// Evaluation names a boundary tensor of the evaluation after a step. Under another plan, or after a repair, the
// evaluation begins again.
func Evaluation(after Attempt, v id.Version, repair, boundary, micro int) comm.Key {
	return comm.Key{
		Kind: comm.KindBoundary, Step: after.Word(), Layer: int32(boundary), Micro: int32(micro), Dir: evaluation,
		Lo: int64(v.N), Hi: int64(repair),
	}
}

// EvaluationShape names the shape of a boundary tensor with a key of [Evaluation].
func EvaluationShape(tensor comm.Key) comm.Key {
	tensor.Dir = evaluationShape
	return tensor
}

func ranged(kind comm.Kind, step uint64, r id.Range) comm.Key {
	return comm.Key{Kind: kind, Step: step, Layer: int32(r.Layer), Lo: int64(r.Lo), Hi: int64(r.Hi)}
}

// Gradient names the complete gradient of a range under a plan. Under another one the gradient is reduced again and may
// differ: without the passes of a worker whose memory was altered, or, in fast reduction, in another order.
func Gradient(a Attempt, v id.Version, r id.Range, micros int) comm.Key {
	k := ranged(comm.KindGradient, a.Word(), r)
	k.Node, k.Micro = tree.Root(micros), int32(v.N)
	return k
}

// Params names the parameters of a range after a step.
func Params(after Attempt, r id.Range) comm.Key { return ranged(comm.KindParams, after.Word(), r) }

// RangeOf returns the range that a key of [Params] is about.
func RangeOf(k comm.Key) id.Range {
	return id.Range{Layer: int(k.Layer), Lo: int(k.Lo), Hi: int(k.Hi)}
}

// Block names an array of a block that is repaired: the parameters, then each moment.
func Block(a Attempt, g id.Gate, block id.Range, array int) comm.Key {
	k := ranged(comm.KindState, a.Word(), block)
	k.Dir, k.Micro = 1+uint8(g), int32(array)
	return k
}

// Collected names an array of a range at the end of the run: the parameters (moment -1) or a moment. Under another plan, or
// after a repair, the collection begins again.
func Collected(after Attempt, v id.Version, repair int, r id.Range, moment int) comm.Key {
	k := ranged(comm.KindState, after.Word(), r)
	k.Micro, k.Node = int32(1+moment), tree.Node{Lo: repair, Hi: v.N}
	return k
}

// Try names the gradients of a step that a source sends to the destination of a transfer: another plan or a repair makes others.
type Try struct {
	Plan   int // N of the version
	Repair int
}

// Word returns the try as one number, which grows from try to try.
func (t Try) Word() int { return t.Plan<<8 | t.Repair }

// TryOf returns the try with a word.
func TryOf(word int) Try { return Try{word >> 8, word & (1<<8 - 1)} }

// A message of a fill outlives the step: the destination may be behind.
func filled(fill id.Fill, r id.Range, step, try int) comm.Key {
	k := ranged(comm.KindState, beyond|fill.Term, r)
	k.Node, k.Micro = tree.Node{Lo: fill.N, Hi: step}, int32(try)
	return k
}

// Base names the state of a range that a fill copies.
func Base(fill id.Fill, r id.Range) comm.Key { return filled(fill, r, 0, 0) }

// Increment names the gradient of a try of a step for a range whose base was sent.
func Increment(fill id.Fill, r id.Range, step int, t Try) comm.Key {
	return filled(fill, r, step, t.Word())
}

// Applied names the numbers of the update of a step, among them the try whose gradient it applied.
func Applied(fill id.Fill, r id.Range, step int) comm.Key {
	return filled(fill, r, step, -1)
}

// Shape names the shape of the input of a layer.
func Shape(epoch, layer int) comm.Key {
	return comm.Key{Kind: comm.KindUser, Step: forever, Layer: int32(layer), Micro: int32(epoch)}
}

// Live names the message that tells a worker that its first plan is live, and where the run is.
func Live(v id.Version) comm.Key {
	return comm.Key{Kind: comm.KindUser, Step: forever, Layer: -1, Lo: int64(v.Generation), Hi: int64(v.N)}
}

// Everyone is the group of all workers of a plan.
const Everyone uint16 = 0

// OfStage returns the group of the workers of a stage.
func OfStage(stage int) uint16 { return uint16(1 + stage) }

// Reduction names the reduction of a layer's gradient in the group of its stage.
func Reduction(a Attempt, v id.Version, layer int) group.Call {
	return group.Call{Version: v, Step: a.Word(), Tag: uint16(layer), Priority: comm.Bulk}
}

// Exchange names what all workers say at a point after the attempt's step began, in the group of all.
func Exchange(a Attempt, v id.Version, g id.Gate) group.Call {
	return group.Call{Version: v, Step: a.Word(), Tag: uint16(g), Priority: comm.Control}
}

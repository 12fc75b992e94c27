package graph

import (
	"cmp"
	"fmt"
)

// Kind is the kind of a task. The order is that of priority on one worker.
type Kind uint8

// The kinds of tasks, with the fields of [Task] that name one.
const (
	Backward Kind = iota // Stage, Micro
	Forward              // Stage, Micro
	Reduce               // Layer, Shard: adds up the gradient at the owner
	Commit               // none
	Update               // Layer, Shard: on the owner and on every mirror
	Gather               // Layer: on every worker of the layer's stage

	// Transfers occupy the sender's network card, which the workers of a host share. Stage and
	// Micro are those of the pass that made what is sent.
	SendGradient   // to the stage before
	SendActivation // to the next stage
)

var kindNames = [...]string{"backward", "forward", "reduce", "commit", "update", "gather", "send gradient", "send activation"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Pair names the work on one micro-batch in one stage: a forward and a
// backward pass, which run on one worker.
type Pair struct {
	Stage int `json:"stage"`
	Micro int `json:"micro"`
}

func (p Pair) String() string { return fmt.Sprintf("stage %d, micro-batch %d", p.Stage, p.Micro) }

// Compare orders pairs by stage, then micro-batch.
func (p Pair) Compare(o Pair) int {
	return cmp.Or(cmp.Compare(p.Stage, o.Stage), cmp.Compare(p.Micro, o.Micro))
}

// Task names a task of a step. Fields that its kind does not use are zero.
type Task struct {
	Kind Kind
	Pair
	Layer, Shard int // Shard counts over all shards of the plan
}

// ForwardOf returns the forward task of a pair.
func ForwardOf(p Pair) Task { return Task{Kind: Forward, Pair: p} }

// BackwardOf returns the backward task of a pair.
func BackwardOf(p Pair) Task { return Task{Kind: Backward, Pair: p} }

func (t Task) String() string {
	switch t.Kind {
	case Forward:
		return fmt.Sprintf("F(%d,%d)", t.Stage, t.Micro)
	case Backward:
		return fmt.Sprintf("B(%d,%d)", t.Stage, t.Micro)
	case SendGradient:
		return fmt.Sprintf("send B(%d,%d)", t.Stage, t.Micro)
	case SendActivation:
		return fmt.Sprintf("send F(%d,%d)", t.Stage, t.Micro)
	case Reduce, Update:
		return fmt.Sprintf("%v(%d,%d)", t.Kind, t.Layer, t.Shard)
	case Gather:
		return fmt.Sprintf("gather(%d)", t.Layer)
	default:
		return t.Kind.String()
	}
}

// Compare orders tasks by priority; the more urgent one is the lesser.
//
// Passes go by micro-batch, and of one micro-batch the deepest stage goes
// first, since it is nearest to its gradient. Gradients are reduced in the
// order in which backward passes make them, the last layer first; parameters
// are updated and gathered in the order in which the next forward pass needs
// them, the first layer first.
func (t Task) Compare(o Task) int {
	layers := cmp.Compare(t.Layer, o.Layer)
	if t.Kind == Reduce {
		layers = -layers
	}
	return cmp.Or(cmp.Compare(t.Kind, o.Kind), cmp.Compare(t.Micro, o.Micro), cmp.Compare(o.Stage, t.Stage),
		layers, cmp.Compare(t.Shard, o.Shard))
}

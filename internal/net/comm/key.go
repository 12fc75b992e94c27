package comm

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/board"
)

// Peer is a session and the address at which its endpoint listens.
type Peer struct {
	id.Session
	Addr string
}

// Priority orders what waits to be sent to one peer: lower goes first, and
// [Control] overtakes all bulk between two chunks.
type Priority uint16

// Control is the priority of messages that must not wait behind bulk. Bulk
// counts from 1, or from 0 added to Bulk.
const (
	Control Priority = 0
	Bulk    Priority = 1
)

// Kind says what a message holds.
type Kind uint8

// The kinds of content. What the other fields of a key mean depends on it.
const (
	KindBoundary Kind = 1 + iota // tensor between stages: Step, Layer (boundary), Micro, Dir
	KindGradient                 // gradient sum: Step, Layer, Lo, Hi, Node
	KindParams                   // parameters of a shard: Step, Layer, Lo, Hi
	KindMetric                   // loss and metrics: Step, Node
	KindState                    // parameters and moments that move: Step, Layer, Lo, Hi, Micro (chunk)
	KindUser                     // free for the caller

	kindGroup // an operation of a group; see GroupKey
	kindAbort // the end of a group's version; see AbortKey
	kindEnd
)

var kindNames = [...]string{
	KindBoundary: "boundary", KindGradient: "gradient", KindParams: "params", KindMetric: "metric", KindState: "state", KindUser: "user",
	kindGroup: "group", kindAbort: "abort",
}

// String returns the kind's name.
func (k Kind) String() string { return id.NameOf("kind", uint8(k), kindNames[:]...) }

// Directions of a boundary tensor.
const (
	Forward  uint8 = 0 // an activation
	Backward uint8 = 1 // a gradient
)

// Key names the content of a message. Two messages with the same key hold the
// same bytes, whoever sends them and however often, so an endpoint takes the
// first and drops the others. Kind is required; the fields a kind does not
// use stay zero.
//
// Step is also the key's lifetime: [Endpoint.Advance] ends all keys of earlier
// steps.
type Key struct {
	Kind   Kind
	Dir    uint8  // direction
	Layer  int32  // layer, or boundary
	Micro  int32  // micro-batch, or chunk
	Step   uint64 // step
	Lo, Hi int64  // range of elements
	Node   tree.Node
}

const keySize = 44

// String renders the key for logs: kind and step, then the fields that are
// not zero.
func (k Key) String() string {
	s := fmt.Sprintf("%v step %d", k.Kind, k.Step)
	if k.Layer != 0 {
		s += fmt.Sprintf(" layer %d", k.Layer)
	}
	if k.Lo != 0 || k.Hi != 0 {
		s += fmt.Sprintf(" [%d,%d)", k.Lo, k.Hi)
	}
	if k.Node != (tree.Node{}) {
		s += fmt.Sprintf(" node %v", k.Node)
	}
	if k.Micro != 0 {
		s += fmt.Sprintf(" micro-batch %d", k.Micro)
	}
	if k.Dir != 0 {
		s += fmt.Sprintf(" dir %d", k.Dir)
	}
	return s
}

// valid reports whether the key has a kind and fits its encoding.
func (k Key) valid() bool {
	fits := func(n int) bool { return n >= 0 && n <= math.MaxInt32 }
	return k.Kind > 0 && k.Kind < kindEnd && fits(k.Node.Lo) && fits(k.Node.Hi)
}

// ofGroup reports whether the key lives and dies with a group's version, and
// not with a step.
func (k Key) ofGroup() bool { return k.Kind >= kindGroup }

// GroupKey names a message of an operation of a group: Layer is the group and the tag, Lo and Hi are the version, Dir is the
// operation. What micro and node are depends on the operation.
func GroupKey(group uint16, v id.Version, op uint8, step uint64, tag uint16, micro int, n tree.Node) Key {
	return Key{Kind: kindGroup, Dir: op, Layer: int32(uint32(group)<<16 | uint32(tag)), Micro: int32(micro), Step: step,
		Lo: int64(v.Generation), Hi: int64(v.N), Node: n}
}

// BoardName names what a member of a group shows on its board in a round of an operation, below 2^24.
func BoardName(group uint16, v id.Version, op uint8, step uint64, tag uint16, round int) board.Name {
	return board.Name{uint64(group)<<48 | uint64(tag)<<32 | uint64(op)<<24 | uint64(round), step, uint64(v.Generation), uint64(v.N)}
}

// boardNameOf returns the group and the version of a name.
func boardNameOf(n board.Name) (group uint16, v id.Version) {
	return uint16(n[0] >> 48), id.Version{Generation: int(n[2]), N: int(n[3])}
}

// AbortKey names the message that a version of a group has ended.
func AbortKey(group uint16, v id.Version) Key {
	return Key{Kind: kindAbort, Layer: int32(uint32(group) << 16), Lo: int64(v.Generation), Hi: int64(v.N)}
}

func versionOf(k Key) id.Version { return id.Version{Generation: int(k.Lo), N: int(k.Hi)} }
func groupOf(k Key) uint16       { return uint16(uint32(k.Layer) >> 16) }

func (k Key) append(b []byte) []byte {
	b = append(b, byte(k.Kind), k.Dir, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(k.Layer))
	b = binary.LittleEndian.AppendUint32(b, uint32(k.Micro))
	b = binary.LittleEndian.AppendUint32(b, uint32(k.Node.Lo))
	b = binary.LittleEndian.AppendUint32(b, uint32(k.Node.Hi))
	b = binary.LittleEndian.AppendUint64(b, k.Step)
	b = binary.LittleEndian.AppendUint64(b, uint64(k.Lo))
	return binary.LittleEndian.AppendUint64(b, uint64(k.Hi))
}

// decodeKey reads a key from the first keySize bytes.
func decodeKey(b []byte) (Key, bool) {
	if len(b) < keySize || b[2] != 0 || b[3] != 0 {
		return Key{}, false
	}
	u32, u64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	k := Key{
		Kind: Kind(b[0]), Dir: b[1], Layer: int32(u32(b[4:])), Micro: int32(u32(b[8:])),
		Step: u64(b[20:]), Lo: int64(u64(b[28:])), Hi: int64(u64(b[36:])),
	}
	lo, hi := u32(b[12:]), u32(b[16:])
	if lo > math.MaxInt32 || hi > math.MaxInt32 {
		return Key{}, false
	}
	k.Node = tree.Node{Lo: int(lo), Hi: int(hi)}
	return k, k.valid()
}

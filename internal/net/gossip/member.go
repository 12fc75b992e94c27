package gossip

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/vmihailenco/msgpack/v5"
)

// Kind tells what a member is.
type Kind uint8

const (
	Worker Kind = 1
	Agent  Kind = 2
)

// Bounds of an identity. What fits into them fits into a packet.
const (
	MaxHost = 128 // bytes
	MaxAddr = 255 // bytes
)

// LocalHost is the name of the host where there is only one.
const LocalHost = "localhost"

// MaxMembers bounds the members a ring remembers, with the dead.
const MaxMembers = 4096

// Identity is what a member says about itself.
type Identity struct {
	Kind        Kind
	Worker      id.WorkerID // of a worker; 0 for an agent, which is known by its host
	Incarnation int         // counts the lives of this worker or agent
	Host        string      // name of the host, 1 to MaxHost printable ASCII bytes without space
	Addr        string      // where package comm, or the agent, is reached; at most MaxAddr such bytes
}

// Name is the life's name in the ring and in logs: worker-3.1, or agent-HOST.1.
func (i Identity) Name() string { return fmt.Sprintf("%s.%d", i.key(), i.Incarnation) }

// key is the name without the incarnation: that of all lives.
func (i Identity) key() string {
	if i.Kind == Agent {
		return "agent-" + i.Host
	}
	return fmt.Sprintf("worker-%d", i.Worker)
}

// lives returns the key in a name.
func lives(name string) string { return name[:max(strings.LastIndexByte(name, '.'), 0)] }

// validate returns the faults, each beginning with the field.
func (i Identity) validate() (f faults.List) {
	f.If(i.Kind != Worker && i.Kind != Agent, "Kind is %d; it must be gossip.Worker or gossip.Agent", i.Kind)
	f.If(i.Worker < 0 || i.Kind == Agent && i.Worker != 0, "Worker is %d; it must be at least 0, and 0 for an agent", i.Worker)
	f.If(i.Incarnation < 0, "Incarnation is %d; it must be at least 0", i.Incarnation)
	f.If(i.Host == "" || len(i.Host) > MaxHost || !printable(i.Host),
		"Host is %.64q; it must be 1 to %d printable ASCII bytes without space", i.Host, MaxHost)
	f.If(len(i.Addr) > MaxAddr || !printable(i.Addr), "Addr is %.64q; it must be at most %d printable ASCII bytes without space", i.Addr, MaxAddr)
	return f
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// format is the first element of the metadata; it changes with their layout.
const format = 2

// encode returns the metadata, at most memberlist.MetaMaxSize bytes if i is valid: a msgpack array of the format and the fields.
func (i Identity) encode() []byte {
	b, err := msgpack.Marshal([]any{format, i.Kind, i.Worker, i.Incarnation, i.Host, i.Addr})
	if err != nil {
		panic(err) // numbers and strings always have an encoding
	}
	return b
}

// decodeIdentity reads metadata that came from outside.
func decodeIdentity(b []byte) (i Identity, err error) {
	if len(b) > memberlist.MetaMaxSize {
		return Identity{}, fmt.Errorf("metadata have %d bytes, more than %d", len(b), memberlist.MetaMaxSize)
	}
	r := bytes.NewReader(b)
	dec := msgpack.NewDecoder(r)
	n, err := dec.DecodeArrayLen()
	if err != nil {
		return Identity{}, fmt.Errorf("metadata: %w", err)
	}
	var is int
	to := []any{&is, &i.Kind, &i.Worker, &i.Incarnation, &i.Host, &i.Addr}
	if n != len(to) {
		return Identity{}, fmt.Errorf("metadata have %d elements, want %d", n, len(to))
	}
	if err := dec.DecodeMulti(to...); err != nil {
		return Identity{}, fmt.Errorf("metadata: %w", err)
	}
	if is != format || r.Len() != 0 {
		return Identity{}, fmt.Errorf("metadata of format %d with %d bytes behind them, want format %d and none", is, r.Len(), format)
	}
	return i, i.validate().Err()
}

// State is what the ring believes of a member.
type State uint8

const (
	StateAlive State = iota
	StateSuspect
	StateDead
)

// String renders the state for logs.
func (s State) String() string { return id.NameOf("state", uint8(s), "alive", "suspect", "dead") }

// Member is a member of the ring.
type Member struct {
	Identity
	State State     // what is believed of it
	By    string    // name of the member that suspects it or says that it is dead
	Since time.Time // when it entered this state, by our clock
}

// order sorts members: agents by host, then workers by ID.
func order(ms []Member) {
	slices.SortFunc(ms, func(a, b Member) int {
		if a.Kind == Worker && b.Kind == Worker {
			return cmp.Compare(a.Worker, b.Worker)
		}
		return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Host, b.Host))
	})
}

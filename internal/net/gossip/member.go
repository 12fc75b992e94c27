package gossip

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/vmihailenco/msgpack/v5"
)

// Kind tells what a member is.
type Kind uint8

const (
	Worker Kind = 1
	Agent  Kind = 2
)

// String renders the kind for logs.
func (k Kind) String() string {
	switch k {
	case Worker:
		return "worker"
	case Agent:
		return "agent"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Bounds of an identity. What fits into them fits into a packet.
const (
	MaxHost = 128 // bytes
	MaxAddr = 255 // bytes
)

// LocalHost is the name of the host where there is only one.
const LocalHost = "localhost"

// MaxMembers bounds the members a ring remembers, the dead included.
const MaxMembers = 4096

// Identity is what a member says about itself.
type Identity struct {
	Kind        Kind
	Worker      id.WorkerID // of a worker; 0 for an agent, which is known by its host
	Incarnation int         // counts the lives of this worker or agent
	Host        string      // name of the host, 1 to MaxHost printable ASCII bytes without space
	Addr        string      // where package comm, or the agent, is reached; at most MaxAddr such bytes
	Plan        id.Version  // newest plan it has applied
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
func (i Identity) validate() (faults []error) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if i.Kind != Worker && i.Kind != Agent {
		fault("Kind is %d; it must be ring.Worker or ring.Agent", uint8(i.Kind))
	}
	if i.Worker < 0 || i.Kind == Agent && i.Worker != 0 {
		fault("Worker is %d; it must be at least 0, and 0 for an agent", i.Worker)
	}
	if i.Incarnation < 0 {
		fault("Incarnation is %d; it must be at least 0", i.Incarnation)
	}
	if i.Host == "" || len(i.Host) > MaxHost || !printable(i.Host) {
		fault("Host is %.64q; it must be 1 to %d printable ASCII bytes without space", i.Host, MaxHost)
	}
	if len(i.Addr) > MaxAddr || !printable(i.Addr) {
		fault("Addr is %.64q; it must be at most %d printable ASCII bytes without space", i.Addr, MaxAddr)
	}
	if i.Plan.Generation < 0 || i.Plan.N < 0 {
		fault("Plan is %v; neither number may be negative", i.Plan)
	}
	return faults
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// format is the first element of the metadata; it changes with their layout.
const format = 1

// metadata is an identity on the wire: a msgpack array of its fields.
type metadata struct {
	_msgpack struct{} `msgpack:",as_array"` //nolint:unused // it is what makes the struct an array

	Format      int
	Kind        uint8
	Worker      int
	Incarnation int
	Host        string
	Addr        string
	Generation  int
	N           int
}

// fields is the number of elements of the array.
const fields = 8

// encode returns the metadata, at most memberlist.MetaMaxSize bytes if i is
// valid.
func (i Identity) encode() []byte {
	b, err := msgpack.Marshal(&metadata{
		Format: format, Kind: uint8(i.Kind), Worker: int(i.Worker), Incarnation: i.Incarnation, Host: i.Host, Addr: i.Addr,
		Generation: i.Plan.Generation, N: i.Plan.N,
	})
	if err != nil {
		panic(err) // numbers and strings always have an encoding
	}
	return b
}

// decodeIdentity reads metadata that came from outside.
func decodeIdentity(b []byte) (Identity, error) {
	if len(b) > memberlist.MetaMaxSize {
		return Identity{}, fmt.Errorf("metadata have %d bytes, more than %d", len(b), memberlist.MetaMaxSize)
	}
	r := bytes.NewReader(b)
	dec := msgpack.NewDecoder(r)
	n, err := dec.DecodeArrayLen()
	if err != nil {
		return Identity{}, fmt.Errorf("metadata: %w", err)
	}
	if n != fields {
		return Identity{}, fmt.Errorf("metadata have %d elements, want %d", n, fields)
	}
	r.Reset(b)
	dec.Reset(r)
	var m metadata
	if err := dec.Decode(&m); err != nil {
		return Identity{}, fmt.Errorf("metadata: %w", err)
	}
	if m.Format != format || r.Len() != 0 {
		return Identity{}, fmt.Errorf("metadata of format %d with %d bytes behind them, want format %d and none", m.Format, r.Len(), format)
	}
	i := Identity{
		Kind: Kind(m.Kind), Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation, Host: m.Host, Addr: m.Addr,
		Plan: id.Version{Generation: m.Generation, N: m.N},
	}
	return i, errors.Join(i.validate()...)
}

// State is what the ring believes of a member.
type State uint8

const (
	StateAlive State = iota
	StateSuspect
	StateDead
	StateLeft // it said goodbye
)

// String renders the state for logs.
func (s State) String() string { return name(stateNames[:], int(s)) }

var stateNames = [...]string{"alive", "suspect", "dead", "left"}

// Gone tells that the member is dead or has left.
func (s State) Gone() bool { return s == StateDead || s == StateLeft }

// Member is a member of the ring.
type Member struct {
	Identity
	Gossip string    // its address in the ring, for Join
	State  State     // what is believed of it
	Since  time.Time // when it got into this state, by our clock
}

// String renders the member for logs.
func (m Member) String() string { return fmt.Sprintf("%s on %s %v", m.Name(), m.Host, m.State) }

// EventKind tells what happened.
type EventKind uint8

const (
	Joined    EventKind = iota // it is new, or alive although it was thought dead
	Changed                    // it has other metadata, and so it is alive
	Suspected                  // Event.By could not reach it
	Refuted                    // it is alive and has said so
	Dead                       // it was suspected and has not refuted that in time
	Left                       // it said goodbye
	Missed                     // events were dropped, as many as Event.Dropped; read Members
)

// String renders the kind for logs.
func (k EventKind) String() string { return name(eventNames[:], int(k)) }

var eventNames = [...]string{"joined", "changed", "suspected", "refuted", "dead", "left", "missed"}

func name(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprint(i)
}

// Event is a piece of evidence.
type Event struct {
	Kind    EventKind
	Member  Member    // after the event
	By      string    // name of the member that suspects it or says that it is dead, if known
	Time    time.Time // when it was learnt, by our clock
	Dropped int       // of Missed
}

// String renders the event for logs.
func (e Event) String() string {
	switch {
	case e.Kind == Missed:
		return fmt.Sprintf("%d events missed", e.Dropped)
	case e.By != "":
		return fmt.Sprintf("%s %v, says %s", e.Member.Name(), e.Kind, e.By)
	}
	return fmt.Sprintf("%s %v", e.Member.Name(), e.Kind)
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

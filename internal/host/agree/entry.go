package agree

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/soliton-train/soliton/internal/id"
)

// Bounds of an entry's fields.
const (
	MaxData   = 8 << 20 // bytes of each opaque field
	MaxReason = 4 << 10 // bytes of a reason
	MaxName   = 255     // bytes of a name, ID or address
)

// An Entry is what the nodes agree on. [Generation], [Job], [Plan], [Member] and [Skip] are proposed; [Servers] follows from changes of the
// configuration, and [Leader] begins a leadership.
type Entry interface {
	// String names the entry for people, in one line.
	String() string

	kind() kind
	code(c *coder) Entry
}

// Generation begins a start of the job. It must be greater than the one before.
type Generation struct{ N int }

// Job is the job of the newest generation, which has one: the bytes of job.json.
type Job struct {
	Generation int
	Data       []byte
}

// Plan is a plan and all that a worker needs to go on under it.
type Plan struct {
	// Term binds the plan to the leadership under which it was made: it is
	// refused if it is committed in another. 0 means any.
	Term    uint64
	Version id.Version
	Reason  string // why there is a new plan, in a sentence

	Data []byte // the order to the workers
}

// Member is a host that has joined the run since it began or, with the name of one that was there before, its new addresses.
type Member struct {
	Name    string
	Agree   string // HOST:PORT of its part in the agreement
	Link    string // where other hosts reach it
	Workers int    // that are to be started on it
}

// Skip says that a sample of the run that no worker can read is skipped, and how many were skipped in its place before.
type Skip struct {
	Term   uint64 // as of Plan
	Sample uint64
	Skips  int
}

// Servers are the nodes of the newest committed configuration.
type Servers struct{ Servers []Server }

// Server is a node of the agreement.
type Server struct {
	ID    string // of its log: a host that lost its log returns as another server, see [NewServerID]
	Addr  string // where others reach it
	Voter bool
}

// NewServerID returns an ID for a server on a host that no other server has or had.
func NewServerID(host string) string { return host + "#" + rand.Text()[:13] }

// HostOf returns the host of a server.
func HostOf(id string) string {
	host, _, _ := strings.Cut(id, "#")
	return host
}

// Leader is the first entry of every leadership of a node of several.
type Leader struct{ ID string }

func (e Generation) String() string { return fmt.Sprintf("generation %d", e.N) }
func (e Job) String() string        { return fmt.Sprintf("job of generation %d", e.Generation) }
func (e Plan) String() string       { return fmt.Sprintf("plan %v", e.Version) }
func (e Member) String() string     { return fmt.Sprintf("host %.64q", e.Name) }
func (e Skip) String() string       { return fmt.Sprintf("skip of sample %d", e.Sample) }
func (e Servers) String() string    { return fmt.Sprintf("servers %v", e.Servers) }
func (e Leader) String() string     { return fmt.Sprintf("leader %.64q", e.ID) }

// String renders the server as "ID at ADDR (voter)".
func (s Server) String() string {
	text := s.ID
	if s.Addr != "" {
		text += " at " + s.Addr
	}
	if s.Voter {
		text += " (voter)"
	}
	return text
}

type kind byte

// The kinds are part of the format of the log: they never change. 4 and 5 are reserved.
const (
	kindGeneration kind = 1
	kindJob        kind = 2
	kindPlan       kind = 3
	kindLeader     kind = 6
	kindServers    kind = 7 // in snapshots only
	kindMember     kind = 8
	kindSkip       kind = 9
)

const format = 1 // of entries and of snapshots

func (Generation) kind() kind { return kindGeneration }
func (Job) kind() kind        { return kindJob }
func (Plan) kind() kind       { return kindPlan }
func (Member) kind() kind     { return kindMember }
func (Skip) kind() kind       { return kindSkip }
func (Servers) kind() kind    { return kindServers }
func (Leader) kind() kind     { return kindLeader }

func (e Generation) code(c *coder) Entry { c.int(&e.N); return e }
func (e Job) code(c *coder) Entry        { c.int(&e.Generation); c.bytes(&e.Data); return e }
func (e Leader) code(c *coder) Entry     { c.text(&e.ID, MaxName); return e }

func (e Plan) code(c *coder) Entry {
	c.uint(&e.Term)
	c.int(&e.Version.Generation)
	c.int(&e.Version.N)
	c.text(&e.Reason, MaxReason)
	c.bytes(&e.Data)
	c.bytes(new([]byte)) // reserved
	return e
}

func (e Member) code(c *coder) Entry {
	c.text(&e.Name, MaxName)
	c.text(&e.Agree, MaxName)
	c.text(&e.Link, MaxName)
	c.int(&e.Workers)
	return e
}

func (e Skip) code(c *coder) Entry {
	c.uint(&e.Term)
	c.uint(&e.Sample)
	c.int(&e.Skips)
	return e
}

func (e Servers) code(c *coder) Entry {
	c.count(len(e.Servers), MaxServers, func(i int) {
		if i == len(e.Servers) {
			e.Servers = append(e.Servers, Server{})
		}
		s := &e.Servers[i]
		c.text(&s.ID, MaxName)
		c.text(&s.Addr, MaxName)
		c.bool(&s.Voter)
	})
	return e
}

// A coder writes fields, or reads them: the same calls do both, so that the
// two cannot differ. The first error stays and makes the others idle.
//
// It calls the library for single values only, never for whole structures, for
// which the library recurses.
type coder struct {
	enc  *msgpack.Encoder // nil when reading
	dec  *msgpack.Decoder // nil when writing
	rest *bytes.Reader    // what dec reads from
	err  error
}

func newReader(b []byte) *coder {
	rest := bytes.NewReader(b)
	return &coder{dec: msgpack.NewDecoder(rest), rest: rest}
}

// end is called after the last field has been read.
func (c *coder) end() error {
	switch {
	case errors.Is(c.err, io.EOF), errors.Is(c.err, io.ErrUnexpectedEOF):
		return errors.New("cut short")
	case c.err == nil && c.rest.Len() > 0:
		return fmt.Errorf("%d bytes after the last field", c.rest.Len())
	}
	return c.err
}

func field[T any](c *coder, v *T, write func(*msgpack.Encoder, T) error, read func(*msgpack.Decoder) (T, error)) {
	switch {
	case c.err != nil:
	case c.enc != nil:
		c.err = write(c.enc, *v)
	default:
		*v, c.err = read(c.dec)
	}
}

func (c *coder) int(v *int) {
	field(c, v, func(e *msgpack.Encoder, v int) error { return e.EncodeInt(int64(v)) }, (*msgpack.Decoder).DecodeInt)
}

func (c *coder) uint(v *uint64) {
	field(c, v, (*msgpack.Encoder).EncodeUint, (*msgpack.Decoder).DecodeUint64)
}

func (c *coder) bool(v *bool) {
	field(c, v, (*msgpack.Encoder).EncodeBool, (*msgpack.Decoder).DecodeBool)
}

func (c *coder) text(v *string, limit int) {
	field(c, v, (*msgpack.Encoder).EncodeString, (*msgpack.Decoder).DecodeString)
	if c.err == nil && len(*v) > limit {
		c.err = fmt.Errorf("text of %d bytes, more than %d", len(*v), limit)
	}
}

func (c *coder) bytes(v *[]byte) {
	field(c, v, (*msgpack.Encoder).EncodeBytes, func(d *msgpack.Decoder) ([]byte, error) {
		n, err := d.DecodeBytesLen() // -1 for nil
		switch {
		case err != nil || n < 0:
			return nil, err
		case n > c.rest.Len(): // DecodeBytes would allocate them
			return nil, io.ErrUnexpectedEOF
		}
		b := make([]byte, n)
		return b, d.ReadFull(b)
	})
	if c.err == nil && len(*v) > MaxData {
		c.err = fmt.Errorf("field of %d bytes, more than %d", len(*v), MaxData)
	}
}

// count codes how many elements follow, and each by its index.
func (c *coder) count(n, limit int, element func(i int)) {
	c.int(&n)
	if c.err == nil && (n < 0 || n > limit) {
		c.err = fmt.Errorf("%d elements, more than %d", n, limit)
	}
	for i := 0; i < n && c.err == nil; i++ {
		element(i)
	}
}

// Encode returns an entry as it stands in the log.
func Encode(e Entry) ([]byte, error) {
	var b bytes.Buffer
	b.Write([]byte{format, byte(e.kind())})
	c := coder{enc: msgpack.NewEncoder(&b)}
	e.code(&c)
	if c.err != nil {
		return nil, c.err
	}
	return b.Bytes(), nil
}

// Decode reads an entry of the log.
func Decode(b []byte) (Entry, error) {
	if len(b) < 2 {
		return nil, errors.New("cut short")
	}
	if b[0] != format {
		return nil, fmt.Errorf("format %d, not %d", b[0], format)
	}
	var e Entry
	switch kind(b[1]) {
	case kindGeneration:
		e = Generation{}
	case kindJob:
		e = Job{}
	case kindPlan:
		e = Plan{}
	case kindLeader:
		e = Leader{}
	case kindMember:
		e = Member{}
	case kindSkip:
		e = Skip{}
	default:
		return nil, fmt.Errorf("unknown kind %d", b[1])
	}
	c := newReader(b[2:])
	e = e.code(c)
	if err := c.end(); err != nil {
		return nil, err
	}
	return e, nil
}

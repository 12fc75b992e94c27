package comm

import (
	"cmp"
	"hash/fnv"
	"math"
	"os"
	"runtime"
	"sync"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// Config configures an [Endpoint]. Zero means the documented default.
type Config struct {
	// Self is our own session; what peers admit. There is no default.
	Self id.Session
	// Transport makes the connections. There is no default.
	Transport transport.Transport
	// Key is the secret of the run: peers prove that they hold it before
	// anything else. Default: none, where the transport lets in members only.
	Key auth.Key
	// Listen is the address others dial. Default: one of the transport's
	// choice, which [Endpoint.Addr] tells.
	Listen string

	// Chunk is how many bytes of bulk are sent without looking for something
	// more urgent, at most [MaxChunk]. Default 256 KiB: less costs bandwidth
	// by system calls, more is latency for control messages.
	Chunk int
	// Eager is the size in bytes up to which a message is sent at once, into
	// the peer's pool if its receiver is not there yet; a larger one waits for
	// credit. Default 32 KiB; negative: every message waits for credit.
	Eager int
	// Pool bounds the bytes of early messages kept for one peer, each counted
	// with [PoolOverhead] on top. Default 1 MiB, at least Eager.
	Pool int
	// Incast is how many peers may hold credit at the same time, at least 1.
	// Default 4: enough to hide that one of them pauses, few enough for a
	// switch's buffers.
	Incast int
	// Ahead is how many bytes of credit one peer may hold before it has used
	// them; the last message may pass it. Default 4 MiB: a millisecond of a
	// 40 Gbit/s link, so that it never waits for credit.
	Ahead int

	// Segment is the size in bytes of the messages into which reductions and
	// rings cut what they add or pass on; the same on all members. Default
	// 256 KiB: it stays in a core's cache.
	Segment int

	// Rejected counts the callers that were cut off before they had a link;
	// nil counts none.
	Rejected *auth.Tally

	// OnLink is told of every link that comes up, goes down, or could not be
	// made. It is called by the link's goroutine: it must not block, and must
	// not call SetMembers or Close.
	OnLink func(LinkEvent)
}

// Machine is what processes on one machine share.
type Machine struct {
	Number     uint64 // the same in all processes of the machine; 0: it is not known
	Processors uint16
}

// thisMachine says what the system does. The number is that of its boot, which containers on the machine have, too. The processors are those that the process may use: where processes may use different ones, they count as if
// they shared them.
var thisMachine = sync.OnceValue(func() Machine {
	m := Machine{Processors: uint16(min(runtime.NumCPU(), math.MaxUint16))}
	if boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		h := fnv.New64a()
		_, _ = h.Write(boot)
		m.Number = h.Sum64()
	}
	return m
})

// PoolOverhead is what a message in the pool counts beside its bytes.
const PoolOverhead = 256

// maxOffers bounds the messages of a link that wait for credit; the sender
// keeps the others back.
const maxOffers = 16384

// maxControl bounds the small frames that wait for a peer that does not read.
// An honest one is owed at most two for each of maxOffers messages.
const maxControl = 8 << 20

// LinkEvent is a change of a link.
type LinkEvent struct {
	Peer id.Session
	Up   bool
	Link uint64 // number of the link among those of the pair, from 1; 0 if there never was one
	Err  error  // why it is down

	Copies error // why messages of a link within a host are not read from the peer's memory; of a second event if only a trial shows it
	Board  error // why collectives of groups do not pass through memory that both share; of a second event if it is the peer's
}

// Validate reports all faults together.
func (c Config) Validate() error {
	var f faults.List
	d, key := c.withDefaults(), len(c.Key)
	f.If(!fits(c.Self), "comm.Config.Self is %v; worker and incarnation must be 0 to %d", c.Self, uint32(math.MaxUint32))
	f.If(c.Transport == nil, "comm.Config.Transport is nil; set comm.TCP{} or another transport")
	f.If(key != 0 && key < auth.KeySize, "comm.Config.Key has %d bytes; it must have at least %d, from a random source, or none", key, auth.KeySize)
	f.If(c.Chunk < 0 || c.Chunk > MaxChunk, "comm.Config.Chunk is %d; it must be 1 to %d, or 0 for %d", c.Chunk, MaxChunk, defaults.Chunk)
	f.If(c.Pool < 0 || c.Pool > 1<<30, "comm.Config.Pool is %d; it must be 1 to %d, or 0 for %d", c.Pool, 1<<30, defaults.Pool)
	f.If(d.Pool >= 0 && d.Pool < d.Eager+PoolOverhead, "comm.Config.Pool is %d, less than Eager (%d) and %d; an eager message would never fit",
		d.Pool, d.Eager, PoolOverhead)
	f.If(c.Incast < 0, "comm.Config.Incast is %d; it must be at least 1, or 0 for %d", c.Incast, defaults.Incast)
	f.If(c.Ahead < 0, "comm.Config.Ahead is %d; it must be at least 1, or 0 for %d", c.Ahead, defaults.Ahead)
	f.If(c.Segment < 0 || c.Segment%4 != 0, "comm.Config.Segment is %d; it must be a multiple of 4, or 0 for %d", c.Segment, defaults.Segment)
	return f.Err()
}

var defaults = Config{Chunk: 256 << 10, Eager: 32 << 10, Pool: 1 << 20, Incast: 4, Ahead: 4 << 20, Segment: 256 << 10}

func (c Config) withDefaults() Config {
	c.Chunk = cmp.Or(c.Chunk, defaults.Chunk)
	c.Eager = cmp.Or(c.Eager, defaults.Eager)
	c.Pool = cmp.Or(c.Pool, defaults.Pool)
	c.Incast = cmp.Or(c.Incast, defaults.Incast)
	c.Ahead = cmp.Or(c.Ahead, defaults.Ahead)
	c.Segment = cmp.Or(c.Segment, defaults.Segment)
	if c.Eager < 0 {
		c.Eager = -PoolOverhead // below the smallest message
	}
	return c
}

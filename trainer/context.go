package trainer

import (
	"fmt"
	"math"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/rng"
)

// Context gives a layer what it may use in a call: the micro-batch, its random
// streams, scratch memory and the compute threads. It is valid during the call
// only and belongs to one goroutine.
type Context struct {
	call   Call // Threads is that of pool
	pool   *kernel.Pool
	arena  *tensor.Arena
	op     uint32 // path of the layer within composite layers, see Sub
	poison bool   // fill new memory with NaN
}

// opBits is the part of the operation number (rng.OpBits wide) that one level
// of composite layers uses.
const opBits = 5

// Train reports whether this is training. In evaluation, layers such as dropout
// pass their input on, and no Backward follows.
func (c *Context) Train() bool { return c.call.Train }

// Samples returns the number of samples of the micro-batch.
func (c *Context) Samples() int { return c.call.Samples }

// Threads returns how many goroutines For runs at once.
func (c *Context) Threads() int { return c.pool.Threads() }

// For splits [0, n) into contiguous ranges, calls f for each, on several
// threads where the worker has them, and returns when all calls have returned. The
// ranges depend on the number of threads, so f's result for an index must not
// depend on its range.
//
// Calls nest: a For within f runs in its caller. f may call [Context.Rand] and
// the other methods that only read, but not [Context.Tensor].
func (c *Context) For(n int, f func(lo, hi int)) { c.pool.For(n, 1, f) }

// Tensor returns a float32 tensor of unspecified content. Memory taken in
// Forward lives until Backward of the same micro-batch has returned; memory
// taken in Backward until the layer before has run its own Backward.
func (c *Context) Tensor(shape ...int) Tensor {
	t := c.arena.Tensor(shape...)
	if c.poison {
		for i := range t.F {
			t.F[i] = float32(math.NaN())
		}
	}
	return t
}

// Keep calls f, frees the memory that f took of [Context.Tensor], and returns what f has returned, in memory that stays.
func (c *Context) Keep(f func() Tensor) Tensor {
	mark := c.arena.Mark()
	t := f()
	t.F = c.arena.Release(mark, t.F)
	return t
}

// Rand returns the random stream of one sample of the micro-batch and one
// operation, numbered 0 to 31, of this layer. Every call returns the stream
// from its beginning. Streams depend on the job's seed, the step, the
// sample's place in the global batch, the layer and the operation.
func (c *Context) Rand(sample, op int) rng.Stream {
	if sample < 0 || sample >= c.call.Samples {
		panic(fmt.Sprintf("trainer: Rand of sample %d of %d", sample, c.call.Samples))
	}
	place := rng.Place{Step: c.call.Step, Sample: uint32(c.call.First + sample), Layer: uint16(c.call.Layer), Op: c.opNumber(op)}
	return rng.New(c.call.Seed, place)
}

// Sub returns the context for part i, 0 to 30, of a composite layer. Each part
// has its own random streams. Parts nest three deep.
func (c *Context) Sub(i int) *Context {
	s := *c
	s.op = c.opNumber(i + 1)
	return &s
}

func (c *Context) opNumber(op int) uint32 {
	if op < 0 || op >= 1<<opBits || c.op >= 1<<(rng.OpBits-opBits) {
		panic(fmt.Sprintf("trainer: operation %d does not fit: composite layers have at most 31 parts and nest three deep", op))
	}
	return c.op<<opBits | uint32(op)
}

// Call describes a call of a layer; see [NewContext].
type Call struct {
	Seed    uint64
	Step    uint32
	First   int // index of the micro-batch's first sample in the global batch
	Samples int
	Layer   int // position in the model
	Train   bool
	Threads int // 0 means 1
}

// NewContext returns a context for calling a layer by hand, as tests of
// layers do, and a function that releases its threads. The memory that
// [Context.Tensor] returns is filled with NaN, which shows when a layer reads
// memory that it has not written.
func NewContext(call Call) (c *Context, release func()) {
	pool := kernel.NewPool(max(call.Threads, 1))
	return &Context{call: call, pool: pool, arena: new(tensor.Arena), poison: true}, pool.Close
}

// Pool returns the worker's compute threads, for the functions of package kernel.
func (c *Context) Pool() *kernel.Pool { return c.pool }

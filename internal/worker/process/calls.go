package process

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
)

// Calls says which call of user code runs in a lane of the engine, or outside of passes. One goroutine at a time makes calls there, and
// any goroutine may look. A call costs a few atomic operations and reads no clock: a heartbeat that sees the same call as the one before
// knows how long it has run.
//
// A nil Calls records nothing.
type Calls struct {
	call   atomic.Uint64 // number, layer and kind; 0 between calls
	sample atomic.Int64
	first  *Calls // lane; nil: this is it

	// Of the first lane:
	number atomic.Uint64 // of the newest call in any
	mu     sync.Mutex
	others []*Calls
}

// Lane returns what records the calls in a lane; called on the first lane, which is number 0.
func (c *Calls) Lane(number int) *Calls {
	if c == nil || number == 0 {
		return c
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.others) < number {
		c.others = append(c.others, &Calls{first: c})
	}
	return c.others[number-1]
}

// The bits of Calls.call, from the lowest.
const (
	kindBits  = 8
	layerBits = 24
)

// Enter records that user code is called. Leave takes what it returns when the call has returned: after a panic, the record tells
// which call it was.
func (c *Calls) Enter(kind control.CallKind, layer, sample int) (before uint64) {
	if c == nil {
		return 0
	}
	before = c.call.Load()
	first := c.first
	if first == nil {
		first = c
	}
	c.sample.Store(int64(sample))
	c.call.Store(first.number.Add(1)<<(kindBits+layerBits) | uint64(layer)<<kindBits | uint64(kind))
	return before
}

// Leave records that the call has returned to what ran before it.
func (c *Calls) Leave(before uint64) {
	if c != nil {
		c.call.Store(before)
	}
}

// Oldest returns of the calls that run in all lanes the one that began first, without times; of kind NoCall for none.
func (c *Calls) Oldest() control.Call {
	c.mu.Lock()
	defer c.mu.Unlock()
	oldest := c.Running()
	for _, lane := range c.others {
		if call := lane.Running(); call.Kind != control.NoCall && (oldest.Kind == control.NoCall || call.Number < oldest.Number) {
			oldest = call
		}
	}
	return oldest
}

// Running returns the call that runs in this lane, without times; of kind NoCall for none.
func (c *Calls) Running() control.Call {
	for {
		call, sample := c.call.Load(), c.sample.Load()
		if c.call.Load() == call {
			return control.Call{
				Kind: control.CallKind(call % (1 << kindBits)), Layer: int(call >> kindBits % (1 << layerBits)), Sample: sample,
				Number: call >> (kindBits + layerBits),
			}
		}
	}
}

// callClock measures how long a call runs, from what heartbeats see.
type callClock struct {
	call   control.Call
	looked time.Time
	queued time.Duration // of this process, at that time; 0 if it was not measured
}

// measureQueued is how long a call must have run before it is measured how long the process waits for processors.
const measureQueued = 5 * timing.Heartbeat

// look returns the call that has run since the last look at least, nil if none has. queued returns for how long the threads of
// this process have waited for a processor so far.
func (c *callClock) look(running control.Call, now time.Time, queued func() time.Duration) *control.Call {
	since := now.Sub(c.looked)
	c.looked = now
	if running.Kind == control.NoCall || running.Kind != c.call.Kind || running.Number != c.call.Number {
		c.call, c.queued = running, 0
		return nil
	}
	waited := max(0, since-2*timing.Heartbeat) // the heartbeats themselves are late
	if c.call.For > int64(measureQueued) {
		was := c.queued
		if c.queued = queued(); was > 0 {
			// A part of the time counts in any case, so that a call that never returns is found on a busy machine, too.
			waited = max(waited, min(c.queued-was, since*9/10))
		}
	}
	c.call.For += int64(since)
	c.call.Waited += int64(waited)
	told := c.call
	return &told
}

// writeStacks writes the stacks of all goroutines but its own, and what the worker was doing.
func writeStacks(to io.Writer, doing string) {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	if _, others, ok := bytes.Cut(stacks, []byte("\n\n")); ok {
		stacks = others
	}
	if doing == "" {
		doing = "no call of user code runs"
	} else {
		doing += " has not returned"
	}
	fmt.Fprintf(to, "SIGQUIT: %s\n\n%s\n", doing, stacks)
}

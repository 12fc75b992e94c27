// Package progress is a worker's record of what it has begun in a step, in
// memory that it shares with its agent, so that it can be read after the worker
// was killed in the middle of anything.
//
// The agent makes a [Record] and hands its file down to the worker process,
// which opens it. Writing is a few stores to memory. What was being written as
// the worker died is left out.
package progress

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/platform"
)

// Pair is a micro-batch in a stage.
type Pair struct{ Stage, Micro int }

// Lanes is how many passes may run side by side.
const Lanes = 8

// The record: words of 64 bits, in the machine's order.
const (
	wordStep    = iota // 0 while another step is set up
	wordRunning        // in the first lane: packed pair + 1, or 0
	wordSince          // when a pass began or ended last: nanoseconds since 1970
	wordCount          // of what follows
	firstPair
	wordBeside = firstPair + maxPairs // as wordRunning, in the other lanes
)

// maxPairs bounds what is recorded of a step; what a worker begins beyond that
// is not.
const maxPairs = 1<<14 - (Lanes - 1)

const size = 8 * (wordBeside + Lanes - 1)

// Record is the memory. One goroutine writes, or one reads after the writer's
// end.
type Record struct {
	mem   []byte
	words []uint64
	timed bool
}

// Create makes an empty record, and the file to hand down, which the caller
// closes.
func Create() (*Record, *os.File, error) {
	f, err := platform.SharedFile("soliton-progress")
	if err != nil {
		return nil, nil, fmt.Errorf("progress: %w", err)
	}
	if err := f.Truncate(size); err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("progress: %w", err)
	}
	r, err := Open(f)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return r, f, nil
}

// Open maps a record whose file was handed down.
func Open(f *os.File) (*Record, error) {
	if st, err := f.Stat(); err != nil || st.Size() != size {
		return nil, fmt.Errorf("progress: %s is not a record of progress", f.Name())
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("progress: %w", err)
	}
	return &Record{mem: mem, words: unsafe.Slice((*uint64)(unsafe.Pointer(&mem[0])), size/8)}, nil
}

// Close gives the memory back.
func (r *Record) Close() error {
	if r == nil || r.mem == nil {
		return nil
	}
	err := unix.Munmap(r.mem)
	r.mem, r.words = nil, nil
	return err
}

func (p Pair) pack() uint64 { return uint64(uint32(p.Stage))<<32 | uint64(uint32(p.Micro)) }

func unpack(v uint64) Pair { return Pair{int(int32(v >> 32)), int(int32(v))} }

// Time has the moments of what follows noted, for which the clock is read.
func (r *Record) Time() {
	if r != nil && !r.timed { // a pass may run
		r.timed = true
	}
}

// stamp notes the moment.
func (r *Record) stamp() {
	if r.timed {
		atomic.StoreUint64(&r.words[wordSince], uint64(time.Now().UnixNano()))
	}
}

// running returns the word of a lane.
func (r *Record) running(lane int) *uint64 {
	if lane == 0 {
		return &r.words[wordRunning]
	}
	return &r.words[wordBeside+lane-1]
}

// Begin says that a pass of a pair begins in a lane, in a step. A nil Record takes no
// notice.
func (r *Record) Begin(lane, step int, p Pair, forward bool) {
	if r == nil {
		return
	}
	if at := &r.words[wordStep]; atomic.LoadUint64(at) != uint64(step) {
		atomic.StoreUint64(at, 0)
		atomic.StoreUint64(&r.words[wordCount], 0)
		atomic.StoreUint64(at, uint64(step))
	}
	if n := atomic.LoadUint64(&r.words[wordCount]); forward && n < maxPairs {
		atomic.StoreUint64(&r.words[firstPair+n], p.pack())
		atomic.StoreUint64(&r.words[wordCount], n+1)
	}
	r.stamp()
	atomic.StoreUint64(r.running(lane), p.pack()+1)
}

// End says that the pass of a lane has ended.
func (r *Record) End(lane int) {
	if r != nil {
		r.stamp()
		atomic.StoreUint64(r.running(lane), 0)
	}
}

// State is what a worker had begun.
type State struct {
	Step    int // 0: it had begun nothing
	Begun   []Pair
	Running *Pair  // as the worker died, in the first lane
	Beside  []Pair // the same, in others
	Since   int64  // when a pass began or ended last: nanoseconds since 1970; 0: not known
}

// All returns what ran as the worker died.
func (s State) All() []Pair {
	if s.Running == nil {
		return s.Beside
	}
	return append([]Pair{*s.Running}, s.Beside...)
}

// State reads the record. Its words may be anything: the worker's memory is
// not ours.
func (r *Record) State() State {
	if r == nil {
		return State{}
	}
	s := State{Step: int(int32(atomic.LoadUint64(&r.words[wordStep])))}
	if s.Step <= 0 {
		return State{}
	}
	s.Since = int64(atomic.LoadUint64(&r.words[wordSince]))
	for i := range min(atomic.LoadUint64(&r.words[wordCount]), maxPairs) {
		s.Begun = append(s.Begun, unpack(atomic.LoadUint64(&r.words[firstPair+i])))
	}
	for lane := range Lanes {
		v := atomic.LoadUint64(r.running(lane))
		if v == 0 {
			continue
		}
		if p := unpack(v - 1); lane == 0 {
			s.Running = &p
		} else {
			s.Beside = append(s.Beside, p)
		}
	}
	return s
}

package process

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// timeline keeps the passes of the steps that the agent watches. In other steps it costs one atomic load for
// each span.
type timeline struct {
	every  atomic.Int64 // the agent watches every n-th step; 0: none
	active atomic.Int64 // the step that is recorded; 0: none

	mu     sync.Mutex
	began  time.Time
	waited [engine.Lanes]time.Duration // for parameters, by the pass that runs in a lane
	t      control.Timeline
}

// begin records the begin of a step.
func (l *timeline) begin(step int, now time.Time) {
	every := l.every.Load()
	if every == 0 || int64(step)%every != 0 {
		l.active.Store(0)
		return
	}
	l.mu.Lock()
	l.began, l.waited, l.t = now, [engine.Lanes]time.Duration{}, control.Timeline{Step: step, Began: now.UnixMicro()}
	l.mu.Unlock()
	l.active.Store(int64(step))
}

// end returns the record of a step that ended, if there is one.
func (l *timeline) end(step int, now time.Time) (t control.Timeline, ok bool) {
	if !l.active.CompareAndSwap(int64(step), 0) {
		return t, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.End = l.since(now)
	t, l.t = l.t, control.Timeline{}
	return t, true
}

func (l *timeline) since(at time.Time) int64 { return at.Sub(l.began).Microseconds() }

// phase records the begin of the commit.
func (l *timeline) phase(step int, phase string) {
	if phase != trace.Commit || l.active.Load() != int64(step) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.t.Commit == 0 {
		l.t.Commit = l.since(time.Now())
	}
}

// add records a pass that ended, and how long it has waited for parameters.
func (l *timeline) add(x engine.Span) {
	if l.active.Load() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case x.Name == trace.Gather: // part of the forward pass that follows
		l.waited[x.Lane] += x.End.Sub(x.Start)
	case x.Name != trace.Forward && x.Name != trace.Backward:
	case len(l.t.Passes) == control.MaxPasses:
		l.t.Cut = true
	default:
		l.t.Passes = append(l.t.Passes, control.Pass{
			Backward: x.Name == trace.Backward, Layer: x.First, Micro: x.Micro,
			From: l.since(x.Start), To: l.since(x.End), Wait: l.waited[x.Lane].Microseconds(), Lane: x.Lane,
		})
		l.waited[x.Lane] = 0
	}
}

// measured is what the last heartbeat with measurements covered.
type measured struct {
	step   int64
	passes uint64
	at     time.Time
	links  map[id.WorkerID]comm.PeerStats
	memory time.Time // when free memory was last reported
	call   callClock
}

// memoryEvery is the time between two reports of free memory.
const memoryEvery = 10 * time.Second

// measure returns the next heartbeat, with measurements if a step ended since the last one.
func (w *Worker) measure(last *measured) control.Beat {
	b := control.Beat{Call: last.call.look(w.calls.Oldest(), time.Now(), platform.Queued), Rejected: w.self.Rejected.Counts()}
	if x := w.pace.Look(time.Now()); x.Step > 0 {
		b.Pace = &control.Pace{Step: x.Step, Left: x.Left, Ready: x.Ready, Running: x.Running, Each: int64(x.Each), Stuck: int64(x.Stuck), Idle: int64(x.Idle)}
	}
	step := w.committed.Load()
	if step <= last.step {
		last.step = step // lower after a rollback
		return b
	}
	layers, passes := w.meter.Layers()
	if passes == last.passes || len(layers) == 0 {
		return b
	}
	b.Step = int(step)
	for _, l := range layers[:min(len(layers), control.MaxMeasured)] {
		b.Layers = append(b.Layers, control.LayerTime{Layer: l.Layer, Forward: int64(l.Forward), Backward: int64(l.Backward)})
	}
	now, links := time.Now(), make(map[id.WorkerID]comm.PeerStats)
	if net := w.links.Load(); net != nil {
		for _, s := range net.Stats() {
			links[s.Peer.Worker] = s
			was := last.links[s.Peer.Worker]
			if was.Peer != s.Peer || s.WireSent <= was.WireSent || len(b.Links) == control.MaxMeasured {
				continue
			}
			b.Links = append(b.Links, control.LinkTime{To: int(s.Peer.Worker), Bytes: s.WireSent - was.WireSent, Busy: int64(s.Busy - was.Busy)})
		}
	}
	if !last.at.IsZero() {
		b.Over = int64(now.Sub(last.at))
	}
	looked := last.memory
	if now.Sub(looked) >= memoryEvery {
		if bytes, ok := platform.AvailableMemory(); ok {
			b.Available = int64(bytes)
		}
		looked = now
	}
	last.step, last.passes, last.at, last.links, last.memory = step, passes, now, links, looked
	return b
}

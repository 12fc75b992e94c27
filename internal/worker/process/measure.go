package process

import (
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform"
)

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
	b := control.Beat{Call: last.call.look(w.calls.Running(), time.Now(), platform.Queued), Rejected: w.self.Rejected.Counts()}
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

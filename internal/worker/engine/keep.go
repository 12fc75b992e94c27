package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Part is an array of a shard of the plan: its parameters (Moment -1) or a moment of the optimizer.
type Part struct {
	Moment        int
	Layer, Lo, Hi int
}

// A Collector takes the state of the job on the worker that the plan names: all
// parameters, then all first moments and so on, shard after shard.
type Collector interface {
	// Take gets the next part; data are valid during the call.
	Take(p Part, data []float32) error
	// Finish returns what Keep returns on all workers, as many bytes as Keep was asked for.
	Finish() ([]byte, error)
	// Discard drops what was taken. It is always called, after Finish or an error.
	Discard()
}

// Keep ends a run: it passes the state of the job after a step to a collector on the worker that the plan names, and returns the
// collector's answer, of size bytes, and that worker on all workers. If it is lost before all have the answer, the collection
// restarts on another. All workers call Keep after the same step.
func (e *Engine) Keep(ctx context.Context, step, size int, collector func(context.Context) (Collector, error)) ([]byte, id.WorkerID, error) {
	// As in Evaluate, these are the loop's own until the call succeeds.
	var words []byte
	var by id.WorkerID
	if err := e.do(ctx, &request{
		ask: core.Ask{Point: id.Point{Step: step, Gate: id.Kept}, Words: size + 4},
		job: func(ctx context.Context, v view) ([]byte, error) { return e.collect(ctx, v, step, collector) },
		conclude: func(said [][]byte) error {
			all := slices.Concat(said...) // only the collector says something
			if len(all) != size+4 {
				return fmt.Errorf("engine: the collector says %d bytes, and not %d", len(all), size+4)
			}
			words, by = all[:size], id.WorkerID(binary.LittleEndian.Uint32(all[size:]))
			return nil
		},
	}); err != nil {
		return nil, 0, err
	}
	return words, by, nil
}

// collect is the job of Keep, in the computing goroutine.
func (e *Engine) collect(ctx context.Context, v view, step int, collector func(context.Context) (Collector, error)) ([]byte, error) {
	collects, me := v.plan.Collector().ID, e.c.Self.ID
	var c Collector
	if me == collects {
		var err error
		if c, err = collector(ctx); err != nil {
			return nil, err
		}
		defer c.Discard()
	}
	var sends []*comm.Sending
	for moment := -1; moment < e.c.Rule.Moments(); moment++ {
		for _, sh := range v.plan.Shards {
			p := Part{moment, sh.Layer, sh.Lo, sh.Hi}
			name := key.Collected(v.after(step), v.plan.Version, v.repair, core.RangeOf(sh), moment)
			switch {
			case sh.Owner == me:
				mine := v.shards[core.RangeOf(sh)]
				data := mine.params
				if moment >= 0 {
					data = mine.state.Moments[moment]
				}
				if c == nil {
					sends = append(sends, e.c.Network.Post(v.session(collects), name, comm.Bytes(data), comm.Bulk))
				} else if err := c.Take(p, data); err != nil {
					return nil, err
				}
			case c != nil:
				if err := e.take(ctx, c, p, name); err != nil {
					return nil, err
				}
			}
		}
	}
	for _, s := range sends {
		if err := s.Wait(ctx); err != nil {
			return nil, err
		}
	}
	if c == nil {
		return []byte{}, nil
	}
	words, err := c.Finish()
	return binary.LittleEndian.AppendUint32(words, uint32(me)), err
}

// take receives a part from its owner.
func (e *Engine) take(ctx context.Context, c Collector, p Part, name comm.Key) error {
	buf := e.free.get(p.Hi - p.Lo)
	defer e.free.put(buf)
	if _, _, err := e.c.Network.Receive(ctx, name, comm.Bytes(buf)); err != nil {
		return err
	}
	return c.Take(p, buf)
}

// capture returns what makes the checkpoint of a commit, for the computing goroutine to call after the update; nil if there is to
// be none. Nothing changes the state of a run that has been stopped, so it is not copied. What came of an altered block is not written: the
// error is a [core.CorruptError].
func (e *Engine) capture(d core.Update) func() error {
	if !d.Save || e.c.Save == nil {
		return nil
	}
	part := checkpoint.Part{Step: d.Update.Step, Plan: e.plan.Version}
	var owned []*shard
	for _, sh := range e.inOrder() {
		if sh.owner {
			owned = append(owned, sh)
		}
	}
	return func() error {
		for _, sh := range owned {
			if err := e.spoiled(sh); err != nil {
				return err
			}
		}
		keep := func(x []float32) []float32 { return x }
		if !d.Stopped {
			numbers := 0
			for _, sh := range owned {
				numbers += len(sh.params) * (1 + len(sh.state.Moments))
			}
			room := e.c.room(numbers)
			keep = func(x []float32) []float32 {
				is := room[:len(x):len(x)]
				room = room[len(x):]
				pages.Copy(is, x)
				return is
			}
		}
		for _, sh := range owned {
			s := checkpoint.Shard{Range: sh.Range, Params: keep(sh.params)}
			for _, m := range sh.state.Moments {
				s.Moments = append(s.Moments, keep(m))
			}
			part.Shards = append(part.Shards, s)
		}
		e.c.Save(part)
		return nil
	}
}

func (c *Config) room(numbers int) []float32 {
	if c.Room == nil {
		return pages.Make(numbers)
	}
	return c.Room(numbers)
}

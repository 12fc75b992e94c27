package engine

import (
	"context"

	"github.com/soliton-train/soliton/comm"
)

// Part is a piece of the state of the job: the parameters (Moment -1) or one
// of the optimizer's numbers for a shard of the plan.
type Part struct {
	Moment        int
	Layer, Lo, Hi int
}

// Collect hands all parameters, then all first moments and so on, shard after
// shard, to take on the first worker of the plan. All workers call it, after
// the same step; data are valid during the call of take, which the others do
// not make.
func (e *Engine) Collect(ctx context.Context, step int, take func(p Part, data []float32) error) error {
	if err := e.settle(ctx); err != nil {
		return err
	}
	collector := e.plan.Workers[0].ID
	var sends []*comm.Sending
	for moment := -1; moment < e.c.Rule.Moments(); moment++ {
		for i, sh := range e.plan.Shards {
			p := Part{moment, sh.Layer, sh.Lo, sh.Hi}
			// The keys of the step are used by the parameters on their way to the
			// stage; these are states.
			key := comm.Key{Kind: comm.KindState, Step: uint64(step), Layer: int32(sh.Layer), Lo: int64(sh.Lo), Hi: int64(sh.Hi), Micro: int32(1 + moment)}
			switch {
			case sh.Owner == e.c.Self:
				data := e.c.Layers[sh.Layer].Params
				if data = data[sh.Lo:sh.Hi]; moment >= 0 {
					data = e.shards[i].Moments[moment]
				}
				if collector != e.c.Self {
					sends = append(sends, e.c.Network.Post(e.session(collector), key, comm.Bytes(data), comm.Bulk))
				} else if err := take(p, data); err != nil {
					return err
				}
			case collector == e.c.Self:
				buf := e.free.get(sh.Hi - sh.Lo)
				if _, _, err := e.c.Network.Receive(ctx, key, comm.Bytes(buf)); err != nil {
					return err
				}
				if err := take(p, buf); err != nil {
					return err
				}
				e.free.put(buf)
			}
		}
	}
	for _, s := range sends {
		if err := s.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Tell lets all workers know what the first worker of the plan says, size
// bytes. All workers call it; only the first one's words count.
func (e *Engine) Tell(ctx context.Context, step int, words []byte, size int) ([]byte, error) {
	b := make([]byte, size)
	copy(b, words)
	call := e.call(step, tagCollect)
	call.Priority = comm.Control
	return b, e.everyone.Broadcast(ctx, call, 0, b)
}

package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// network is what is under way.
type network struct {
	receiving map[core.Ticket]*receiving
	sent      []*comm.Sending // of memory that the update changes
	fills     []*comm.Sending // of transfers
}

// receiving is a message that is expected.
type receiving struct {
	r    *comm.Receiving
	into core.Buffer
	buf  []byte
}

// arrived says that the wait for a message has ended.
type arrived struct {
	ticket core.Ticket
	at     time.Time // where spans are wanted
}

// expect posts a receive.
func (e *Engine) expect(d core.Expect) {
	x := &receiving{into: d.Into}
	var took func()
	switch r := d.Into.Range; d.Into.Content {
	case core.Words:
		x.buf = make([]byte, d.Size)
	case core.Boundary:
		b := &boundary{t: tensor.Of(e.free.get(tensor.Size(d.Dims)), d.Dims...)}
		e.tensors[d.Into.Tensor] = b
		x.buf = comm.Bytes(b.t.F)
	case core.Gradient:
		sh := e.shards[r]
		e.gradientMemory(sh)
		sh.gradientIn(sh.own, 0, len(sh.own))
		x.buf = comm.Bytes(sh.total)
	case core.Parameters:
		params := e.c.Layers[r.Layer].Params[r.Lo:r.Hi]
		x.buf = comm.Bytes(params)
		took = func() { e.guard.take(r, params) }
	case core.RepairBlock:
		b := make([]float32, d.Size/4)
		e.blocks[blockArray{d.Into.Block, d.Into.Array}] = b
		x.buf = comm.Bytes(b)
	case core.BaseState:
		in := &incoming{r: r, base: pages.Make(d.Size / 4)}
		e.incoming[r] = in
		x.buf = comm.Bytes(in.base)
	case core.Increment:
		x.buf = comm.Bytes(e.incoming[r].increment(d.Into.Array))
	}
	x.r = e.c.Network.Expect(d.Key, x.buf)
	e.receiving[d.Ticket] = x
	if b := e.tensors[d.Into.Tensor]; d.Into.Content == core.Boundary {
		b.recv = x.r
	}
	x.r.OnDone(func() {
		if took != nil {
			if _, _, err := x.r.Wait(e.ctx); err == nil || errors.Is(err, comm.ErrDuplicate) {
				took()
			}
		}
		e.mail.put(arrived{d.Ticket, e.now()})
	})
}

// receive tells the core of a message. One that was given up meanwhile counts for nothing.
func (e *Engine) receive(a arrived) {
	x := e.receiving[a.ticket]
	if x == nil {
		return
	}
	delete(e.receiving, a.ticket)
	n, from, err := x.r.Wait(e.ctx) // it has ended
	ev := core.Received{Ticket: a.ticket, From: from, Bytes: n, Duplicate: errors.Is(err, comm.ErrDuplicate)}
	if err != nil && !ev.Duplicate {
		return
	}
	switch x.into.Content {
	case core.Words:
		ev.Data = x.buf[:n]
	case core.BaseState:
		ev.Data = x.buf[:min(n, 4*core.BaseHead)]
	case core.Boundary:
		if e.c.Span != nil {
			of := spanOfTensor(x.into.Tensor, from.Worker, len(x.buf))
			of.Name, of.Start, of.End = trace.Arrive, a.at, a.at
			e.c.Span(of)
		}
	}
	e.core.Step(ev)
}

// cancelReceive gives an expected message up.
func (e *Engine) cancelReceive(t core.Ticket, wait bool) {
	x := e.receiving[t]
	if x == nil {
		return // it has ended
	}
	delete(e.receiving, t)
	x.r.Cancel(errClosed)
	if wait {
		<-x.r.Done() // what writes to the memory leaves it soon
	}
}

// send posts a message.
func (e *Engine) send(d core.Send) {
	r := d.From.Range
	switch d.From.Content {
	case core.Words:
		e.c.Network.Post(d.To, d.Key, d.Data, d.Priority)
	case core.Boundary:
		b := e.tensors[d.From.Tensor]
		sending := e.c.Network.Post(d.To, d.Key, comm.Bytes(b.t.F), d.Priority)
		b.sends = append(b.sends, sending)
		if e.c.Span != nil {
			began, of := time.Now(), spanOfTensor(d.From.Tensor, d.To.Worker, 4*len(b.t.F))
			sending.OnDone(func() { e.span(trace.Transfer, began, of) })
		}
	case core.Gradient:
		e.post(d, e.shards[r].total)
	case core.Parameters:
		e.post(d, e.shards[r].params)
	case core.RepairBlock:
		sh := e.shards[r]
		x := sh.arrays()[d.From.Array][d.From.Block.Lo-r.Lo : d.From.Block.Hi-r.Lo]
		if !e.guard.fitArray(d.From.Block, d.From.Array, x) { // moments are not checked before each exchange
			e.fail(e.corrupt(sh.owner, d.From.Block, d.From.Array))
			return
		}
		e.post(d, x)
	}
}

// post sends memory that the update changes. Every worker has all that is sent
// so when a commit is passed, since no worker enters it before.
func (e *Engine) post(d core.Send, data []float32) {
	e.sent = append(slices.DeleteFunc(e.sent, ended), e.c.Network.Post(d.To, d.Key, comm.Bytes(data), d.Priority))
}

func ended(s *comm.Sending) bool { return comm.Closed(s.Done()) }

// drain ends what is still being sent after a commit: copies that no worker waits for. It returns when the memory is ours.
func drain(ctx context.Context, sent []*comm.Sending) error {
	for _, s := range sent {
		s.Cancel(errClosed)
	}
	for _, s := range sent {
		select {
		case <-s.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// fillPriority comes after everything that training waits for.
const fillPriority comm.Priority = 1<<16 - 1

// sendFill posts a message of a transfer.
func (e *Engine) sendFill(d core.SendFill) {
	data, prio := d.Data, fillPriority
	var base []float32
	var sh *shard
	switch r := d.Transfer.Range; d.Content {
	case core.Words:
		prio = comm.Control
	case core.BaseState:
		base = e.bases[d.Transfer]
		data = comm.Bytes(base)
		delete(e.bases, d.Transfer)
	case core.Increment:
		sh = e.shards[d.Source]
		data = comm.Bytes(sh.total[r.Lo-d.Source.Lo : r.Hi-d.Source.Lo])
	}
	s := e.c.Network.Post(d.Transfer.To, d.Key, data, prio)
	e.fills = append(slices.DeleteFunc(e.fills, ended), s)
	if sh != nil && len(data) > 0 {
		e.lend(sh.within, s)
	}
	if base != nil {
		s.OnDone(func() { e.mail.put(baseSent{d.Transfer, base}) })
	}
}

// baseSent says that a base is sent, and gives its memory back.
type baseSent struct {
	transfer core.Transfer
	base     []float32
}

// stopFills cancels what is being sent of transfers.
func (e *Engine) stopFills() {
	for _, s := range e.fills {
		s.Cancel(errClosed)
	}
	e.fills = nil
}

// opEnded ends an operation of a group.
type opEnded struct {
	done core.OpDone
	err  error
	name string // of the span
	of   Span
	at   time.Time // it began
	take func()    // takes what an operation that has succeeded gave
}

// operation runs an operation of a group beside the loop.
func (e *Engine) operation(end opEnded, f func(ctx context.Context, end *opEnded) error) {
	ctx := e.opsCtx
	end.at = e.now()
	e.tasks.Go(func() {
		end.err = f(ctx, &end)
		e.mail.put(end)
	})
}

// endOp takes the end of an operation of a group.
func (e *Engine) endOp(x opEnded) {
	switch {
	case x.err == nil:
		if x.take != nil {
			x.take()
		}
		if x.name != "" {
			e.span(x.name, x.at, x.of)
		}
	case passing(x.err):
		x.done.Broken = true
	default:
		x.done.Err = x.err
	}
	e.core.Step(x.done)
}

// passing reports whether an error is about links and members, which the next plan repairs.
func passing(err error) bool {
	for _, class := range []error{comm.ErrLink, comm.ErrAborted, comm.ErrVersion, comm.ErrRefused, comm.ErrNotMember, comm.ErrStale, comm.ErrClosed} {
		if errors.Is(err, class) {
			return true
		}
	}
	return errors.Is(err, context.Canceled)
}

// edit edits groups in place.
func (e *Engine) edit(d core.Edit) {
	e.opsCancel()
	e.opsCtx, e.opsCancel = context.WithCancel(e.ctx)
	groups := make([]*group.Group, len(d.Groups))
	for i, g := range d.Groups {
		if e.c.Groups[g.ID] == nil {
			made, err := group.New(e.c.Network, g.ID)
			if err != nil {
				e.fail(err)
				return
			}
			e.c.Groups[g.ID] = made
		}
		groups[i] = e.c.Groups[g.ID]
	}
	e.operation(opEnded{done: core.OpDone{Op: d.Op}}, func(ctx context.Context, end *opEnded) error {
		for i, g := range groups {
			n, err := g.Edit(ctx, d.Version, d.Groups[i].Members)
			end.done.Opened += n
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// exchange lets every worker know what all of them say.
func (e *Engine) exchange(d core.Exchange) {
	all := make([]byte, d.Parts[len(d.Parts)-1])
	copy(all[d.Parts[d.Rank]:], d.Said)
	name := trace.Exchange
	if d.Point.Gate == id.Committed {
		name = trace.Commit
		e.phase(d.Point.Step, trace.Commit)
	}
	g := e.c.Groups[key.Everyone]
	e.operation(opEnded{done: core.OpDone{Op: d.Op, All: all}, name: name, of: spanOf(-1, int64(len(all)))},
		func(ctx context.Context, _ *opEnded) error { return g.AllGather(ctx, d.Call, all, d.Parts) })
}

// total takes the gradients of ranges out of the sums that this worker has, which are all.
func (e *Engine) total(d core.Total) {
	e.phase(e.number, trace.Reduce)
	total, ok := e.plain[d.Layer], e.c.Fast
	if !ok {
		total, ok = e.grads[d.Layer].Total()
	}
	if !ok {
		panic("engine: a gradient is complete and its sum is not")
	}
	for _, r := range d.Ranges {
		e.shards[r].gradientIn(total, r.Lo, r.Hi)
	}
}

// reduce brings the gradient of a layer to the workers that reduce its shards.
func (e *Engine) reduce(d core.Reduce) {
	e.phase(e.number, trace.Reduce)
	mine := make([]*shard, len(d.Mine))
	for i, r := range d.Mine {
		if r != (id.Range{}) {
			mine[i] = e.shards[r]
		}
	}
	g := e.c.Groups[d.Group]
	if e.c.Fast {
		e.fastReduce(g, d, mine)
		return
	}
	for _, sh := range mine {
		if sh != nil {
			e.gradientMemory(sh)
		}
	}
	sums := e.grads[d.Layer]
	e.operation(opEnded{
		done: core.OpDone{Op: d.Op}, name: trace.Reduce, of: spanOf(d.Layer, 4*int64(e.c.Layers[d.Layer].Size())),
		take: func() {
			for _, sh := range mine {
				if sh != nil {
					sh.gradientIn(sh.own, 0, len(sh.own))
				}
			}
		},
	}, func(ctx context.Context, _ *opEnded) error {
		return g.TreeReduce(ctx, d.Call, d.Tree, func(shard int, n tree.Node) []float32 {
			v, _ := sums.At(n)
			return v[d.Tree.Shards[shard].Lo:d.Tree.Shards[shard].Hi]
		}, func(shard int) []float32 { return mine[shard].own }, nil)
	})
}

// fastReduce reduces a layer without an order.
func (e *Engine) fastReduce(g *group.Group, d core.Reduce, mine []*shard) {
	if e.plain[d.Layer] == nil { // nothing of it ran here
		e.plain[d.Layer] = e.free.get(e.c.Layers[d.Layer].Size())
		pages.Clear(e.plain[d.Layer])
	}
	// In the order of ranks, which promotions may have changed. The reduction spoils its operand, and may have to begin again.
	shards := d.Tree.Shards
	parts, places, at := []int{0}, make([]int, len(shards)), 0
	for rank := range d.Tree.Nodes {
		for i, p := range shards {
			if p.Owner == rank {
				places[i] = at
				at += p.Hi - p.Lo
			}
		}
		parts = append(parts, at)
	}
	sum := e.free.get(len(e.plain[d.Layer]))
	for i, p := range shards {
		pages.Copy(sum[places[i]:places[i]+p.Hi-p.Lo], e.plain[d.Layer][p.Lo:p.Hi])
	}
	e.scratch = append(e.scratch, sum)
	e.operation(opEnded{
		done: core.OpDone{Op: d.Op}, name: trace.Reduce, of: spanOf(d.Layer, 4*int64(len(sum))),
		take: func() {
			for i, sh := range mine {
				if sh != nil {
					sh.gradientIn(sum, places[i], places[i]+sh.Hi-sh.Lo)
				}
			}
		},
	}, func(ctx context.Context, _ *opEnded) error { return g.ReduceScatter(ctx, d.Call, sum, parts) })
}

// digestBytes returns the digest of a tensor, as a message.
func (b *boundary) digestBytes() []byte {
	if b.digest == nil {
		b.digest = binary.LittleEndian.AppendUint64(nil, uint64(zero.DigestOf(b.t.F)))
	}
	return b.digest
}

// spanOfTensor is about a boundary tensor and the other end of its way.
func spanOfTensor(id key.Tensor, peer id.WorkerID, bytes int) Span {
	return Span{Stage: id.Boundary, Micro: id.Micro, Layer: -1, Peer: peer, Back: id.Back, Bytes: int64(bytes)}
}

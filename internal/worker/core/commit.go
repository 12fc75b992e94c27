package core

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// Loss is a sum of losses over some targets.
type Loss struct {
	Sum   float64
	Count int64
}

// Add returns the sum of two losses.
func (l Loss) Add(o Loss) Loss { return Loss{l.Sum + o.Sum, l.Count + o.Count} }

// Mean returns the mean loss, NaN over no targets.
func (l Loss) Mean() float64 { return l.Sum / float64(l.Count) }

// Measured is a loss, and the job's metrics over the same samples, which are sums and counts as a loss is.
type Measured struct {
	Loss
	Metrics []Loss
}

// Add returns the sum of what was measured on two sets of samples, each term by itself.
func (m Measured) Add(o Measured) Measured {
	sum := Measured{Loss: m.Loss.Add(o.Loss), Metrics: slices.Clone(m.Metrics)}
	for i, x := range o.Metrics {
		sum.Metrics[i] = sum.Metrics[i].Add(x)
	}
	return sum
}

// measuredSize returns the size of a loss with so many metrics.
func measuredSize(metrics int) int { return 16 + 16*metrics }

// append appends the loss and the metrics, measuredSize bytes.
func (m Measured) append(b []byte) []byte {
	b = m.Loss.append(b)
	for _, x := range m.Metrics {
		b = x.append(b)
	}
	return b
}

func (l Loss) append(b []byte) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, math.Float64bits(l.Sum)), uint64(l.Count))
}

// parseMeasured reads measuredSize bytes.
func parseMeasured(b []byte, metrics int) (m Measured) {
	at := func(i int) Loss {
		return Loss{math.Float64frombits(binary.LittleEndian.Uint64(b[16*i:])), int64(binary.LittleEndian.Uint64(b[16*i+8:]))}
	}
	m.Loss = at(0)
	for i := range metrics {
		m.Metrics = append(m.Metrics, at(1+i))
	}
	return m
}

// LossSum is the sum of a node of the tree of losses.
type LossSum struct {
	Node tree.Node
	Loss Measured
}

// Result is what a committed step gives, the same on every worker.
type Result struct {
	Step     int
	Loss     float64 // mean over the targets
	Targets  int64
	LR       float64
	GradNorm float64 // norm of the gradient of the mean loss, before clipping
	Stop     string  // why a worker was asked to end the run, "" if none was
	Metrics  []Loss  // sums over the step

	// Of this worker:
	Plan                id.Version // under which the step was committed
	Forwards, Backwards int64      // passes of training that it has run so far
	Reading             int64      // nanoseconds since the result before that its lanes read samples, by their number
}

// NonFiniteError says that a step cannot be committed because a number in it is NaN, infinite or too large.
type NonFiniteError struct {
	Step  int
	Layer string // name of the layer where it shows first; "" if it is the loss itself
	What  string // "loss" or "gradient"
}

func (e *NonFiniteError) Error() string {
	where := "in the loss itself"
	if e.Layer != "" {
		where = fmt.Sprintf("from layer %q on", e.Layer)
	}
	if e.What == "gradient" {
		where = fmt.Sprintf("in layer %q", e.Layer)
	}
	return fmt.Sprintf("step %d: the %s is not finite (%s); a lower learning rate or clipping may help", e.Step, e.What, where)
}

// nonFinite makes the error of a number that is not finite; layer may be -1.
func (w *Worker) nonFinite(step, layer int, what string) error {
	err := &NonFiniteError{Step: step, What: what}
	if layer >= 0 {
		err.Layer = w.c.Layers[layer].Name
	}
	return err
}

// Saving is what a worker says about checkpoints.
type Saving uint64

// The bits of Saving.
const (
	SavingWanted Saving = 1 << iota // this worker was asked for a checkpoint
	SavingBusy                      // and could not make one now
	SavingLast                      // this is the last step, whose state is to be kept
)

// saves draws the conclusion from what all workers said: one that was asked is enough, and one that is still writing the checkpoint
// before puts it off. A run that ends before its last step is saved in any case, and so is the last step where that is wanted.
func saves(records []Record) bool {
	var all Saving
	stopped := false
	for _, r := range records {
		all |= r.Saving
		stopped = stopped || r.Stop != ""
	}
	return stopped || all&SavingLast != 0 || all == SavingWanted
}

// append appends the result as a worker that joins gets it, without what is of this worker.
func (r Result) append(b []byte) []byte {
	for _, v := range []uint64{uint64(r.Step), math.Float64bits(r.Loss), uint64(r.Targets), math.Float64bits(r.LR), math.Float64bits(r.GradNorm),
		uint64(r.Plan.Generation), uint64(r.Plan.N)} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return Measured{Metrics: r.Metrics}.append(appendStop(b, r.Stop))
}

// resultSize returns the size of a result with so many metrics.
func resultSize(metrics int) int { return 56 + stopSize + measuredSize(metrics) }

// parseResult reads resultSize bytes.
func parseResult(b []byte, metrics int) Result {
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return Result{
		Step: int(word(0)), Loss: math.Float64frombits(word(1)), Targets: int64(word(2)), LR: math.Float64frombits(word(3)), GradNorm: math.Float64frombits(word(4)),
		Plan: id.Version{Generation: int(word(5)), N: int(word(6))}, Stop: parseStop(b[56 : 56+stopSize]),
		Metrics: parseMeasured(b[56+stopSize:], metrics).Metrics,
	}
}

func appendStop(b []byte, s string) []byte {
	var stop [stopSize]byte
	copy(stop[:], s)
	return append(b, stop[:]...)
}

func parseStop(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

const (
	stopSize   = 24
	recordSize = 56 + stopSize + 8

	spotDigestSize = 4
)

// lossSumSize returns the size of the sum of a node with so many metrics.
func lossSumSize(metrics int) int { return 16 + measuredSize(metrics) }

func (r Record) append(b []byte) []byte {
	le := binary.LittleEndian
	for _, v := range []uint64{r.Squares.Hi, r.Squares.Lo, math.Float64bits(r.LR), uint64(int64(r.Spoiled)), uint64(int64(r.Suspect)),
		uint64(r.Newest.Generation), uint64(r.Newest.N)} {
		b = le.AppendUint64(b, v)
	}
	b = le.AppendUint64(appendStop(b, r.Stop), uint64(r.Saving))
	for _, s := range r.Losses {
		b = s.Loss.append(le.AppendUint64(le.AppendUint64(b, uint64(s.Node.Lo)), uint64(s.Node.Hi)))
	}
	for _, d := range r.Spot {
		b = le.AppendUint32(b, d)
	}
	return b
}

// parseRecord reads a record of a step of so many micro-batches, with so many metrics, and digests of a spot check.
func parseRecord(b []byte, micros, metrics, digests int) (Record, error) {
	losses := len(b) - recordSize - spotDigestSize*digests
	if losses < 0 || losses%lossSumSize(metrics) != 0 {
		return Record{}, fmt.Errorf("a record of %d bytes", len(b))
	}
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	r := Record{
		Squares: zero.Fixed{Hi: word(0), Lo: word(1)},
		LR:      math.Float64frombits(word(2)),
		Spoiled: int(int64(word(3))),
		Suspect: int(int64(word(4))),
		Newest:  id.Version{Generation: int(word(5)), N: int(word(6))},
		Stop:    parseStop(b[56 : 56+stopSize]),
		Saving:  Saving(word((56 + stopSize) / 8)),
	}
	root := tree.Root(micros)
	for b = b[recordSize:]; len(b) > spotDigestSize*digests; b = b[lossSumSize(metrics):] {
		n := tree.Node{Lo: int(word(0)), Hi: int(word(1))}
		if _, _, ok := n.Parent(root); !ok && n != root {
			return Record{}, fmt.Errorf("a loss of %v, which is no node of %v", n, root)
		}
		r.Losses = append(r.Losses, LossSum{n, parseMeasured(b[16:], metrics)})
	}
	for ; len(b) > 0; b = b[spotDigestSize:] {
		r.Spot = append(r.Spot, binary.LittleEndian.Uint32(b))
	}
	return r, nil
}

// sayCommit takes what this worker says in the commit.
func (w *Worker) sayCommit(ev Said) {
	w.watchFills()
	ev.Record.Newest = w.newest()
	if want := w.step.digestsOf(w.me); want == 0 {
		ev.Record.Spot = nil // of a run that a plan within the step has overtaken
	} else if len(ev.Record.Spot) != want {
		w.fail(fmt.Errorf("step %d: the passes of a spot check made %d digests, not %d", w.step.number, len(ev.Record.Spot), want))
		return
	}
	w.req.said, w.req.lr = ev.Record.append(ev.Checked), ev.Record.LR
}

// EvalSize returns what a worker says of a micro-batch of an evaluation with so many metrics, in bytes.
func EvalSize(metrics int) int { return 8 + measuredSize(metrics) }

// AppendEvaluated appends what a worker says of a micro-batch of an evaluation, EvalSize bytes.
func AppendEvaluated(b []byte, micro int, m Measured) []byte {
	return m.append(binary.LittleEndian.AppendUint64(b, uint64(micro)))
}

// ParseEvaluated reads EvalSize bytes. The number of the micro-batch is any that a worker may have sent.
func ParseEvaluated(b []byte, metrics int) (micro uint64, m Measured) {
	return binary.LittleEndian.Uint64(b), parseMeasured(b[8:], metrics)
}

// says returns how many bytes a worker says in the exchange of the operation, beside what it says of blocks.
func (w *Worker) says(x id.WorkerID) (size int) {
	last := len(w.plan.Stages) - 1
	switch w.req.Point.Gate {
	case id.Committed:
		return recordSize + lossSumSize(w.c.Metrics)*len(w.plan.Nodes(last, x, w.req.Point.Step)) + spotDigestSize*w.step.digestsOf(x)
	case id.Evaluated:
		for m := range w.req.Micros {
			if Evaluator(w.plan, last, m) == x {
				size += w.req.Words
			}
		}
	case id.Kept:
		if x == w.plan.Collector().ID {
			size = w.req.Words
		}
	}
	return size
}

// Evaluator returns the worker that runs a micro-batch of an evaluation in a stage: the workers of a stage take turns.
func Evaluator(p *plan.Plan, stage, micro int) id.WorkerID {
	workers := p.Stages[stage].Workers
	return workers[micro%len(workers)]
}

// exchange lets every worker know what all of them say, which takes them past the operation's point together.
func (w *Worker) exchange() {
	r := w.req
	parts, checks, rank := []int{0}, w.checkSizes(), 0
	for i, x := range w.plan.Workers {
		if x.ID == w.me {
			rank = i
		}
		parts = append(parts, parts[len(parts)-1]+checks[x.ID]+w.says(x.ID))
	}
	if size := parts[rank+1] - parts[rank]; len(r.said) > size {
		w.fail(fmt.Errorf("this worker says %d bytes in the exchange of %v, and may say %d", len(r.said), r.Point, size))
		return
	}
	r.exchanging = true
	op := w.begin(operation{kind: opExchange, ballot: w.ballot, req: r})
	w.emit(Exchange{op, r.Point, key.Exchange(w.attempt(), w.plan.Version, r.Point.Gate), parts, rank, r.said})
}

// exchanged takes what all workers said.
func (w *Worker) exchanged(o operation, all []byte) {
	if w.over() || w.sealed() || w.ballot != o.ballot || w.req != o.req {
		return // it has said that it did not pass
	}
	checks := w.checkSizes()
	said := make([][]byte, len(w.plan.Workers))
	for i, x := range w.plan.Workers {
		n := checks[x.ID] + w.says(x.ID)
		said[i], all = all[:n], all[n:]
	}
	w.pass(said)
}

// pass takes this worker past the point of its operation, or, if blocks were altered, to their repair. said is what each worker of
// the plan said.
func (w *Worker) pass(said [][]byte) {
	r := w.req
	words, repairs, again, err := w.judge(said)
	switch others := new(othersError); {
	case errors.As(err, &others):
		w.broken = true // until the plan goes on without them
		return
	case err != nil:
		w.fail(err)
		return
	case again:
		w.beginRepair(said, repairs)
		return
	}
	try := w.try()
	w.passed, w.result = r.Point, encodeSaid(said)
	w.repairs = nil
	if r.Point.Gate != id.Committed {
		w.req = nil
		w.emit(Conclude{words})
		return
	}
	u, next, err := w.decide(r, words)
	if err != nil {
		w.fail(err)
		return
	}
	r.result.Plan = w.plan.Version
	w.committed = r.result
	if next != w.plan.Version {
		if w.goLive(next); w.over() {
			return
		}
	}
	w.endStep()
	w.update(r, try, u)
}

// encodeSaid and decodeSaid turn what all workers said into bytes and back.
func encodeSaid(said [][]byte) []byte {
	b := []byte{}
	for _, s := range said {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return b
}

func decodeSaid(b []byte) (said [][]byte, err error) {
	for len(b) > 0 {
		if len(b) < 4 || uint64(binary.LittleEndian.Uint32(b)) > uint64(len(b)-4) {
			return nil, errors.New("a result that is cut off")
		}
		n := int(binary.LittleEndian.Uint32(b))
		said = append(said, b[4:4+n])
		b = b[4+n:]
	}
	return said, nil
}

// decide draws the conclusions from what all workers said. next is the plan of the next step.
func (w *Worker) decide(req *request, said [][]byte) (u zero.Update, next id.Version, err error) {
	step := req.Point.Step
	r := Result{Step: step, LR: req.lr}
	losses := tree.NewSums(w.c.Micros, Measured.Add)
	var squares zero.Fixed
	suspect, spoiled := -1, -1
	var records []Record
	for i, b := range said {
		rec, err := parseRecord(b, w.c.Micros, w.c.Metrics, w.step.digestsOf(w.plan.Workers[i].ID))
		if err != nil {
			return u, next, fmt.Errorf("step %d: worker %d sent %w", step, w.plan.Workers[i].ID, err)
		}
		if math.Float64bits(rec.LR) != math.Float64bits(req.lr) {
			return u, next, fmt.Errorf("step %d: worker %d has the learning rate %v, and worker %d has %v",
				step, w.me, req.lr, w.plan.Workers[i].ID, rec.LR)
		}
		records = append(records, rec)
		r.Stop = cmp.Or(r.Stop, rec.Stop)
		spoiled = max(spoiled, rec.Spoiled)
		if suspect < 0 {
			suspect = rec.Suspect
		}
		if i == 0 || rec.Newest.Compare(next) < 0 {
			next = rec.Newest
		}
		sum, fits := squares.Add(rec.Squares)
		if !fits {
			return u, next, w.nonFinite(step, len(w.c.Layers)-1, "gradient")
		}
		squares = sum
		for _, s := range rec.Losses {
			losses.Put(s.Node, s.Loss)
		}
	}
	loss, ok := losses.Total()
	switch {
	case !ok:
		return u, next, fmt.Errorf("step %d: the losses of the workers do not make up the step", step)
	case loss.Count < 1:
		return u, next, fmt.Errorf("step %d: the loss counted no target, so it has no mean", step)
	case max(suspect, spoiled) >= len(w.c.Layers):
		return u, next, fmt.Errorf("step %d: a worker speaks of layer %d of %d", step, max(suspect, spoiled), len(w.c.Layers))
	case math.IsNaN(loss.Sum) || math.IsInf(loss.Sum, 0):
		return u, next, w.nonFinite(step, suspect, "loss")
	case spoiled >= 0:
		return u, next, w.nonFinite(step, spoiled, "gradient")
	}
	if err := w.compareSpot(records); err != nil {
		return u, next, err
	}
	r.Loss, r.Targets, r.Metrics = loss.Mean(), loss.Count, loss.Metrics
	r.GradNorm = zero.Norm(squares, w.c.NormScale) / float64(loss.Count)
	factor := 1.0
	if clip := w.c.ClipNorm; clip > 0 {
		factor = min(1, clip/(r.GradNorm+1e-6))
	}
	req.result, req.save = r, saves(records)
	return zero.Update{Step: step, LR: float32(req.lr), GradScale: float32(factor / float64(loss.Count))}, next, nil
}

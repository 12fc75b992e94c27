package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/session/skips"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/internal/worker/order"
)

// How workers read samples, and what becomes of those that a worker cannot read.

// Reader is what a process reads data with. It returns the number of sample i of the run or, where that is skipped, of the one behind it
// in the data, by so many. ok is false where this process cannot read it.
type Reader func(i uint64, skips int) (number int, ok bool)

// reads is what a session of a worker knows of the samples that it reads.
type reads struct {
	skips  map[uint64]int
	open   map[skips.Spot]int // questions to the leader, with the step that needs the sample
	failed map[skips.Spot]bool
	read   map[uint64]bool
}

func newReads(ledger []uint64) *reads {
	r := &reads{skips: make(map[uint64]int)}
	for _, sample := range ledger {
		r.skips[sample]++
	}
	r.begin()
	return r
}

// begin forgets what was read: the steps begin again.
func (r *reads) begin() {
	r.open, r.failed, r.read = make(map[skips.Spot]int), make(map[skips.Spot]bool), make(map[uint64]bool)
}

// batches are the samples of each micro-batch of a step, as read writes them.
type batches [maxMicros]string

// read returns the samples of a micro-batch as this worker reads them. Where it cannot, again is called once that may be different.
func (w *worker) read(step, micro int, again func()) (samples string, ok bool) {
	if w.sample == nil {
		return "", true
	}
	for k := range microBatch {
		number, ok := w.readOne(step, order.First(step, w.c.cfg.Micros*microBatch, micro*microBatch+k))
		if !ok {
			w.blocked = append(w.blocked, again)
			return "", false
		}
		samples += fmt.Sprint(number, " ")
	}
	return samples, true
}

func (w *worker) readOne(step int, i uint64) (number int, ok bool) {
	r := w.reads
	at := skips.Spot{Sample: i, Skips: r.skips[i]}
	if _, asked := r.open[at]; asked {
		return 0, false
	}
	if number, ok = w.sample(i, at.Skips); ok {
		r.read[i] = true
		return number, true
	}
	if r.failed[at] { // others can read it
		w.c.note("worker %v cannot read sample %d", w.session, i)
		w.c.refused++
		w.say(control.Failed{Kind: control.NoSample, Text: fmt.Sprintf("sample %d: bad sector", i), Step: step})
		w.exit(session.Status{Code: 1, Text: "exit status 1"})
		return 0, false
	}
	w.ask(at, step)
	return 0, false
}

// ask opens a question to the leader.
func (w *worker) ask(at skips.Spot, step int) {
	w.reads.open[at] = step
	w.insist(at)
}

// insist tells the leader now and then, which may be another one than before, until there is a verdict.
func (w *worker) insist(at skips.Spot) {
	if _, open := w.reads.open[at]; !open || at.Skips != w.reads.skips[at.Sample] {
		return
	}
	w.answer(at)
	w.in(timing.Disk, func() { w.insist(at) })
}

// answer says whether the worker can read a sample.
func (w *worker) answer(at skips.Spot) {
	m := control.Unread{Sample: at.Sample, Skips: at.Skips, Step: 1}
	if step, open := w.reads.open[at]; open {
		m.Step, m.Text = step, "bad sector"
	}
	w.say(m)
}

// judged takes in what the leader says of a sample.
func (w *worker) judged(m control.BadSample) {
	r, at := w.reads, skips.Spot{Sample: m.Sample, Skips: m.Skips}
	switch m.Do {
	case control.TrySample:
		w.skipTo(at) // an earlier leader may have been lost before it said so
		if at.Skips == r.skips[at.Sample] {
			w.c.after(w.c.delay(20*time.Microsecond), func() { w.run(func() { w.try(at) }) }) // also beyond a rollback
		}
		return
	case control.SkipSample:
		w.skipTo(skips.Spot{Sample: at.Sample, Skips: at.Skips + 1})
	case control.FailSample:
		r.failed[at] = true
		w.settle(at)
	}
}

// skipTo skips as many samples in a place of the run as at says, unless that is known.
func (w *worker) skipTo(at skips.Spot) {
	r := w.reads
	was := r.skips[at.Sample]
	if at.Skips <= was {
		return
	}
	if r.read[at.Sample] {
		w.c.violated("worker %v has read sample %d, which is skipped", w.session, at.Sample)
	}
	r.skips[at.Sample] = at.Skips
	w.settle(skips.Spot{Sample: at.Sample, Skips: was})
}

// settle ends a question, if there is one.
func (w *worker) settle(at skips.Spot) {
	if _, open := w.reads.open[at]; open {
		delete(w.reads.open, at)
		for _, f := range w.blocked {
			w.later(f)
		}
		w.blocked = nil
	}
}

// try reads a sample that another worker cannot read.
func (w *worker) try(at skips.Spot) {
	r := w.reads
	if _, open := r.open[at]; !open && !r.read[at.Sample] {
		if _, ok := w.sample(at.Sample, at.Skips); !ok {
			w.ask(at, int(at.Sample)/(w.c.cfg.Micros*microBatch)+1)
			return
		}
	}
	w.answer(at)
}

// agreeSkip brings a sample that no worker can read before the hosts.
func (c *Cluster) agreeSkip(q skips.Question) {
	c.enter(func(leads bool) {
		if slices.Contains(c.skips, q.Spot) {
			return // under an earlier leader
		}
		if c.skips = append(c.skips, q.Spot); leads {
			c.do(session.SkipAgreed{Question: q})
		}
	}, func() {})
}

// ledger returns the samples that are skipped, as a leader finds them, and writes those into skips.jsonl that the one before has only had
// agreed.
func (c *Cluster) ledger() []uint64 {
	had := make(map[uint64]int)
	for _, sample := range c.books.skips {
		had[sample]++
	}
	for _, s := range c.skips {
		if had[s.Sample]--; had[s.Sample] < 0 {
			c.books.skips = append(c.books.skips, s.Sample)
		}
	}
	return slices.Clone(c.books.skips)
}

// skipped returns how many samples are skipped in a place of the run.
func (c *Cluster) skipped(sample uint64) (n int) {
	for _, s := range c.books.skips {
		if s == sample {
			n++
		}
	}
	return n
}

// use holds that all updates of a layer in a step use the gradients of the same samples, but for a commit of which only workers have known
// that are lost or have gone back since, and that each micro-batch is made of one sample in each place.
func (c *Cluster) use(w *worker, step, layer int, samples batches) {
	layers := c.used[step]
	if layers == nil {
		layers = make([]batches, len(c.cfg.Layers))
		c.used[step] = layers
	}
	for _, s := range samples {
		if strings.Contains(s, "and") {
			c.violated("layer %d is updated in step %d with a micro-batch of the samples %q", layer, step, s)
		}
	}
	at := [2]int{step, layer}
	if was := layers[layer]; was != (batches{}) && was != samples {
		goesOn := func(x user) bool { return x.status == nil && x.epoch == w.core.Epoch() }
		if step <= c.most || slices.ContainsFunc(c.users[at], goesOn) {
			c.violated("layer %d is updated in step %d with the samples %q, and with %q", layer, step, samples, was)
		}
		c.users[at] = nil
	}
	layers[layer] = samples
	c.users[at] = append(c.users[at], user{w, w.core.Epoch()})
}

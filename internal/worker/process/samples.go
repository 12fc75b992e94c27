package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
)

// samples reads the samples of the run, [Job.Readers] at a time. Where the run may skip samples that no worker can read, it asks the agent what is
// to become of one (package internal/host/session/skips), and waits.
type samples struct {
	w     *Worker
	j     *Job
	shift uint64 // added to the numbers of samples
	skip  bool   // the run may skip samples

	reading gate
	tries   sync.WaitGroup

	mu     sync.Mutex
	skips  map[uint64]int
	open   map[place]*question
	failed map[place]bool      // another worker can read it
	read   map[uint64]struct{} // samples that passes have read since the last rollback, of the newest steps
}

// gate lets so many goroutines read at a time as it has room for.
type gate chan struct{}

func (g gate) enter() { g <- struct{}{} }
func (g gate) leave() { <-g }

func (g gate) tryEnter() bool {
	select {
	case g <- struct{}{}:
		return true
	default:
		return false
	}
}

// place is a sample of the run, and how many were skipped there before.
type place struct {
	sample uint64
	skips  int
}

// question is a sample that this worker cannot read, until the agent says what is to become of it.
type question struct {
	err  *SampleError
	step int
	done chan struct{} // closed: there is a verdict
}

// newSamples returns what reads the samples from start on, and a function that joins its goroutines.
func newSamples(w *Worker, j *Job, start control.Start) (s *samples, closeIt func()) {
	s = &samples{w: w, j: j, shift: start.Shift, skip: start.SkipBad, skips: make(map[uint64]int), reading: make(gate, max(j.Readers, 1))}
	for _, sample := range start.Skipped {
		s.skips[sample]++
	}
	s.begin()
	return s, s.tries.Wait
}

// begin forgets what was read: the steps begin again.
func (s *samples) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open, s.failed, s.read = make(map[place]*question), make(map[place]bool), make(map[uint64]struct{})
}

// verdicts brings what the agent says of samples to those of the session, also what comes before they are there: a worker that missed that
// a sample is skipped would train on it.
type verdicts struct {
	mu    sync.Mutex
	to    *samples
	early []control.BadSample
}

// maxEarly bounds what comes before the samples are there.
const maxEarly = 1 << 16

func (v *verdicts) put(m control.BadSample) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.to != nil:
		return v.to.told(m)
	case len(v.early) == maxEarly:
		return fmt.Errorf("the agent spoke of more than %d samples before the first pass", maxEarly)
	}
	v.early = append(v.early, m)
	return nil
}

func (v *verdicts) open(s *samples) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.to = s
	for _, m := range v.early {
		if err := s.told(m); err != nil {
			return err
		}
	}
	v.early = nil
	return nil
}

// load reads sample i of the run for a pass in a lane, of the step that has it.
func (s *samples) load(ctx context.Context, lane int, i uint64, in, target tensor.Tensor) error {
	for {
		s.mu.Lock()
		at := place{i + s.shift, s.skips[i+s.shift]}
		q := s.open[at]
		s.mu.Unlock()
		if q == nil {
			err := s.readFor(s.w.calls.Lane(lane), at, in, target)
			if errors.Is(err, errElsewhere) {
				continue
			}
			var bad *SampleError
			if err == nil || !s.skip || !errors.As(err, &bad) {
				return err
			}
			if q, err = s.unread(at, bad); err != nil {
				return err
			}
			if q == nil {
				continue
			}
		}
		if err := s.wait(ctx, at, q); err != nil {
			return err
		}
	}
}

// unread takes in that this worker cannot read a sample for a pass. It returns a question to wait for, nil where the place has changed
// meanwhile, or the error of a sample that is good.
func (s *samples) unread(at place, bad *SampleError) (*question, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.moved(at) {
		return nil, nil
	}
	if _, has := s.read[at.sample]; has || s.failed[at] { // others will read it
		return nil, bad
	}
	return s.ask(at, bad), nil
}

// errElsewhere says that a sample is skipped, or that the agent is asked about it, since its place was looked up.
var errElsewhere = errors.New("the sample is skipped, or the agent is asked about it")

// moved reports whether another sample is in the place of the run than at says, or may be soon; s.mu is held.
func (s *samples) moved(at place) bool { return s.skips[at.sample] != at.skips || s.open[at] != nil }

// readFor reads a sample, and remembers that this worker has it. The error is errElsewhere where it must not be used.
func (s *samples) readFor(calls *Calls, at place, in, target tensor.Tensor) error {
	if !s.reading.tryEnter() { // other goroutines are in such calls, which may block this one
		before := calls.Enter(control.CallSample, 0, s.j.Index(at.sample, at.skips))
		s.reading.enter()
		calls.Leave(before)
	}
	defer s.reading.leave()
	s.mu.Lock()
	moved := s.moved(at) // meanwhile
	s.mu.Unlock()
	if moved {
		return errElsewhere
	}
	if err := s.j.Load(calls, at.sample, at.skips, in, target); err != nil {
		return err
	}
	if s.skip {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.moved(at) { // while it was read: the agent had asked before a rollback
			return errElsewhere
		}
		s.read[at.sample] = struct{}{}
		if most := 8 * s.j.GlobalBatch; len(s.read) > most {
			maps.DeleteFunc(s.read, func(i uint64, _ struct{}) bool { return i+uint64(most)/2 < at.sample })
		}
	}
	return nil
}

// ask opens a question; s.mu is held.
func (s *samples) ask(at place, err *SampleError) *question {
	q := s.open[at]
	if q == nil {
		q = &question{err: err, step: int((at.sample-s.shift)/uint64(s.j.GlobalBatch)) + 1, done: make(chan struct{})}
		s.open[at] = q
	}
	return q
}

// wait tells the agent now and then, which may be another one than before, until it has a verdict.
func (s *samples) wait(ctx context.Context, at place, q *question) error {
	again := time.NewTicker(timing.Disk)
	defer again.Stop()
	for {
		if err := s.say(at, q); err != nil {
			return err
		}
		select {
		case <-q.done:
			return nil
		case <-again.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *samples) say(at place, q *question) error {
	m := control.Unread{Sample: at.sample, Skips: at.skips}
	if q != nil {
		m.Index, m.Step, m.Text = q.err.Index, q.step, q.err.Error()
	} else {
		m.Step = 1
	}
	return s.w.send(m)
}

// told takes in what the agent says of a sample.
func (s *samples) told(m control.BadSample) error {
	at := place{m.Sample, m.Skips}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch m.Do {
	case control.TrySample:
		if err := s.skipTo(at); err != nil { // an earlier leader may have been lost before it said so
			return err
		}
		if at.skips == s.skips[at.sample] {
			s.tries.Go(func() { _ = s.try(at) }) // without an agent, this worker ends
		}
		return nil
	case control.SkipSample:
		return s.skipTo(place{at.sample, at.skips + 1})
	case control.FailSample:
		s.failed[at] = true
		s.settle(at)
		return nil
	}
	return fmt.Errorf("the agent sent %q for a sample", m.Do)
}

// skipTo skips as many samples in a place of the run as at says, unless that is known; s.mu is held.
func (s *samples) skipTo(at place) error {
	was := s.skips[at.sample]
	if at.skips <= was {
		return nil
	}
	if _, has := s.read[at.sample]; has {
		return fmt.Errorf("the agent skips sample %d, which this worker has read", at.sample)
	}
	s.skips[at.sample] = at.skips
	s.settle(place{at.sample, was})
	return nil
}

// settle ends a question, if there is one; s.mu is held.
func (s *samples) settle(at place) {
	if q := s.open[at]; q != nil {
		delete(s.open, at)
		close(q.done)
	}
}

// try reads a sample that another worker cannot read, and says whether this one can.
func (s *samples) try(at place) error {
	s.reading.enter()
	defer s.reading.leave()
	s.mu.Lock()
	_, has := s.read[at.sample]
	q, skipped := s.open[at], s.skips[at.sample] != at.skips
	s.mu.Unlock()
	if q == nil && !has && !skipped {
		if bad := s.attempt(at); bad != nil {
			s.mu.Lock()
			if skipped = s.skips[at.sample] != at.skips; !skipped {
				q = s.ask(at, bad)
			}
			s.mu.Unlock()
		}
	}
	if skipped {
		return nil // the question is settled
	}
	return s.say(at, q)
}

// attempt reads a sample beside the pass that runs, whose call of user code is the one that is watched.
func (s *samples) attempt(at place) (bad *SampleError) {
	defer func() {
		if v := recover(); v != nil {
			bad = &SampleError{Index: s.j.Index(at.sample, at.skips), Tries: 1, Err: fmt.Errorf("panic: %v", v)}
		}
	}()
	in, target := tensor.Make(s.j.Input.Kind, s.j.Input.Shape...), tensor.Make(s.j.Target.Kind, s.j.Target.Shape...)
	errors.As(s.j.Load(nil, at.sample, at.skips, in, target), &bad)
	return bad
}

// index returns the index in the data of a sample of the run, shifted.
func (s *samples) index(sample uint64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.j.Index(sample, s.skips[sample])
}

// evaluate reads a sample of an evaluation.
func (s *samples) evaluate(i int, in, target tensor.Tensor) error {
	s.reading.enter()
	defer s.reading.leave()
	return s.j.Evaluate(i, in, target)
}

// ahead reads sample i of the run before it is needed, beside the pass that runs. What cannot be read is left to load.
func (s *samples) ahead(i uint64, in, target tensor.Tensor) error {
	s.mu.Lock()
	at := place{i + s.shift, s.skips[i+s.shift]}
	q := s.open[at]
	s.mu.Unlock()
	if q != nil {
		return q.err
	}
	return s.readFor(nil, at, in, target)
}

// await records a call of user code while a pass in a lane waits for sample i, which is being read ahead.
func (s *samples) await(lane int, i uint64, wait func()) {
	calls := s.w.calls.Lane(lane)
	before := calls.Enter(control.CallSample, 0, s.index(i+s.shift))
	wait()
	calls.Leave(before)
}

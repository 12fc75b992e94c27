package process

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/soliton-train/soliton/internal/compute/pages"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/model"
)

// saver writes this worker's part of checkpoints in the background. It outlives
// engines.
type saver struct {
	w    *Worker
	j    *Job
	dir  string
	job  string      // ID
	eras rundir.Eras // of the job
	ctx  context.Context

	writing atomic.Int32
	order   sync.Mutex // held while a part is written
	writers sync.WaitGroup
	pace    atomic.Pointer[pace] // of the newest part

	mu    sync.Mutex
	spare []float32 // memory of a part that is written
	lent  []float32 // what room has returned and save has yet to get
}

func newSaver(ctx context.Context, w *Worker, j *Job, start control.Start) (s *saver, closeIt func()) {
	ctx, cancel := context.WithCancel(ctx)
	s = &saver{w: w, j: j, dir: start.RunDir, job: j.eras(start).Now(), eras: j.eras(start), ctx: ctx}
	s.pace.Store(newPace(time.Now(), 0, 0))
	if j.CheckpointSteps > 0 {
		w.saveAsked.Store(true) // the first steps may be over before the agent can ask
	}
	return s, func() {
		cancel()
		s.writers.Wait()
	}
}

// saving says whether a checkpoint of a step is wanted, and whether the one before is still being written here. What the agent has asked
// for waits for a multiple of the job's CheckpointSteps, if it has any.
func (s *saver) saving(step int) (say core.Saving) {
	if step == s.j.Steps && (s.j.CheckpointEvery > 0 || s.j.CheckpointSteps > 0) {
		say |= core.SavingLast
	}
	if s.w.saveAsked.Load() && step%max(s.j.CheckpointSteps, 1) == 0 {
		say |= core.SavingWanted
	}
	if s.writing.Load() > 0 {
		say |= core.SavingBusy
	}
	return say
}

// room returns memory for the copy of a part, which save gets next: that of the part before where that is written, because the first
// use of new memory costs more than the copy.
func (s *saver) room(numbers int) []float32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lent, s.spare = s.spare, nil
	if cap(s.lent) < numbers || cap(s.lent)/2 > numbers {
		s.lent = pages.Make(numbers)
	}
	s.lent = s.lent[:numbers]
	return s.lent
}

// save writes a part in the background.
func (s *saver) save(part checkpoint.Part) {
	s.w.saveAsked.Store(false)
	s.mu.Lock()
	memory := s.lent
	s.lent = nil
	s.mu.Unlock()
	if len(part.Shards) == 0 {
		return
	}
	s.writing.Add(1)
	began := time.Now()
	before := s.pace.Load()
	before.hurry()
	pace := newPace(began, began.Sub(before.began), 4*int64(len(memory)))
	s.pace.Store(pace)
	s.writers.Go(func() {
		s.order.Lock()
		m := s.write(part, pace)
		m.Began = began.UnixNano()
		s.order.Unlock()
		s.mu.Lock()
		s.spare = memory
		s.mu.Unlock()
		s.writing.Add(-1)
		_ = s.w.send(m) // without an agent, this worker exits
	})
}

// finish returns when all parts are written, for which it does not let them take their time.
func (s *saver) finish() {
	s.pace.Load().hurry()
	s.writers.Wait()
}

func (s *saver) write(part checkpoint.Part, pace *pace) control.Saved {
	part.Job, part.Worker, part.Rule = s.job, int(s.w.self.id()), s.j.ruleName()
	m := control.Saved{Step: part.Step, Generation: part.Plan.Generation, N: part.Plan.N, Rule: part.Rule}
	var file checkpoint.File
	err := s.eras.Own(s.dir)
	if err == nil {
		file, err = checkpoint.WritePaced(s.ctx, s.dir, part, pace.start(s.ctx))
	}
	if err == nil {
		m.File, err = json.Marshal(file)
	}
	if err != nil {
		m.Err = err.Error()
	}
	return m
}

// A pace has a part of a checkpoint written beside training so that steps take hardly longer: at slowBytes a second, or as fast as it must
// be to be whole well before the next checkpoint, and without a rest as soon as the run waits for it.
type pace struct {
	began   time.Time     // when the part was captured
	window  time.Duration // how long after that it may take
	bytes   int64         // of the part
	hurried chan struct{}
	once    sync.Once
}

// Processors, memory and often the disk of a machine are busy with training, so a writer at full speed makes one or two steps longer by
// all that it takes. At this rate a part of 10 MB takes a second.
const slowBytes = 10e6

// newPace returns the pace of a part that was captured at a time, that long after the one before.
func newPace(began time.Time, since time.Duration, bytes int64) *pace {
	return &pace{began: began, window: since * 3 / 4, bytes: bytes, hurried: make(chan struct{})}
}

// hurry ends all rests.
func (p *pace) hurry() { p.once.Do(func() { close(p.hurried) }) }

// start returns what the writer calls with the bytes that it has written, from when it begins.
func (p *pace) start(ctx context.Context) (rest func(written int64)) {
	start := time.Now()
	all := min(p.began.Add(p.window).Sub(start).Seconds(), float64(p.bytes)/slowBytes)
	return func(written int64) {
		due := time.Duration(all * float64(written) / float64(max(p.bytes, 1)) * float64(time.Second))
		d := time.Until(start.Add(due))
		if d <= 0 {
			return
		}
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-p.hurried:
		case <-ctx.Done():
		}
	}
}

// ruleName returns the name of the optimizer in checkpoints.
func (j *Job) ruleName() string { return ruleName(j.Rule) }

func ruleName(rule zero.Rule) string {
	if _, ok := rule.(zero.SGD); ok {
		return "sgd"
	}
	return "adamw"
}

// Moments returns the names of an optimizer's moments in files.
func Moments(rule zero.Rule) []string { return checkpoint.MomentsOf(ruleName(rule)) }

// eras returns the eras of the run.
func (j *Job) eras(start control.Start) rundir.Eras {
	if len(start.Eras) > 0 {
		return start.Eras
	}
	return rundir.Only(j.ID())
}

// beginning returns what reads the state that an order begins with, and a function that closes it.
func (j *Job) beginning(ctx context.Context, of rundir.Eras, o control.Order) (begin func(id.Range, []float32, [][]float32) error, closeIt func(), err error) {
	if o.From == "" {
		begin, closeIt = j.firstValues()
		return begin, closeIt, nil
	}
	r, err := checkpoint.At(o.From, of, o.Passed.Step)
	if err != nil {
		return nil, nil, err
	}
	var sizes []int
	for _, l := range j.Params.Layers {
		sizes = append(sizes, l.Size())
	}
	if m := r.Manifest(); m.Rule != j.ruleName() || !slices.Equal(m.Layers, sizes) {
		r.Close()
		return nil, nil, fmt.Errorf("the checkpoint of step %d has layers of %v parameters and %s; the job has %v and %s", m.Step, m.Layers, m.Rule, sizes, j.ruleName())
	}
	return func(x id.Range, params []float32, moments [][]float32) error {
		return r.Read(ctx, x.Layer, x.Lo, x.Hi, params, moments)
	}, func() { r.Close() }, nil
}

// firstValues returns what sets the first values of a range of the parameters and of their moments, and a function that closes it.
// Moments begin as zeros, which they are, unless the job has a file of them. Values are made for whole layers: where they are, for one, and where a range is
// asked for in memory that is kept for other ranges.
func (j *Job) firstValues() (begin func(r id.Range, params []float32, moments [][]float32) error, closeIt func()) {
	layer, values := -1, []float32(nil)
	var state *model.Moments // once it is wanted
	begin = func(r id.Range, params []float32, moments [][]float32) error {
		size := j.Params.Layers[r.Layer].Size()
		if len(moments) == 0 && len(params) == size && r.Layer != layer {
			clear(params)
			return j.Params.First(r.Layer, params, j.InitFrom, j.InitSHA256)
		}
		if r.Layer != layer {
			layer, values = -1, pages.Make(size)
			if err := j.Params.First(r.Layer, values, j.InitFrom, j.InitSHA256); err != nil {
				return err
			}
			layer = r.Layer
		}
		pages.Copy(params, values[r.Lo:r.Hi])
		if j.InitOptimizer == "" || len(moments) == 0 {
			return nil
		}
		if state == nil {
			opened, err := j.Params.OpenMoments(j.InitOptimizer, Moments(j.Rule))
			if err != nil {
				return err
			}
			if state = opened; state.Updates != j.InitUpdates {
				return fmt.Errorf("%s has %d updates in it, and had %d when the run began", j.InitOptimizer, state.Updates, j.InitUpdates)
			}
			if err := state.Check(j.InitOptimizerSHA256); err != nil {
				return err
			}
		}
		return state.Read(r.Layer, r.Lo, moments)
	}
	return begin, func() {
		if state != nil {
			state.Close()
		}
	}
}

package dashboard

import (
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Bounds of what is kept for pages.
const (
	maxPoints = 1024 // of the loss curve; when it is full, neighbours become one
	maxEvents = 400
	maxGone   = 24
)

// The states of a run.
const (
	starting   = "starting"
	training   = "training"
	recovering = "recovering"
	stopping   = "stopping"
	done       = "done"
	stopped    = "stopped"
	failed     = "failed"
)

// board is what a page shows: a function of the events it was given. It counts the changes of
// each part, so that a page can be told of what is new.
type board struct {
	run      runState
	points   []point
	merged   int // steps behind one point
	part     point
	parts    int
	workers  []workerState
	events   []eventLine
	next     int // Seq of the next event
	timeline *timeline
	partial  *timeline // the newest step of which not all have told

	began time.Time // of training
	first int       // the newest step at that time
	speed []rundir.Metrics
	at    seen
}

// seen counts how often each part has changed; for a page, when it was told.
type seen struct {
	run, workers, timeline int
	curve                  int // how often the points were changed and not only added to
	points                 int // of them
	events                 int // Seq of the next
}

// runState is the run as a whole.
type runState struct {
	State       string       `json:"state"`
	Note        string       `json:"note"` // what is going on, or why it has ended
	Program     string       `json:"program"`
	Model       string       `json:"model"`
	Parameters  int64        `json:"parameters"`
	Kernel      string       `json:"kernel"`
	Reduction   string       `json:"reduction"`
	Threads     int          `json:"threads"`
	GlobalBatch int          `json:"global_batch"`
	MicroBatch  int          `json:"micro_batch"`
	RunDir      string       `json:"run_dir"`
	Steps       int          `json:"steps"`
	Step        int          `json:"step"`
	Loss        *float64     `json:"loss"`
	ValLoss     *float64     `json:"val_loss"`
	LR          float64      `json:"lr"`
	GradNorm    float64      `json:"grad_norm"`
	MS          float64      `json:"ms"`      // of a step
	Speed       float64      `json:"speed"`   // tokens a second
	Left        float64      `json:"left"`    // seconds; below 0: not known yet
	Plan        uint64       `json:"plan"`    // version
	Reason      string       `json:"reason"`  // of the plan
	Stages      []view.Stage `json:"stages"`  // of the plan
	Seconds     float64      `json:"seconds"` // that the run took, when it is over
	Params      string       `json:"params"`  // params_sha256 then
	Recovered   int          `json:"recovered"`
	Acts        bool         `json:"acts"` // there is a run to act on
}

// point is a point of the curves: means over one step or several.
type point struct {
	Step  int      `json:"step"` // the last of them
	Loss  float64  `json:"loss"`
	Speed float64  `json:"speed"` // tokens a second
	MS    float64  `json:"ms"`
	Val   *float64 `json:"val,omitempty"`
}

// workerState is a worker, or one that is gone.
type workerState struct {
	ID          int    `json:"id"`
	Incarnation int    `json:"incarnation"`
	Stages      []int  `json:"stages"`
	Layers      []int  `json:"layers"`
	State       string `json:"state"` // "" while it trains
	Step        int    `json:"step"`
	Forwards    int64  `json:"forwards"`
	Backwards   int64  `json:"backwards"`
	Gone        string `json:"gone"` // why; "" for one that is there

	// Of the newest step that it told of: the mean milliseconds of a micro-batch, forward and backward
	// together, and the share of the step in which it computed. Below 0 before there is one.
	PassMS float64 `json:"pass_ms"`
	Busy   float64 `json:"busy"`
}

// eventLine is a line of events.jsonl.
type eventLine struct {
	Seq      int              `json:"seq"`
	Time     rundir.Time      `json:"time"`
	Kind     string           `json:"kind"`
	Worker   int              `json:"worker"`
	Plan     uint64           `json:"plan"`
	Reason   string           `json:"reason"`
	Recovery *rundir.Recovery `json:"recovery,omitempty"`
}

// timeline is what all workers did in a step, in microseconds from Began on.
type timeline struct {
	Step    int     `json:"step"`
	Plan    uint64  `json:"plan"`
	Began   int64   `json:"began"`
	Workers []track `json:"workers"`
}

type track struct {
	ID     int    `json:"id"`
	From   int64  `json:"from"` // when the worker began the step
	Commit int64  `json:"commit"`
	End    int64  `json:"end"`
	Cut    bool   `json:"cut"`
	Spans  []span `json:"spans"`
}

type span struct {
	Backward bool  `json:"b"`
	Stage    int   `json:"s"`
	Micro    int   `json:"m"`
	From     int64 `json:"f"`
	To       int64 `json:"t"`
	Lane     int   `json:"l,omitempty"` // of those that run side by side
}

// frame is one update of a page. Parts that are nil have not changed.
type frame struct {
	Now      time.Time     `json:"now"`
	Run      *runState     `json:"run,omitempty"`
	Reset    bool          `json:"reset,omitempty"` // Points replace all there were
	Points   []point       `json:"points,omitempty"`
	Workers  []workerState `json:"workers,omitempty"`
	Events   []eventLine   `json:"events,omitempty"`
	Timeline *timeline     `json:"timeline,omitempty"`
}

func newBoard() board {
	return board{run: runState{State: starting, Left: -1, Stages: []view.Stage{}}, merged: 1, at: seen{run: 1, curve: 1}}
}

// since returns what has changed, and brings c up to date.
func (b *board) since(now time.Time, c *seen) (f frame, news bool) {
	f.Now = now
	if c.run != b.at.run {
		run := b.run
		f.Run = &run
	}
	if c.curve != b.at.curve {
		f.Reset, f.Points = true, slices.Clone(b.points)
	} else if c.points < len(b.points) {
		f.Points = slices.Clone(b.points[c.points:])
	}
	if c.workers != b.at.workers {
		f.Workers = slices.Clone(b.workers)
	}
	if missing := b.next - c.events; missing > 0 {
		f.Events = slices.Clone(b.events[max(0, len(b.events)-missing):])
	}
	if c.timeline != b.at.timeline {
		f.Timeline = b.timeline // never changed after it was shown
	}
	was := *c
	*c = b.at
	c.points, c.events = len(b.points), b.next
	return f, *c != was
}

func (b *board) add(now time.Time, e view.Event) {
	switch e := e.(type) {
	case view.Note:
		b.run.Note = string(e)
		b.at.run++
	case view.Begin:
		b.begin(now, e)
	case view.Plan:
		b.run.Reason = e.Reason
		b.place(e.Workers, e.Stages)
	case view.Worker:
		b.worker(e)
	case view.Step:
		b.step(now, rundir.Metrics(e))
	case view.Change:
		b.change(rundir.Event(e))
	case view.Timeline:
		b.told(e)
	case view.Stopping:
		b.run.State, b.run.Note = stopping, e.Reason
		b.at.run++
	case view.End:
		b.end(e.Summary)
	}
}

func (b *board) begin(now time.Time, e view.Begin) {
	job := e.Job
	b.began = now
	b.run.State, b.run.Note = training, ""
	b.run.Program, b.run.Model, b.run.Parameters = job.Program, job.Model, job.Parameters
	b.run.Kernel, b.run.Reduction, b.run.Threads = job.Kernel, job.Reduction, job.Threads
	b.run.GlobalBatch, b.run.MicroBatch, b.run.Steps = job.GlobalBatch, job.MicroBatch, job.Steps
	b.run.RunDir, b.run.Reason = e.RunDir, e.Reason
	b.place(e.Workers, e.Stages)
}

// place gives the workers of a plan their stages and ranks. A worker without any is gone, or has not joined yet.
func (b *board) place(workers []rundir.Worker, stages []view.Stage) {
	b.run.Stages = append([]view.Stage{}, stages...)
	for i := range b.workers {
		b.workers[i].Stages, b.workers[i].Layers = []int{}, []int{}
	}
	for _, w := range workers {
		to := b.find(w.ID)
		if to.Incarnation != w.Incarnation {
			to.Incarnation, to.Gone, to.PassMS, to.Busy = w.Incarnation, "", -1, -1
		}
		if to.Gone != "" {
			continue // the plan is older than that: a new leader repeats it
		}
		to.Stages, to.Layers = append([]int{}, w.Stages...), append([]int{}, w.Layers...)
	}
	b.at.run++
	b.at.workers++
}

// find returns the worker with an ID, which it makes if there is none.
func (b *board) find(id int) *workerState {
	i, ok := slices.BinarySearchFunc(b.workers, id, func(w workerState, id int) int { return w.ID - id })
	if !ok {
		b.workers = slices.Insert(b.workers, i, workerState{ID: id, Stages: []int{}, Layers: []int{}, PassMS: -1, Busy: -1})
	}
	return &b.workers[i]
}

func (b *board) worker(e view.Worker) {
	w := b.find(e.ID)
	w.State = e.State
	if e.State == "" || e.Step > 0 {
		w.Step, w.Forwards, w.Backwards = e.Step, e.Forwards, e.Backwards
	}
	if e.State == view.Begins || e.State == view.Awaited {
		w.Gone = ""
	}
	b.at.workers++
}

// lose notes why a worker is gone, and forgets the oldest when there are many.
func (b *board) lose(id int, why string) {
	w := b.find(id)
	w.Gone, w.Stages = why, []int{}
	b.at.workers++
	gone := 0
	for _, w := range b.workers {
		if w.Gone != "" {
			gone++
		}
	}
	if gone > maxGone {
		i := slices.IndexFunc(b.workers, func(w workerState) bool { return w.Gone != "" && w.ID != id })
		b.workers = slices.Delete(b.workers, i, i+1)
	}
}

// window is over how many steps the speed is averaged.
const window = 16

func (b *board) step(now time.Time, m rundir.Metrics) {
	if m.Step <= b.run.Step { // the run has gone back
		b.points = slices.DeleteFunc(b.points, func(p point) bool { return p.Step >= m.Step })
		b.parts, b.part = 0, point{}
		b.at.curve++
	}
	if b.run.Step == 0 {
		b.first = m.Step - 1
	}
	b.speed = append(b.speed, m)
	b.speed = b.speed[max(0, len(b.speed)-window):]
	var tokens, ms float64
	for _, m := range b.speed {
		tokens += float64(m.Tokens)
		ms += m.MS
	}
	if b.run.MS, b.run.Speed = ms/float64(len(b.speed)), 0; ms > 0 {
		b.run.Speed = tokens / ms * 1000
	}
	if m.ValLoss != nil {
		b.run.ValLoss = m.ValLoss
	}
	b.run.Step, b.run.Loss, b.run.LR, b.run.GradNorm, b.run.Plan = m.Step, &m.Loss, m.LR, m.GradNorm, m.Plan
	b.run.Left = -1
	if n := m.Step - b.first; n > 0 {
		b.run.Left = now.Sub(b.began).Seconds() / float64(n) * float64(b.run.Steps-m.Step)
	}
	if b.run.State == training {
		b.run.Note = ""
	}
	b.at.run++

	p := point{Step: m.Step, Loss: m.Loss, MS: m.MS, Val: m.ValLoss}
	if m.MS > 0 {
		p.Speed = float64(m.Tokens) / m.MS * 1000
	}
	b.part = mean(b.part, b.parts, p, 1)
	if b.parts++; b.parts < b.merged {
		return
	}
	b.points = append(b.points, b.part)
	b.parts, b.part = 0, point{}
	if len(b.points) == maxPoints {
		for i := range maxPoints / 2 {
			b.points[i] = mean(b.points[2*i], 1, b.points[2*i+1], 1)
		}
		b.points = b.points[:maxPoints/2]
		b.merged *= 2
		b.at.curve++
	}
}

// mean returns the mean of two points that stand for n and m.
func mean(p point, n int, q point, m int) point {
	of := func(x, y float64) float64 { return (x*float64(n) + y*float64(m)) / float64(n+m) }
	r := point{Step: q.Step, Loss: of(p.Loss, q.Loss), Speed: of(p.Speed, q.Speed), MS: of(p.MS, q.MS), Val: p.Val}
	if q.Val != nil {
		r.Val = q.Val
	}
	return r
}

func (b *board) change(e rundir.Event) {
	b.events = append(b.events, eventLine{b.next, e.Time, e.Kind, e.Worker, e.Plan, e.Reason, e.Recovery})
	b.events = b.events[max(0, len(b.events)-maxEvents):]
	b.next++
	b.at.run++
	running := b.run.State == training || b.run.State == recovering
	switch e.Kind {
	case "plan":
		b.run.Plan = e.Plan
	case "lost", "left", "refused":
		had := e.Worker >= 0 && len(b.find(e.Worker).Stages) > 0
		if e.Worker >= 0 {
			b.lose(e.Worker, e.Reason)
		}
		if e.Kind == "lost" && had && running {
			b.run.State = recovering
		}
	case "recovered":
		b.run.Recovered++
		if b.run.State == recovering {
			b.run.State = training
		}
	case "hold", "full", "removed":
		b.run.Note = e.Reason
	case "room":
		b.run.Note = ""
	case "failed":
		b.run.State, b.run.Note, b.run.Left, b.run.Acts = failed, e.Reason, -1, false
	}
}

func (b *board) end(s rundir.Summary) {
	switch {
	case b.run.State == failed: // which said more
	case s.StoppedBy != "":
		b.run.State, b.run.Note = stopped, s.StoppedBy
	default:
		b.run.State, b.run.Note = done, ""
	}
	b.run.Step, b.run.Seconds, b.run.Params, b.run.Left, b.run.Acts = s.Steps, s.Seconds, s.ParamsSHA256, -1, false
	if s.ValLoss != nil {
		b.run.ValLoss = s.ValLoss
	}
	if s.TokensPerSecond > 0 {
		b.run.Speed = s.TokensPerSecond
	}
	b.at.run++
}

// told takes in what a worker did in a step. The timeline of the step is shown when all workers of the
// plan have reported it, or when one reports a newer step.
func (b *board) told(e view.Timeline) {
	i := slices.IndexFunc(b.workers, func(w workerState) bool { return w.ID == e.ID && w.Gone == "" })
	if i < 0 || e.End <= 0 {
		return
	}
	w := &b.workers[i]
	w.PassMS, w.Busy = speedOf(e.Timeline)
	b.at.workers++
	if b.partial == nil || e.Step > b.partial.Step {
		if b.partial != nil {
			b.reveal()
		}
		b.partial = &timeline{Step: e.Step, Plan: b.run.Plan, Began: e.Began}
	}
	p := b.partial
	if e.Step < p.Step || slices.ContainsFunc(p.Workers, func(t track) bool { return t.ID == e.ID }) {
		return
	}
	if e.Began < p.Began {
		for i := range p.Workers {
			p.Workers[i].shift(p.Began - e.Began)
		}
		p.Began = e.Began
	}
	t := track{ID: e.ID, Commit: e.Commit, End: e.End, Cut: e.Cut}
	for _, s := range e.Passes {
		st := slices.IndexFunc(b.run.Stages, func(st view.Stage) bool { return st.Lo <= s.Layer && s.Layer < st.Hi })
		t.Spans = append(t.Spans, span{s.Backward, st, s.Micro, s.From, s.To, s.Lane})
	}
	t.shift(e.Began - p.Began)
	p.Workers = append(p.Workers, t)
	slices.SortFunc(p.Workers, func(a, b track) int { return a.ID - b.ID })
	placed := 0
	for _, w := range b.workers {
		if len(w.Stages) > 0 {
			placed++
		}
	}
	if len(p.Workers) >= placed {
		b.reveal()
	}
}

// reveal shows the partial timeline, which nothing may change afterwards.
func (b *board) reveal() {
	shown := *b.partial
	shown.Workers = slices.Clone(shown.Workers)
	b.timeline = &shown
	b.at.timeline++
}

func (t *track) shift(by int64) {
	t.From, t.Commit, t.End = t.From+by, t.Commit+by, t.End+by
	spans := make([]span, len(t.Spans))
	for i, s := range t.Spans {
		s.From, s.To = s.From+by, s.To+by
		spans[i] = s
	}
	t.Spans = spans
}

// speedOf returns the mean milliseconds of a micro-batch and the share of the step that was computing, below 0
// where nothing was run. Of passes that run side by side, each takes a share of the worker.
func speedOf(t control.Timeline) (ms, busy float64) {
	var sum int64
	forwards, lanes := 0, 1
	for _, s := range t.Passes {
		lanes = max(lanes, s.Lane+1)
		sum += max(0, s.To-s.From-s.Wait)
		if !s.Backward {
			forwards++
		}
	}
	if forwards == 0 {
		return -1, 0
	}
	sum /= int64(lanes)
	return float64(sum) / 1000 / float64(forwards), min(1, float64(sum)/float64(t.End))
}

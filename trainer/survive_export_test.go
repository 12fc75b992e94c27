package trainer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/worker/core"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// survival is a run on several workers of this process, some of which are killed.
// It plays their agent.
type survival struct {
	t       *testing.T
	network *transport.Mem
	job     func() Job

	workers []*victim
	events  chan func()
	c       *controller.Controller
	plans   map[uint64]plan.Plan // by Version.N
	post    func(func())
	failed  error
	over    bool

	live       plan.Plan // the newest that was adopted
	result     Survived  // what counts plans
	recoveries []controller.Recovery
	notes      []string
	repaired   []Repaired
}

// victim is a worker.
type victim struct {
	w      plan.Worker
	worker *process.Worker
	conn   *control.Conn
	cancel context.CancelFunc
	gone   bool
	left   bool // it was let go
	joins  bool // it is not of the first plan
	History
	done *control.Done
	addr string
	prof plan.Profile
}

// SurviveConfig describes a run and when its workers are killed.
type SurviveConfig struct {
	Workers, Stages, Mirrors int
	Start                    control.Start
	// Moment is called for every message of a worker during the run. It returns
	// the worker to kill, -1 for none, and the delay.
	Moment func(from int, m control.Message) (victim int, after time.Duration)
	// Act, if it is not nil, is called at the same times and returns the workers that join, with
	// their next incarnation, and leave; -1 for none.
	Act func(from int, m control.Message) (joins, leaves int)
	// Speeds, if it is not nil, is called likewise. The controller takes the speeds it returns
	// as measured; other workers have speed 1.
	Speeds func(from int, m control.Message) map[int]float64
	// Flip is called likewise and returns the worker in whose memory a bit flips.
	Flip func(from int, m control.Message) (victim int, target core.Target, after time.Duration)
}

// Survived is how such a run went.
type Survived struct {
	Left       map[int]History // what the remaining workers reported
	Recoveries []controller.Recovery
	Joined     int   // workers that joined
	Rebalanced int   // plans that went live because of times
	Borders    int   // of stages that these moved
	Places     int   // workers that they gave another stage
	Forwards   int64 // passes of training, of all workers, as far as they told
	Notes      []string
	Repaired   []Repaired
}

// Repaired is a worker's report of a repaired block.
type Repaired struct {
	Worker int
	control.Repaired
}

// Survive trains a job on several workers of this process, some of which are killed.
func Survive(t *testing.T, cfg SurviveConfig, job func() Job) Survived {
	t.Helper()
	s := &survival{t: t, network: transport.NewMem(), job: job, events: make(chan func()), plans: make(map[uint64]plan.Plan)}
	quit := make(chan struct{})
	var tasks sync.WaitGroup
	post := func(f func()) {
		select {
		case s.events <- f:
		case <-quit:
		}
	}
	s.post = post
	live := func() (n int) {
		for _, v := range s.workers {
			if !v.gone && s.planned(v) {
				n++
			}
		}
		return n
	}
	var start func(w plan.Worker)
	start = func(w plan.Worker) {
		ctx, cancel := context.WithCancel(context.Background())
		ours, theirs := net.Pipe()
		v := &victim{w: w, conn: control.New(ours), cancel: cancel, joins: s.c != nil}
		s.workers = append(s.workers, v)
		tasks.Go(func() {
			me := process.Self{Session: id.Session{Worker: w.ID, Incarnation: w.Incarnation}, Transport: s.network}
			w := process.New(control.New(theirs), me)
			post(func() { v.worker = w })
			_ = w.Serve(ctx, maker(func() (Job, error) { return job(), nil }))
			theirs.Close()
		})
		tasks.Go(func() {
			for {
				m, err := v.conn.Receive(context.Background())
				if err != nil {
					post(func() { s.dead(v) })
					return
				}
				post(func() {
					if v.gone {
						return
					}
					s.heard(v, m, cfg)
					if s.c == nil || s.over || s.failed != nil {
						return
					}
					if cfg.Flip != nil {
						if x, target, after := cfg.Flip(int(w.ID), m); x >= 0 {
							time.AfterFunc(after, func() { post(func() { s.newest(x).worker.Flip(target) }) })
						}
					}
					if cfg.Moment != nil {
						if x, after := cfg.Moment(int(w.ID), m); x >= 0 {
							kill := func() {
								if w := s.newest(x); w != nil && !w.gone && w.done == nil && (live() > 1 || !s.planned(w)) {
									w.cancel()
									w.conn.Close()
									s.dead(w)
								}
							}
							if after == 0 {
								kill()
							} else {
								time.AfterFunc(after, func() { post(kill) })
							}
						}
					}
					if cfg.Speeds != nil {
						s.measure(cfg.Speeds(int(w.ID), m))
					}
					if cfg.Act != nil {
						joins, leaves := cfg.Act(int(w.ID), m)
						if joins >= 0 {
							w := plan.Worker{ID: id.WorkerID(joins)}
							was := s.newest(joins)
							if was != nil {
								w.Incarnation = was.w.Incarnation + 1
							}
							if was == nil || was.gone {
								start(w)
							}
						}
						if leaves >= 0 {
							if v := s.newest(leaves); v != nil && !v.gone {
								s.step(controller.Leaving{Worker: v.w})
							}
						}
					}
				})
			}
		})
	}
	for i := range cfg.Workers {
		start(plan.Worker{ID: id.WorkerID(i)})
	}
	deadline := time.After(time.Minute)
	for !s.over && s.failed == nil {
		select {
		case f := <-s.events:
			f()
		case <-deadline:
			s.failed = fmt.Errorf("the run hangs:\n%s", strings.Join(s.notes, "\n"))
			if os.Getenv("SOLITON_HANG") != "" {
				panic(s.failed)
			}
		}
	}
	close(quit)
	for _, v := range s.workers {
		v.cancel()
		v.conn.Close()
	}
	tasks.Wait()
	if s.failed != nil {
		t.Fatal(s.failed)
	}
	r := s.result
	r.Left, r.Recoveries, r.Notes, r.Repaired = make(map[int]History), s.recoveries, s.notes, s.repaired
	for _, v := range s.workers {
		if v.done != nil {
			r.Left[int(v.w.ID)] = v.History
		}
		if v.done != nil {
			r.Forwards += v.done.Worker.Forwards
		} else if n := len(v.Steps); n > 0 {
			r.Forwards += v.Steps[n-1].Forwards
		}
		if v.joins && (v.done != nil || len(v.Steps) > 0) {
			r.Joined++
		}
	}
	return r
}

// newest returns the newest incarnation of a worker, nil if there is none.
func (s *survival) newest(id int) (newest *victim) {
	for _, v := range s.workers {
		if int(v.w.ID) == id {
			newest = v
		}
	}
	return newest
}

// planned reports whether a worker is in the newest plan.
func (s *survival) planned(v *victim) bool {
	if s.c == nil {
		return true
	}
	w, ok := s.c.Plan().Worker(v.w.ID)
	return ok && w == v.w
}

func (s *survival) dead(v *victim) {
	if v.gone {
		return
	}
	v.gone = true
	if s.c == nil {
		s.failed = fmt.Errorf("worker %d ended before training", v.w.ID)
		return
	}
	switch {
	case v.done == nil && !v.left:
		s.step(controller.Dead{Worker: v.w, Cause: fmt.Sprintf("worker %d killed", v.w.ID), Died: time.Now(), How: controller.Reaped})
	case v.left:
		s.step(controller.Ended{Worker: v.w})
	}
	s.finish()
}

// finish ends the run when all living workers of the last plan are done.
func (s *survival) finish() {
	last := uint64(0)
	for _, v := range s.workers {
		if v.done != nil {
			last = max(last, v.done.Plan)
		}
	}
	if last == 0 {
		return
	}
	p := s.plans[last]
	for _, v := range s.workers {
		if w, ok := p.Worker(v.w.ID); ok && w == v.w && !v.gone && v.done == nil {
			return
		}
	}
	s.over = true
	for _, v := range s.workers {
		if !v.gone {
			_ = v.conn.Send(control.Release{})
		}
	}
}

func (s *survival) heard(v *victim, m control.Message, cfg SurviveConfig) {
	switch m := m.(type) {
	case control.Ready:
		v.addr = m.Addr
		for _, l := range m.Layers {
			v.prof.Layers = append(v.prof.Layers, plan.Layer{Tensors: l.Tensors})
		}
		if s.c != nil {
			start := cfg.Start
			start.Threads, start.Joins = 1, true
			_ = v.conn.Send(start)
			s.step(controller.Joined{Worker: v.w, Addr: v.addr})
			return
		}
		s.begin(cfg)
	case control.Step:
		if n := len(v.Steps); n > 0 && m.Step <= v.Steps[n-1].Step { // after a restart
			for v.Steps[len(v.Steps)-1].Step >= m.Step {
				v.Steps = v.Steps[:len(v.Steps)-1]
				if len(v.Steps) == 0 {
					break
				}
			}
		}
		v.Steps = append(v.Steps, m)
	case control.Done:
		v.Done, v.done = m, &m
		s.step(controller.Finished{Worker: v.w, Step: m.Steps, Result: m.Result})
		s.finish()
	case control.Repaired:
		s.repaired = append(s.repaired, Repaired{int(v.w.ID), m})
		s.notes = append(s.notes, fmt.Sprintf("worker %d: %+v", v.w.ID, m))
	case control.Failed:
		if m.Kind == control.Corrupt {
			s.notes = append(s.notes, fmt.Sprintf("worker %d: %s", v.w.ID, m.Text))
			return // its end comes
		}
		s.failed = fmt.Errorf("worker %d: %s\n%s\n%s", v.w.ID, m.Text, m.Stack, strings.Join(s.notes, "\n"))
	case control.Answer:
		s.step(controller.Answered{Worker: v.w, Ballot: m.Ballot, Report: m.Report})
	case control.Level:
		s.step(controller.Level{Worker: v.w, ID: m.ID, Step: m.Step})
	case control.Applied:
		s.step(controller.Applied{Worker: v.w, Ballot: m.Ballot, Version: m.Version, Opened: m.Opened, Edit: m.Edit, Resume: m.Resume})
	}
}

func (s *survival) begin(cfg SurviveConfig) {
	var v plan.View
	start := cfg.Start
	var peers []control.Peer
	for _, w := range s.workers {
		if w.addr == "" {
			return
		}
		v.Workers = append(v.Workers, w.w)
		peers = append(peers, control.Peer{Worker: w.w, Addr: w.addr})
	}
	j := s.job().withDefaults()
	prof := s.workers[0].prof
	p, _, err := planner.Next(plan.Plan{}, v, prof, planner.Event{Kind: planner.Start, Micros: j.GlobalBatch / j.MicroBatch, Stages: cfg.Stages, Mirrors: cfg.Mirrors})
	if err != nil {
		s.failed = err
		return
	}
	start.Threads = 1
	s.plans[uint64(p.Version.N)], s.live = p, p
	s.c = controller.New(controller.Config{Plan: p, Peers: peers, Profile: prof, Term: 1, Stages: cfg.Stages, Mirrors: cfg.Mirrors, Detect: 30 * time.Second})
	for _, w := range s.workers {
		if err := errors.Join(w.conn.Send(start), w.conn.Send(control.Order{Plan: p, Peers: peers})); err != nil {
			s.failed = err
		}
	}
}

// step lets the controller decide, and does what it wants.
func (s *survival) step(e controller.Event) {
	s.notes = append(s.notes, fmt.Sprintf("%T %+v", e, brief(e)))
	for _, f := range s.c.Step(time.Now(), e) {
		switch f := f.(type) {
		case controller.Ask:
			s.send(f.Worker, control.Query{Ballot: f.Ballot})
		case controller.Command:
			s.plans[uint64(f.Order.Plan.Version.N)] = f.Order.Plan
			s.send(f.Worker, f.Order)
		case controller.Copy:
			s.send(f.Worker, f.Fill)
		case controller.Propose:
			s.step(controller.Agreed{Version: f.Order.Plan.Version, Proposed: time.Now()})
		case controller.Balance:
			s.step(f.Make())
		case controller.SetTimer:
			if f.Timer == controller.WishTimer || f.Timer == controller.LookTimer {
				f.After = min(f.After, 2*time.Millisecond)
				time.AfterFunc(f.After, func() { s.post(func() { s.step(controller.Late{Timer: f.Timer}) }) })
			}
		case controller.Adopt:
			if f.Cause == controller.CauseRebalance {
				s.reshaped(f.Order.Plan)
			}
			s.live = f.Order.Plan
		case controller.Note:
			s.notes = append(s.notes, "  "+f.Reason)
		case controller.Recovered:
			s.recoveries = append(s.recoveries, f.Recovery)
		case controller.End:
			if f.Err == nil {
				f.Err = errors.New("ended")
			}
			s.failed = f.Err
		case controller.Kill:
			if f.Reason != fmt.Sprintf("worker %d had not begun under its first plan when a worker failed", f.Worker.ID) {
				s.failed = errors.New(f.Reason)
			}
			for _, v := range s.workers {
				if v.w == f.Worker {
					v.cancel()
					v.conn.Close()
				}
			}
		case controller.Dismiss:
			for _, v := range s.workers {
				if v.w == f.Worker {
					v.left = true
				}
			}
			s.send(f.Worker, control.Release{})
		}
	}
}

// reshaped counts what a plan has changed.
func (s *survival) reshaped(p plan.Plan) {
	s.result.Rebalanced++
	for i, st := range p.Stages {
		if i > 0 && st.Lo != s.live.Stages[i].Lo {
			s.result.Borders++
		}
		for _, w := range st.Workers {
			if !slices.Contains(s.live.Stages[i].Workers, w) {
				s.result.Places++
			}
		}
	}
}

// measure tells the controller what workers of these speeds measure.
func (s *survival) measure(speeds map[int]float64) {
	if speeds == nil {
		return
	}
	p := s.c.Plan()
	for _, w := range p.Workers {
		v := s.newest(int(w.ID))
		if v == nil || v.gone || v.w != w {
			continue
		}
		speed := speeds[int(w.ID)]
		if speed == 0 {
			speed = 1
		}
		var times plan.Times
		for _, stage := range p.StagesOf(w.ID) {
			for l := p.Stages[stage].Lo; l < p.Stages[stage].Hi; l++ {
				t := time.Duration(float64(time.Millisecond) / speed)
				times.Layers = append(times.Layers, plan.LayerTime{Layer: l, Forward: t, Backward: 2 * t})
			}
		}
		s.step(controller.Measured{Worker: w, Times: times})
	}
}

func brief(e controller.Event) any {
	if a, ok := e.(controller.Answered); ok {
		works := ""
		for _, w := range a.Report.Works {
			works += fmt.Sprintf("%d/%d:%v,%v,%v ", w.Stage, w.Micro, w.Phase, w.Input, w.Gradient)
		}
		return fmt.Sprintf("worker %d at %v, plan %v, complete %v, %s", a.Worker.ID, a.Report.Passed, a.Report.Plan, len(a.Report.Complete), works)
	}
	return e
}

func (s *survival) send(w plan.Worker, m control.Message) {
	for _, v := range s.workers {
		if v.w == w && !v.gone {
			_ = v.conn.Send(m)
		}
	}
}

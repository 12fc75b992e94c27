package trainer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/comm"
	"github.com/soliton-train/soliton/elastic"
	"github.com/soliton-train/soliton/elastic/plan"
	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/engine"
)

// survival is a run on several workers of this process, some of which are
// ended in the middle. It plays their agent.
type survival struct {
	t       *testing.T
	network *comm.Mem
	job     func() Job

	workers []*victim
	events  chan func()
	c       *elastic.Controller
	post    func(func())
	failed  error
	over    bool

	recoveries []elastic.Recovery
	notes      []string
	repaired   []Repaired
}

// victim is a worker.
type victim struct {
	id     int
	w      *worker
	conn   *control.Conn
	cancel context.CancelFunc
	gone   bool
	History
	done *control.Done
	addr string
	prof plan.Profile
}

// SurviveConfig describes a run, and who is ended when.
type SurviveConfig struct {
	Workers, Stages, Mirrors int
	Start                    control.Start
	// Moment is called for every message a worker sends while the run goes on,
	// and returns the worker to end, -1 for none, and after which time.
	Moment func(from int, m control.Message) (victim int, after time.Duration)
	// Flip is called likewise, and returns the worker of whose memory a bit is
	// to flip.
	Flip func(from int, m control.Message) (victim int, target engine.Target, after time.Duration)
}

// Survived is how such a run went.
type Survived struct {
	Left       map[int]History // what the workers that are left said
	Recoveries []elastic.Recovery
	Notes      []string
	Repaired   []Repaired
}

// Repaired is what a worker says of its memory.
type Repaired struct {
	Worker int
	control.Repaired
}

// Survive trains a job on several workers of this process, some of which are
// ended in the middle.
func Survive(t *testing.T, cfg SurviveConfig, job func() Job) Survived {
	t.Helper()
	s := &survival{t: t, network: comm.NewMem(), job: job, events: make(chan func())}
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
			if !v.gone {
				n++
			}
		}
		return n
	}
	for i := range cfg.Workers {
		ctx, cancel := context.WithCancel(context.Background())
		ours, theirs := net.Pipe()
		v := &victim{id: i, conn: control.New(ours), cancel: cancel}
		s.workers = append(s.workers, v)
		tasks.Go(func() {
			me := self{session: comm.Session{Worker: comm.WorkerID(i)}, transport: s.network}
			w := newWorker(control.New(theirs), me)
			post(func() { v.w = w })
			_ = w.serve(ctx, func() (Job, error) { return job(), nil })
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
					if s.c != nil && cfg.Flip != nil {
						if x, target, after := cfg.Flip(i, m); x >= 0 {
							time.AfterFunc(after, func() { post(func() { s.workers[x].w.recovery.flip(target) }) })
						}
					}
					if s.c != nil && cfg.Moment != nil {
						if x, after := cfg.Moment(i, m); x >= 0 {
							kill := func() {
								if w := s.workers[x]; !w.gone && w.done == nil && live() > 1 {
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
				})
			}
		})
	}
	deadline := time.After(8 * time.Second)
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
	r := Survived{Left: make(map[int]History), Recoveries: s.recoveries, Notes: s.notes, Repaired: s.repaired}
	for _, v := range s.workers {
		if v.done != nil {
			r.Left[v.id] = v.History
		}
	}
	return r
}

func (s *survival) worker(id int) plan.Worker { return plan.Worker{ID: plan.WorkerID(id)} }

func (s *survival) dead(v *victim) {
	if v.gone {
		return
	}
	v.gone = true
	if s.c == nil {
		s.failed = fmt.Errorf("worker %d ended before training", v.id)
		return
	}
	if v.done == nil {
		s.step(elastic.Dead{Worker: s.worker(v.id), Cause: fmt.Sprintf("worker %d killed", v.id), Died: time.Now(), How: elastic.Reaped})
	}
	s.finish()
}

// finish ends the run when all living workers are done.
func (s *survival) finish() {
	for _, v := range s.workers {
		if !v.gone && v.done == nil {
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
		s.step(elastic.Finished{Worker: s.worker(v.id), Step: m.Steps, Result: m.Result})
		s.finish()
	case control.Repaired:
		s.repaired = append(s.repaired, Repaired{v.id, m})
		s.notes = append(s.notes, fmt.Sprintf("worker %d: %+v", v.id, m))
	case control.Failed:
		if m.Kind == control.Corrupt {
			s.notes = append(s.notes, fmt.Sprintf("worker %d: %s", v.id, m.Text))
			return // its end comes
		}
		s.failed = fmt.Errorf("worker %d: %s\n%s", v.id, m.Text, m.Stack)
	case control.Answer:
		r, err := elastic.ParseReport(m.Report)
		if err != nil {
			s.failed = err
			return
		}
		s.step(elastic.Answered{Worker: s.worker(v.id), Ballot: elastic.Ballot{Term: m.Term, Attempt: m.Attempt}, Report: r})
	case control.Level:
		s.step(elastic.Level{Worker: s.worker(v.id), ID: m.ID, Step: m.Step})
	case control.Applied:
		s.step(elastic.Applied{Worker: s.worker(v.id), Ballot: elastic.Ballot{Term: m.Term, Attempt: m.Attempt},
			Version: plan.Version{Generation: m.Generation, N: m.N}, Opened: m.Opened, Edit: time.Duration(m.Edit), Resume: time.Duration(m.Resume)})
	}
}

func (s *survival) begin(cfg SurviveConfig) {
	var v plan.View
	start := cfg.Start
	var peers []elastic.Peer
	for i, w := range s.workers {
		if w.addr == "" {
			return
		}
		v.Workers = append(v.Workers, s.worker(i))
		start.Peers = append(start.Peers, control.Peer{ID: i, Addr: w.addr})
		peers = append(peers, elastic.Peer{Worker: s.worker(i), Addr: w.addr})
	}
	j := s.job().withDefaults()
	prof := s.workers[0].prof
	p, _, err := plan.Next(plan.Plan{}, v, prof, plan.Event{Kind: plan.Start, Micros: j.GlobalBatch / j.MicroBatch, Stages: cfg.Stages, Mirrors: cfg.Mirrors})
	if err == nil {
		start.Plan, err = json.Marshal(p)
	}
	if err != nil {
		s.failed = err
		return
	}
	start.Threads = 1
	s.c = elastic.New(elastic.Config{Plan: p, Peers: peers, Profile: prof, Term: 1, Stages: cfg.Stages, Mirrors: cfg.Mirrors, Detect: 30 * time.Second})
	for _, w := range s.workers {
		if err := w.conn.Send(start); err != nil {
			s.failed = err
		}
	}
}

// step lets the controller decide, and does what it wants.
func (s *survival) step(e elastic.Event) {
	s.notes = append(s.notes, fmt.Sprintf("%T %+v", e, brief(e)))
	for _, f := range s.c.Step(time.Now(), e) {
		switch f := f.(type) {
		case elastic.Ask:
			s.send(f.Worker, control.Query{Term: f.Ballot.Term, Attempt: f.Ballot.Attempt})
		case elastic.Command:
			body, err := f.Order.Encode()
			if err != nil {
				s.failed = err
				return
			}
			s.send(f.Worker, control.Order{Order: body})
		case elastic.Copy:
			body, err := f.Fill.Encode()
			if err != nil {
				s.failed = err
				return
			}
			s.send(f.Worker, control.Fill{Fill: body})
		case elastic.Propose:
			s.step(elastic.Agreed{Version: f.Order.Plan.Version, Proposed: time.Now()})
		case elastic.SetTimer:
			if f.Timer == elastic.WishTimer {
				time.AfterFunc(f.After, func() { s.post(func() { s.step(elastic.Late{Timer: f.Timer}) }) })
			}
		case elastic.Note:
			s.notes = append(s.notes, "  "+f.Reason)
		case elastic.Recovered:
			s.recoveries = append(s.recoveries, f.Recovery)
		case elastic.End:
			if f.Err == nil {
				f.Err = errors.New("ended")
			}
			s.failed = f.Err
		case elastic.Kill:
			s.failed = errors.New(f.Reason)
		}
	}
}

func brief(e elastic.Event) any {
	if a, ok := e.(elastic.Answered); ok {
		works := ""
		for _, w := range a.Report.Works {
			works += fmt.Sprintf("%d/%d:%v,%v,%v ", w.Stage, w.Micro, w.Phase, w.Input, w.Gradient)
		}
		return fmt.Sprintf("worker %d at %v, plan %v, complete %v, %s", a.Worker.ID, a.Report.Passed, a.Report.Plan, len(a.Report.Complete), works)
	}
	return e
}

func (s *survival) send(w plan.Worker, m control.Message) {
	if v := s.workers[w.ID]; !v.gone {
		_ = v.conn.Send(m)
	}
}

package session

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/spans"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// eventKind is the kind of a line of events.jsonl. Scripts depend on the words.
type eventKind string

const (
	eventStart       eventKind = "start"
	eventResume      eventKind = "resume"
	eventChanged     eventKind = "changed"
	eventLead        eventKind = "lead"
	eventPlan        eventKind = "plan"
	eventCheckpoint  eventKind = "checkpoint"
	eventUnsaved     eventKind = "unsaved"
	eventArchived    eventKind = "archived"
	eventUnarchived  eventKind = "unarchived"
	eventChaos       eventKind = "chaos"
	eventLost        eventKind = "lost"
	eventEvict       eventKind = "evict"
	eventLeft        eventKind = "left"
	eventBegin       eventKind = "begin"
	eventRefused     eventKind = "refused"
	eventJoined      eventKind = "joined"
	eventRollback    eventKind = "rollback"
	eventRecovered   eventKind = "recovered"
	eventUnprotected eventKind = "unprotected"
	eventProtected   eventKind = "protected"
	eventRepaired    eventKind = "repaired"
	eventSlow        eventKind = "slow"
	eventBlocked     eventKind = "blocked"
	eventReturned    eventKind = "returned"
	eventNormal      eventKind = "recovered speed"
	eventHold        eventKind = "hold"
	eventFull        eventKind = "full"    // the disk
	eventRoom        eventKind = "room"    // on the disk again
	eventRemoved     eventKind = "removed" // the run directory
	eventClocks      eventKind = "clocks"
	eventStop        eventKind = "stop"
	eventEnd         eventKind = "end"
	eventFailed      eventKind = "failed"
	eventNote        eventKind = "note"
	eventRejected    eventKind = "rejected" // connections
	eventStarved     eventKind = "starved"  // steps wait for data
	eventFed         eventKind = "fed"      // no longer
	eventSkipped     eventKind = "skipped"  // a sample
)

// records account for a run: what metrics.jsonl and summary.json say of it.
type records struct {
	last       rundir.Metrics   // the newest committed step, of whichever worker told first
	most       int              // newest step that was ever committed, also before the run was resumed
	steps      []rundir.Metrics // the newest steps, at most maxRecorded, for the manifests of checkpoints
	val        *float64
	tokens     int64
	ms         float64
	recent     []float64 // milliseconds of the newest steps
	recoveries []rundir.Recovery
	ends       []string // in words, of workers that were lost since the newest recovery

	earlier   int // workers started before those of this session
	lost      int
	joined    int
	rollbacks int

	noted   id.Version // of the newest line of plans.jsonl
	summary *rundir.Summary
}

// stallWindow is how many steps before a recovery say how long its step should have taken.
const stallWindow = 10

// maxRecorded is how many steps may be committed while a checkpoint of the first of them is written, for its manifest to have the loss.
const maxRecorded = 4096

// step accounts for a committed step, and for how long a recovery in it stalled the run.
func (r *records) step(m control.Step, workers int) {
	r.last = rundir.Metrics{
		Step: m.Step, Loss: m.Loss, LR: m.LR, GradNorm: m.GradNorm, Tokens: m.Tokens, MS: m.MS,
		Time: rundir.Time{Time: m.Time}, Workers: workers, Plan: m.Plan, ValLoss: m.ValLoss, Metrics: m.Metrics,
		TrainMetrics: m.TrainMetrics,
	}
	r.most = max(r.most, m.Step)
	if len(r.steps) == maxRecorded {
		r.steps = slices.Delete(r.steps, 0, maxRecorded/2)
	}
	// After a rollback a step is committed again, with the same numbers.
	r.steps = append(r.steps, r.last)
	for i := range r.recoveries {
		if x := &r.recoveries[i]; x.Step == m.Step && x.StallMS == nil && len(r.recent) > 0 {
			stall := max(0, m.MS-r.median())
			x.StallMS = &stall
		}
	}
	r.recent = append(r.recent, m.MS)
	r.recent = r.recent[max(0, len(r.recent)-stallWindow):]
	r.tokens += m.Tokens
	r.ms += m.MS
	if m.ValLoss != nil {
		r.val = m.ValLoss
	}
}

// median returns the median duration of the newest steps in milliseconds; there is one.
func (r *records) median() float64 {
	return slices.Sorted(slices.Values(r.recent))[len(r.recent)/2]
}

// at returns a step, and whether more than its number is known.
func (r *records) at(step int) (m rundir.Metrics, known bool) {
	if i := slices.IndexFunc(r.steps, func(m rundir.Metrics) bool { return m.Step == step }); i >= 0 {
		return r.steps[i], true
	}
	return rundir.Metrics{Step: step}, false
}

// inherit takes over the account of the leader before.
func (r *records) inherit(h *rundir.History) {
	r.recoveries, r.lost, r.rollbacks, r.val, r.joined = h.Recoveries, h.Lost, h.Rollbacks, h.ValLoss, h.Joined
	r.tokens, r.ms, r.most = h.Tokens, h.MS, h.Committed
	if h.Last != nil {
		r.most = max(r.most, h.Last.Step)
	}
	for _, x := range r.recoveries {
		r.most = max(r.most, x.Step-1) // a rollback may have taken the run back since
	}
	if h.Plan != nil {
		r.noted = written(h.Plan)
	}
}

// summarise accounts for the committed steps.
func (s *Session) summarise(stoppedBy string) rundir.Summary {
	r := &s.records
	sum := rundir.Summary{
		Steps: r.last.Step, Loss: r.last.Loss, ValLoss: r.val, DataSHA256: s.job.DataSHA256,
		Seconds:        float64(s.now.Sub(s.began).Milliseconds()) / 1000,
		WorkersStarted: len(s.workers) + r.earlier, WorkersLost: r.lost, WorkersJoined: r.joined, Reduction: s.cfg.Reduction.String(), StoppedBy: stoppedBy,
		Recoveries: append([]rundir.Recovery{}, r.recoveries...), Rollbacks: r.rollbacks,
	}
	for _, w := range s.workers {
		if !w.joins {
			own := w.own
			own.Times = s.paces.times(w.who.ID)
			sum.Workers = append(sum.Workers, own)
		}
	}
	if r.ms > 0 {
		sum.TokensPerSecond = math.Round(float64(r.tokens) / r.ms * 1000)
	}
	return sum
}

// recovered writes down that a recovery is over.
func (s *Session) recovered(r controller.Recovery) {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	account := rundir.Recovery{
		Step: min(r.Step, s.job.Steps), Cause: r.Cause, DiedAt: r.How.String(),
		DetectMS: ms(r.Detect), QueryMS: ms(r.Query), PlanMS: ms(r.Plan), AgreeMS: ms(r.Agree), EditMS: ms(r.Edit), ResumeMS: ms(r.Resume),
		TotalMS: ms(r.Total), UpdateMS: ms(r.Update), RecomputedMicrobatches: r.Again, LinksOpened: r.Opened,
	}
	s.records.recoveries = append(s.records.recoveries, account)
	reason := fmt.Sprintf("%s: %s on after %.1f ms", r.Cause, plan.Count(len(s.plan.Workers), "worker"), account.TotalMS)
	if r.Rollback {
		reason = fmt.Sprintf("%s: %s on from step %d after %.1f ms", r.Cause, plan.Count(len(s.plan.Workers), "worker"), r.From, account.TotalMS)
	}
	e := s.event(eventRecovered, reason)
	e.Event.Recovery = &account
	s.then(e, Show{view.Recovered{Recovery: account, What: strings.Join(s.records.ends, ", ")}})
	s.records.ends = nil
}

// event is an event of the whole run.
func (s *Session) event(kind eventKind, reason string) WriteEvent {
	return WriteEvent{rundir.Event{Time: rundir.Time{Time: s.now}, Kind: string(kind), Worker: -1, Plan: uint64(s.plan.Version.N), Reason: reason}}
}

// notePlan writes the live plan down, unless another leader has.
func (s *Session) notePlan(event, reason string) {
	if s.plan.Version.Compare(s.records.noted) <= 0 {
		return
	}
	text, err := json.Marshal(s.plan)
	if err != nil {
		s.judge(&PlanError{err})
		return
	}
	s.records.noted = s.plan.Version
	s.then(WritePlan{rundir.Plan{Time: rundir.Time{Time: s.now}, Event: event, Reason: reason, Plan: text}})
}

// rejections are the connections that an agent or a worker has rejected.
type rejections struct {
	host   string
	worker int // -1: the agent

	written, newest []int64
	pause           time.Duration // from the newest line to the next
	at              time.Time     // of that line
}

// rejected takes in how many connections were rejected so far, and writes that down where there are new ones: at once, and while others
// come ever more rarely, as strangers must not fill the disk.
func (s *Session) rejected(host string, worker int, counts []int64) {
	if len(counts) == 0 || len(counts) > int(auth.Causes) {
		return
	}
	who := fmt.Sprintf("%s/%d", host, worker)
	r := s.rejections[who]
	if r == nil {
		if len(s.rejections) == maxRejecting {
			return
		}
		r = &rejections{host: host, worker: worker}
		s.rejections[who] = r
	}
	r.newest = counts
	if slices.Equal(r.newest, r.written) || s.now.Sub(r.at) < r.pause || s.phase != training {
		return
	}
	if s.now.Sub(r.at) > 2*timing.Rejections {
		r.pause = 0
	}
	r.pause = min(max(2*r.pause, time.Second), timing.Rejections)
	s.noteRejections(r)
}

// maxRejecting bounds those of which rejections are kept.
const maxRejecting = 4096

func (s *Session) noteRejections(r *rejections) {
	r.written, r.at = slices.Clone(r.newest), s.now
	all := make(map[string]int64)
	var total int64
	var parts []string
	for c, n := range r.newest {
		if n > 0 {
			total += n
			all[auth.Cause(c).String()] = n
			parts = append(parts, fmt.Sprintf("%d %s", n, auth.Cause(c)))
		}
	}
	who := "the agent of " + cmp.Or(r.host, "this host")
	if r.worker >= 0 {
		who = fmt.Sprintf("worker %d", r.worker)
	}
	e := s.event(eventRejected, fmt.Sprintf("%s has rejected %s so far: %s", who, plan.Count(int(total), "connection"), strings.Join(parts, ", ")))
	e.Event.Worker, e.Event.Host, e.Event.Rejected = r.worker, r.host, all
	s.then(e)
}

// lastRejections writes down what waits.
func (s *Session) lastRejections() {
	for _, who := range slices.Sorted(maps.Keys(s.rejections)) {
		if r := s.rejections[who]; !slices.Equal(r.newest, r.written) {
			s.noteRejections(r)
		}
	}
}

// about is an event of one worker.
func (s *Session) about(w id.WorkerID, kind eventKind, reason string) WriteEvent {
	e := s.event(kind, reason)
	e.Event.Worker = int(w)
	return e
}

func (s *Session) note(format string, args ...any) {
	s.then(s.event(eventNote, fmt.Sprintf(format, args...)))
}

// row is a worker's line of the view.
func (w *worker) row(state string) Show {
	return Show{view.Worker{ID: w.id(), Step: w.last.Step, Forwards: w.own.Forwards, Backwards: w.own.Backwards, State: state}}
}

// processes are the processes that can be reached.
func (s *Session) processes() (e WriteWorkers) {
	for _, w := range s.workers {
		if w.state != gone && !w.hasExited() && w.pid > 0 {
			p := rundir.Process{ID: w.id(), Incarnation: w.who.Incarnation, PID: w.pid, Host: w.who.Host, Ring: w.membership()}
			if w.overdue {
				p.Call, p.Since = w.callText(), &rundir.Time{Time: w.called}
			}
			e.Alive = append(e.Alive, p)
		}
	}
	return e
}

// beginTrace begins the trace of the run, where spans and measures are wanted.
func (s *Session) beginTrace() {
	if s.cfg.Telemetry {
		s.tr = spans.New(&s.job, s.began)
		s.then(BeginTrace{s.tr.Run(), s.job.Program})
	}
}

// moment is what the tracer has to know of the run.
func (s *Session) moment() spans.Moment {
	return spans.Moment{Now: s.now, Step: s.records.last.Step, Plan: s.plan.Version, Restart: s.restart.version}
}

// victim is the worker whose failure an event of the controller is, nil for another event.
func (s *Session) victim(cause controller.Event) *spans.Victim {
	if dead, ok := cause.(controller.Dead); ok {
		if w := s.find(dead.Worker); w != nil {
			return &spans.Victim{Worker: w.who, Hit: w.hit, Doing: w.status.Progress}
		}
	}
	return nil
}

// trace hands on what the tracer has made.
func (s *Session) trace(o spans.Out) {
	if len(o.Spans) > 0 {
		s.then(WriteSpans{o.Spans})
	}
	for _, m := range o.Measures {
		s.then(Measure{m})
	}
}

// A disk that is full, or takes no writes for another cause that may pass: what the run must write waits in the shell, the workers commit
// no step meanwhile, and the session asks the shell now and then whether it is written. A run that is to stop does not hold: it has one
// step left to commit.

// disk is what the session knows of the disk of the run directory.
type disk struct {
	full   time.Time // since when what must be written waits; zero: it does not
	noRoom bool      // because there is no room, and not because the disk takes no writes
	due    time.Time // when the next attempt is due
}

// diskFull takes in that what must be written waits.
func (s *Session) diskFull(err error) {
	if s.phase == ending {
		return
	}
	d := &s.disk
	d.due = s.now.Add(timing.Disk)
	if d.full.IsZero() {
		d.full = s.now
		fault, until := (*rundir.WaitError)(nil), "it can be written"
		if d.noRoom = errors.As(err, &fault) && fault.Full(); d.noRoom {
			until = "there is room"
		}
		reason := fmt.Sprintf("training holds until %s: %s", until, OneLine(err.Error()))
		s.then(s.event(eventFull, reason), Show{view.Note(reason)})
	}
	s.hold()
}

// diskRoom takes in that all that must be written is written.
func (s *Session) diskRoom() {
	d := &s.disk
	if d.full.IsZero() {
		return
	}
	is := "the run directory can be written"
	if d.noRoom {
		is = "the disk has room"
	}
	reason := fmt.Sprintf("%s again after %v: training continues", is, s.now.Sub(d.full).Round(time.Second))
	*d = disk{}
	s.then(s.event(eventRoom, reason), Show{view.Note(reason)})
	s.hold()
}

// dirRemoved takes in that the run directory was removed. Training continues, and the next checkpoint is due where there is none any more.
func (s *Session) dirRemoved(e DirRemoved) {
	reason := OneLine(e.Err.Error())
	s.then(s.event(eventRemoved, reason), Show{view.Note(reason)})
	if c := &s.checkpoints; e.Checkpoints && s.phase == training {
		if c.newest = 0; !c.due.IsZero() {
			c.due = s.now
		}
	}
}

// holds reports whether a full disk holds training.
func (s *Session) holds() bool { return !s.disk.full.IsZero() && s.end.stop == "" }

// hold tells the workers whether they may commit steps.
func (s *Session) hold() {
	on := s.holds()
	for _, w := range s.workers {
		if w.state == working && !w.closed() {
			s.send(w, control.Hold{On: on})
		}
	}
}

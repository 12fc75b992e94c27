package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// step has the session take in an event, and carries out what follows.
func (r *run) step(e session.Event) { r.apply(r.s.Step(time.Now(), e)) }

func (r *run) steps(events []session.Event) {
	for _, e := range events {
		r.step(e)
	}
}

// apply carries out effects. The session is told of the places that the roster gives before it hears of anything else: what is
// found out of a host may concern the newest of its workers.
func (r *run) apply(effects []session.Effect) {
	if !r.s.Recovering() {
		r.writeLate()
	}
	r.doAll(effects, r.do)
	for len(r.placed) > 0 {
		e := r.placed[0]
		r.placed = r.placed[1:]
		r.step(e)
	}
}

// doAll carries out effects in their order. A file that cannot be written is one more event for the session.
func (r *run) doAll(effects []session.Effect, do func(session.Effect) error) {
	var waits *rundir.WaitError
	var removed *rundir.RemovedError
	for _, e := range effects {
		if err := do(e); err != nil {
			isWait, isRemoved := errors.As(err, &waits), errors.As(err, &removed)
			if !isWait && !isRemoved {
				r.step(session.FileFailed{Err: err})
				return
			}
		}
	}
	if removed != nil {
		r.step(session.DirRemoved{Err: removed, Checkpoints: removed.Checkpoints})
	}
	if waits != nil {
		r.step(session.DiskFull{Err: waits})
	}
}

// writeLate writes what has waited for the end of a recovery.
func (r *run) writeLate() {
	late := r.late
	r.late = nil
	r.doAll(late, r.write)
}

func (r *run) do(e session.Effect) error {
	switch e := e.(type) {
	case session.Send:
		r.hosts.send(e.Worker, e.Message)
	case session.Kill:
		r.hosts.kill(e.Worker, e.Stacks)
	case session.Fence:
		r.hosts.fence(e.Worker)
	case session.FenceWorker:
		r.placed = append(r.placed, r.hosts.rejoin(e.Worker, e.As))
	case session.StartWorker:
		place, started := r.hosts.place(e.Worker)
		r.placed = append(r.placed, started)
		if started.Err == nil {
			r.hosts.begin(place)
		}
	case session.Propose:
		return r.log.plan(e.Order, e.Reason)
	case session.VerifyCheckpoint:
		if r.c.Apart {
			r.gatherShards(e)
			return nil
		}
		r.others.Go(func() { r.post(verifyFiles(r.talking, r.dir.Path(), e.Of, e.Propose, r.post)) })
	case session.ProposeSkip:
		r.log.skip(e.Question)
	case session.Balance:
		r.others.Go(func() { r.post(session.Balanced{Balanced: e.Make()}) })
	case session.CommitCheckpoint:
		if r.c.Apart {
			r.saveShards(e)
			return nil
		}
		r.others.Go(func() { commitFiles(r.talking, r.dir.Path(), e.Manifest, r.c.Keep, r.post) })
	case session.ArchiveCheckpoint:
		if r.archiving != nil {
			r.archiving.Put(e)
		}
	case session.AnswerAdd:
		r.answer = e
	case session.ObserveStep:
		r.governing.take(e, r.hosts.linkedHosts())
	case session.ReleaseClocks, session.DeviceUsed:
		r.governing.take(e, nil)
	case session.BeginTrace:
		var file func([]byte) error
		if r.dir != nil {
			file = r.dir.AddTrace
		}
		r.Telemetry.Begin(e.Run, e.Program, file)
	case session.WriteSpans:
		r.Telemetry.Spans(e.Spans)
	case session.Measure:
		r.Telemetry.Measure(e.Measure)
	case session.Show:
		if r.View != nil {
			r.View.Show(e.Event)
		}
	case session.CloseView:
		r.closeView()
	case session.Output:
		if r.viewClosed {
			r.print([]byte(e.Text))
		} else if len(r.early)+len(e.Text) <= maxEarlyOutput {
			r.early = append(r.early, e.Text...)
		}
	default:
		if x, ok := e.(session.WriteEvent); ok && r.View != nil {
			r.View.Show(view.Change(x.Event)) // in the order of all that is shown
		}
		if r.s.Recovering() {
			if len(r.late) == 0 {
				r.lateDue.Reset(timing.Records)
			}
			r.late = append(r.late, e)
			return nil
		}
		return r.write(e)
	}
	return nil
}

// write writes to the run directory.
func (r *run) write(e session.Effect) error {
	switch e := e.(type) {
	case session.WriteJob:
		if err := r.log.job(e.Job); err != nil || r.dir == nil {
			return err
		}
		return r.dir.WriteJob(e.Job, e.Data)
	case session.WriteEvent:
		if r.dir != nil {
			return r.dir.AddEvent(e.Event)
		}
	case session.WritePlan:
		if r.dir != nil {
			return r.dir.AddPlan(e.Plan)
		}
	case session.WriteMetrics:
		if r.dir != nil {
			return r.dir.AddMetrics(e.Metrics)
		}
	case session.WriteSkip:
		if r.dir != nil {
			return r.dir.AddSkip(e.Skip)
		}
	case session.WriteDelivery:
		if r.dir != nil {
			return r.dir.AddDelivery(e.Delivery)
		}
	case session.WriteWorkers:
		switch {
		case r.dir == nil:
		case r.c.Apart:
			r.lead.told.tell("alive", control.Alive{Workers: e.Alive})
			return r.c.RunDir.WriteWorkers(r.lead.relay.alive(e.Alive))
		case r.commands != nil:
			return r.dir.WriteWorkers(rundir.Workers{Agent: r.commands.listener.Path(), Workers: e.Alive})
		}
	case session.WriteSummary:
		if r.dir != nil {
			err := r.dir.WriteSummary(e.Summary)
			made, err2 := r.dir.Salvage(e.Elsewhere, e.Summary)
			if made != "" {
				err2 = errors.Join(err2, r.do(session.Output{Text: "summary and records of the run are in " + made + ", since the run directory does not take them\n"}))
			}
			return errors.Join(err, err2)
		}
	case session.RetryFiles:
		if err := r.dir.Flush(); err != nil {
			return err
		}
		r.step(session.DiskRoom{})
	case session.DropCheckpoints:
		if r.c.Apart {
			r.dropShards(e.Step)
			return nil
		}
		r.others.Go(func() {
			if !r.dir.IsAnother() {
				_ = checkpoint.Prune(r.talking, r.dir.Path(), r.c.Keep, e.Step+1) // else the next one
			}
		})
	default:
		panic(fmt.Sprintf("host: effect %T", e))
	}
	return nil
}

// maxEarlyOutput bounds what is kept for the time after the view; a program prints at its
// end, and what it prints between is in its log.
const maxEarlyOutput = 1 << 20

func (r *run) closeView() {
	if r.viewClosed {
		return
	}
	r.viewClosed = true
	if r.View != nil {
		r.View.Close()
	}
	r.print(r.early)
	r.early = nil
}

func (r *run) print(text []byte) {
	if r.Output != nil {
		_, _ = r.Output.Write(text) // a reader that has gone does not end the run
	}
}

// stamped returns the time of a stamp in nanoseconds of CLOCK_MONOTONIC; now, if it cannot be one.
func stamped(at int64) time.Time {
	now := time.Now()
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return now
	}
	if ago := ts.Nano() - at; ago > 0 {
		return now.Add(-time.Duration(ago))
	}
	return now
}

// commitFiles makes a checkpoint whole, and removes those that are not needed any more.
func commitFiles(ctx context.Context, dir string, m checkpoint.Manifest, keep checkpoint.Keep, post func(session.Event) bool) {
	err := rundir.Only(m.Job).Own(dir)
	if err == nil {
		err = checkpoint.Commit(dir, m)
	}
	if !post(session.CheckpointCommitted{Step: m.Step, Err: err}) {
		return
	}
	e := session.CheckpointsPruned{}
	if err == nil {
		e.Err = checkpoint.Prune(ctx, dir, keep, m.Step+1)
	}
	post(e)
}

// verifyFiles finds the newest whole checkpoint before a plan that goes on from one is proposed.
func verifyFiles(ctx context.Context, dir string, of rundir.Eras, p session.Propose, post func(session.Event) bool) session.CheckpointVerified {
	v := session.CheckpointVerified{Propose: p}
	var r *checkpoint.Reader
	var refused []*checkpoint.Error
	err := untilDisk(ctx, func() (err error) {
		r, refused, err = checkpoint.Newest(ctx, dir, of)
		return err
	}, func(err error) {
		post(session.Noted{Text: "waits until the checkpoints can be read: " + session.OneLine(err.Error())})
	})
	for _, fault := range refused {
		if !errors.Is(fault, checkpoint.ErrUnfinished) {
			v.Refused = append(v.Refused, session.OneLine(fault.Error())+"; the checkpoint is not used")
		}
	}
	switch {
	case err == nil:
		v.Step = r.Manifest().Step
		_ = r.Close()
	case !errors.Is(err, checkpoint.ErrNone):
		v.Err = err
	}
	return v
}

// untilDisk repeats what needs the disk until it is done, the error is none that may pass, or ctx ends; waits gets the first one. A directory that
// was moved or covered may come back, too, for some time. One that was removed does not: what was in it is open in its leader.
func untilDisk(ctx context.Context, do func() error, waits func(error)) error {
	err, said := do(), false
	away := func() bool { return rundir.IsMissing(err) || errors.Is(err, rundir.ErrNoRun) }
	for begun := time.Now(); platform.MayPass(err) || away() && time.Since(begun) < timing.DirReturns; err = do() {
		if !said {
			waits(err)
			said = true
		}
		select {
		case <-time.After(timing.Disk):
		case <-ctx.Done():
			return err
		}
	}
	return err
}

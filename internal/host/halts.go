package host

import (
	"context"
	"time"

	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
)

// What a host finds out about the processes of its workers: how they exit, and whether they are stopped, frozen or busy.

func (r *relay) awaitExit(ctx context.Context, l *local, w spawn.Worker) {
	if !spawn.AwaitExit(ctx, w, r.c.times(), func(since time.Time) { r.halted(l, since) }) {
		return
	}
	defer spawn.AwaitReaped(w) // and without the lock
	s := w.Status()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exited(l.newest(), control.Exited{Code: s.Code, Text: s.Text, Panicked: s.Panicked, Fault: s.Fault, Progress: s.Progress, Last: w.LastOutput()})
}

// halted takes in since when the process of a worker is stopped by a signal, zero when it was continued.
func (r *relay) halted(l *local, since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l = l.newest()
	l.halted, l.frozen = since, false
	r.tell(haltedOf(l))
}

func haltedOf(l *local) control.Halted {
	m := control.Halted{Worker: int(l.who.Worker), Incarnation: l.who.Incarnation, Stopped: !l.halted.IsZero(), Frozen: l.frozen}
	if m.Stopped {
		m.For = int64(time.Since(l.halted))
	}
	return m
}

// pulse is what a relay knows of whether the process of a worker runs.
type pulse struct {
	pid   int         // as it says; 0 before its Hello
	heard time.Time   // when it said anything last
	vigil spawn.Vigil // of feel alone
}

// feel looks at the processes of workers that are silent, and tells the leader what their threads say: that one is frozen, or that it
// runs or waits for a processor.
func (r *relay) feel(ctx context.Context) {
	tick := time.NewTicker(timing.Heartbeat / 2)
	defer tick.Stop()
	late, due := r.c.times().Late, time.Now()
	for {
		due = due.Add(timing.Heartbeat / 2)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		stopped := late > 0 && now.Sub(due) > late // this process was, too
		due = now
		for _, l := range r.silent(now) {
			if threads, ok := l.worker.Threads(l.pid); ok {
				r.felt(l.local, l.vigil.Look(time.Now(), threads, stopped))
			}
		}
	}
}

// silent is a process of which no heartbeat has come for longer than the next one may take.
type silent struct {
	*local
	worker spawn.Worker
	pid    int
	vigil  *spawn.Vigil // of feel alone
}

// silent returns the silent processes, but for those of which the system tells that a signal has stopped them.
func (r *relay) silent(now time.Time) (all []silent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.locals {
		p := l.pulse
		switch {
		case l.worker == nil: // its session is over, or its process is not there yet
		case p.pid == 0 || l.closed || l.exit != nil, !l.halted.IsZero() && !l.frozen, l.halted.IsZero() && now.Sub(p.heard) < 3*timing.Heartbeat/2:
			p.vigil.Forget()
		default:
			all = append(all, silent{l, l.worker, p.pid, &p.vigil})
		}
	}
	return all
}

// felt tells the leader what a look at the threads of a silent process says.
func (r *relay) felt(l *local, v spawn.Verdict) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l = l.newest()
	switch {
	case v == spawn.Frozen && l.halted.IsZero():
		l.halted, l.frozen = l.pulse.vigil.Still(), true
		r.tell(haltedOf(l))
	case v == spawn.Runs && l.frozen:
		l.halted, l.frozen = time.Time{}, false
		r.tell(haltedOf(l))
	}
	if v == spawn.Runs {
		r.tell(control.Runs{Worker: int(l.who.Worker), Incarnation: l.who.Incarnation})
	}
}

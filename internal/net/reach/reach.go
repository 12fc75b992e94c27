// Package reach finds out whether the machine of a silent host can be reached. The answers come from its operating system, which answers
// however busy or frozen the processes there are; so a machine that answers none of several hosts is off or cut off.
package reach

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/timing"
)

// Finding is what a host finds.
type Finding uint8

const (
	Unsure  Finding = iota // the observer learned nothing
	Answers                // the machine answers
	Refuses                // it answers that no process listens: the host's agent has exited
	Silent                 // it does not answer
)

// Gone reports whether it is to count as failed: its agent has exited, or its machine is off or cut off.
func (f Finding) Gone() bool { return f == Refuses || f == Silent }

// Judge returns what follows from the findings of a host and of others, so far. A machine is Silent where this host and so many others find
// it so, and none reaches it; so a host that is cut off itself is Unsure of the others.
func Judge(own Finding, others []Finding, need int) Finding {
	silent := 0
	for _, f := range others {
		if f == Silent {
			silent++
		}
	}
	switch {
	case own == Answers || own == Refuses:
		return own
	case slices.Contains(others, Refuses):
		return Refuses
	case own == Silent && silent >= max(need, 1) && !slices.Contains(others, Answers):
		return Silent
	}
	return Unsure
}

// Pace says when a silent machine is worth a probe: not while one is under way, nor soon after one that found it answering. A process that is
// starved answers the connections of probes late, all at once, and has them before those of hosts that have something to say.
// The zero value is ready.
type Pace struct {
	under bool // way
	began time.Time
	heard time.Time // before
}

// Begin reports whether a probe is to begin, as it then has. heard is when the host was heard last, and every how long after the start of a
// probe the next one may begin, if the host has not been heard meanwhile.
func (p *Pace) Begin(now, heard time.Time, every time.Duration) bool {
	if p.under || heard.Equal(p.heard) && now.Sub(p.began) < every {
		return false
	}
	*p = Pace{true, now, heard}
	return true
}

// End takes in that the probe has ended.
func (p *Pace) End() { p.under = false }

// Inquire probes a machine and, if that takes longer than a moment, asks other hosts to do so, until it is clear what follows.
func Inquire(ctx context.Context, moment time.Duration, need int, probe func(context.Context) Finding, others []func(context.Context) Finding) Finding {
	ctx, end := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer end()
	own, theirs := make(chan Finding, 1), make(chan Finding, len(others))
	tasks.Go(func() { own <- probe(ctx) })
	ask := time.NewTimer(moment)
	defer ask.Stop()
	var mine Finding
	var found []Finding
	for waits := true; waits || len(found) < len(others); {
		select {
		case mine = <-own:
			waits = false
			if mine == Unsure {
				return Unsure
			}
		case f := <-theirs:
			found = append(found, f)
		case <-ask.C:
			for _, other := range others {
				tasks.Go(func() { theirs <- other(ctx) })
			}
			continue
		}
		if f := Judge(mine, found, need); f != Unsure {
			return f
		}
	}
	return Unsure
}

const (
	attempts = 5  // connections that a probe tries: packets may be lost
	settles  = 20 // times that an observer without processors waits for answers
)

// Probe dials a machine several times within a window. When that is over, answers may be there already that this process had no processor to
// take in; so it concludes only after it had one.
func Probe(ctx context.Context, window time.Duration, dial func(context.Context) (net.Conn, error)) Finding {
	ctx, end := context.WithCancel(ctx)
	var dials sync.WaitGroup
	defer dials.Wait()
	defer end()
	found := make(chan Finding, attempts)
	attempt := func() {
		dials.Go(func() {
			conn, err := dial(ctx)
			if err == nil {
				_ = conn.Close()
			}
			found <- of(err)
		})
	}
	next := time.NewTicker(window / attempts)
	defer next.Stop()
	attempt()
	over := time.NewTimer(window)
	defer over.Stop()
	due := time.Now().Add(window)
	settled := 0
	for tried, unsure := 1, false; ; {
		select {
		case f := <-found:
			if f == Answers || f == Refuses {
				return f
			}
			unsure = unsure || f == Unsure
		case <-next.C:
			if tried < attempts {
				tried++
				attempt()
			}
		case <-over.C:
			late := time.Since(due) > timing.Settle
			switch {
			case settled > 0 && !late && !unsure:
				return Silent
			case settled == settles || unsure:
				return Unsure
			}
			settled++
			due = time.Now().Add(timing.Settle)
			over.Reset(timing.Settle)
		case <-ctx.Done():
			return Unsure
		}
	}
}

// of returns what the end of an attempt to connect says.
func of(err error) Finding {
	var timeout net.Error
	switch {
	case err == nil:
		return Answers
	case errors.Is(err, unix.ECONNREFUSED):
		return Refuses
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return Silent
	}
	return Unsure // such as without free files
}

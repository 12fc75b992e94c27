package timing

import (
	"math"
	"time"
)

// Detector decides from the history of a peer whether it has failed. Every observer of missed heartbeats uses one: an agent
// for its workers, the leader for hosts, a host for the leader, and a worker for its agent.
//
// It is an accrual detector (Hayashibara et al., "The φ accrual failure detector", 2004): the suspicion φ of a silent peer
// grows with its silence, measured by the mean and the deviation of the intervals at which it was heard before. The peer
// counts as failed at φ = Phi. The intervals are taken as exponentially distributed beyond their mean, not as normally
// distributed, because the pauses of a busy machine have a long tail. A detector also gets the intervals of what else
// runs there, so that one worker is not blamed for a machine on which all are late.
type Detector struct {
	// Least is how long a peer may be silent, however regularly it was heard. Most bounds the silence of an irregular one.
	Least, Most time.Duration
	// Every is the time between two heartbeats of the peer.
	Every time.Duration
	// Pause is a silence that is allowed beyond the intervals so far.
	Pause time.Duration
	// Deviation is the least deviation that intervals are taken to have.
	Deviation time.Duration
	// Late is how late a look may come; see [Policy].Late. 0 means that no look is too late: an observer that must
	// stop when it was stopped itself forgives nothing.
	Late time.Duration

	// Phi is the suspicion at which the peer counts as failed.
	Phi float64

	crowd time.Duration // is allowed beyond Pause; see In
}

const (
	// Phi is the suspicion at which a peer counts as failed: a live peer is so late after one of 10^Phi heartbeats.
	Phi = 8
	// SuspectPhi is the suspicion at which a host is suspected, which costs a probe of its machine.
	SuspectPhi = 3
	// memory is the number of intervals over which [Intervals] average.
	memory = 32
	// ebb is how much of a [Crowd] is left after a look that finds fewer threads.
	ebb = 0.9
)

// Intervals are the mean and the deviation of the newest intervals at which something was heard, relative to the time between two of
// its heartbeats. The zero value has heard them exactly in time.
type Intervals struct{ late, square float64 } // means of the seconds beyond that time, and of their squares

// Add takes in an interval that is so much longer than the time between two heartbeats, or shorter.
func (i *Intervals) Add(d time.Duration) {
	late := d.Seconds()
	i.late += (late - i.late) / memory
	i.square += (late*late - i.square) / memory
}

// Pool returns the intervals of several peers together, each peer with the same weight.
func Pool(all []Intervals) (pool Intervals) {
	for _, i := range all {
		pool.late += i.late / float64(len(all))
		pool.square += i.square / float64(len(all))
	}
	return pool
}

// limit returns the silence beyond the time between two heartbeats at which the suspicion reaches phi.
func (i Intervals) limit(deviation time.Duration, phi float64) time.Duration {
	sigma := max(math.Sqrt(max(i.square-i.late*i.late, 0)), deviation.Seconds())
	seconds := i.late + (phi*math.Ln10-1)*sigma
	return time.Duration(min(seconds, 1e9) * float64(time.Second))
}

// Crowd is how many threads wait for each processor of a machine. The intervals of heartbeats tell of it only after some have been
// late, and the first may be late by more than Detect.
type Crowd float64

// Next returns the crowd after a look that finds so many threads which have a processor or wait for one. It grows at
// once and shrinks little by little, because a look may come at a quiet moment.
func (c Crowd) Next(threads, processors int) Crowd {
	return max(Crowd(threads)/Crowd(max(processors, 1))-1, ebb*c, 0)
}

// In returns the detector of peers on a machine that is so crowded.
func (d Detector) In(c Crowd) Detector {
	d.crowd = c.turns(d.Most)
	return d
}

// turns returns for how long a process waits for its turns in a crowd, up to a limit.
func (c Crowd) turns(most time.Duration) time.Duration {
	if !(c > 0) {
		return 0
	}
	return time.Duration(min(float64(c)*float64(Turn), float64(most)))
}

// History is what an observer knows about a peer.
type History struct {
	Heard     time.Time // last; zero means not yet, and such a peer is not silent
	Intervals Intervals
	excused   time.Duration // time since Heard that does not count
}

// Hear takes in that a peer was heard that sends a heartbeat every so often. What comes within half of that time after the message
// before says nothing about lateness.
func (h *History) Hear(now time.Time, every time.Duration) {
	if silence := h.Silence(now); !h.Heard.IsZero() && silence >= every/2 {
		h.Intervals.Add(silence - every)
	}
	h.Restart(now)
}

// Restart takes the peer as heard just now, which says nothing about lateness.
func (h *History) Restart(now time.Time) { h.Heard, h.excused = now, 0 }

// Excuse leaves a time out of the peer's silence.
func (h *History) Excuse(d time.Duration) { h.excused += d }

// Silence returns for how long the peer has been silent.
func (h *History) Silence(now time.Time) time.Duration {
	return max(now.Sub(h.Heard)-h.excused, 0)
}

// Limit returns how long a peer may be silent, given the intervals of itself and of what else runs where it does. A crowd makes it
// longer beyond Pause, so a machine without spare processors but without a crowd leaves it at Least.
func (d Detector) Limit(intervals ...Intervals) time.Duration {
	limit := d.Least
	for _, i := range intervals {
		limit = max(limit, d.Every+d.Pause+d.crowd+i.limit(d.Deviation, d.Phi))
	}
	return min(limit, d.Most)
}

// Stopped reports whether a look that comes late by so much proves that the observer was stopped.
func (d Detector) Stopped(lateness time.Duration) bool { return d.Late > 0 && lateness > d.Late }

// Suspect reports whether the peer counts as failed, and returns its history after this look: an
// observer that was stopped itself heard nothing, and takes every peer as heard just now. around are the intervals of what
// else runs where the peer does, the looks of the observer among them.
func (d Detector) Suspect(h History, now time.Time, lateness time.Duration, around ...Intervals) (failed bool, next History) {
	switch {
	case h.Heard.IsZero():
	case d.Stopped(lateness):
		h.Restart(now)
	default:
		return h.Silence(now) > max(d.Limit(h.Intervals), d.Limit(around...)), h
	}
	return false, h
}

// Looks are the looks of an observer for silent peers. An observer that is late itself hears its peers late.
type Looks struct {
	Intervals Intervals
	last      time.Time
}

// Look takes in a look that comes late by so much, and excuses the time since the last look for all peers where none of several was heard
// for longer than the detector's Pause: their machine is stopped, or all of them are, and none is to blame. If that lasts, they get their whole
// time again, since some continue later than others. After [Hold] they are to blame all the same. It reports whether it excused them.
func (l *Looks) Look(d Detector, now time.Time, lateness time.Duration, peers []*History) (excused bool) {
	if !d.Stopped(lateness) { // else all silence is forgiven already
		l.Intervals.Add(max(lateness, 0))
	}
	elapsed := now.Sub(l.last)
	first := l.last.IsZero()
	l.last = now
	if first || len(peers) < 2 || d.Pause == 0 {
		return false
	}
	silent := Hold
	for _, h := range peers {
		silent = min(silent, now.Sub(h.Heard))
	}
	if silent <= d.Pause || silent >= Hold {
		return false
	}
	for _, h := range peers {
		if silent > d.Least {
			elapsed = h.Silence(now)
		}
		h.Excuse(elapsed)
	}
	return true
}

// accrual returns the detector of a peer with heartbeats.
func (p Policy) accrual() Detector {
	return Detector{Least: p.Detect, Most: p.Longest, Every: Heartbeat, Pause: p.Pause, Deviation: p.Deviation, Late: p.Late, Phi: Phi}
}

// regular returns the detector of a peer whose intervals say nothing.
func regular(silence, late time.Duration) Detector {
	return Detector{Least: silence, Most: silence, Late: late}
}

// Worker returns the detector of an agent for its workers.
func (p Policy) Worker(training bool) Detector {
	d := p.accrual()
	if !training {
		d.Least = d.Most
	}
	return d
}

// Follower returns the detector of the leader for a host with a connection.
func (p Policy) Follower() Detector {
	d := Of(p.Host).accrual()
	d.Every = HostHeartbeat
	return d
}

// Suspicion returns the detector of a host for another one, the leader among them, that is to be probed. A suspicion decides nothing, so
// it comes early, and no crowd delays it.
func (p Policy) Suspicion() Detector {
	if p.Detect == 0 {
		return regular(p.Host, p.LinkLate)
	}
	return Detector{Least: MinSuspect, Most: max(p.Suspect, MinSuspect), Every: HostHeartbeat, Deviation: p.Host / 100, Late: p.LinkLate, Phi: SuspectPhi}
}

// Unlinked returns the detector of the leader for a host without a connection. Before the first step a host may take
// as long as a worker process.
func (p Policy) Unlinked(fresh bool, hello time.Duration) Detector {
	if fresh {
		return regular(hello, p.LinkLate)
	}
	return regular(p.HostLink, p.LinkLate)
}

// Leader returns the detector of a host for the leader.
func (p Policy) Leader() Detector { return p.Follower() }

// Agent returns the detector of a worker for its agent. It forgives nothing: a worker that was frozen must not commit.
func (p Policy) Agent() Detector { return regular(p.Fence, 0) }

package timing

import "time"

// Detector decides from the history of a peer whether it has failed. Every observer of silence uses one: an agent
// for its workers, the leader for hosts, a host for the leader, and a worker for its agent.
type Detector struct {
	// Silence is how long a peer may be silent.
	Silence time.Duration
	// Late is how late a look may come; see [Policy].Late. 0 means that no look is too late: an observer that must
	// stop when it was stopped itself forgives nothing.
	Late time.Duration
	// Doubt and Suspected shorten Silence to Suspected once others have suspected the peer for longer than Doubt, all
	// of it since the peer was heard. 0 for Suspected ignores suspicions.
	Doubt, Suspected time.Duration
}

// History is what an observer knows about a peer.
type History struct {
	Heard     time.Time // last; zero means not yet, and such a peer is not silent
	Suspected time.Time // since when others suspect it; zero means that they do not
}

// Limit returns how long the peer may be silent at a time.
func (d Detector) Limit(h History, now time.Time) time.Duration {
	if d.Suspected > 0 && !h.Suspected.IsZero() && h.Suspected.After(h.Heard) && now.Sub(h.Suspected) > d.Doubt {
		return min(d.Silence, d.Suspected)
	}
	return d.Silence
}

// Stopped reports whether a look that comes late by so much proves that the observer was stopped.
func (d Detector) Stopped(lateness time.Duration) bool { return d.Late > 0 && lateness > d.Late }

// Suspect reports whether the peer counts as failed, and returns its history after this look: an
// observer that was stopped itself heard nobody, and takes everybody as heard just now.
func (d Detector) Suspect(h History, now time.Time, lateness time.Duration) (failed bool, next History) {
	switch {
	case h.Heard.IsZero():
		return false, h
	case d.Stopped(lateness):
		return false, History{Heard: now}
	}
	return now.Sub(h.Heard) > d.Limit(h, now), h
}

// Worker returns the detector of an agent for its workers.
func (p Policy) Worker(training bool) Detector {
	if !training {
		return Detector{Silence: p.StartSilence, Late: p.Late}
	}
	return Detector{Silence: p.Silence, Late: p.Late, Doubt: p.Doubt, Suspected: p.SuspectSilence}
}

// Follower returns the detector of the leader for a host with a connection.
func (p Policy) Follower() Detector { return Detector{Silence: p.Host * 3 / 4, Late: p.Host / 4} }

// Unlinked returns the detector of the leader for a host without a connection. Before the first step a host may take
// as long as a worker process.
func (p Policy) Unlinked(fresh bool, hello time.Duration) Detector {
	if fresh {
		return Detector{Silence: hello, Late: p.Host / 4}
	}
	return Detector{Silence: p.HostLink, Late: p.Host / 4}
}

// Leader returns the detector of a host for the leader.
func (p Policy) Leader() Detector { return Detector{Silence: p.Host * 3 / 4, Late: p.LinkLate} }

// Agent returns the detector of a worker for its agent. It forgives nothing: a worker that was frozen must not commit.
func (p Policy) Agent() Detector { return Detector{Silence: p.Fence} }

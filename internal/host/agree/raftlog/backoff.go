package raftlog

import "time"

// backoff decides how long a candidate waits for votes. Where every machine is so busy that votes take longer than the usual time to
// come, elections would fail without end, and each makes more work. So the time doubles while there is no leader, up to maxBackoff
// times the usual one, as Ethernet's stations back off (Metcalfe and Boggs 1976), and is the usual one again when a leader has
// stayed.
type backoff struct {
	usual  time.Duration
	factor int
	led    bool // there is a leader
}

const (
	maxBackoff = 16
	rounds     = 3  // of the candidate's time, without a leader, until it is doubled
	calm       = 30 // of the usual time, with a leader, until it is the usual one again
)

func newBackoff(usual time.Duration) backoff { return backoff{usual: usual, factor: 1} }

// heard takes in whether there is a leader. It reports whether that is news, so that wait counts from now on.
func (p *backoff) heard(led bool) bool {
	news := led != p.led
	p.led = led
	return news
}

// wait is how long things have to stay as they are until next is due.
func (p *backoff) wait() time.Duration {
	if p.led {
		return calm * p.usual
	}
	return time.Duration(rounds*p.factor) * p.usual
}

// next returns the time for a candidate from now on.
func (p *backoff) next() time.Duration {
	if p.led {
		p.factor = 1
	} else {
		p.factor = min(2*p.factor, maxBackoff)
	}
	return time.Duration(p.factor) * p.usual
}

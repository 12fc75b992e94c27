package spawn

import (
	"time"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// Verdict is what the threads of a process say of why it is silent.
type Verdict int

const (
	Unknown Verdict = iota
	Runs            // a thread of it runs, has run, or waits for a processor
	Frozen          // nothing stopped it by a signal, and none of its threads has run for [timing.Still] although a heartbeat is due
)

// Vigil judges a process that is silent from looks at its threads. The zero value has not looked yet.
type Vigil struct {
	threads map[int]platform.Thread // as of the last look
	still   time.Time               // since when none of them runs
}

// Look takes in what the threads do now; late says that this look comes late, so that the whole machine may have been stopped.
//
// A process of which no thread runs is not yet frozen: all of them may wait. But the one that sends heartbeats wakes at each, so in a
// process that is silent for longer something runs, or is runnable.
func (v *Vigil) Look(now time.Time, threads map[int]platform.Thread, late bool) Verdict {
	before := v.threads
	v.threads = threads
	runs, unclear := len(before) != len(threads), before == nil || late
	for id, t := range threads {
		was, known := before[id]
		runs = runs || !known || t.Ran != was.Ran || t.State == platform.ThreadRunnable
		switch t.State {
		case platform.ThreadBlocked, platform.ThreadStopped:
			unclear = true
		}
	}
	if runs || unclear {
		v.still = now
	}
	switch {
	case before == nil:
		return Unknown
	case runs:
		return Runs
	case now.Sub(v.still) >= timing.Still:
		return Frozen
	}
	return Unknown
}

// Still returns since when no thread of the process runs.
func (v *Vigil) Still() time.Time { return v.still }

// Forget has the next look be the first one.
func (v *Vigil) Forget() { *v = Vigil{} }

package process

import (
	"testing"
	"testing/synctest"
	"time"
)

// A part is written slowly, is whole before the next checkpoint, and takes no longer than it must where the run waits for it.
func TestPace(t *testing.T) {
	const pieces, piece, work = 100, 1e6, 10 * time.Millisecond
	for _, c := range []struct {
		name               string
		since, hurry, want time.Duration
	}{
		{"has time", time.Hour, time.Hour, pieces * piece * time.Second / slowBytes},
		{"is to be ready", 8 * time.Second, time.Hour, 6 * time.Second},
		{"has no time", 0, time.Hour, pieces * work},
		{"is waited for", time.Hour, 5 * time.Second, 5*time.Second + pieces*work/2},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := newPace(time.Now(), c.since, pieces*piece)
			defer time.AfterFunc(c.hurry, p.hurry).Stop()
			rest := p.start(t.Context())
			for i := range int64(pieces) {
				time.Sleep(work)
				rest((i + 1) * piece)
			}
			if got := time.Since(p.began); got < c.want-work || got > c.want+work {
				t.Errorf("one that %s takes %v, want %v", c.name, got, c.want)
			}
		})
	}
}

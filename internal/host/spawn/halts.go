package spawn

import (
	"context"
	"time"

	"github.com/soliton-train/soliton/internal/timing"
)

// AwaitExit returns when the process of a worker has exited, false when ctx ends before. Meanwhile it calls halted with since when a
// signal has stopped the process: at once, again when it is still stopped after [timing.Halt], and with zero when it is continued.
func AwaitExit(ctx context.Context, w Worker, times timing.Policy, halted func(since time.Time)) bool {
	look := time.NewTimer(0)
	defer look.Stop()
	look.Stop()
	var since, due time.Time
	lookIn := func(d time.Duration) {
		due = time.Now().Add(d)
		look.Reset(d)
	}
	for {
		select {
		case stopped := <-w.Halted():
			look.Stop()
			if since = (time.Time{}); stopped {
				since = time.Now()
				lookIn(timing.Halt)
			}
			halted(since)
		case <-look.C:
			switch {
			case times.Late > 0 && time.Since(due) > times.Late: // this process was stopped, too
				lookIn(times.Detect)
			case w.Stopped(): // else that comes next
				halted(since)
			}
		case <-w.Exited():
			return true
		case <-ctx.Done():
			return false
		}
	}
}

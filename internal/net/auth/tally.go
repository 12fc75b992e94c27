package auth

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
)

// Cause says why a connection was rejected.
type Cause int

// The causes.
const (
	NoSecret  Cause = iota // the caller did not prove the secret of the run: it has another one or none, or replays what others said
	Silent                 // it proved nothing in time
	Crowded                // newer callers took its place before it proved anything
	Outdated               // it has the secret, but another process has taken its place in the run
	Malformed              // it has the secret, but what it sent is no message, or none of those that it may send
	Causes                 // their number
)

// String returns the cause as events.jsonl has it.
func (c Cause) String() string {
	return [Causes]string{"no secret", "silent", "crowded out", "outdated", "malformed"}[c]
}

// Tally counts rejected connections by their cause. The zero value is ready for use, and a nil one counts nothing.
type Tally struct{ counts [Causes]atomic.Int64 }

// Add counts n more.
func (t *Tally) Add(c Cause, n int64) {
	if t != nil {
		t.counts[c].Add(n)
	}
}

// AddError counts the connection of a caller that failed to prove the secret, unless it left by itself or this side closed it.
func (t *Tally) AddError(err error) {
	switch {
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, net.ErrClosed), errors.Is(err, context.Canceled):
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		t.Add(Silent, 1)
	default:
		t.Add(NoSecret, 1)
	}
}

// Counts returns how many there were of each cause, nil if there were none.
func (t *Tally) Counts() []int64 {
	if t == nil {
		return nil
	}
	counts, none := make([]int64, Causes), true
	for c := range counts {
		counts[c] = t.counts[c].Load()
		none = none && counts[c] == 0
	}
	if none {
		return nil
	}
	return counts
}

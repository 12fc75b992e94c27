package agree

import (
	"context"
	"errors"
	"fmt"
)

// Log is the agreement as one host sees it. Its implementations are [Local] for a run on one host, and
// raftlog.Node for one of several.
type Log interface {
	// Propose commits an entry and returns when this host has applied it. Errors are [NotLeaderError],
	// [RefusedError], [ErrUncertain] and [ErrClosed], or of the disk.
	Propose(ctx context.Context, e Entry) (index uint64, err error)

	// State returns what this host knows to be agreed.
	State() State

	// Leadership returns what Changes sent last. Changes returns a channel with the newest leadership; a slow reader
	// misses those between. Close closes it.
	Leadership() Leadership
	Changes() <-chan Leadership

	// Term returns the newest term that this host knows.
	Term() uint64

	// Stand makes this host a candidate now, if it votes. It is for a host that knows that the leader is gone.
	Stand()

	// Miss has this host stand for an election if a majority does not hear the leader either. It is for a host that has not heard the
	// leader for the failure-detection timeout, which is shorter than the log waits by itself.
	Miss()

	// Broken returns a channel that is closed when the disk has refused an entry that counted as committed, which
	// Sync then explains; nil where an entry is on the disk before it is committed.
	Broken() <-chan struct{}
	Sync() error

	// Close writes what is committed and ends the log.
	Close() error
}

// Leadership says which node leads.
type Leadership struct {
	// Term is the newest that this node knows. Only one node is ever Ready in a
	// term.
	Term uint64
	// Leader is "" while this node hears of no leader with a majority. What it
	// knows may then be old.
	Leader string
	// Ready means that this node leads, and that its state has all that was
	// committed in the terms before.
	Ready bool
}

// RefusedError says that an entry was refused, and so changed nothing.
type RefusedError struct {
	Entry string // which
	Class error  // [ErrStale] or [ErrInvalid]
	Why   string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("agree: %s refused: %v: %s", e.Entry, e.Class, e.Why)
}

// Unwrap returns the class.
func (e *RefusedError) Unwrap() error { return e.Class }

// NotLeaderError says that an entry was not proposed, because another node leads
// or none.
type NotLeaderError struct{ Leader Server } // zero if not known

func (e *NotLeaderError) Error() string {
	if e.Leader.ID == "" {
		return "agree: this node does not lead, and knows no leader"
	}
	return fmt.Sprintf("agree: this node does not lead, but %v", e.Leader)
}

// NoLogError says that a directory holds no log to continue. Its server may have voted, and would not know: a node
// that is to return without its log joins as a new server.
type NoLogError struct{ Dir string }

func (e *NoLogError) Error() string {
	return fmt.Sprintf("agree: %s holds no log: the host joins the run again with an empty directory", e.Dir)
}

// DamagedError says that the file of a log cannot be read. It is then as good as lost, see [NoLogError].
type DamagedError struct {
	File string
	Err  error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("agree: %s is damaged: %v: the host joins the run again when the directory is removed", e.File, e.Err)
}

// Unwrap returns what is wrong with the file.
func (e *DamagedError) Unwrap() error { return e.Err }

// Errors to be matched with errors.Is.
var (
	// ErrStale is the class of entries that come too late: what is agreed is
	// as new or newer.
	ErrStale = errors.New("stale")
	// ErrInvalid is the class of entries that could never be accepted.
	ErrInvalid = errors.New("invalid")
	// ErrUncertain means that the entry may or may not be committed: leadership was lost,
	// or the caller's context ended, meanwhile.
	ErrUncertain = errors.New("agree: the entry may be committed or not")
	// ErrClosed means that the log is closed. A pending entry may be
	// committed or not.
	ErrClosed = errors.New("agree: log is closed")
	// ErrInUse means that another process has the directory open.
	ErrInUse = errors.New("agree: directory is in use by another process")
)

func refused(e Entry, class error, format string, args ...any) error {
	return &RefusedError{Entry: e.String(), Class: class, Why: fmt.Sprintf(format, args...)}
}

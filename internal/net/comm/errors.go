package comm

import (
	"errors"
	"fmt"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// Classes of errors, matched with [errors.Is]. What reaches a caller is an
// [*Error] or a [*GroupError] around one of them.
var (
	// ErrClosed: the endpoint or group was closed.
	ErrClosed = errors.New("closed")
	// ErrVersion: the operation names another version than the group's
	// present one, or the group was edited under it. Take the present version
	// and, if the plan still wants it, begin again.
	ErrVersion = errors.New("not the group's version")
	// ErrLink: the link to the peer was lost; what was not complete may or may
	// not have arrived. It is evidence about a link, not about the peer.
	ErrLink = errors.New("link lost")
	// ErrNotMember: the session is not admitted, or was evicted.
	ErrNotMember = errors.New("not a member")
	// ErrStale: the key's step has been left behind.
	ErrStale = errors.New("step is over")
	// ErrDuplicate: the key is being received, or has been.
	ErrDuplicate = errors.New("key is taken")
	// ErrSize: a message does not fit the buffer that waits for it.
	ErrSize = errors.New("wrong size")
	// ErrAborted: another member gave the operation up.
	ErrAborted = errors.New("aborted by another member")
	// ErrRefused: the peer refused the link.
	ErrRefused = errors.New("link refused")
	// ErrProtocol: the peer sent bytes that are no protocol of ours.
	ErrProtocol = errors.New("protocol violated")
	// ErrUsage: the call itself is wrong.
	ErrUsage = transport.ErrUsage
)

// Error is the failure of one message, link or call on an endpoint.
type Error struct {
	Op     string     // what failed: "send", "receive", "dial", ...
	Peer   id.Session // the other side; zero if there is none
	Key    Key        // the message; zero if it was none
	Remote bool       // the fault is the other side's or the network's
	Err    error      // one of the classes, or an error around it
}

func (e *Error) Error() string {
	s := "comm: " + e.Op
	if e.Key != (Key{}) {
		s += " " + e.Key.String()
	}
	if e.Peer != (id.Session{}) {
		s += fmt.Sprintf(" with worker %v", e.Peer)
	}
	return s + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// protocolError is what a reader makes of bytes that are no frame.
func protocolError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

package auth

import (
	"net"
	"slices"
	"sync"
)

// Lobby holds the connections whose callers have not proved anything yet. A new one beyond the limit closes the oldest: callers
// that stay silent do not keep out those that prove themselves at once.
type Lobby struct {
	limit int

	mu      sync.Mutex
	waiting []net.Conn // oldest first
	closed  bool
}

// NewLobby returns a lobby for at most limit connections.
func NewLobby(limit int) *Lobby { return &Lobby{limit: limit} }

// Enter takes a connection in. It reports false, and closes the connection, after [Lobby.Close].
func (l *Lobby) Enter(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = c.Close()
		return false
	}
	if len(l.waiting) == l.limit {
		_ = l.waiting[0].Close()
		l.waiting = slices.Delete(l.waiting, 0, 1)
	}
	l.waiting = append(l.waiting, c)
	return true
}

// Leave lets a connection out. It reports false if the lobby has closed the connection.
func (l *Lobby) Leave(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.waiting, c)
	if i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
	}
	return i >= 0
}

// Close closes all connections that wait, and those that enter later.
func (l *Lobby) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, c := range l.waiting {
		_ = c.Close()
	}
	l.waiting = nil
}

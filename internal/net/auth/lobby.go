package auth

import (
	"net"
	"slices"
	"sync"
)

// Lobby holds the connections whose callers have not proved anything yet. A new one beyond the limit closes the oldest: callers
// that stay silent do not keep out those that prove themselves at once. Whoever serves a connection that was closed leaves as well; until
// that has happened to enough of them, the next has to wait, so that at most twice the limit are served at a time.
type Lobby struct {
	limit int

	mu      sync.Mutex
	left    sync.Cond
	inside  map[net.Conn]bool // entered, and have not left
	waiting []net.Conn        // of these, those that are not closed, the oldest first
	closed  bool
}

// NewLobby returns a lobby for at most limit connections.
func NewLobby(limit int) *Lobby {
	l := &Lobby{limit: limit, inside: make(map[net.Conn]bool)}
	l.left.L = &l.mu
	return l
}

// Enter takes a connection in. It reports false, and closes the connection, after [Lobby.Close].
func (l *Lobby) Enter(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.closed && len(l.inside) >= 2*l.limit {
		l.left.Wait()
	}
	if l.closed {
		_ = c.Close()
		return false
	}
	if len(l.waiting) == l.limit {
		_ = l.waiting[0].Close()
		l.waiting = slices.Delete(l.waiting, 0, 1)
	}
	l.waiting, l.inside[c] = append(l.waiting, c), true
	return true
}

// Leave lets a connection out, as has to be done once for each that has entered. It reports false if the lobby has closed the connection.
func (l *Lobby) Leave(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.inside, c)
	l.left.Signal()
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
	l.left.Broadcast()
	for _, c := range l.waiting {
		_ = c.Close()
	}
	l.waiting = nil
}

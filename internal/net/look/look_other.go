//go:build !linux || portable

package look

import "time"

// Slept does nothing.
func Slept(d time.Duration) {}

// For reports whether a condition holds: on this system, a thread does not look twice.
func For(done func() bool) bool { return done() }

package data

import "time"

// SetSettled sets how long files must have stayed as they are for their fingerprint to be kept.
func SetSettled(d time.Duration) (restore func()) {
	was := settled
	settled = d
	return func() { settled = was }
}

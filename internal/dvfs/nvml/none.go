//go:build !linux || !cgo

package nvml

import (
	"fmt"

	"github.com/soliton-train/soliton/internal/dvfs"
)

// Library is the loaded library, which there is none of in this build.
type Library struct{}

// Card is the clock of one card. There is none in this build.
type Card struct{ dvfs.Clock }

// Open says that this build has no NVML: the error is [dvfs.ErrUnsupported], wrapped.
func Open() (*Library, error) {
	return nil, fmt.Errorf("no NVIDIA graphics cards: %w: this program was built without cgo, or not for Linux", dvfs.ErrUnsupported)
}

// Driver returns the version of the driver.
func (l *Library) Driver() string { return "" }

// Cards returns the cards.
func (l *Library) Cards() []*Card { return nil }

// Close ends the use of the library.
func (l *Library) Close() {}

// Processes returns the processes that compute on a card.
func (c *Card) Processes() ([]int, error) { return nil, dvfs.ErrUnsupported }

// Watts returns what a card draws at the moment, and the limit that is set for it.
func (c *Card) Watts() (now, limit float64, err error) { return 0, 0, dvfs.ErrUnsupported }

// Restore puts the clocks of the cards in a record back.
func Restore(r dvfs.Record) error {
	for _, s := range r.Clocks {
		if s.Kind == dvfs.KindNVML {
			_, err := Open()
			return err
		}
	}
	return nil
}

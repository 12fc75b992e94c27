package checkpoint

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/faults"
)

// DefaultKeep is how many checkpoints a run keeps: one to resume from, and two in case it turns out to be damaged.
const DefaultKeep = 3

// Keep says which whole checkpoints of a run are kept. A checkpoint is kept if one of the rules keeps it. The zero value keeps the
// newest DefaultKeep.
type Keep struct {
	// Newest is how many of the newest are kept. 0 means DefaultKeep.
	Newest int

	// Every keeps the oldest one, and then the first that was made at least so long after the last of these. 0 keeps none for its age.
	Every time.Duration

	// Best keeps the one with the least "val_loss" or "loss", of those that have one. "" and "none" keep none for it.
	Best string
}

// Validate reports every fault.
func (k Keep) Validate() error {
	var errs faults.List
	errs.If(k.Newest < 0, "Newest is %d: give at least 1, or 0 for %d", k.Newest, DefaultKeep)
	errs.If(k.Every < 0, "Every is %v: give a positive time, or 0 for none", k.Every)
	if !Measured(k.Best) {
		errs.Add(fmt.Errorf("Best is %.40q: give val_loss, loss or none", k.Best))
	}
	return errs.Err()
}

// Measured reports whether checkpoints can be compared by a number of that name; "" and "none" mean that they are not.
func Measured(name string) bool {
	return slices.Contains([]string{"", "none", "val_loss", "loss"}, name)
}

// Choose says which checkpoints are kept of all, the newest first.
func (k Keep) Choose(all []Manifest) []bool {
	keep := make([]bool, len(all))
	for i := range min(cmp.Or(k.Newest, DefaultKeep), len(all)) {
		keep[i] = true
	}
	if k.Every > 0 {
		var last time.Time
		for i := len(all) - 1; i >= 0; i-- {
			if made := all[i].Made.Time; !made.IsZero() && (last.IsZero() || made.Sub(last) >= k.Every) {
				keep[i], last = true, made
			}
		}
	}
	if k.Best != "" {
		best := -1
		for i := range all {
			if x := all[i].measure(k.Best); x != nil && (best < 0 || *x < *all[best].measure(k.Best)) {
				best = i
			}
		}
		if best >= 0 {
			keep[best] = true
		}
	}
	return keep
}

// measure returns the number that Keep.Best names, nil if it is not known.
func (m *Manifest) measure(name string) *float64 {
	switch name {
	case "val_loss":
		return m.ValLoss
	case "loss":
		return m.Loss
	}
	return nil
}

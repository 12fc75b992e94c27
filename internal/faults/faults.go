// Package faults collects what is wrong with a configuration, so that its user hears of all of it at once.
package faults

import (
	"errors"
	"fmt"
)

// List holds faults in the order in which they were found. The zero List is ready for use.
type List []error

// If adds a fault, in the format of [fmt.Errorf], if wrong is true.
func (l *List) If(wrong bool, format string, args ...any) {
	if wrong {
		*l = append(*l, fmt.Errorf(format, args...))
	}
}

// Add adds errors. A nil error is no fault.
func (l *List) Add(errs ...error) { *l = append(*l, errs...) }

// Err returns the faults as one error with a line for each, nil for none.
func (l List) Err() error { return errors.Join(l...) }

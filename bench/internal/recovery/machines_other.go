//go:build !linux

package recovery

import "errors"

// Machines needs Linux.
func Machines([]string) error { return errors.New("machines needs Linux") }

// Trials needs Linux, too.
func Trials([]string) error { return errors.New("trials needs Linux") }

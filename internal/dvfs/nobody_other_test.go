//go:build !linux

package dvfs_test

import "errors"

// readAsNobody fails: a user is the whole process's here.
func readAsNobody() error { return errors.ErrUnsupported }

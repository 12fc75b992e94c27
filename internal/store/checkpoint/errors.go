package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
)

// What can be wrong with a file of a checkpoint: an [Error] wraps one of these.
var (
	ErrUnfinished = errors.New("unfinished")   // manifest.json is not there: the checkpoint was never committed
	ErrMissing    = errors.New("missing")      // a file that the manifest names is not there
	ErrTruncated  = errors.New("truncated")    // the file is shorter than its manifest says
	ErrAltered    = errors.New("altered")      // the content is not that which was written
	ErrForeign    = errors.New("foreign")      // of another job, step or version of the format
	ErrMalformed  = errors.New("malformed")    // not what the format demands
	ErrUnreadable = errors.New("not readable") // the system gave an error: Err
)

// ErrNone is the error of [Newest] where no checkpoint can be used.
var ErrNone = errors.New("no whole checkpoint")

// Error says which file of a checkpoint cannot be used, and why.
type Error struct {
	Path   string // of the file, below the run directory; "" for a manifest that was no file
	Kind   error  // one of the errors above
	Reason string // what was found, and what was wanted
	Err    error  // the system's error; nil where there was none
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: %v: %s", cmp.Or(e.Path, "manifest"), e.Kind, e.Reason)
}

// Unwrap returns the kind of the fault and the system's error.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

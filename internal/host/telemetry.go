package host

import "github.com/soliton-train/soliton/internal/observe/trace"

// Telemetry takes in what is told of a run. No method but Close waits.
type Telemetry interface {
	// Begin says which run it is, before anything else. file appends a line to its traces.jsonl; it
	// is nil for a run without files.
	Begin(run trace.Run, program string, file func(line []byte) error)
	Spans([]trace.Span)
	Measure(trace.Measure)
	// Close returns when all is where it belongs, or why it is not. No file is written
	// after that.
	Close() error
}

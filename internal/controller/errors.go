package controller

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// NoWorkersError is the error of [End] when the last worker has died, and no other is awaited.
type NoWorkersError struct {
	Worker id.WorkerID
	Cause  string
}

func (e *NoWorkersError) Error() string { return e.Cause + "; no worker is left" }

// FewError is the error of [End] when too few workers are left and no others
// came.
type FewError struct {
	Have, Need int
	Held       time.Duration
}

func (e *FewError) Error() string {
	return fmt.Sprintf("%d of at least %d workers are left, and no other came within %v", e.Have, e.Need, e.Held)
}

// CrashError is the error of [End] when a task ran on two workers that crashed,
// one after the other: it would end all others, too.
type CrashError struct {
	Crash
	Workers [2]id.WorkerID
	Cause   string       // of the second
	Beside  []graph.Pair // that ran on both as well, and may be to blame instead
}

func (e *CrashError) Error() string {
	text := fmt.Sprintf("%s, as worker %d before it, in stage %d of micro-batch %d in step %d",
		e.Cause, e.Workers[0], e.Stage, e.Micro, e.Step)
	for _, p := range e.Beside {
		text += fmt.Sprintf(", or in stage %d of micro-batch %d, which ran beside it", p.Stage, p.Micro)
	}
	return text
}

// ReportError is the error of [End] when answers cannot be true together.
type ReportError struct {
	Worker id.WorkerID
	Why    string
}

func (e *ReportError) Error() string { return fmt.Sprintf("worker %d %s", e.Worker, e.Why) }

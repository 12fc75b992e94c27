// Package view shows a run to people: live in a terminal, or in plain lines.
//
// Both kinds take in the same typed events.
package view

import (
	"github.com/soliton-train/soliton/internal/rundir"
)

// View shows a run. Show and Close may be called from any goroutine; neither
// waits for a slow reader of the terminal longer than one write.
type View interface {
	// Show takes in one event. After Close it does nothing.
	Show(Event)

	// Close draws the last state, which stays on the screen, and gives the
	// terminal back. It may be called again.
	Close()
}

// Event is one of Note, Begin, Step, Stopping and End.
type Event interface{ event() }

// Note says what is going on, such as "reading data".
type Note string

// Begin says that training starts. Views compute the percentage and the time
// left from its Job.
type Begin struct {
	Job    rundir.Job
	RunDir string // as to be shown; "" for a run without files
}

// Step is a committed step.
type Step rundir.Metrics

// Stopping says that the run ends early, by its reason such as
// "interrupt".
type Stopping struct {
	Reason string
}

// End says that the run is over and what came out.
type End struct {
	Summary rundir.Summary
}

func (Note) event()     {}
func (Begin) event()    {}
func (Step) event()     {}
func (Stopping) event() {}
func (End) event()      {}

// Package view shows a run to people, in one of two ways that take in the same
// typed events.
//
// The live view keeps a few lines at the bottom of a terminal: a bar with the
// time left, the loss as a line, speed, learning rate and gradient norm, and a row for
// each of several workers. It follows the terminal's width, never wraps, and leaves its last state on the screen.
//
// The plain view prints about twenty lines for a run, without any escape code: for
// files, pipes, dumb terminals, and --plain.
//
// What the live view says is a pure function of what it has seen, the time and the
// width; a thin shell puts it on the screen with a few escape codes that every
// terminal has. It asks the terminal nothing and takes no keys, so Ctrl-C is the signal that it is
// everywhere.
package view

import (
	"os"
	"time"

	"golang.org/x/term"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// View shows a run. Its methods may be called from any goroutine.
type View interface {
	// Show takes in one event. After Close it does nothing.
	Show(Event)

	// Close shows the last state, which stays on the screen. It may be called again.
	Close()
}

// Event is one of Note, Begin, Plan, Worker, Step, Recovered, Change, Timeline, Unsaved, Stopping and End.
type Event interface{ event() }

// Note says what is going on, such as "reading data".
type Note string

// Begin says that training starts.
type Begin struct {
	Job    rundir.Job
	Since  time.Time // when it started; zero is now
	RunDir string    // as to be shown; "" for a run without files

	Reason  string          // of the first plan
	Workers []rundir.Worker // their IDs, stages and layers, in the order of their rows
	Stages  []Stage         // of the first plan
}

// Stage is a stage of a plan.
type Stage struct {
	Lo      int   `json:"lo"` // layers [Lo, Hi)
	Hi      int   `json:"hi"`
	Workers []int `json:"workers"` // by their ranks
}

// Plan is another plan than before.
type Plan struct {
	Reason  string
	Workers []rundir.Worker // their IDs, stages and layers
	Stages  []Stage
}

// Recovered is the end of a recovery.
type Recovered struct {
	rundir.Recovery
	What string // what happened, such as "worker 2 killed"; "" for Cause
}

// States of a worker that is to join: its process begins, or is one that missed heartbeats and is awaited.
const (
	Begins  = "begins"
	Awaited = "is awaited"
)

// Worker is news of one worker.
type Worker struct {
	ID                  int
	Step                int // newest it has committed
	Forwards, Backwards int64
	State               string // what it does, such as "reading data"; "" while it trains
}

// Step is a committed step.
type Step rundir.Metrics

// Change is a line of events.jsonl. The terminal has no room for them.
type Change rundir.Event

// Timeline is what a worker did in a step, for views that have asked for it.
type Timeline struct {
	ID int
	control.Timeline
}

// Unsaved says that checkpoints fail, and since when there is none. The zero value says that there is one again.
type Unsaved struct {
	Step  int       // of the newest checkpoint; 0 for none
	Since time.Time // when it was made, or training began
	Why   string
}

// Stopping says that the run is to end early, by its reason, such as
// "interrupt".
type Stopping struct {
	Reason string
}

// End says that training is over and what came out.
type End struct {
	Summary rundir.Summary
}

func (Note) event()      {}
func (Plan) event()      {}
func (Change) event()    {}
func (Timeline) event()  {}
func (Recovered) event() {}
func (Begin) event()     {}
func (Worker) event()    {}
func (Step) event()      {}
func (Stopping) event()  {}
func (Unsaved) event()   {}
func (End) event()       {}

// Options say where and how a run is shown.
type Options struct {
	// Out is where to show it; nil means standard output.
	Out *os.File

	// Plain asks for plain lines even in a terminal.
	Plain bool
}

// Open returns the live view where Out is a terminal that can show it, and the
// plain view otherwise. Colours are left out where NO_COLOR is set.
func Open(o Options) View {
	out, live := o.terminal()
	if !live {
		return newPlain(out, time.Now)
	}
	return newLive(out, o.colour(), sizeOf(out))
}

// terminal returns where to show a run, and whether that is a terminal to draw on.
func (o Options) terminal() (out *os.File, live bool) {
	if out = o.Out; out == nil {
		out = os.Stdout
	}
	return out, !o.Plain && term.IsTerminal(int(out.Fd())) && os.Getenv("TERM") != "dumb" && os.Getenv("TERM") != ""
}

func (o Options) colour() bool { return os.Getenv("NO_COLOR") == "" }

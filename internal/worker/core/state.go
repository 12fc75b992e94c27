package core

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
)

// State is where a worker is in the protocol.
type State uint8

// The states.
const (
	Joining    State = iota // it has no plan yet
	Working                 // it works under its plan
	Sealed                  // it has answered a query, or could not go over to the live plan, and waits for an order
	CatchingUp              // it passes the point that others passed before an order's plan
	Draining                // what the plan does not wait for is done, or still arrives
	Editing                 // groups are edited
	Preparing               // the state at the beginning of the run is made
	Left                    // the plan goes on without it
	Dead                    // it has failed, or was closed
)

var stateNames = [...]string{"joining", "working", "sealed", "catching up", "draining", "editing", "preparing", "left", "dead"}

func (s State) String() string { return id.NameOf("state", uint8(s), stateNames[:]...) }

// transitions are the states that may follow each state; the package comment says why.
var transitions = [...][]State{
	Joining:    {Sealed, CatchingUp, Draining, Dead},
	Working:    {Sealed, CatchingUp, Draining, Dead},
	Sealed:     {Working, Joining, CatchingUp, Draining, Dead},
	CatchingUp: {Sealed, Draining, Dead},
	Draining:   {Sealed, CatchingUp, Editing, Left, Dead},
	Editing:    {Sealed, CatchingUp, Draining, Preparing, Working, Joining, Dead},
	Preparing:  {Sealed, CatchingUp, Draining, Working, Dead},
	Left:       {},
	Dead:       {},
}

// follows reports whether a state may follow another one.
func follows(from, to State) bool { return from == to || slices.Contains(transitions[from], to) }

// to enters a state.
func (w *Worker) to(s State) {
	if !follows(w.state, s) {
		panic(fmt.Sprintf("core: %v after %v", s, w.state))
	}
	w.state = s
}

// sealed reports whether the worker must pass no point and begin no pass, because a recovery is under way.
func (w *Worker) sealed() bool {
	return w.state == Sealed || w.order != nil && w.order.Ballot != noBallot
}

// over reports whether nothing goes on.
func (w *Worker) over() bool { return w.err != nil }

package session

import "fmt"

// phase is the state of the run.
type phase uint8

const (
	assembling phase = iota // the run began under another leader: hosts tell what became of each worker
	starting                // workers connect and say which job they have
	training                // workers report steps, and the controller decides about faults
	finished                // every file is written, and workers exit by themselves
	ending                  // the verdict is known: workers are killed, and what they say no longer counts
)

func (p phase) String() string {
	return [...]string{"assembling", "starting", "training", "finished", "ending"}[p]
}

// phases are the legal transitions of a run. Its first phase is assembling or starting.
var phases = map[phase][]phase{
	assembling: {training, finished, ending},
	starting:   {training, ending},
	training:   {finished, ending},
	finished:   {ending},
}

// workerState is the state of the conversation with a worker.
type workerState uint8

const (
	connecting workerState = iota // it has yet to say Hello
	greeted                       // it reads its data
	prepared                      // it is Ready, and has the run's job
	working                       // it was told to start
	done                          // it has told its result
	gone                          // the run continues without it
)

func (w workerState) String() string {
	return [...]string{"connecting", "greeted", "prepared", "working", "done", "gone"}[w]
}

// workerStates are the legal transitions of a worker. A leader that takes a run over hears of a worker as it is now.
var workerStates = map[workerState][]workerState{
	connecting: {greeted, prepared, gone},
	greeted:    {prepared, gone},
	prepared:   {working, done, gone},
	working:    {done, gone},
	done:       {gone},
}

// exitState is the state of a worker's process and of its connection.
type exitState uint8

const (
	running   exitState = iota
	hungUp              // its connection is closed, and its process may live
	exited              // its process has exited, and what it has sent may still come
	reaped              // both are over
	abandoned           // it was killed, and has not exited in time
)

func (e exitState) String() string {
	return [...]string{"running", "hung-up", "exited", "reaped", "abandoned"}[e]
}

// exitStates are the legal transitions of a process.
var exitStates = map[exitState][]exitState{
	running: {hungUp, exited, reaped, abandoned},
	hungUp:  {reaped, abandoned},
	exited:  {reaped},
}

// move returns the state after a transition that the table has, and panics on another one, which is a fault of this package.
func move[S interface {
	comparable
	fmt.Stringer
}](table map[S][]S, from, to S) S {
	for _, legal := range table[from] {
		if legal == to {
			return to
		}
	}
	panic(fmt.Sprintf("session: from %v to %v", from, to))
}

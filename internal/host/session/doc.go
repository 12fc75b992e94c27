// Package session decides what a host does about a run: it makes the first plan, follows what workers report, carries the wishes of
// the controller to them, and accounts for all of it. A [Session] has no goroutine, socket, file, clock or callback: an
// [Event] goes in, with the time at which it happened, and the [Effect]s to carry out come out, in the order in which they are to be
// done: first what other processes wait for, then files and views.
//
//	s := session.New(cfg, workers)
//	do(s.Begin(now))
//	for !s.Over() {
//		do(s.Step(time.Now(), <-events)) // or AlarmDue at s.Alarm()
//	}
//	out := s.Outcome()
//
// A run is over when every worker has exited and its connection is closed. So whatever a worker has sent is taken in before its
// exit is judged.
//
// Each part of what a session knows has a file: messages.go (what workers say), steps.go (committed steps), lifecycle.go (stop,
// exit, verdict), losses.go (what the controller decides about exits), evidence.go (missed heartbeats and gossip), joins.go,
// checkpoints.go, takeover.go, records.go (metrics, events, plans, summary), trace.go and clocks.go.
//
// The tables list all legal transitions. A test holds that states.go has the same, and that random runs take each.
//
// # Run
//
// A session begins assembling where another host has led the run before, and starting otherwise.
//
//	state       next       when
//	assembling  training   the state of every worker is known: the run is taken over
//	assembling  finished   the leader before has written the summary
//	assembling  ending     a worker or a file is at fault
//	starting    training   all workers are ready, and there is a plan
//	starting    ending     the user stops the run, or something is at fault
//	training    finished   every worker that is left has told its result
//	training    ending     the user stops the run at once, or it cannot continue
//	finished    ending     a worker fails, or the user is impatient, after all was written
//
// # Worker
//
// A host that takes a run over hears of a worker as it is at that moment.
//
//	state       next       when
//	connecting  greeted    Hello
//	connecting  prepared   Ready, told to a host that takes over
//	connecting  gone       it has exited, or has no part in the run that is taken over
//	greeted     prepared   Ready
//	greeted     gone       a joining worker exits
//	prepared    working    it is sent Start
//	prepared    done       the run that is taken over has ended
//	prepared    gone       it is not of this job, is refused and exits
//	working     done       Done
//	working     gone       it exits, and the run continues without it
//	done        gone       it exits before the others are done
//
// # Process
//
//	state       next       when
//	running     hung-up    its connection is closed
//	running     exited     it exits before all is received
//	running     reaped     it has no part in the run that is taken over
//	running     abandoned  it was killed, and has not exited in time
//	hung-up     reaped     it exits
//	hung-up     abandoned  it was killed, and has not exited in time
//	exited      reaped     all it has sent is received, or does not come in time
package session

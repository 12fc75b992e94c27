// Package host owns a run on this machine: it starts the workers, keeps the
// conversation of package control with each, makes the plan they follow, writes the run
// directory, feeds the view, and sees that nothing is left behind.
//
// A worker is a child process ([StartProcesses]) or a function of this process
// ([InProcess]); everything else is the same for both, and for one worker and many:
//
//	dir, err := rundir.Create("", "gpt", time.Now())     // or no directory at all
//	a, err := agent.New(agent.Config{RunDir: dir, View: v, Output: os.Stdout, Program: "./gpt", Stages: 2})
//	defer a.CatchSignals()()                             // Ctrl-C and SIGTERM
//	workers, err := agent.StartProcesses(agent.Command{Path: "./gpt"}, 4, nil)
//	out := a.Serve(ctx, workers...)
//	if out.Err != nil { fmt.Fprintln(os.Stderr, out.Err) }
//	os.Exit(out.ExitStatus())
//
// # Beginning
//
// When all workers have said that they are ready, and run the same program with the same flags
// on the same data, the first plan is made of the layers they have and the stages that were asked for. It
// is written to plans.jsonl with its reason and goes to every worker, with the addresses of all.
//
// # Agreement
//
// Every worker reports every committed step and the end. These numbers are a function of
// the job, so they must have the same bits from all; the first report of a step is
// the one in metrics.jsonl, and another one that differs fails the run.
//
// # Stopping
//
// The first [Agent.Stop], or the end of Serve's context, asks the workers to
// finish their step and write their files, and they agree on the step; the second ends them at once. A run
// that has not begun to train, or has nothing more to write, ends at the first. Either
// way the run directory is valid.
//
// # Failure
//
// When a worker ends in training, the controller of package elastic decides how the others go
// on, and session carries its wishes to them. A worker that is silent for Config.Detect, or does not
// answer the controller, is killed, and its end is the event. The run ends only when no
// worker is left, too few are, or what happened would happen to every other one, too: a
// panic in the program, numbers that are not finite, workers that disagree. An agent whose own timer is
// late by more than a quarter of the budget was not listening itself, and holds no silence
// before that against anyone.
//
// # Joining
//
// Workers may begin while the run goes on: as many as another process asks for over the socket in
// workers.json (control.Add), and with Config.Respawn one in the place of each that was lost, which
// has its ID and the next incarnation. One that is ready and has the run's job goes to the controller,
// which gives it a part; before that, whatever is wrong with it, it is refused and the run goes on. After
// three replacements in a row that died before they had a part, no other one is started.
//
// # Events
//
// events.jsonl gets one line for each change: start, resume, plan, checkpoint, chaos (what Config.Chaos returned),
// lost, evict, left, begin (a worker is started), refused, joined (it has a part), rollback,
// recovered (with the phases and numbers of rundir.Recovery), unprotected and protected (as shards have
// fewer mirrors than they should, and have them again), repaired (memory of a worker was altered, and
// restored from another; the second time it is evicted), hold, clocks (which were set, or why none will
// be; with Config.Clocks), stop, end, failed, and notes: every
// decision of the controller in a sentence.
//
// Whatever happens, Serve returns one [Outcome] with at most one error, which is of
// a type of this package and prints as one line; what there is to read beyond
// that line is in [Outcome.Detail].
//
// # Checkpoints
//
// When one is due, the workers are asked for it; each owner of shards writes a file, and says so. Of all
// files of a step, the agent makes a checkpoint (package internal/store/checkpoint), which is what a rollback begins
// from, and a run that goes on ([Resume]).
//
// # Structure
//
// What to do is decided by package session, a state machine without goroutines,
// sockets, files or clocks: an event goes in, a list of effects comes out. Serve is
// the loop around it and the only goroutine that touches it. Beside the loop run, for each worker, one goroutine that
// receives, one that sends, one that awaits its end, and its own; Serve joins them before it returns, except a function
// in this process that does not return within a second after it was killed.
//
// Child processes are started by one goroutine that stays on one operating system
// thread as long as this process lives, because the parent-death signal
// that takes workers along with a killed agent follows the thread that made them.
package host

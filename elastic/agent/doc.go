// Package agent owns a run on this machine: it starts the worker, keeps the
// conversation of package control with it, writes the run directory, feeds
// the view, and sees that nothing is left behind.
//
// The worker is a child process ([StartProcess]) or a function of this process
// ([InProcess]); everything else is the same for both:
//
//	dir, err := rundir.Create("", "gpt", time.Now())     // or no directory at all
//	a, err := agent.New(agent.Config{RunDir: dir, View: v, Output: os.Stdout, Program: "./gpt"})
//	defer a.CatchSignals()()                             // Ctrl-C and SIGTERM
//	out := a.Serve(ctx, agent.InProcess(func(ctx context.Context, conn net.Conn) { ... }))
//	if out.Err != nil { fmt.Fprintln(os.Stderr, out.Err) }
//	os.Exit(out.ExitStatus())
//
// # Stopping
//
// The first [Agent.Stop], or the end of Serve's context, asks the worker to
// finish its step and write its files; the second ends it at once. A run
// that has not begun to train, or has nothing more to write, ends at the first. Either
// way the run directory is valid.
//
// # Failure
//
// Whatever happens, Serve returns one [Outcome] with at most one error, which is of
// a type of this package and prints as one line; what there is to read beyond
// that line is in [Outcome.Detail].
//
// # Structure
//
// What to do is decided by session, a state machine without goroutines,
// sockets, files or clocks: an event goes in, a list of effects comes out. Serve is
// the loop around it and the only goroutine that touches it. Beside the loop run one goroutine that
// receives, one that sends, and the worker's own; Serve joins them before it returns, except a function
// in this process that does not return within a second after it was killed.
//
// Child processes are started by one goroutine that stays on one operating system
// thread as long as this process lives, because the parent-death signal
// that takes workers along with a killed agent follows the thread that made them.
package agent

// Package host keeps a run on one machine or several: it starts the workers, keeps the
// conversation of package control with each, makes the plan they follow, writes the run
// directory, feeds the view, and leaves nothing behind.
//
// A run on one machine is a run of one host:
//
//	dir, err := rundir.Create("", "gpt", time.Now())     // or no directory at all
//	links, err := socket.NewFolder()                     // for the sockets of the workers
//	defer links.Remove()
//	h, err := host.New(host.Config{
//		Settings: session.Settings{Program: "./gpt", Stages: 2}, RunDir: dir, Console: host.Console{View: v, Output: os.Stdout},
//		Workers: 4, Start: spawn.Starter(spawn.Command{Path: "./gpt", Links: links.Path()}, dir.LogFile),
//	})
//	defer h.CatchSignals()()                             // Ctrl-C and SIGTERM
//	out := h.Run(ctx)
//	out.Report(os.Stdout, os.Stderr, "launcher")
//	os.Exit(out.ExitStatus())
//
// # Structure
//
// A worker is a child process ([Starter]) or a function of this process ([InProcess]). The relay of its host is
// its only partner: it passes on what the worker says, keeps what a new leader has to know, and hands it what the leader says. The
// leader is the host that leads in the log of package agree; a host alone leads at once. It keeps a roster of the hosts
// and their workers, and a loop around a session, which decides. The relay of the leader's own host
// calls it; those of other hosts have a link to it.
//
//	worker ⇄ relay ⇄ [link, to another host] ⇄ roster ⇄ loop ⇄ session ⇄ controller
//
// The session and the roster have no goroutine, socket, file or clock; the loop is the only goroutine that touches them, and one
// queue brings it all that happens. A session starts in one way: from the log, the run directory and the configuration, which
// say whether the run is fresh, resumed or taken over from another leader.
//
// Beside the loop run, for each worker, a goroutine that receives, one that sends and one that awaits its end; Run and
// Serve join them before they return, except a function
// in this process that does not return within a second after it was killed.
// Child processes are started by one goroutine that stays on one operating system
// thread as long as this process lives, because the parent-death signal
// that takes workers along with a killed host follows the thread that made them.
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
// The first [Host.Stop], or the end of Run's context, asks the workers to
// finish their step and write their files, and they agree on the step; the second ends them at once. A run
// that has not begun to train, or has nothing more to write, ends at the first. Either
// way the run directory is valid.
//
// # Failure
//
// When a worker ends in training, the controller decides how the others go
// on, and session carries its wishes to them. A worker that is silent for Config.Detect, or does not
// answer the controller, is killed, and its end is the event. The run ends only when no
// worker is left, too few are, or what happened would happen to every other one, too: a
// panic in the program, numbers that are not finite, workers that disagree. A host whose own timer is
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
// events.jsonl gets one line for each change: start, resume, plan, checkpoint, skipped (a sample), unsaved (no checkpoint could be made), removed (the run directory), chaos (what Config.Chaos returned),
// lost, evict, left, begin (a worker is started), refused, joined (it has a part), rollback,
// recovered (with the phases and numbers of rundir.Recovery), unprotected and protected (as shards have
// fewer mirrors than they should, and have them again), repaired (memory of a worker was altered, and
// restored from another; the second time it is evicted), blocked and returned (a call of user code takes too long, and
// has returned), hold, clocks (which were set, or why none will
// be; with Config.Clocks), stop, end, failed, and notes: every
// decision of the controller in a sentence.
//
// Whatever happens, Run returns one [Outcome] with at most one error, which is of
// a type of this package and prints as one line; what there is to read beyond
// that line is in [Outcome.Detail].
//
// # Checkpoints
//
// When one is due, the workers are asked for it; each owner of shards writes a file, and says so. Of all
// files of a step, the leader makes a checkpoint (package internal/store/checkpoint), which is what a rollback begins
// from, and a run that goes on ([Resume]).
package host

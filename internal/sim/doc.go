// Package sim runs the session of the leading host, with its controller, and the cores of all workers together in one
// goroutine, under simulated time and without sockets, for tests of the protocol. They talk in the messages of package
// control.
//
// A [Cluster] takes the place of everything around these machines: the shell of the host that leads and the hosts that
// replace it, the log, the run directory, the links between workers, the groups, and the program and the memory of each
// worker. Delays are drawn from a seed, so a schedule is repeated exactly by its seed. Faults are calls: [Cluster.Kill],
// [Cluster.Freeze], [Cluster.Halt], [Cluster.Late], [Cluster.KillAll], [Cluster.FreezeAll], [Cluster.Cut], [Cluster.Flip], [Cluster.Join], [Cluster.Leave], [Cluster.Stop] and [Cluster.Lead].
//
// Memory holds no numbers but what they are made of: parameters and moments are the step they are of, a gradient is its
// step and the set of its micro-batches. That is all that their bits depend on, so the cluster checks what a run with
// numbers would only show by its hashes. It panics with a [Violation] where
//
//   - two plans have the same version,
//   - a gradient or a loss counts a micro-batch twice or not at all,
//   - two updates of a layer in a step are made of different samples, or input and targets of a pass are,
//   - a pass or an update uses parameters, moments or tensors of another step,
//   - an update uses memory that was altered, or what was computed with it,
//   - metrics.jsonl would lack a step,
//   - a sample is skipped that a worker has read, or before it is in skips.jsonl,
//   - a run fails although a worker of its plan lives, or lost workers are replaced,
//   - a lane of a worker has two tasks, or something runs beside a job,
//   - a worker passes a point while it is sealed, or goes back to one,
//   - two workers commit a step or pass another point with different results, or
//   - a worker fails.
//
// What the cluster leaves out: checkpoints in files, hosts that are lost with their workers, and the bytes of messages.
package sim

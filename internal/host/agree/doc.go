// Package agree is the agreement between the agents of a job: a log that all
// of them hold in the same order, and the state that follows from it. It is
// hashicorp/raft with a bbolt file under it, one [Node] in each agent.
//
// The leader proposes entries; each node applies the committed ones in order and
// hands them to its agent:
//
//	n, err := agree.Open(agree.Config{
//		Dir: dir, ID: "host-0", Bootstrap: []agree.Server{{ID: "host-0", Voter: true}},
//		Apply: func(e agree.Entry, s agree.State) { ... },
//	})
//	for l := range n.Changes() {
//		if l.Ready { // this node leads, and has applied all that was committed before
//			_, err = n.Propose(ctx, agree.Plan{Term: l.Term, Version: next, Data: order})
//		}
//	}
//
// # What is agreed
//
// [State.Apply] is a pure function and the only place where an entry is judged.
// An entry that it refuses changes nothing on any node. Above all, the version of
// a plan must be of the newest [Generation] and greater than that of every plan
// before it. The log survives the death of all processes, but for what is said below of a node without a network, and
// whoever begins a job or goes on with it begins a generation, so versions never repeat in the life of a run directory.
//
// # Failure
//
// An entry whose Propose has returned nil survives as long as a majority of the
// voters of the newest committed configuration keep their directories. A node without a network is different:
// whoever acts on what it says ends with its process, so the newest plans are on their way to the disk for some
// milliseconds, and are lost with a process that is killed then. Generations are synced, and the
// next one is greater, so the version of a lost plan does not come again. A minority
// commits nothing: its leader steps down after a fifteenth of [Config.Detect], and from
// then on [Leadership.Leader] is "" there. [ErrUncertain] means that the entry may be
// committed, now or later; [Node.Changes] and [Config.Apply] tell.
//
// After the death of all processes each node is opened again over its directory,
// at any address ([Config.Resolve]). To go on with other servers, open the
// directory whose [Last] is the greatest with [Config.Recover] and the others empty.
//
// # Concurrency
//
// All methods may be called by several goroutines. Config.Apply is called by one
// goroutine at a time; it must return soon, and must not wait for Propose, which
// waits for it. Close ends and joins everything; calls that wait return [ErrClosed].
//
// # Trust
//
// With a secret, both ends of a connection prove that they have it before a byte
// is read as a message, and all is encrypted. Who has the secret is trusted like an
// agent of the job. Without one, a listener must be on the loopback interface.
//
// # Entries in the log
//
// A byte for the format (1), a byte for the kind, and the fields in the order of
// the Go type, each as msgpack. A node refuses kinds and formats that it does not
// know, and bytes after the last field. Snapshots hold a byte for their format (1)
// and the fields of the state in the same way.
package agree

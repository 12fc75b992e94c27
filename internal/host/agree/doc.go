// Package agree is the agreement between the hosts of a job: a [Log] that all
// of them hold in the same order, and the [State] that follows from it. [Local] is the log of a run
// on one host; package raftlog has that of several.
//
// The leader proposes entries; each host applies the committed ones in order:
//
//	for l := range log.Changes() {
//		if l.Ready { // this host leads, and has applied all that was committed before
//			_, err = log.Propose(ctx, agree.Plan{Term: l.Term, Version: next, Data: order})
//		}
//	}
//
// # What is agreed
//
// [State.Apply] is a pure function and the only place where an entry is judged.
// An entry that it refuses changes nothing on any host. Above all, the version of
// a plan must be of the newest [Generation] and greater than that of every plan
// before it. Each start of a job begins a generation, so versions never repeat in the life of a run directory.
//
// # Entries in the log
//
// A byte for the format (1), a byte for the kind, and the fields in the order of
// the Go type, each as msgpack. [Decode] refuses kinds and formats that it does not
// know, and bytes after the last field. Snapshots hold a byte for their format (1)
// and the fields of the state in the same way.
package agree

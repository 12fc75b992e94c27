// Package raftlog is the log of a run on several hosts: hashicorp/raft with a bbolt file under it, one [Node] on each host.
// It implements [agree.Log].
//
// # Failure
//
// An entry whose Propose has returned nil survives as long as a majority of the
// voters of the newest committed configuration keep their directories. A minority
// commits nothing: its leader steps down after [timing.Log].Election, and from
// then on [agree.Leadership.Leader] is "" there.
//
// [Create] makes the log of a new run, once on each of its hosts. After the death of any process its node is opened again over
// its directory, at any address ([Config.Resolve]).
//
// # Lost logs
//
// A node that forgot its votes could vote twice in a term, and elect a second leader. So [Open] refuses a directory whose log is
// missing ([agree.NoLogError]) or cannot be read ([agree.DamagedError]), and Create one that is not empty. A host without its log
// opens an empty directory with [Config.Join]: it gets a new server ID, begins as a non-voter, and catches up. Its former server
// stays silent until the leader removes it, as each connection names the server that it is for, and a node refuses those for
// another.
//
// # Concurrency
//
// All methods may be called by several goroutines. Config.Apply is called by one
// goroutine at a time; it must return soon, and must not wait for Propose, which
// waits for it. Close ends and joins everything; calls that wait return [agree.ErrClosed].
//
// # Trust
//
// With [Config.TLS], both ends of a connection finish the handshake before a byte is read as a message. A process that passes
// it is trusted like a host of the job. Without TLS, a listener must be on the loopback interface.
package raftlog

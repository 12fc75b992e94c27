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
// After the death of all processes each node is opened again over its directory,
// at any address ([Config.Resolve]). To continue with other servers, open the
// directory whose [Last] is the greatest with [Config.Recover] and the others empty.
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

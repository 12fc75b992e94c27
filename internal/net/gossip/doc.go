// Package gossip is the gossip ring of a job: all its workers and agents, who
// tell each other where they are and whom they cannot reach.
//
//	r, err := ring.Open(ring.Config{Job: "gpt-1", Self: ring.Identity{
//		Kind: ring.Worker, Worker: 3, Incarnation: 1, Host: "a", Addr: "127.0.0.1:4711"}})
//	defer r.Close()
//	err = r.Join(ctx, "127.0.0.1:7946")   // one member's Addr is enough
//	for e := range r.Events() { ... }     // until Close
//	all := r.Members()                    // at any time
//
// # Evidence, not decisions
//
// What the ring says is evidence. It evicts nobody and changes no plan; a
// member that it calls dead may be alive behind a broken link, and one that it
// calls alive may have ended a moment ago. An [Event] says what was learnt, of
// whom, when, and from whom. [Ring.Members] is the newest state and never
// waits; who reads events slowly misses some, is told so by a [Missed], and
// reads Members.
//
// A member is suspected when another one probed it in vain, directly and
// through others, and dead when nobody has heard it say otherwise within the
// time for suspicion. One that says otherwise is alive again: [Refuted] while
// suspected, [Joined] when it was thought dead. One that says goodbye has
// [Left].
//
// # Lives
//
// A member is one life of a worker or agent: its name has the incarnation in
// it. The newest incarnation that was heard of counts. It takes the place of
// an older one in Members, and what is then said by or about the older one is
// not passed on; its claims to be alive are refused.
//
// # Time
//
// One budget, [Config.Detect], gives every timeout: see [Config.Interval].
// How soon a loss is found is a matter of luck, because everyone probes in an
// order of its own: the budget holds for most losses, and a loss during a heavy
// load or a partition may take longer.
//
// # Security
//
// The ring listens on loopback, and then hears nobody else. Elsewhere it wants
// [Config.SecretKey], with which everything is encrypted and authenticated
// (AES-GCM); who has no key is not heard. Without a key every process of the
// machine is trusted: a false exchange of states can make the library panic or
// take much memory. So give a key wherever the machine is shared. [Config.Job] keeps the rings of
// different jobs apart when one takes over a port of the other.
//
// # How it is done
//
// The protocol is that of hashicorp/memberlist: SWIM with Lifeguard's local
// health. The library tells neither suspicions nor whether a member died or left.
// Both are on the wire, so this package reads the packets that the library
// sends and gets: a member passes a suspicion on once it has accepted it, and a
// goodbye is a death that its subject reports itself.
//
// Close joins all goroutines of this package. The library cannot be
// waited for: its own end by themselves, within two intervals, and reach nothing
// of the ring any more.
package gossip

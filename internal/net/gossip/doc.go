// Package gossip is the gossip ring of a job: all its workers and agents, which tell each other where they are and which members
// they cannot reach.
//
//	r, err := gossip.Open(gossip.Config{Job: "gpt-1", Detect: time.Second, Members: 8, Self: gossip.Identity{
//		Kind: gossip.Worker, Worker: 3, Incarnation: 1, Host: "a", Addr: "127.0.0.1:4711"}})
//	defer r.Close()
//	err = r.Join(ctx, "127.0.0.1:7946")   // one member's Addr is enough
//	for range r.Changed() {
//		all := r.Members()
//	}
//
// # Evidence, not decisions
//
// What the ring says is evidence. It evicts no member and changes no plan. A member that it calls dead may be alive behind a broken
// link, and one that it calls alive may have ended a moment ago.
//
// A member is suspected when another one probed it without an answer, directly and through others. It is dead when it has not
// refuted that within the time for suspicion. A dead member that is heard again is alive again.
//
// # Lives
//
// A member is one life of a worker or agent: its name has the incarnation in it. The newest incarnation that was heard of counts. It
// replaces an older one in Members; claims by or about the older one are then ignored, and its claims to be alive are refused.
//
// # Time
//
// One budget, [Config.Detect], gives every timeout, see package timing. Each member probes the others in an order of its own, so how
// soon a loss is found is a matter of luck: the budget holds for most losses, and a loss during a heavy load or a partition may take
// longer.
//
// # Security
//
// The ring listens on loopback, and then ignores packets from elsewhere. On other addresses it wants [Config.SecretKey], which
// encrypts and authenticates everything (AES-GCM). Without a key every process of the machine is trusted: a false exchange of states
// can make the library panic or take much memory. So give a key wherever the machine is shared. [Config.Job] keeps the rings of
// different jobs apart when one takes over a port of the other.
//
// # How it is done
//
// The protocol is that of hashicorp/memberlist: SWIM with Lifeguard's local health. The library reports no suspicions, nor which
// member says that another is dead. Both are on the wire, so this package reads the packets that the library sends and gets: a member
// passes a suspicion on once it has accepted it.
//
// Close joins all goroutines of this package. The library offers no way to wait for its own: they end by themselves, within two
// intervals, and no longer reach the ring.
package gossip

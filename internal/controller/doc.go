// Package controller decides what happens when workers fail, leave or join.
//
// A [Controller] is a state machine without goroutine, socket, file or clock. Its shell passes events and the time to
// [Controller.Step] and carries out the effects that come back, in their order. So what the controller does is a
// function of what it was told. It is not safe for concurrent use.
//
// Two machines make it up. Recovery repairs a step in which a worker failed or a link broke. Reconfiguration changes the
// plan between two steps. Recovery goes first: it interrupts a reconfiguration, learns from the workers whether the
// boundary plan under way is live, and adopts or withdraws it.
//
// Stories in testdata are exact records of conversations with the controller. A test holds that the tables below are
// complete and that the stories show every row.
//
// # Recovery
//
// A recovery seals all members and asks for their reports (query), makes a plan of them (plan), has the agents agree on
// it (agree), and sends it as an order, which the members apply (edit) and under which they continue (resume). Whatever
// fails on the way, it starts over with a higher [Ballot]. The order is a rollback to a checkpoint where a shard has no
// holder left. Where no worker of the plan is left and lost workers are replaced, the run holds for the replacements, which
// roll it back. See recovery.go, position.go (how far the run is), replan.go (the order) and links.go (broken links).
//
//	state      events                         next        when
//	idle       Dead, Led, Late(link), Behind  querying    a worker of the plan fails, a leader takes over, a link stays broken, a worker is late
//	idle       Dead                           holding     the last worker fails
//	querying   Answered, Ended, Dead          agreeing    all members have reported
//	querying   Answered, Ended, Dead          holding     the same, and fewer than MinWorkers are left
//	querying   Dead                           holding     the last worker fails
//	holding    Joined                         agreeing    enough workers are there
//	holding    Joined                         querying    the same, and none of the plan is left
//	holding    Dead, Led                      querying    the next ballot
//	agreeing   Agreed                         applying    the order is agreed
//	agreeing   Dead, Led, Saved               querying    the next ballot; Saved: the checkpoint of the order is damaged
//	agreeing   Dead                           holding     the last worker fails
//	applying   Applied, Ended, Dead           idle        all members have applied the order
//	applying   Dead, Led                      querying    the next ballot
//	applying   Dead                           holding     the last worker fails
//
// # Reconfiguration
//
// A reconfiguration lets new holders of shards catch up while training continues, has the agents agree on the boundary
// plan, and sends it to all members. It goes live after the next commit for which all have it. Dead stands for a joining
// worker, except where the next state is interrupted. See reconfiguration.go and balance.go (which work should move).
//
//	state        events                                           next         when
//	stable       Joined, Leaving, Balanced, Late(wish), Late(look), Late(rest) catchingUp  another plan is needed
//	stable       Joined, Leaving, Balanced, Late(wish), Late(look), Late(rest) proposed    the same, and its holders lack nothing
//	catchingUp   Level, Joined, Leaving, Dead, LinkLost           proposed     the holders lack nothing, or another plan is needed
//	catchingUp   Joined, Leaving, Dead, LinkLost                  stable       the plan is not needed any more
//	proposed     Agreed                                           switching    the plan is agreed, and sent
//	switching    Applied, Ended, Dead                             stable       all members have applied the plan
//	switching    Applied, Ended, Dead                             catchingUp   the same, and yet another plan is needed
//	switching    Applied, Ended, Dead                             proposed     the same, and its holders lack nothing
//	stable       Dead, Led, Late(link), Behind                    interrupted  a recovery begins
//	catchingUp   Dead, Led, Late(link)                            interrupted
//	proposed     Dead, Led, Late(link), Behind                    interrupted
//	switching    Dead, Led, Late(link), Behind                    interrupted
//	interrupted  Applied, Ended, Dead                             stable       the recovery ends
//
// The types in protocol.go say what workers and controller tell each other, and what a worker may rely on.
package controller

// Package control is the conversation between a worker and the agent that
// started it.
//
// # Who says what
//
//	worker                         agent
//	  | <------------------- Welcome |   the key of the run
//	  | Hello ---------------------> |   before any user code runs
//	  | Beat* ---------------------> |   from here on, ten times a second
//	  | Note* ---------------------> |   "reading data": what is going on, for people
//	  | Ready ---------------------> |   the job is valid, its data are read, peers can connect
//	  | <--------------------- Start |   all workers are ready; how to train
//	  | <--------------------- Order |   the first plan, and where its workers are
//	  | (Step | Note | Output)* ---> |   one Step for every committed step, in order
//	  | <---------------------- Stop |   at most once, any time after Start
//	  | Done ----------------------> |   every file of the worker is written
//	  | (Note | Output)* ----------> |   of the program's own end, such as sampled text
//	  | close                        |
//
// Every worker of a run has this conversation. What their Ready, Step and Done say
// of the run must be the same from all. Output, and the
// program's own end, come from the first worker of the plan alone.
//
// A worker that joins a run under way has the same conversation. Its Start says Joins: it gets a Fill, then an Order with its
// first plan, and says Applied when that plan is live. If the run ends without it, Release comes.
//
// At any time the worker may send Failed instead of what would come next; it
// is its last message. A worker whose connection ends has lost its agent and
// must exit. A worker reads all the time, also while it computes, so that a
// Stop reaches it in mid-step; the agent reads all the time too, so neither
// side's Send waits for more than the other's reader.
//
// # Worker side
//
// A worker process inherits its connection to the agent, so no other process can take part in it. The environment says which
// file that is:
//
//	w, ok := control.Launched()        // ok is false without an agent
//	conn, key, err := w.Connect(ctx)   // says Hello
//	...
//	conn.Send(control.Ready{Job: job, Data: files})
//	m, err := conn.Receive(ctx)        // control.Start
//
// A worker in the agent's own process gets one end of a [net.Pipe], wraps it
// with [New], and sends Hello itself. It gets no Welcome.
//
// # Frames
//
// A frame is a big-endian uint32 with the length of the body, at most
// [MaxFrame], and the body in msgpack: an array of two, the kind of message
// (its type's name in lower case) and the message as a map from field names. Unknown fields
// are skipped, an unknown kind is an error. Hello carries the version of the protocol,
// and the agent refuses every other.
//
// # Hostile bytes
//
// The reader bounds frames before it makes room for them, and checks the
// nesting, and the counts of all containers against the bytes that are there,
// before the decoder sees a body. Whatever arrives is either a message or an
// error, never a panic.
//
// # Waiting
//
// Send may be called from several goroutines and ends when the message is
// written or the connection closed. Receive belongs to one goroutine at a
// time and ends on message, context, or close; after its context has ended, it
// may be called again and loses nothing.
package control

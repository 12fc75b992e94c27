// Package controller decides what happens when workers are lost, leave or join.
//
// The [Controller] is a state machine. Its shell tells it what happens with
// [Controller.Step], gives it the time, and carries out the effects that come
// back, in their order. It has no goroutine, socket, file or clock, so what it
// does is a function of what it was told; testdata tells the protocol as
// stories, each an exact record of one conversation. It is not safe for
// concurrent use.
//
// A recovery goes through asking, proposing and applying. Whatever else dies
// on the way, it begins again with a higher [Ballot], and ends when all
// that live have applied one plan. The types in protocol.go say what workers
// and controller tell each other, and what a worker may rely on.
package controller

// Package chaos injects faults: it reads which faults a run is to have, and injects them into processes.
//
// # The grammar
//
// A schedule is written as parts between commas:
//
//	kill:W@S  freeze:W@S  leave:W@S     SIGKILL, SIGSTOP or SIGTERM to worker W when it begins step S
//	flip:W@S:TARGET                     flip one bit in the memory of worker W: own (the default), mirror, copy or moment
//	  ...@S+MS                          these four: MS milliseconds later; fractions such as +2.5 are allowed
//	  ...@S/PHASE                       these four: when the worker enters the phase of the step: forward backward reduce commit gather
//	slow:W@S:FACTOR                     worker W computes at this share of its speed from step S on: 0 < FACTOR <= 1, and 1 restores it
//	join@S                              one more worker
//	killhost:H@S  freezehost:H@S        kill or freeze the agent of host H and its workers
//	cut:H@S:SECONDS                     for so long, nothing passes between host H and the others
//	slowlink:A-B@S:FACTOR               the link of workers A and B moves bytes at this share of its speed
//	random:SEED:RATE                    draw faults of all kinds: in each step one, with probability RATE
//	random:SEED:RATE:KINDS              draw from some kinds, joined by plus signs: kill+freeze
//
// Workers and hosts count from 0, steps from 1. [Parse] reads a schedule and reports all of its problems together;
// [Schedule.String] writes it back; [Schedule.Expand] replaces the random parts by what they draw.
//
// # Division of labour
//
// A worker injects the faults of its own steps into itself, because only the worker knows the moment: a [Trigger] learns where the step
// is and kills, freezes or slows its own process, or calls hooks for faults in memory or on links. [Schedule.Worker] picks the
// faults of one worker. Faults of a host, and joins, belong to the process that started the workers; [Due] says when.
//
// [Kill], [Freeze], [Thaw] and [Terminate] act on another process. [Slow] leaves the speed in a file and signals the worker to read it.
// [Cuts] keeps packets from processes that use plain TCP and UDP at IPv4 addresses.
//
// # Timing
//
// A fault is injected when its step begins, MS milliseconds after that (within about one more, by the accuracy of timers, and even if
// the step is over by then), or at the first report of its phase. Each fault is injected once in the life of a process: a step that
// runs again does not get it again. A step or phase that the process never reports injects nothing. A restarted worker is
// given only the faults that are still to come; a [Fault] can be compared with == for that.
//
// The hook Stamp receives each fault and its moment on the monotonic clock ([Now]) just before the fault is injected, so
// measurements of a recovery know when it began.
//
// # What this package does not know
//
// Nothing here knows of plans or detectors, and those must not import it: a fault has to be found by its effects. A
// test at the root of the repository holds this.
package chaos

// Package chaos does harm on purpose: it reads what shall happen to a run, and
// makes it happen to processes.
//
// # The grammar
//
// A schedule is written as parts between commas:
//
//	kill:W@S  freeze:W@S  leave:W@S     end worker W when it begins step S (SIGKILL), stop it (SIGSTOP), ask it to leave (SIGTERM)
//	flip:W@S:TARGET                     flip one bit of what worker W holds: own (the default), mirror, copy or moment
//	  ...@S+MS                          these four: MS milliseconds later, also a fraction such as +2.5
//	  ...@S/PHASE                       these four: when the worker enters the phase of the step: forward backward reduce commit gather
//	slow:W@S:FACTOR                     worker W computes at this share of its speed from step S on: 0 < FACTOR <= 1, and 1 restores it
//	join@S                              one more worker
//	killhost:H@S  freezehost:H@S        kill or freeze the agent of host H and its workers
//	cut:H@S:SECONDS                     for so long, nothing passes between host H and the others
//	slowlink:A-B@S:FACTOR               the link of workers A and B moves bytes at this share of its speed
//	random:SEED:RATE                    draws harms of all kinds: in each step one, with probability RATE
//	random:SEED:RATE:KINDS              draws from some kinds, joined by plus signs: kill+freeze
//
// Workers and hosts count from 0, steps from 1. [Parse] reads a schedule and
// reports all of its faults together; [Schedule.String] writes it back;
// [Schedule.Expand] replaces the random parts by what they draw.
//
// # Who does what
//
// What happens at a point of a worker's own step, the worker does to itself,
// because nobody else knows the moment: a [Trigger] hears where the step is
// and kills, freezes or slows its own process, or calls the hooks it was
// given for what lies in memory or on links. [Schedule.Worker] picks the
// harms of one worker. What strikes a host, and joins, belong to the process
// that started the workers; [Due] tells it when.
//
// [Kill], [Freeze], [Thaw] and [Terminate] do it to another process. [Slow]
// leaves the speed in a file, and tells the worker to read it. [Cuts] keeps
// packets from processes that use plain TCP and UDP at addresses of IPv4.
//
// # When
//
// A harm strikes when its step begins, MS milliseconds after that (within
// about one more, by the accuracy of timers, and even if the step is over by
// then), or at the first report of its phase. Each strikes once in the life of
// a process: a step that is run again is not struck again. A step or phase
// which the process never reports strikes nothing. Whoever starts a worker
// anew leaves out what has struck already; a [Harm] can be compared with ==
// for that.
//
// The hook Stamp learns each harm and its moment on the monotonic clock
// ([Now]) just before it strikes, so that whoever measures the recovery need
// not guess when it began.
//
// # What this package does not know
//
// Nothing here knows of plans or detectors, and those must not import it: what
// finds out about a harm has to do so by its effects. A test at the root of
// the repository holds this.
package chaos

// Package look decides for how long a thread that waits for another process looks again and again before it sleeps.
//
// To wake a thread takes 30 to 40 µs on a virtual machine, and while it is woken, the one that it then waits for falls asleep in turn, unless that one looks for longer. Between two
// looks, a thread yields the processor, so that the other processes of its host make progress where they outnumber the processors.
//
// That is for collectives that follow each other. A thread whose last sleep was long sleeps at once: it waits for others that compute, and looking would take time from them. And
// no thread looks for a while after the processor was gone for long between two looks, because then other programs may use it, and the system soon runs those threads that it wakes.
package look

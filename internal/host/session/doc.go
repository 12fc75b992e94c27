// Package session decides what a host does about a run: it makes the first plan, follows what workers report, carries the wishes of
// the controller to them, and accounts for all of it. A [Session] has no goroutine, socket, file, clock or callback: an
// [Event] goes in, with the time at which it happened, and the [Effect]s to carry out come out.
//
//	s := session.New(cfg, workers)
//	effects := s.Begin(now)
//	for !s.Over() {
//		do(effects)
//		effects = s.Step(time.Now(), <-events) // or AlarmDue at s.Alarm()
//	}
//	out := s.Outcome()
package session

package platform

import (
	"os"
	"os/signal"
	"syscall"
)

// NotifyEnd has c get the signals that end a program. SIGHUP is not among them where it was ignored when the process started, as nohup does.
// SIGINT is, because shells without job control ignore it for what they run in the background.
func NotifyEnd(c chan<- os.Signal) {
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) {
		signal.Notify(c, syscall.SIGHUP)
	}
}

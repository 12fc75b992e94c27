package platform

import (
	"os/exec"
	"runtime"
	"sync"
)

// starts takes functions to the one thread that starts processes. Its goroutine never ends, because the kernel kills a process with
// [ChildAttr] when the thread that started it ends.
var starts = sync.OnceValue(func() chan<- func() {
	ch := make(chan func())
	go keepThread(ch)
	return ch
})

func keepThread(ch <-chan func()) {
	runtime.LockOSThread()
	for f := range ch {
		f()
	}
}

// StartChild starts a process that may have the attributes of [ChildAttr], on a thread that lasts as long as this process.
func StartChild(cmd *exec.Cmd) error {
	err := make(chan error, 1)
	starts() <- func() { err <- cmd.Start() }
	return <-err
}

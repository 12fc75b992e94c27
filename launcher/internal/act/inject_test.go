package act

import (
	"os"
	"testing"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// An agent that answers each word before it reads the next one is told of all workers of a large run.
func TestManyWorkers(t *testing.T) {
	l, err := socket.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Remove()
	defer l.Close()
	heard := make(chan int, 1)
	go func() {
		n := 0
		defer func() { heard <- n }()
		nc, err := l.Accept()
		if err != nil || l.Admit(nc) != nil {
			return
		}
		conn := control.New(nc)
		defer conn.Close()
		for {
			m, err := conn.Receive(t.Context())
			if err != nil || conn.Send(m) != nil {
				return
			}
			n++
		}
	}()
	const workers = 1000
	targets := make([]rundir.Process, workers)
	for i := range targets {
		targets[i] = rundir.Process{ID: i, PID: os.Getpid()}
	}
	done := 0
	in := Injection{Name: control.Thaw, do: func(chaos.Process) error { done++; return nil }, tell: true}
	if err := in.signal(t.Context(), l.Path(), targets); err != nil || done != workers {
		t.Errorf("%d workers: %v", done, err)
	}
	if n := <-heard; n != workers {
		t.Errorf("the agent has heard of %d workers", n)
	}
}

package host

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// commands takes in what other processes of this user have to say about a run: a
// control.Stop, a control.Add, or a control.Harm that tells of harm to one of its workers. They find the socket
// in workers.json of the run directory.
type commands struct {
	dir      string
	listener *net.UnixListener
	talks    sync.WaitGroup
}

func listenForCommands() (*commands, error) {
	dir, err := socketDir()
	if err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, socketName), Net: "unix"})
	if err != nil {
		removeSocketDir(dir)
		return nil, err
	}
	return &commands{dir: dir, listener: l}, nil
}

func (c *commands) socket() string { return filepath.Join(c.dir, socketName) }

// serve hands messages to post until close is called.
func (c *commands) serve(ctx context.Context, post func(event) bool) {
	defer c.talks.Wait()
	for {
		nc, err := c.listener.Accept()
		if err != nil {
			return
		}
		c.talks.Go(func() {
			conn := control.New(nc)
			defer conn.Close()
			for {
				m, err := conn.Receive(ctx)
				if err != nil {
					return
				}
				var e event
				answer := m // it says that it was heard
				switch m := m.(type) {
				case control.Stop:
					e = stopAsked{Stopped}
				case control.Harm:
					e = harmOf(harmed{worker: -1, id: m.Worker}, m)
				case control.Add:
					e = addAsked{m.N, func(ids []int, refusal string) { answer = control.Added{Workers: ids, Refusal: refusal} }}
				default:
					return
				}
				heard := make(chan struct{})
				if !post(heardOf{e, heard}) {
					return
				}
				<-heard
				if conn.Send(answer) != nil {
					return
				}
			}
		})
	}
}

// ForgetSocket removes the socket that workers.json of a run directory names, if the process
// that it belongs to is no more.
func ForgetSocket(runDir string) {
	run, err := rundir.ReadWorkers(runDir)
	if err != nil {
		return
	}
	dir := filepath.Dir(run.Agent)
	if filepath.Base(run.Agent) != socketName || !socketDirs.MatchString(filepath.Base(dir)) {
		return
	}
	if lock := lockDir(dir); lock != nil {
		_ = os.RemoveAll(dir) // what is left harms nobody
		_ = lock.Close()
	}
}

// harmOf is what a session is told of harm to h.worker.
func harmOf(h harmed, m control.Harm) event {
	if m.Kind != control.Thaw {
		h.at = stamped(m.At)
	}
	return h
}

func (c *commands) close() error {
	defer removeSocketDir(c.dir)
	return c.listener.Close()
}

package agent

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/soliton-train/soliton/internal/control"
)

// commands takes in what other processes of this user have to say about a run: a
// control.Stop, or a control.Harm that tells of harm to one of its workers. They find the socket
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
		_ = os.RemoveAll(dir)
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
				switch m := m.(type) {
				case control.Stop:
					e = stopAsked{Stopped}
				case control.Harm:
					e = harmOf(m.Worker, m)
				default:
					return
				}
				if !post(e) || conn.Send(m) != nil { // the answer says that it was heard
					return
				}
			}
		})
	}
}

// harmOf is what a session is told of harm.
func harmOf(id int, m control.Harm) event {
	if m.Kind == control.Thaw {
		return harmed{worker: id}
	}
	return harmed{id, stamped(m.At)}
}

func (c *commands) close() error {
	return errors.Join(c.listener.Close(), os.RemoveAll(c.dir))
}

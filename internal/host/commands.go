package host

import (
	"context"
	"sync"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// commands takes in what other processes of this user have to say about a run: [control.Stop], [control.Add], or [control.Fault]
// for a fault that was injected into a worker. They find the socket in workers.json of the run directory, and beside it the key
// that they prove to hold.
type commands struct {
	listener *socket.Listener
	talks    sync.WaitGroup
}

func listenForCommands() (*commands, error) {
	l, err := socket.Listen()
	if err != nil {
		return nil, err
	}
	return &commands{listener: l}, nil
}

// serve hands messages to post until close is called.
func (c *commands) serve(ctx context.Context, post func(session.Event) bool) {
	defer c.talks.Wait()
	for {
		nc, err := auth.Accept(ctx, c.listener)
		if err != nil {
			return
		}
		c.talks.Go(func() {
			conn := control.New(nc)
			defer conn.Close()
			if c.listener.Admit(nc) != nil {
				return // a caller without the key
			}
			for {
				m, err := conn.Receive(ctx)
				if err != nil {
					return
				}
				var e session.Event
				var answer session.AnswerAdd
				switch m := m.(type) {
				case control.Stop:
					e = session.StopAsked{Reason: session.Stopped}
				case control.Fault:
					e = stampedFault(session.FaultStamped{Worker: -1, ID: m.Worker}, m)
				case control.Add:
					e = session.AddWorkers{N: m.N}
				default:
					return
				}
				heard := make(chan struct{})
				if !post(heardOf{e, &answer, heard}) {
					return
				}
				select {
				case <-heard:
				case <-ctx.Done():
					return
				}
				if _, add := m.(control.Add); add {
					m = control.Added{Workers: answer.IDs, Refusal: answer.Refusal}
				} // else the same says that it was heard
				if conn.Send(m) != nil {
					return
				}
			}
		})
	}
}

// ForgetSockets removes the sockets of a host's process that has exited, perhaps before its workers had connected.
func ForgetSockets(pid int) { socket.ForgetProcess(pid) }

// A Door takes in what other processes have to say about a run before it has a leader: it passes on stops, and refuses the rest.
type Door struct {
	commands *commands
	leave    context.CancelFunc
	served   sync.WaitGroup
}

// OpenDoor opens the door of a run, which the leader replaces in workers.json.
func OpenDoor(dir *rundir.Dir, stop func()) (*Door, error) {
	c, err := listenForCommands()
	if err != nil {
		return nil, err
	}
	if err := dir.WriteWorkers(rundir.Workers{Agent: c.listener.Path()}); err != nil {
		_ = c.close() // the error that counts is the one before
		return nil, &session.FileError{Err: err}
	}
	ctx, leave := context.WithCancel(context.Background())
	d := &Door{commands: c, leave: leave}
	d.served.Go(func() {
		c.serve(ctx, func(e session.Event) bool {
			h := e.(heardOf)
			switch h.Event.(type) {
			case session.StopAsked:
				stop()
			case session.AddWorkers:
				h.answer.Refusal = "the run has not begun yet"
			}
			close(h.done)
			return true
		})
	})
	return d, nil
}

// Close closes the door. The leader's own stays. It may be called again.
func (d *Door) Close() {
	d.leave()
	_ = d.commands.close() // a socket that is left behind is removed by the next process
	d.served.Wait()
}

// ForgetSocket removes the socket that workers.json of a run directory names, unless the process that made it lives.
func ForgetSocket(runDir string) {
	if run, err := rundir.ReadWorkers(runDir); err == nil {
		socket.Forget(run.Agent)
	}
}

// stampedFault returns what a session is told of a fault of f.Worker.
func stampedFault(f session.FaultStamped, m control.Fault) session.Event {
	if m.Kind != control.Thaw {
		f.At = stamped(m.At)
	}
	return f
}

func (c *commands) close() error {
	defer c.listener.Remove()
	return c.listener.Close()
}

// Package spawn starts workers, as child processes or as functions of this process, and says how they end.
package spawn

import (
	"context"
	"net"
	"os"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// Worker is a worker that was started.
type Worker interface {
	// Conn returns the connection to the worker, which belongs to the caller. It ends when the worker exits.
	Conn() net.Conn

	// Exited is closed when the worker does not run any more. From then on Status says how it ended, and its connection has only
	// what it has sent. The kernel may still have to free the memory of a killed process.
	Exited() <-chan struct{}
	Status() session.Status

	// Halted has true when a signal such as SIGSTOP has stopped the process, and false when it was continued; what is not taken is
	// replaced. It is nil where the system does not tell.
	Halted() <-chan bool
	// Stopped reports whether the process is stopped now.
	Stopped() bool
	// Threads returns what the threads of the process do, or false where the system does not tell, or the worker is another
	// process than the one with that number.
	Threads(pid int) (map[int]platform.Thread, bool)

	// Program returns the path of the file that the worker runs, "" for a function of this process.
	Program() string

	// LastOutput returns the last lines that the worker printed, "" for a worker without a log.
	LastOutput() string

	// Leave asks the worker to leave its run, and does not wait. A function of this process is not asked.
	Leave()

	// Kill ends the worker at once, and does not wait.
	Kill()

	// Quit has the worker write its stacks into its log, and kills it when it has exited or [timing.Stacks] later. It does not
	// wait. For a function of this process it is Kill.
	Quit()
}

// InProcess starts f as a worker: it gets its end of the connection, and a context that ends when the worker is killed. The
// worker exits when f returns. A panic in f is not caught.
func InProcess(f func(ctx context.Context, conn net.Conn)) Worker {
	agent, worker := net.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	w := &inProcess{conn: agent, cancel: cancel, exited: make(chan struct{})}
	go func() {
		defer close(w.exited)
		defer cancel()
		defer worker.Close()
		f(ctx, worker)
	}()
	return w
}

type inProcess struct {
	conn   net.Conn
	cancel context.CancelFunc
	exited chan struct{}
}

func (w *inProcess) Conn() net.Conn          { return w.conn }
func (w *inProcess) Exited() <-chan struct{} { return w.exited }
func (w *inProcess) Halted() <-chan bool     { return nil }
func (w *inProcess) Stopped() bool           { return false }
func (w *inProcess) Threads(int) (map[int]platform.Thread, bool) {
	return nil, false
}
func (w *inProcess) Status() session.Status { return session.Status{Text: "returned"} }
func (w *inProcess) Program() string        { return "" }
func (w *inProcess) LastOutput() string     { return "" }
func (w *inProcess) Leave()                 {}
func (w *inProcess) Kill()                  { w.cancel(); _ = w.conn.Close() }
func (w *inProcess) Quit()                  { w.Kill() }

// Command describes a worker process.
type Command struct {
	Path        string   // the program; also its argv[0]
	Args        []string // its flags
	WorkerID    int
	Incarnation int
	Links       string // folder of the sockets at which workers of this host reach each other
	Addr        string // IP address at which workers of other hosts reach it; "" where there are none
	Ports       ports.Range
	Key         auth.Key // of the run
	Withhold    []string // environment variables of this process that it does not get: secrets that are not for the program

	// Log gets the standard output and error of the process, and is closed when the process has exited; nil drops them.
	Log *os.File
}

// Starter returns a function that starts processes like c. If c has no key, it draws one for all of them. log, which may be nil,
// opens the log of each.
func Starter(c Command, log func(worker, incarnation int) (*os.File, error)) func(worker, incarnation int) (Worker, error) {
	if c.Key == nil {
		c.Key = auth.NewKey()
	}
	return func(worker, incarnation int) (w Worker, err error) {
		c := c
		c.WorkerID, c.Incarnation = worker, incarnation
		if log != nil {
			if c.Log, err = log(worker, incarnation); err != nil {
				return nil, err
			}
		}
		if w, err = Start(c); err != nil && c.Log != nil {
			_ = c.Log.Close()
		}
		return w, err
	}
}

// End kills a worker and waits until its process has exited. It does not wait for a function that does not return.
func End(w Worker) {
	w.Kill()
	if p, ok := w.(*process); ok {
		<-p.exited
		AwaitReaped(p)
		_ = p.conn.Close() // if nothing reads from it
	}
}

// AwaitReaped waits until the process of a worker that has exited is reaped, for [timing.Reap] at most.
func AwaitReaped(w Worker) {
	p, ok := w.(*process)
	if !ok {
		return
	}
	timeout := time.NewTimer(timing.Reap)
	defer timeout.Stop()
	select {
	case <-p.reaped:
	case <-timeout.C:
	}
}

package host

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/platform/progress"
)

// Worker is a worker that was started.
type Worker interface {
	// Connect returns the worker's connection. It ends when there is one, when
	// ctx ends, and when the worker does. Serve calls it once.
	Connect(ctx context.Context) (net.Conn, error)

	// Exited is closed when the worker runs no more; from then on Status says how, and what it
	// has sent is all there is to read. Of a process that was killed, the kernel may still have to free what
	// it had.
	Exited() <-chan struct{}
	Status() session.Status

	// Program returns the path of the file the worker runs, "" where it is
	// this process's own.
	Program() string

	// LastOutput returns the last lines the worker printed, "" where nobody
	// keeps them.
	LastOutput() string

	// Kill ends the worker at once, and does not wait.
	Kill()
}

// InProcess starts f as the worker: it gets its end of the connection, and a
// context that ends when the worker is killed. It has ended when f returns. A
// panic in f is not caught.
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

func (w *inProcess) Connect(context.Context) (net.Conn, error) { return w.conn, nil }
func (w *inProcess) Exited() <-chan struct{}                   { return w.exited }
func (w *inProcess) Status() session.Status                    { return session.Status{Text: "returned"} }
func (w *inProcess) Program() string                           { return "" }
func (w *inProcess) LastOutput() string                        { return "" }
func (w *inProcess) Kill()                                     { w.cancel(); _ = w.conn.Close() }

// Command describes a worker process.
type Command struct {
	Path        string   // the program; also its argv[0]
	Args        []string // its flags
	WorkerID    int
	Incarnation int
	Addr        string // IP address at which other workers reach it; "": one of the loopback interface

	// Log gets the standard output and error of the process, and is closed
	// when the process has ended; nil drops them.
	Log *os.File
}

// Starter returns the function that starts processes like c. log, which may be nil, opens the log of each.
func Starter(c Command, log func(worker, incarnation int) (*os.File, error)) func(worker, incarnation int) (Worker, error) {
	return func(worker, incarnation int) (w Worker, err error) {
		c := c
		c.WorkerID, c.Incarnation = worker, incarnation
		if log != nil {
			if c.Log, err = log(worker, incarnation); err != nil {
				return nil, err
			}
		}
		if w, err = StartProcess(c); err != nil && c.Log != nil {
			_ = c.Log.Close()
		}
		return w, err
	}
}

// end kills a worker and waits for the end of its process. A function of this process that does not return is
// left to itself.
func end(w Worker) {
	w.Kill()
	if p, ok := w.(*process); ok {
		<-p.exited
		waitReaped(p)
		p.disconnect()
	}
}

// waitReaped waits until nothing is left of a worker that has ended. One that cannot
// be reaped in time is left to itself.
func waitReaped(w Worker) {
	p, ok := w.(*process)
	if !ok {
		return
	}
	patience := time.NewTimer(timing.Reap)
	defer patience.Stop()
	select {
	case <-p.reaped:
	case <-patience.C:
	}
}

// StartProcess starts a worker process: in a process group of its own, so that
// a terminal's Ctrl-C does not reach it, to be killed by the kernel when this process dies, and
// with a socket to connect to in its environment.
func StartProcess(c Command) (Worker, error) {
	p, err := launch(c)
	if err != nil {
		return nil, err
	}
	p.attend()
	go p.reap()
	return p, nil
}

// launch starts the process, which is still to be attended and reaped.
func launch(c Command) (*process, error) {
	dir, err := socketDir()
	if err != nil {
		return nil, err
	}
	id := control.Identity{Socket: filepath.Join(dir, socketName), WorkerID: c.WorkerID, Incarnation: c.Incarnation, Addr: c.Addr}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: id.Socket, Net: "unix"})
	if err != nil {
		removeSocketDir(dir)
		return nil, fmt.Errorf("agent: the worker's socket: %w", err)
	}
	cmd := &exec.Cmd{
		Path:        c.Path,
		Args:        append([]string{c.Path}, c.Args...),
		SysProcAttr: platform.ChildAttr(syscall.SIGKILL),
	}
	logFrom := int64(0)
	if c.Log != nil { // a nil *os.File would be a non-nil io.Writer
		cmd.Stdout, cmd.Stderr = c.Log, c.Log
		if info, err := c.Log.Stat(); err == nil {
			logFrom = info.Size()
		}
	}
	// Without a record, the worker does its work all the same, and without a canary.
	record, file, err := progress.Create()
	if err == nil {
		id.Progress = 3 + len(cmd.ExtraFiles)
		cmd.ExtraFiles = append(cmd.ExtraFiles, file)
	}
	var birds []*os.File
	for i := range id.Canaries {
		if bird, nest, err := platform.NewCanary(); err == nil {
			birds = append(birds, bird)
			id.Canaries[i] = 3 + len(cmd.ExtraFiles)
			cmd.ExtraFiles = append(cmd.ExtraFiles, nest)
		}
	}
	if len(birds) < len(id.Canaries) {
		clear(id.Canaries[:])
	}
	cmd.Env = append(os.Environ(), id.Environ()...)
	err = startOnKeptThread(cmd)
	for _, f := range cmd.ExtraFiles {
		_ = f.Close()
	}
	if err != nil {
		closeAll(birds)
		_ = record.Close()
		_ = l.Close()
		removeSocketDir(dir)
		return nil, err
	}
	return &process{
		cmd: cmd, dir: dir, log: c.Log, logFrom: logFrom, listener: l, progress: record, canaries: birds,
		exited: make(chan struct{}), reaped: make(chan struct{}),
	}, nil
}

// starts takes functions to the one thread that starts processes. The goroutine behind
// it has no end: when its thread ended, the kernel would kill every worker
// it started.
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

func startOnKeptThread(cmd *exec.Cmd) error {
	err := make(chan error, 1)
	starts() <- func() { err <- cmd.Start() }
	return <-err
}

type process struct {
	cmd      *exec.Cmd
	dir      string // of the socket, until the worker is connected
	log      *os.File
	logFrom  int64 // where its part of the log begins
	listener *net.UnixListener
	progress *progress.Record
	canaries []*os.File // the first end of one tells of the process's; none: nothing does
	watch    sync.WaitGroup
	exited   chan struct{}
	reaped   chan struct{}

	mu     sync.Mutex
	conn   net.Conn       // of the worker, once it is connected
	ended  bool           // exited is closed, or about to be
	dead   bool           // the process is reaped and its number may be someone else's
	status session.Status // does not change once exited is closed
	last   string         // the same
}

// reap waits for the end of the process, ends what is left of its group, and cleans up.
func (p *process) reap() {
	defer close(p.reaped)
	pid := p.cmd.Process.Pid
	platform.WaitExit(pid)
	p.mu.Lock()
	_ = unix.Kill(-pid, unix.SIGKILL)
	known := p.ended
	p.mu.Unlock()
	if known {
		time.Sleep(timing.Zombie)
	}
	p.mu.Lock()
	_ = p.cmd.Wait()
	p.dead = true
	known = p.ended
	p.ended = true
	p.mu.Unlock()
	closeAll(p.canaries) // ends the watch, if a child of the process has the other end
	p.watch.Wait()

	if !known {
		defer close(p.exited)
		state := p.cmd.ProcessState
		p.status = session.Status{Code: state.ExitCode(), Text: state.String(), Progress: p.progress.State()}
		if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			switch ws.Signal() {
			case syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGILL, syscall.SIGFPE, syscall.SIGABRT, syscall.SIGTRAP, syscall.SIGSYS:
				p.status.Fault = true
			}
		}
	}
	_ = p.progress.Close()
	// A worker may have connected, spoken and died before anyone accepted: so its
	// connection must still be taken, and the listener stays. This one
	// queues behind it, and ends the wait for a worker that never came.
	if conn, err := net.Dial("unix", filepath.Join(p.dir, socketName)); err == nil {
		_ = conn.Close()
	}
	removeSocketDir(p.dir)
	if p.log != nil {
		if !known {
			p.last = lastLines(p.log, p.logFrom, 20)
			p.status.Panicked = p.status.Code == 2 && strings.HasPrefix(p.last, "panic: ")
		}
		_ = p.log.Close()
	}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// attend begins to watch the canaries, if there are any.
func (p *process) attend() {
	for _, bird := range p.canaries {
		p.watch.Go(func() { p.watchCanary(bird) })
	}
}

// watchCanary waits for a canary's end. If that is because the process was killed, the worker has ended,
// although the process may need the processor for a long time yet. All other ends, of which
// more is to be known, are left to reap.
func (p *process) watchCanary(bird *os.File) {
	if _, err := bird.Read(make([]byte, 1)); err != io.EOF {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	conn, ok := p.conn.(*net.UnixConn)
	if p.ended || !ok || !platform.Killed(p.cmd.Process.Pid) {
		return
	}
	p.ended = true
	// To give its memory back takes milliseconds of a processor, which others have better use for now.
	_ = unix.Setpriority(unix.PRIO_PGRP, p.cmd.Process.Pid, 19)
	p.status = session.Status{Code: -1, Text: "signal: " + syscall.SIGKILL.String(), Progress: p.progress.State()}
	if p.log != nil {
		p.last = lastLines(p.log, p.logFrom, 20)
	}
	// The connection is closed only when the last thread has ended. What has come is still
	// read, and nothing more comes.
	_ = conn.CloseRead()
	close(p.exited)
}

func (p *process) Connect(ctx context.Context) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = p.listener.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	conn, err := p.listener.Accept()
	// One worker, one connection: nobody else finds a socket. And nothing is left
	// behind by an agent that is killed from here on.
	_ = p.listener.Close()
	removeSocketDir(p.dir)
	p.mu.Lock()
	p.conn = conn
	p.mu.Unlock()
	return conn, err
}

// disconnect drops the listener of a worker that nobody connects to.
func (p *process) disconnect() { _ = p.listener.Close() }

func (p *process) Exited() <-chan struct{} { return p.exited }
func (p *process) Status() session.Status  { return p.status }
func (p *process) LastOutput() string      { return p.last }

// Program returns the file that really runs, also where another one has taken
// its name.
func (p *process) Program() string { return platform.Executable(p.cmd.Process.Pid) }

func (p *process) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead {
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
	}
}

const (
	lastSearch = 256 << 10 // how much of a log's end is searched for the cause of a crash
	lastBytes  = 8 << 10   // most that is shown of it
)

// crash returns where the last line begins that begins what Go says of a crash, -1 for none. The stacks
// below it may be long.
func crash(log []byte) int {
	at := -1
	for _, begins := range []string{"panic:", "fatal error:", "runtime: "} {
		if bytes.HasPrefix(log, []byte(begins)) {
			at = max(at, 0)
		}
		if i := bytes.LastIndex(log, []byte("\n"+begins)); i >= 0 {
			at = max(at, i+1)
		}
	}
	return at
}

// lastLines returns the last n lines of a file after the first from bytes, at most 8 KiB of them; of a program that crashed,
// the n lines that begin with the cause.
func lastLines(f *os.File, from int64, n int) string {
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	buf := make([]byte, min(max(0, info.Size()-from), lastSearch))
	got, _ := f.ReadAt(buf, info.Size()-int64(len(buf)))
	buf = bytes.TrimRight(buf[:got], "\n")
	if at := crash(buf); at >= 0 {
		buf = buf[at:]
		lines := bytes.Split(buf[:min(len(buf), lastBytes)], []byte("\n"))
		return string(bytes.Join(lines[:min(len(lines), n)], []byte("\n")))
	}
	lines := bytes.Split(buf[max(0, len(buf)-lastBytes):], []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-n):], []byte("\n")))
}

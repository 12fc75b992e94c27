package spawn

import (
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
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

// Start starts a worker process. It has a process group of its own, so a terminal's Ctrl-C does not reach it, inherits its
// connection to this process, and is killed by the kernel when this process dies.
func Start(c Command) (Worker, error) {
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
	conn, theirs, err := control.Pair(c.Key)
	if err != nil {
		return nil, err
	}
	id := control.Identity{Conn: 3, WorkerID: c.WorkerID, Incarnation: c.Incarnation, Links: c.Links, Addr: c.Addr, Ports: c.Ports}
	cmd := &exec.Cmd{
		Path:        c.Path,
		Args:        append([]string{c.Path}, c.Args...),
		ExtraFiles:  []*os.File{theirs},
		SysProcAttr: platform.ChildAttr(syscall.SIGKILL),
	}
	logFrom := int64(0)
	if c.Log != nil { // a nil *os.File would be a non-nil io.Writer
		cmd.Stdout, cmd.Stderr = c.Log, c.Log
		if info, err := c.Log.Stat(); err == nil {
			logFrom = info.Size()
		}
	}
	// A worker trains without a record of its progress, and without canaries, too.
	record, file, err := progress.Create()
	if err == nil {
		id.Progress = 3 + len(cmd.ExtraFiles)
		cmd.ExtraFiles = append(cmd.ExtraFiles, file)
	}
	var canaries []*os.File
	for i := range id.Canaries {
		if ours, theirs, err := platform.NewCanary(); err == nil {
			canaries = append(canaries, ours)
			id.Canaries[i] = 3 + len(cmd.ExtraFiles)
			cmd.ExtraFiles = append(cmd.ExtraFiles, theirs)
		}
	}
	if len(canaries) < len(id.Canaries) {
		clear(id.Canaries[:])
	}
	cmd.Env = append(environ(c.Withhold), id.Environ()...)
	err = platform.StartChild(cmd)
	for _, f := range cmd.ExtraFiles {
		_ = f.Close()
	}
	if err != nil {
		closeAll(canaries)
		_ = record.Close()
		_ = conn.Close()
		return nil, err
	}
	return &process{
		cmd: cmd, log: c.Log, logFrom: logFrom, conn: conn.(*net.UnixConn), progress: record, canaries: canaries,
		halted: make(chan bool, 1), exited: make(chan struct{}), reaped: make(chan struct{}),
	}, nil
}

// environ returns the environment of this process without some variables.
func environ(without []string) []string {
	return slices.DeleteFunc(os.Environ(), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return slices.Contains(without, name)
	})
}

type process struct {
	cmd      *exec.Cmd
	log      *os.File
	logFrom  int64 // where its part of the log begins
	conn     *net.UnixConn
	progress *progress.Record
	canaries []*os.File // empty where the platform has none
	watch    sync.WaitGroup
	halted   chan bool // the newest
	exited   chan struct{}
	reaped   chan struct{}

	mu     sync.Mutex
	ended  bool           // exited is closed, or about to be
	dead   bool           // the process is reaped, and its number may belong to another one
	status session.Status // does not change once exited is closed
	last   string         // the same
	quit   *time.Timer    // kills it after SIGQUIT
}

// reap waits until the process exits, kills what is left of its group, and cleans up.
func (p *process) reap() {
	defer close(p.reaped)
	pid := p.cmd.Process.Pid
	platform.WaitExit(pid, p.halt)
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
	if p.quit != nil {
		p.quit.Stop()
	}
	known = p.ended
	p.ended = true
	p.mu.Unlock()
	closeAll(p.canaries) // ends the watch where a child of the process holds the other end
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
	_ = p.conn.CloseRead() // a child of the process may hold the other end
	if p.log != nil {
		if !known {
			p.last = LastLines(p.log, p.logFrom, 20)
			p.status.Panicked = p.status.Code == 2 && strings.HasPrefix(p.last, "panic: ")
			if outOfMemory(p.last) {
				p.status.Text += ", out of memory"
			} else if p.status.Fault && p.last == "" { // Go programs say why they crash, once their runtime has memory
				p.status.Text += ", without a word, as where ulimit -v leaves too little memory"
			}
		}
		_ = p.log.Close()
	}
}

// halt takes in that the process was stopped by a signal, or continued. Only reap calls it.
func (p *process) halt(stopped bool) {
	select {
	case <-p.halted:
	default:
	}
	p.halted <- stopped
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// attend begins to watch the canaries.
func (p *process) attend() {
	for _, canary := range p.canaries {
		p.watch.Go(func() { p.watchCanary(canary) })
	}
}

// watchCanary waits until a canary thread ends. If the process was killed, the worker has exited, although the process may need
// the processor for a long time yet. All other exits are left to reap, which learns more of them.
func (p *process) watchCanary(canary *os.File) {
	if _, err := canary.Read(make([]byte, 1)); err != io.EOF {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended || !platform.Killed(p.cmd.Process.Pid) {
		return
	}
	p.ended = true
	// Freeing its memory takes milliseconds of a processor that the recovery needs.
	_ = unix.Setpriority(unix.PRIO_PGRP, p.cmd.Process.Pid, 19)
	p.status = session.Status{Code: -1, Text: "signal: " + syscall.SIGKILL.String(), Progress: p.progress.State()}
	if p.log != nil {
		p.last = LastLines(p.log, p.logFrom, 20)
	}
	// The kernel closes the connection only when the last thread has ended. What has arrived is still read.
	_ = p.conn.CloseRead()
	close(p.exited)
}

func (p *process) Conn() net.Conn          { return p.conn }
func (p *process) Exited() <-chan struct{} { return p.exited }
func (p *process) Halted() <-chan bool     { return p.halted }

// Stopped implements [Worker].
func (p *process) Stopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.dead && platform.Stopped(p.cmd.Process.Pid)
}

// Threads implements [Worker].
func (p *process) Threads(pid int) (map[int]platform.Thread, bool) {
	if pid != p.cmd.Process.Pid { // of a program that started the worker, or in another PID namespace
		return nil, false
	}
	threads, ok := platform.Threads(pid) // may take long on a busy machine, so without the lock
	p.mu.Lock()
	defer p.mu.Unlock()
	return threads, ok && !p.dead // else it may have been another process by then
}

func (p *process) Status() session.Status { return p.status }
func (p *process) LastOutput() string     { return p.last }

// Program returns the file that runs, even if another file has its name by now.
func (p *process) Program() string { return platform.Executable(p.cmd.Process.Pid) }

func (p *process) Leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead {
		_ = unix.Kill(p.cmd.Process.Pid, unix.SIGTERM)
	}
}

func (p *process) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead {
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
	}
}

func (p *process) Quit() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return
	}
	_ = unix.Kill(p.cmd.Process.Pid, unix.SIGQUIT)
	if p.quit == nil {
		p.quit = time.AfterFunc(timing.Stacks, p.Kill)
	}
}

const (
	lastSearch = 256 << 10 // how much of a log's end is searched for the cause of a crash
	lastBytes  = 8 << 10   // bytes of it that are shown, at most
)

// crashes begin Go's reports of crashes, and of the signals that end a Go program with one, and Python's.
var crashes = []string{
	"Fatal Python error: ", "panic:", "fatal error:", "runtime: ", "SIGQUIT: ", "SIGILL: ", "SIGTRAP: ", "SIGABRT: ", "SIGBUS: ", "SIGFPE: ", "SIGSEGV: ", "SIGSTKFLT: ", "SIGSYS: ", "SIGEMT: ",
}

// crash returns the offset of the last line that begins Go's report of a crash, -1 for none. The stacks below it may be long.
func crash(log []byte) int {
	at := -1
	for _, begins := range crashes {
		if bytes.HasPrefix(log, []byte(begins)) {
			at = max(at, 0)
		}
		if i := bytes.LastIndex(log, []byte("\n"+begins)); i >= 0 {
			at = max(at, i+1)
		}
	}
	return at
}

// outOfMemory reports whether the last lines of a log are Go's report that memory ran out, which a limit such as ulimit -v can
// cause anywhere, even before main.
func outOfMemory(last string) bool {
	first, _, _ := strings.Cut(last, "\n")
	return strings.HasPrefix(first, "fatal error: ") && slices.ContainsFunc([]string{"out of memory", "cannot allocate", "failed to reserve"},
		func(cause string) bool { return strings.Contains(first, cause) })
}

// LastLines returns the last n lines of a file after an offset, at most lastBytes of them. After a crash it returns the n lines
// that begin with its cause.
func LastLines(f *os.File, from int64, n int) string {
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

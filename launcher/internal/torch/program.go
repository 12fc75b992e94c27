package torch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/trainer"
)

// maxDeaths is how often the computing process exits in one call before the run ends.
const maxDeaths = 3

// Program is a Python program in its processes.
type Program struct {
	command command
	memory  *memory
	output  *output

	mu sync.Mutex // one goroutine at a time speaks with the processes: that which computes, or that which calls onStep

	first    *connection  // to the process that forks the others
	process  *exec.Cmd    // that process
	computer *connection  // to the process that computes; nil for none
	readers  chan *reader // that are free; nil where the process that computes reads
	ended    string       // how the process that computed before has exited

	values *os.File // first values of the run, which its directory may lose; nil for none

	told  []byte // the description, as JSON
	job   *description
	found map[string][]byte // what the program has looked for, and the answers

	params, grads []block // of each layer, once it is held
	number        uint64  // of the newest pass
	passes        map[uint64]*pass
	din           block // that the last backward pass has returned
}

// command says how to start the first process.
type command struct {
	python string // interpreter
	folder string // with the package soliton
	setup  setup
}

// setup is the first request.
type setup struct {
	Script string   `json:"script"`
	Args   []string `json:"args"`
	Seed   uint64   `json:"seed"` // of the generators when the job is made

	Rates    int    `json:"rates"`     // steps of a function as the learning rate; 0: those of the job
	InitFrom string `json:"init_from"` // in place of the job's; "": the job's
	First    string `json:"first"`     // file of the first values of all processes of the run, which the first one writes; "": each has its own

	Nice int `json:"nice"` // of Python processes, beyond that of the worker
}

// failure is an exception of the program.
type failure struct {
	Text    string `json:"text"`
	Trace   string `json:"trace"`
	Refused bool   `json:"refused"` // the job is not valid
	Exit    *int   `json:"exit"`    // the program has called sys.exit
}

func (f *failure) Error() string { return f.Text }

// lostError says that a Python process has exited, or cannot be spoken with.
type lostError struct {
	err  error
	call string // that it did; "" before one
}

func (e *lostError) Error() string { return e.err.Error() }
func (e *lostError) Unwrap() error { return e.err }

// start starts the program and returns it with its job. Its errors are of type [*failure] where the program is at fault.
func start(c command) (*Program, error) {
	m, err := newMemory(reserved)
	if err != nil {
		return nil, err
	}
	out, err := newOutput(os.Stderr)
	if err != nil {
		m.close()
		return nil, err
	}
	p := &Program{command: c, memory: m, output: out, passes: make(map[uint64]*pass)}
	if p.told, err = p.startFirst(); err == nil {
		p.job, err = parse(p.told)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	if at := c.setup.First; at != "" {
		if p.values, err = rundir.Open(at); err != nil && !rundir.IsMissing(err) {
			p.close()
			return nil, err
		}
	}
	p.params, p.grads = make([]block, len(p.job.Layers)), make([]block, len(p.job.Layers))
	p.openReaders(p.job.Readers)
	return p, nil
}

// close ends the processes.
func (p *Program) close() {
	p.endReaders()
	p.endComputer()
	p.endFirst()
	if p.values != nil {
		_ = p.values.Close() // it was read
	}
	p.output.close()
	p.memory.close()
}

// maxStarts is how often the first process is started where something outside ends it before the job is made.
const maxStarts = 3

// startFirst starts the first process and returns its description of the job.
func (p *Program) startFirst() ([]byte, error) {
	s := p.command.setup
	first, forget, err := p.firstValues()
	if err != nil {
		return nil, err
	}
	defer forget()
	s.First, s.Nice = first, platform.Nice()
	for starts := 1; ; starts++ {
		told, how, err := p.startOnce(s)
		if !errors.As(err, new(*lostError)) {
			return told, err
		}
		if starts == maxStarts || !fromOutside(how) {
			return nil, &failure{Text: fmt.Sprintf("%s exited before the job was made (%v)%s", p.command.python, how, lastWords()), Refused: true}
		}
	}
}

// fromOutside reports whether a process was ended by a signal that is no fault of its program.
func fromOutside(how *os.ProcessState) bool {
	status, ok := how.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && !slices.Contains([]syscall.Signal{syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGILL, syscall.SIGSEGV, syscall.SIGSYS, syscall.SIGTRAP}, status.Signal())
}

// firstValues returns the file of first values for a process that starts, and a function that is called when it has read them. Where the run
// directory is away, it is a copy, or this waits until the run has made the directory again: a process without the file would write another one.
func (p *Program) firstValues() (path string, forget func(), err error) {
	path, forget = p.command.setup.First, func() {}
	missing := func(path string) bool {
		_, err := os.Stat(path)
		return rundir.IsMissing(err)
	}
	if path == "" || !missing(path) || p.values == nil && !missing(filepath.Dir(path)) {
		return path, forget, nil
	}
	if p.values == nil {
		for began := time.Now(); missing(path); time.Sleep(timing.Retry) {
			if time.Since(began) > timing.DirReturns {
				return "", nil, &failure{Text: fmt.Sprintf("the first values of the run, %s, are gone", path)}
			}
		}
		return path, forget, nil
	}
	folder, err := os.MkdirTemp("", "soliton-first-")
	if err != nil {
		return "", nil, err
	}
	forget = func() { _ = os.RemoveAll(folder) }
	path = filepath.Join(folder, First)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = io.Copy(f, io.NewSectionReader(p.values, 0, math.MaxInt64))
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		forget()
		return "", nil, err
	}
	return path, forget, nil
}

// startOnce starts the first process. A lostError comes with how it has exited.
func (p *Program) startOnce(s setup) (told []byte, how *os.ProcessState, err error) {
	conn, theirs, err := platform.SocketPair()
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close() // again, on errors
	cmd := exec.Command(p.command.python, "-m", "soliton._child", "3", "4", "5")
	cmd.ExtraFiles = []*os.File{theirs, p.memory.file, os.Stderr}
	cmd.Stdout, cmd.Stderr = p.output.theirs, p.output.theirs
	cmd.Env = p.command.environ(os.Environ())
	cmd.SysProcAttr = platform.ChildAttr(syscall.SIGKILL)
	cmd.SysProcAttr.Setpgid = false // the agent ends the worker's group, of which this is
	if err := platform.StartChild(cmd); err != nil {
		conn.Close()
		return nil, nil, &failure{Text: fmt.Sprintf("--python %s cannot be started: %v", p.command.python, err), Refused: true}
	}
	theirs.Close() // or its exit would not end our reads
	p.process, p.first = cmd, newConnection(conn, cmd.Process.Pid)
	text, err := json.Marshal(s)
	if err != nil {
		return nil, nil, err
	}
	if err = p.first.ask(askSetup, text, nil); err == nil {
		told, err = p.described()
	}
	if errors.As(err, new(*lostError)) {
		p.endFirst()
		p.output.flush()
	}
	return told, cmd.ProcessState, err
}

// described receives the description of the job, and finds files that the program asks for before.
func (p *Program) described() ([]byte, error) {
	for {
		kind, payload, err := p.first.frame(maxSetup)
		if err != nil || kind != saidLooks {
			return settled(kind, payload, err)
		}
		answer, ok := p.found[string(payload)] // the same for a process that is started again
		if !ok {
			if answer, err = look(payload); err != nil {
				return nil, err
			}
			if p.found == nil {
				p.found = make(map[string][]byte)
			}
			p.found[string(payload)] = answer
		}
		if err := p.first.ask(askFiles, answer, nil); err != nil {
			return nil, err
		}
	}
}

// look finds the files that match patterns, on other machines, too, and returns the answer to the program.
func look(patterns []byte) ([]byte, error) {
	var names []string
	if err := json.Unmarshal(patterns, &names); err != nil {
		return nil, &failure{Text: fmt.Sprintf("the Python process looks for files with a request that cannot be read: %v", err)}
	}
	var found struct {
		Files [][2]string `json:"files"` // as people name them, and where this machine has them
		Error string      `json:"error"`
	}
	files, err := trainer.LocalFiles(names...)
	if err != nil {
		found.Error = err.Error()
	}
	for _, f := range files {
		found.Files = append(found.Files, [2]string{f.Path, f.At})
	}
	answer, err := json.Marshal(found)
	if len(answer) > maxSetup {
		return nil, &failure{Text: fmt.Sprintf("soliton.local_files found %d files, too many to name: put what belongs together into fewer files", len(files))}
	}
	return answer, err
}

// lastWords returns the last line of the worker's log, or the cause of a crash that it tells of, as the end of an error.
func lastWords() string {
	line := strings.TrimSpace(spawn.LastLines(os.Stderr, 0, 1))
	if line == "" {
		return ", without a word"
	}
	return fmt.Sprintf(": %.200s", line)
}

// environ returns the environment of a Python process: in it, all that can change bits has one value, unless the user has set it.
func (c *command) environ(env []string) []string {
	for _, name := range []string{"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"} {
		env = append(env, name+"=1") // PyTorch's own number is Job.threads
	}
	path := c.folder
	if given := os.Getenv("PYTHONPATH"); given != "" {
		path += string(os.PathListSeparator) + given
	}
	return append(env, "PYTHONPATH="+path, "PYTHONHASHSEED=0", "PYTHONUNBUFFERED=1")
}

func (p *Program) endFirst() {
	if p.first != nil {
		p.first.Close()
		_ = p.process.Process.Kill() // it may have exited
		_ = p.process.Wait()
		p.first, p.process = nil, nil
	}
}

func (p *Program) endComputer() {
	if p.computer != nil {
		p.computer.Close() // it exits, or is killed before the next one is forked
		p.computer = nil
	}
}

// computing returns the connection to the process that computes, which it starts if there is none.
func (p *Program) computing() (*connection, error) {
	if p.computer != nil {
		return p.computer, nil
	}
	c, err := p.child(0)
	if err == nil {
		p.computer = c
	}
	return c, err
}

// child returns the connection to a new process: 0 is the one that computes, the others read samples. If the first process is gone, it starts
// another one; p.mu is held.
func (p *Program) child(place int) (*connection, error) {
	c, err := p.fork(place)
	if !errors.As(err, new(*lostError)) {
		return c, err
	}
	p.endFirst()
	told, err := p.startFirst()
	if err != nil {
		return nil, err
	}
	if string(told) != string(p.told) {
		return nil, &failure{Text: "the program was started again, and makes another job now: it must depend on its flags only"}
	}
	return p.fork(place)
}

// fork has the first process fork one, in place of the one before.
func (p *Program) fork(place int) (*connection, error) {
	if p.first == nil {
		return nil, &lostError{err: io.EOF}
	}
	conn, theirs, err := platform.SocketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close() // again, on errors
	var forked struct {
		PID   int    `json:"pid"`
		Ended string `json:"ended"` // how the process before has ended
	}
	err = p.first.ask(askFork, []byte{byte(place)}, theirs)
	theirs.Close()
	if err == nil {
		var said []byte
		if said, err = p.first.receive(maxReply); err == nil {
			err = json.Unmarshal(said, &forked)
		}
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	if place == 0 && forked.Ended != "" {
		p.ended = forked.Ended
	}
	return newConnection(conn, forked.PID), nil
}

// run calls f with the process that computes, and again with another one when that exits. Its errors are of type [*failure], or those
// of f that are no [*lostError].
func (p *Program) run(f func(c *connection) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.output.flush() // what a call has printed is in the log when it returns
	for deaths := 1; ; deaths++ {
		c, err := p.computing()
		if err != nil {
			return err
		}
		err = f(c)
		lost := new(lostError)
		if !errors.As(err, &lost) {
			return err
		}
		if deaths == maxDeaths {
			return &failure{Text: fmt.Sprintf("the Python process exited %d times%s (%s), such as by os._exit, for a lack of memory, or because it wrote to a parameter; its log has what it printed", deaths, lost.call, p.ended)}
		}
		p.endComputer()
	}
}

// call makes one request of numbers, and returns what follows the time in the reply.
func (p *Program) call(ask byte, numbers ...int) (said []byte, err error) {
	err = p.run(func(c *connection) error {
		if err := c.send(ask, numbers...); err != nil {
			return err
		}
		_, said, err = c.done()
		return err
	})
	return said, err
}

// tell makes one request of JSON, which may depend on whether it is made again, and returns what follows the time in the reply.
func (p *Program) tell(ask byte, what func(again bool) any) (said []byte, err error) {
	again := false
	err = p.run(func(c *connection) error {
		text, err := json.Marshal(what(again))
		if err != nil {
			return err
		}
		again = true
		if err := c.ask(ask, text, nil); err != nil {
			return err
		}
		_, said, err = c.done()
		return err
	})
	return said, err
}

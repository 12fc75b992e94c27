package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/chaos"
	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/observe/dashboard"
	"github.com/soliton-train/soliton/internal/observe/telemetry"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ship"
)

// With several hosts the command is no agent itself: it starts one for each host that this machine emulates, or the one of this
// machine (machines.go), shows what the one that leads tells it, and sees that none of them is left behind.

// agentName is the hidden command of an agent's process, and in its argv what people see.
const agentName = "agent"

// assignment is the first line on an agent's standard input.
type assignment struct {
	Hosts  []host.Addr `json:"hosts"`
	Self   int         `json:"self"`
	Secret []byte      `json:"secret"`
	RunDir string      `json:"run_dir"`
	Shown  string      `json:"shown"`
	Store  string      `json:"store"`
	File   string      `json:"file"`
	Args   []string    `json:"args"`

	Settings session.Settings `json:"settings"`
	Workers  int              `json:"workers"`
	Chaos    string           `json:"chaos"`
	Clocks   string           `json:"clocks"` // of --clocks
	SysFS    string           `json:"sysfs"`
	Measures bool             `json:"measures"` // are told to the supervisor
	Ports    ports.Range      `json:"ports"`    // of this machine

	Apart    bool         `json:"apart"`  // the hosts are machines, and each has a run directory of its own
	Enters   *host.Addr   `json:"enters"` // this machine, where the run has begun without it; Self means nothing then
	TieBreak string       `json:"tie_break"`
	Program  ship.Program `json:"program"`
}

// own returns this host.
func (a *assignment) own() host.Addr {
	if a.Enters != nil {
		return *a.Enters
	}
	return a.Hosts[a.Self]
}

// emulated returns the number of hosts that this machine emulates.
func (a *assignment) emulated() int {
	if a.Apart {
		return 1
	}
	return len(a.Hosts)
}

// request is every other line: what the supervisor wants. Its end means that the run is over,
// or the supervisor is.
type request struct {
	Stop  session.Reason `json:"stop,omitempty"`
	Watch *bool          `json:"watch,omitempty"` // a page is open, or none
	Leave bool           `json:"leave,omitempty"` // the run; a signal could end an agent that does not hear it yet

	Rejected []int64 `json:"rejected,omitempty"` // connections at the door since the last one, by auth.Cause
}

// report is a line on an agent's standard output.
type report struct {
	Term   uint64          `json:"term"` // in which the agent led
	Kind   string          `json:"kind"`
	Value  json.RawMessage `json:"value,omitempty"`  // an event of the view or a measure, whose type Kind is
	Text   string          `json:"text,omitempty"`   // output, or what went wrong
	Status int             `json:"status,omitempty"` // the end: exit status,
	Errs   string          `json:"errs,omitempty"`   // and what goes to standard error; Text to standard output
}

// Kinds of reports that have no value.
const (
	reportOutput = "output"
	reportErrors = "errors" // for standard error, of a launcher
	reportClose  = "close"  // the view
	reportEnd    = "end"
	reportFailed = "failed" // the agent cannot work
	reportWaits  = "waits"  // the agent hears of no leader
	reportLeft   = "left"   // its host has left the run
)

// reported are the types of values in reports, by their kinds.
var reported = kindsOf(view.Note(""), view.Begin{}, view.Plan{}, view.Recovered{}, view.Change{}, view.Timeline{}, view.Worker{}, view.Step{},
	view.Unsaved{}, view.Stopping{}, view.End{}, trace.StepDone{}, trace.WorkerStep{}, trace.Traffic{}, trace.Collective{}, trace.RecoveryDone{},
	trace.MirrorLag{}, trace.Device{})

func kindsOf(values ...any) map[string]reflect.Type {
	kinds := make(map[string]reflect.Type)
	for _, v := range values {
		kinds[fmt.Sprintf("%T", v)] = reflect.TypeOf(v)
	}
	return kinds
}

// reportOf returns the report of a value.
func reportOf(term uint64, v any) (report, error) {
	text, err := json.Marshal(v)
	return report{Term: term, Kind: fmt.Sprintf("%T", v), Value: text}, err
}

// value returns the value of a report; nil for none.
func (x report) value() any {
	of := reported[x.Kind]
	if of == nil {
		return nil
	}
	v := reflect.New(of)
	if json.Unmarshal(x.Value, v.Interface()) != nil {
		return nil
	}
	return v.Elem().Interface()
}

// voters is the number of hosts that vote at first: an odd one, at most five. Of two hosts only one may fail.
func voters(hosts int) int {
	switch {
	case hosts > 4:
		return 5
	case hosts > 2:
		return 3
	}
	return 1
}

// emulate trains the program with an agent for each of several hosts on this machine.
func emulate(ctx context.Context, f runFlags, p program, file string, args []string, dir *rundir.Dir, cwd string, v view.View, page *dashboard.Server, stops chan session.Reason, stdout, stderr io.Writer) error {
	own, err := os.Executable()
	if err != nil {
		return cli.Fail(err)
	}
	if f.hosts == 2 {
		v.Show(view.Note("2 hosts: if host-0 fails, the run ends; with 3 any of them may fail"))
	}
	places := emulatedPlaces(f.hosts)
	if err := reach(ctx, places); err != nil {
		return cli.Fail(fmt.Errorf("--emulate-hosts %d: %w", f.hosts, err))
	}
	s := newSupervisor(f, own, places, v, stdout)
	if err := s.measure(ctx, page); err != nil {
		return cli.Fail(err)
	}
	return s.train(dir, page, stops, stderr, func() error { return s.start(p, file, args, dir, cwd) })
}

func newSupervisor(f runFlags, own string, places []place, v view.View, stdout io.Writer) *supervisor {
	s := &supervisor{
		f: f, own: own, places: places, v: v, stdout: f.stage.printed(programOutput(stdout), reportOutput),
		ended: make(chan struct{}), end: make(chan report, 1), gone: make(chan gone, f.hosts), cuts: make(chan chaos.Fault, chaos.MaxFaults),
	}
	s.steps = stepsSeen{faults: f.faults, workers: f.workers, hosts: f.hosts, pick: func(all chaos.Schedule) (faults []chaos.Fault) {
		for h := range f.hosts {
			faults = append(faults, all.Host(h)...)
		}
		return faults
	}}
	return s
}

// train starts the agents, and returns how the run has ended.
func (s *supervisor) train(dir *rundir.Dir, page *dashboard.Server, stops chan session.Reason, stderr io.Writer, start func() error) error {
	f, v, stdout := s.f, s.v, s.stdout
	if err := start(); err != nil {
		s.stopAll()
		dir.Adopt()
		v.Close()
		return cli.Fail(err)
	}
	if page != nil {
		page.Attach(paged{s, dir.Path()})
	}
	var asked []session.Reason
	var late <-chan time.Time // for the leader to end the run at once
	var leaving time.Time     // since then
	living := f.hosts
	var last report
wait:
	for {
		select {
		case reason := <-stops:
			if s.apart && reason == session.Terminated && len(asked) == 0 {
				// Schedulers signal all processes, or a process twice, at once: that counts once.
				if leaving.IsZero() {
					leaving = time.Now()
					s.leave()
				} else if time.Since(leaving) > timing.Reap {
					last = s.goneAlone(gone{left: true})
					break wait
				}
				continue
			}
			s.ask(request{Stop: reason})
			if asked = append(asked, reason); len(asked) == maxStops {
				late = time.After(leaderGrace)
			}
		case <-late:
			last = s.stopped(asked[0])
			break wait
		case last = <-s.end:
			break wait
		case g := <-s.gone:
			if s.apart {
				select {
				case last = <-s.end:
				default:
					last = s.goneAlone(g)
				}
				break wait
			}
			// One that is left says itself when there can be no majority.
			if living--; living == 0 {
				select {
				case last = <-s.end:
				default:
					last = report{Kind: reportEnd, Status: session.ExitFailed, Errs: "launcher: all hosts are gone\n"}
				}
				break wait
			}
		}
	}
	s.stopAll()
	v.Close()
	host.ForgetSocket(dir.Path()) // of an agent that was killed
	dir.Adopt()
	_, _ = io.WriteString(stdout, last.Text)
	_, _ = io.WriteString(stderr, last.Errs)
	if last.Status != session.ExitDone {
		return cli.Exit(last.Status)
	}
	return nil
}

// leaderGrace is how long a leader may take to end a run at once: its workers have to exit.
const leaderGrace = 2 * timing.Reap

// stopped is the end of a run that no leader ends.
func (s *supervisor) stopped(reason session.Reason) report {
	s.mu.Lock()
	defer s.mu.Unlock()
	var text, errs strings.Builder
	out := session.Outcome{Err: &session.StoppedError{Reason: reason, Step: s.step, Steps: s.last, AtOnce: true}, Warning: "no host leads: summary.json is not written"}
	out.Report(&text, &errs, "launcher")
	return report{Kind: reportEnd, Status: out.ExitStatus(), Text: text.String(), Errs: errs.String()}
}

// supervisor keeps the agents' processes.
type supervisor struct {
	f      runFlags
	own    string // path of this command
	places []place
	v      view.View
	stdout io.Writer
	board  *telemetry.Board // nil without metrics
	agents []*agentProcess
	apart  bool      // this machine is one host of several
	gone   chan gone // a host's process has ended
	end    chan report
	ended  chan struct{} // closed when the supervisor listens no more
	tasks  sync.WaitGroup
	cuts   chan chaos.Fault // to the one that cuts hosts off

	mu     sync.Mutex
	term   uint64 // newest
	closed bool   // the view
	early  []string
	steps  stepsSeen // finds faults of hosts
	step   int       // newest that was committed
	last   int       // of the run; 0 before it begins
}

// inject injects the faults of hosts that are due; s.mu is held. The run is not told.
func (s *supervisor) inject(e view.Event) {
	for _, h := range s.steps.next(e) {
		p := s.agents[h.Host]
		switch h.Kind {
		case chaos.KindKillHost:
			p.signal(syscall.SIGKILL)
		case chaos.KindFreezeHost:
			p.signal(syscall.SIGSTOP)
			p.frozen.Store(true)
		case chaos.KindCut:
			s.cuts <- h // there is room
		}
	}
}

// signal sends a signal to an agent and its workers, as nearly at once as can be.
func (p *agentProcess) signal(sig syscall.Signal) {
	_ = p.cmd.Process.Signal(sig)
	for _, w := range platform.Children(p.cmd.Process.Pid) {
		_ = syscall.Kill(w, sig)
	}
}

type agentProcess struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	done  chan struct{}

	frozen atomic.Bool // by --chaos: it does not hear that the run is over
}

func (s *supervisor) start(p program, file string, args []string, dir *rundir.Dir, cwd string) error {
	f := s.f
	store, err := dir.MakeStore()
	if err != nil {
		return err
	}
	a := assignment{
		Secret: newSecret(), RunDir: dir.Path(), Shown: dir.String(), File: file, Args: args,
		Settings: f.settings(p, cwd), Workers: f.workers, Chaos: f.chaos, Clocks: f.clocks, SysFS: f.sysfs, Measures: s.board != nil,
	}
	var files []*os.File
	defer func() { closeAll(files) }()
	for h := range f.hosts {
		host := host.Addr{Name: fmt.Sprintf("host-%d", h), Voter: h < voters(f.hosts)}
		err := s.places[h].at(func() error {
			two, err := listenFor(&host, s.places[h].addr.String(), ports.Range{})
			files = append(files, two...)
			return err
		})
		if err != nil {
			return err
		}
		a.Hosts = append(a.Hosts, host)
	}
	for w := range f.workers {
		h := &a.Hosts[w*f.hosts/f.workers]
		h.Workers = append(h.Workers, w)
	}
	for h := range f.hosts {
		a.Self, a.Store = h, filepath.Join(store, a.Hosts[h].Name)
		if err := s.startAgent(a, files[2*h:2*h+2]); err != nil {
			return err
		}
	}
	return s.startCutting()
}

// listenFor opens the listeners of a host's agent at an IP address, and enters their addresses.
func listenFor(h *host.Addr, ip string, in ports.Range) (files []*os.File, err error) {
	var listen net.ListenConfig
	listen.SetMultipathTCP(false) // see mayCut
	for _, addr := range []*string{&h.Agree, &h.Link} {
		var l net.Listener
		if err := in.Listen(func(port int) (err error) {
			l, err = listen.Listen(context.Background(), "tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
			return err
		}); err != nil {
			return files, err
		}
		*addr = l.Addr().String()
		file, err := l.(*net.TCPListener).File()
		_ = l.Close() // the file is another handle
		if err != nil {
			return files, err
		}
		files = append(files, file)
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

func (s *supervisor) startAgent(a assignment, listeners []*os.File) error {
	log, err := os.OpenFile(filepath.Join(a.RunDir, "log", a.own().Name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(s.own, agentName, a.own().Name)
	cmd.Stderr = log
	cmd.ExtraFiles = listeners
	cmd.Env = os.Environ()
	if s.mayCut() {
		cmd.Env = append(cmd.Env, "GODEBUG="+strings.TrimPrefix(os.Getenv("GODEBUG")+",multipathtcp=0", ","))
	}
	// A terminal's Ctrl-C is for the supervisor.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	start := cmd.Start
	if !s.apart {
		start = func() error { return s.places[a.Self].at(cmd.Start) }
	}
	if err := start(); err != nil {
		return err
	}
	p := &agentProcess{cmd: cmd, stdin: stdin, done: make(chan struct{})}
	s.mu.Lock()
	s.agents = append(s.agents, p)
	s.mu.Unlock()
	s.tasks.Go(func() {
		defer close(p.done)
		left := s.listen(stdout)
		_ = cmd.Wait() // its status does not matter
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGTERM {
			left = true // it was asked to before it could hear that
		}
		last := ""
		if written, err := os.Open(log.Name()); err == nil {
			last = spawn.LastLines(written, 0, 20)
			_ = written.Close()
		}
		host.ForgetSockets(cmd.Process.Pid)
		select {
		case s.gone <- gone{left, last}:
		case <-s.ended:
		}
	})
	text, err := json.Marshal(a)
	if err == nil {
		_, _ = stdin.Write(append(text, '\n')) // it fails if the agent has ended, which counts as the loss of its host
	}
	return err
}

// maxReport bounds a line of an agent.
const maxReport = 16 << 20

// listen takes in the reports of an agent, and returns whether its host has left the run.
func (s *supervisor) listen(r io.Reader) (left bool) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxReport)
	for lines.Scan() {
		var x report
		if json.Unmarshal(lines.Bytes(), &x) == nil {
			left = left || x.Kind == reportLeft
			s.take(x)
		}
	}
	_, _ = io.Copy(io.Discard, r) // after a line that was too long
	return left
}

func (s *supervisor) take(x report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x.Kind == reportFailed {
		s.finish(report{Kind: reportEnd, Status: session.ExitFailed, Errs: "launcher: " + x.Text + "\n"})
		return
	}
	if x.Kind == reportWaits {
		s.v.Show(view.Note(x.Text))
		return
	}
	if x.Kind == reportLeft {
		return
	}
	if x.Term < s.term {
		return // another one leads since
	}
	s.term = x.Term
	switch x.Kind {
	case reportOutput:
		if s.closed {
			_, _ = io.WriteString(s.stdout, x.Text)
		} else {
			s.early = append(s.early, x.Text)
		}
	case reportClose:
		s.closed = true
		s.v.Close()
		for _, text := range s.early {
			_, _ = io.WriteString(s.stdout, text)
		}
		s.early = nil
	case reportEnd:
		s.finish(x)
	default:
		switch v := x.value().(type) {
		case trace.Measure:
			if s.board != nil {
				s.board.Measure(v)
			}
		case view.Event:
			switch v := v.(type) {
			case view.Begin:
				s.last = v.Job.Steps
			case view.Step:
				s.step = v.Step
			}
			s.v.Show(v)
			s.inject(v)
		}
	}
}

func (s *supervisor) finish(x report) {
	select {
	case s.end <- x:
	default: // the first one counts
	}
}

// Watch tells the agents whether a page is open.
func (s *supervisor) Watch(on bool) { s.ask(request{Watch: &on}) }

// ask sends a request to all agents.
func (s *supervisor) ask(r request) {
	for _, p := range s.agents {
		_ = json.NewEncoder(p.stdin).Encode(r) // one that is gone does not hear it
	}
}

// agentGrace is how long agents may take to end their workers and themselves.
const agentGrace = 3 * time.Second

// stopAll ends the agents, which takes their workers along.
func (s *supervisor) stopAll() {
	for _, p := range s.agents {
		_ = p.stdin.Close()
		if p.frozen.Load() {
			_ = p.cmd.Process.Kill() // the kernel ends its workers
		}
	}
	timer := time.NewTimer(agentGrace)
	defer timer.Stop()
	late := false
	for _, p := range s.agents {
		for !late {
			select {
			case <-p.done:
			case <-timer.C:
				late = true
				continue
			}
			break
		}
		if late {
			_ = p.cmd.Process.Kill() // frozen, perhaps; the kernel ends its workers
		}
	}
	close(s.ended)
	s.tasks.Wait()
}

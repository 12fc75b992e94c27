//go:build linux

// Command injector injects faults into the workers of a run from outside, and reads the clock
// just before it does. It knows no more of the run than any other process: its
// run directory, and the processes below its launcher. All it does to them is to send
// them signals.
//
//	injector -run DIR -launcher PID -faults SPEC [-protected] [-tell]
//
// SPEC is a list of KIND:W@TIME, separated by commas and in the order of time:
// KIND is kill (SIGKILL), freeze (SIGSTOP), thaw (SIGCONT) or leave (SIGTERM), W the ID of a
// worker, of which the newest incarnation is meant, and TIME microseconds since the start of
// training, or with + before it since the fault before, or with plan+ before it since a plan went
// live, other than the first one, that was not live at the fault before. With add, which asks the run for more
// workers as launcher add does, W is their number. With killhost, freezehost and thawhost, W is the number of an emulated host:
// its agent and then its workers get the signal. With -protected, each fault waits until every shard has its mirrors
// again after the one before. With -tell, the run is told the time of each kill, for
// its records, in the way of launcher kill.
//
// It writes one JSON line for each fault that it did ([Fault]), for each worker whose
// end it sees ([Gone]), and for each recovery that it sees the end of ([Seen]), and ends
// when its standard input does. As root it runs before all others, so that its clock is
// read when something happens and not when a core is free.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// Fault is a line about a fault.
type Fault struct {
	Fault  string // as in SPEC
	PID    int
	AtNS   int64  // CLOCK_MONOTONIC, just before the signal
	WallNS int64  // the same moment, since 1970
	Error  string `json:",omitempty"` // why it could not be done
}

// Gone is a line about a worker that has ended: the moment at which its parent can
// know.
type Gone struct {
	Gone int // its ID
	AtNS int64
}

// Seen is a line about a recovery.
type Seen struct {
	Recovered json.RawMessage // the line of events.jsonl
	SeenNS    int64           // CLOCK_MONOTONIC, when the line was there
}

func main() {
	run := flag.String("run", "", "run `directory`")
	launcher := flag.Int("launcher", 0, "process ID of the launcher")
	spec := flag.String("faults", "", "what to do and when, see go doc")
	protected := flag.Bool("protected", false, "wait before each fault until every shard has its mirrors again")
	tell := flag.Bool("tell", false, "tell the run the time of each kill, for its records")
	flag.Parse()
	faults, err := parse(*spec)
	if err == nil {
		err = watch(*run, *launcher, faults, *protected, *tell)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "injector:", err)
		os.Exit(1)
	}
}

// fault is one of SPEC.
type fault struct {
	text   string
	signal syscall.Signal
	host   bool
	worker int           // or host
	at     time.Duration // since the start, or since the one before
	after  bool          // the latter
	plan   bool          // since a plan
}

var signals = map[string]syscall.Signal{"kill": syscall.SIGKILL, "freeze": syscall.SIGSTOP, "thaw": syscall.SIGCONT, "leave": syscall.SIGTERM}

// add is the KIND that is no signal.
const add = "add"

func parse(spec string) (faults []fault, err error) {
	if spec == "" {
		return nil, nil
	}
	for text := range strings.SplitSeq(spec, ",") {
		kind, rest, ok1 := strings.Cut(text, ":")
		worker, at, ok2 := strings.Cut(rest, "@")
		kind, host := strings.CutSuffix(kind, "host")
		f := fault{text: text, signal: signals[kind], host: host}
		if at, f.plan = strings.CutPrefix(at, "plan+"); !f.plan {
			at, f.after = strings.CutPrefix(at, "+")
		}
		us, err1 := strconv.ParseUint(at, 10, 40)
		f.worker, err = strconv.Atoi(worker)
		if !ok1 || !ok2 || f.signal == 0 && kind != add || err1 != nil || err != nil || f.worker < 0 {
			return nil, fmt.Errorf("-faults: %q is no KIND:W@MICROSECONDS", text)
		}
		f.at = time.Duration(us) * time.Microsecond
		faults = append(faults, f)
	}
	return faults, nil
}

// watch follows the run and does the faults at their times. One goroutine: a second
// one would have to be woken, too.
func watch(run string, launcher int, faults []fault, protected, tell bool) error {
	runtime.LockOSThread()
	first := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
	_ = unix.SchedSetAttr(0, &first, 0) // where it may not, it waits its turn
	t, err := follow(filepath.Join(run, "events.jsonl"))
	if err != nil || t == nil {
		return err
	}
	defer t.close()
	out := json.NewEncoder(os.Stdout)
	rehearse()
	var began, last, live int64 // of the start, the fault before, and the plan since
	var workers map[int]*worker
	var agent *control.Conn
	bare := false     // some shard has too few mirrors
	injected := false // and the recovery from it is not over
	for {
		timeout := time.Duration(-1)
		if began != 0 && len(faults) > 0 && !(protected && (injected || bare)) && !(faults[0].plan && live == 0) {
			f := faults[0]
			due := began + f.at.Nanoseconds()
			switch {
			case f.after:
				due = last + f.at.Nanoseconds()
			case f.plan:
				due = live + f.at.Nanoseconds()
			}
			if timeout = time.Duration(due - now(unix.CLOCK_MONOTONIC)); timeout <= 0 {
				faults = faults[1:]
				done := Fault{Fault: f.text}
				if w := workers[f.worker]; f.signal != 0 && !f.host && (w == nil || w.ended) {
					if err := more(launcher, workers); err != nil {
						return err
					}
				}
				if f.signal == 0 {
					done.WallNS, done.AtNS = now(unix.CLOCK_REALTIME), now(unix.CLOCK_MONOTONIC)
					err = agent.Send(control.Add{N: f.worker})
				} else if f.host {
					done.PID, err = signalHost(launcher, f.worker, f.signal)
					done.WallNS, done.AtNS = now(unix.CLOCK_REALTIME), now(unix.CLOCK_MONOTONIC)
				} else if w := workers[f.worker]; w != nil {
					done.PID = w.pid
					done.WallNS, done.AtNS = now(unix.CLOCK_REALTIME), now(unix.CLOCK_MONOTONIC)
					err = unix.PidfdSendSignal(w.fd, f.signal, nil, 0)
				} else {
					done.AtNS, err = now(unix.CLOCK_MONOTONIC), errors.New("there is no such worker")
				}
				if err != nil {
					done.Error = err.Error()
				}
				last, live, injected = done.AtNS, 0, true
				if tell && f.signal == syscall.SIGKILL && !f.host && err == nil {
					if err := agent.Send(control.Fault{Kind: "kill", Worker: f.worker, At: done.AtNS}); err != nil {
						done.Error = "the agent was not told: " + err.Error()
					}
				}
				if err := out.Encode(done); err != nil {
					return err
				}
				continue
			}
		}
		lines, ended, err := t.next(timeout, workers)
		seen := now(unix.CLOCK_MONOTONIC)
		if err != nil || ended {
			return err
		}
		for id, w := range workers {
			if w.ended && !w.told {
				w.told = true
				if err := out.Encode(Gone{id, seen}); err != nil {
					return err
				}
			}
		}
		for _, line := range lines {
			var e struct {
				Kind string
				Plan int
			}
			if err := json.Unmarshal(line, &e); err != nil {
				return fmt.Errorf("events.jsonl: %w", err)
			}
			switch e.Kind {
			case "start":
				if began = seen; workers == nil {
					if workers, err = children(launcher); err != nil {
						return err
					}
				}
				adds := slices.ContainsFunc(faults, func(f fault) bool { return f.signal == 0 })
				if (tell || adds) && agent == nil {
					if agent, err = dial(run); err != nil {
						return err
					}
					defer agent.Close()
					for id := range workers { // takes back what was never told: both sides have then used all that a fault needs
						if err := agent.Send(control.Fault{Kind: control.Thaw, Worker: id}); err != nil {
							return err
						}
					}
				}
			case "plan":
				if live == 0 && e.Plan > 1 {
					live = seen
				}
			case "protected":
				bare = false
			case "unprotected":
				bare = true
			case "recovered":
				injected = false
				if err := out.Encode(Seen{line, seen}); err != nil {
					return err
				}
			}
		}
	}
}

// rehearse does once what follows a fault. The first time takes about a millisecond, on a processor that the recovery needs.
func rehearse() {
	for _, line := range []any{Fault{}, Gone{}, Seen{Recovered: json.RawMessage("{}")}} {
		_ = json.NewEncoder(io.Discard).Encode(line)
	}
}

// dial connects to the agent of a run.
func dial(run string) (*control.Conn, error) {
	w, err := rundir.ReadWorkers(run)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timing.Handshake)
	defer cancel()
	conn, err := socket.Dial(ctx, w.Agent)
	if err != nil {
		return nil, fmt.Errorf("the agent of %s: %w", run, err)
	}
	return control.New(conn), nil
}

func now(clock int32) int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		panic(err) // Linux has it
	}
	return ts.Nano()
}

// worker is a worker process. Its descriptor goes on to mean it when its number is
// another's.
type worker struct {
	pid, fd     int
	ended, told bool
}

// below returns the processes whose parent is one of these.
func below(parents ...int) (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue // it has ended
		}
		// What follows the name, which may hold anything, is state and parent.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 2 {
			continue
		}
		if parent, err := strconv.Atoi(fields[1]); err == nil && slices.Contains(parents, parent) {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// agentOf returns the name of the emulated host whose agent the process is.
func agentOf(pid int) (host string, ok bool) {
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	words := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	if len(words) != 3 || words[1] != "agent" {
		return "", false
	}
	return words[2], true
}

// signalHost signals the agent of an emulated host and its workers, and returns the agent.
func signalHost(launcher, host int, signal syscall.Signal) (int, error) {
	agents, err := below(launcher)
	for _, agent := range agents {
		if name, ok := agentOf(agent); !ok || name != fmt.Sprintf("host-%d", host) {
			continue
		}
		workers, err := below(agent)
		for _, pid := range append([]int{agent}, workers...) {
			err = errors.Join(err, syscall.Kill(pid, signal))
		}
		return agent, err
	}
	return 0, errors.Join(err, errors.New("there is no such host"))
}

// children returns the worker processes of a launcher, below it or its agents, by the IDs of the workers.
func children(launcher int) (map[int]*worker, error) {
	agents, err := below(launcher)
	if err != nil {
		return nil, err
	}
	agents = slices.DeleteFunc(agents, func(pid int) bool { _, ok := agentOf(pid); return !ok })
	pids, err := below(append(agents, launcher)...)
	if err != nil {
		return nil, err
	}
	found := make(map[int]*worker)
	for _, pid := range pids {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			continue // it has ended
		}
		for v := range bytes.SplitSeq(env, []byte{0}) {
			if id, ok := bytes.CutPrefix(v, []byte("SOLITON_WORKER=")); ok {
				n, err := strconv.Atoi(string(id))
				if err != nil {
					return nil, fmt.Errorf("process %d: %s", pid, v)
				}
				fd, err := unix.PidfdOpen(pid, 0)
				if err != nil {
					return nil, fmt.Errorf("process %d: %w", pid, err)
				}
				found[n] = &worker{pid: pid, fd: fd}
			}
		}
	}
	return found, nil
}

// more takes in workers that were started since.
func more(parent int, workers map[int]*worker) error {
	found, err := children(parent)
	for id, w := range found {
		if was := workers[id]; was != nil && was.pid == w.pid {
			_ = unix.Close(w.fd)
			continue
		} else if was != nil {
			_ = unix.Close(was.fd)
		}
		workers[id] = w
	}
	return err
}

// tail follows a file of lines that grows, until standard input ends.
type tail struct {
	notes int // inotify
	f     *os.File
	rest  []byte // of a line that is not whole
	first bool
}

// follow waits until the file is there; nil where standard input ends before.
func follow(path string) (*tail, error) {
	t := &tail{first: true}
	var err error
	if t.notes, err = unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC); err != nil {
		return nil, err
	}
	for {
		if t.f, err = os.Open(path); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		ended, err := t.wait(5*time.Millisecond, nil) // the directory may not be there either
		if err != nil || ended {
			return nil, err
		}
	}
	if err == nil {
		_, err = unix.InotifyAddWatch(t.notes, path, unix.IN_MODIFY)
	}
	return t, err
}

func (t *tail) close() {
	_ = unix.Close(t.notes)
	_ = t.f.Close()
}

// wait waits for a change of the file or the end of a worker; without end, if timeout
// is below 0.
func (t *tail) wait(timeout time.Duration, workers map[int]*worker) (ended bool, err error) {
	var limit *unix.Timespec
	if timeout >= 0 {
		ts := unix.NsecToTimespec(timeout.Nanoseconds())
		limit = &ts
	}
	fds := []unix.PollFd{{Fd: int32(t.notes), Events: unix.POLLIN}, {Fd: 0, Events: unix.POLLIN}}
	var living []*worker
	for _, w := range workers {
		if !w.ended {
			living = append(living, w)
			fds = append(fds, unix.PollFd{Fd: int32(w.fd), Events: unix.POLLIN})
		}
	}
	if _, err := unix.Ppoll(fds, limit, nil); err != nil && !errors.Is(err, unix.EINTR) {
		return false, err
	}
	var buf [4096]byte
	_, _ = unix.Read(t.notes, buf[:]) // only that there was something counts
	for i, w := range living {
		w.ended = fds[2+i].Revents != 0
	}
	return fds[1].Revents != 0, nil
}

// next returns the lines that have come within the time.
func (t *tail) next(timeout time.Duration, workers map[int]*worker) (lines [][]byte, ended bool, err error) {
	if t.first { // what came before the watch
		t.first = false
	} else if ended, err = t.wait(timeout, workers); err != nil {
		return nil, false, err
	}
	var buf [64 << 10]byte
	for {
		n, err := t.f.Read(buf[:])
		t.rest = append(t.rest, buf[:n]...)
		if err != nil || n < len(buf) {
			break // all that there is
		}
	}
	for {
		line, rest, whole := bytes.Cut(t.rest, []byte("\n"))
		if !whole {
			return lines, ended, nil
		}
		lines, t.rest = append(lines, bytes.Clone(line)), rest
	}
}

package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// The test binary is also the worker process of these tests.
func TestMain(m *testing.M) {
	if id, ok, err := control.Launched(); ok {
		if err != nil {
			panic(err)
		}
		os.Exit(workerProcess(id, os.Args[1:]))
	}
	// Lives as long as the process, as its comment says.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/soliton-train/soliton/internal/platform.keepThread"))
}

// trainer is a worker that trains nothing.
type trainer struct {
	steps  int
	at     int                      // step before which trouble is made; below 0: rests after step 2, until there is a new plan
	before func(conn *control.Conn) // the trouble
	end    func(conn *control.Conn) // after Done
	asked  func()                   // before it answers a query
}

// run trains after the hello.
func (f trainer) run(ctx context.Context, conn *control.Conn) {
	defer conn.Close()
	conn.Send(control.Note{Text: "reading data"})
	conn.Send(control.Ready{
		Job:  rundir.Job{Program: "fake", Steps: f.steps, Layers: 2, GlobalBatch: 8, MicroBatch: 1},
		Addr: "nowhere", Layers: []control.Layer{{Name: "a", Tensors: []int{10}}, {Name: "b", Tensors: []int{10}}},
	})
	if m, err := conn.Receive(ctx); err != nil {
		return
	} else if _, ok := m.(control.Start); !ok {
		return
	}
	if _, err := conn.Receive(ctx); err != nil { // the first order
		return
	}
	inbox := make(chan control.Message, 16)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer close(inbox)
		for {
			m, err := conn.Receive(ctx)
			if err != nil {
				return
			}
			inbox <- m
		}
	}()
	defer func() { conn.Close(); <-ended }()
	step, stoppedBy, version, rests, sealed := 0, "", id.Version{Generation: 1, N: 1}, f.at < 0, false
	commit := func() error {
		step++
		return conn.Send(control.Step{Step: step, Loss: 1 / float64(step), Tokens: 10, MS: 1, Plan: uint64(version.N)})
	}
	handle := func(m control.Message) (ok bool) {
		switch m := m.(type) {
		case control.Stop:
			stoppedBy = m.Reason
		case control.Query:
			if f.asked != nil {
				f.asked()
			}
			conn.Send(control.Answer{Ballot: m.Ballot, Report: control.Report{Plan: version, Passed: id.Point{Step: step}}})
			sealed = true
		case control.Order:
			for step < m.Passed.Step { // others have passed it
				commit()
			}
			version, step, rests, sealed = m.Plan.Version, m.Passed.Step, false, false
			conn.Send(control.Applied{Ballot: m.Ballot, Version: version, Edit: 1000, Opened: 1})
		}
		return m != nil
	}
	for step < f.steps && stoppedBy == "" {
		if step+1 == f.at {
			f.before(conn)
		}
		if commit() != nil {
			return
		}
		for rests && step == 2 && stoppedBy == "" {
			if !handle(<-inbox) {
				return
			}
		}
		select {
		case m, ok := <-inbox:
			if ok {
				handle(m)
			}
		default:
		}
		for sealed { // it commits nothing before the order
			if !handle(<-inbox) {
				return
			}
		}
	}
	conn.Send(control.Done{Steps: step, Loss: 1 / float64(step), ParamsSHA256: "aa", StoppedBy: stoppedBy, Worker: rundir.Worker{Stages: []int{0}}})
	for m := range inbox {
		if _, ok := m.(control.Release); ok {
			break
		}
		handle(m)
	}
	if f.end != nil {
		f.end(conn)
	}
}

func (f trainer) inProcess() spawn.Worker { return f.inProcessAs(0) }

func (f trainer) inProcessAs(worker int) spawn.Worker {
	return spawn.InProcess(func(ctx context.Context, nc net.Conn) {
		conn := control.New(nc)
		conn.Send(control.Identity{WorkerID: worker}.Hello())
		f.run(ctx, conn)
	})
}

// workerProcess is main of the process; args begin with what it is to do.
func workerProcess(id control.Identity, args []string) int {
	fmt.Println("hello from the worker")
	for _, fd := range id.Canaries {
		if err := platform.KeepCanary(fd); err != nil {
			panic(err)
		}
	}
	switch args[0] {
	case "exit":
		fmt.Fprintln(os.Stderr, "cannot find my socks")
		n, _ := strconv.Atoi(args[1])
		return n
	case "sleep":
		<-time.After(math.MaxInt64) // until killed; with a timer, this is no deadlock to the runtime
	}
	conn, _, err := id.Connect(context.Background())
	if err != nil {
		panic(err)
	}
	if args[0] == "usage" {
		conn.Send(control.Failed{Kind: control.Usage, Text: "--steps 0: give at least 1"})
		return 2
	}
	n, _ := strconv.Atoi(args[1])
	f := trainer{steps: n}
	switch args[0] {
	case "die":
		f.at = 3
		f.before = func(*control.Conn) { raise(syscall.SIGKILL) }
	case "forever":
		f.at = -1
	case "child":
		// A child that would outlive the worker; it holds the standard output.
		f.at = 1
		f.before = func(conn *control.Conn) {
			p, err := os.StartProcess("/bin/sleep", []string{"sleep", "3600"}, &os.ProcAttr{Files: []*os.File{nil, os.Stdout, os.Stderr}})
			if err != nil {
				panic(err)
			}
			conn.Send(control.Output{Text: strconv.Itoa(p.Pid)})
		}
	case "die-1":
		if f.at = -1; id.WorkerID == 1 {
			f.at = 3
			f.before = func(*control.Conn) { raise(syscall.SIGKILL) }
		}
	case "freeze-2":
		if f.at = -1; id.WorkerID == 2 {
			f.at = 3
			f.before = func(*control.Conn) { raise(syscall.SIGSTOP) }
		}
		go func() {
			for conn.Send(control.Beat{}) == nil {
				time.Sleep(timing.Heartbeat)
			}
		}()
	case "print":
		if id.WorkerID > 0 {
			break
		}
		f.end = func(conn *control.Conn) { conn.Send(control.Output{Text: "func main()"}) }
	}
	f.run(context.Background(), conn)
	return 0
}

// raise sends this process a signal that it does not survive. It may take effect a little
// later, in which time nothing else must happen.
func raise(s syscall.Signal) {
	syscall.Kill(os.Getpid(), s)
	select {}
}

// newHost returns a host whose workers the test has started.
func newHost(t *testing.T, cfg Config) *Host {
	t.Helper()
	cfg.Fixed, cfg.Start = true, func(int, int) (spawn.Worker, error) { panic("no worker") }
	h, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// runWith runs a host with workers.
func runWith(ctx context.Context, h *Host, ws ...spawn.Worker) session.Outcome {
	all := Config{Workers: len(ws)}.withDefaults()
	h.c.Hosts, h.c.Workers = all.Hosts, all.Workers
	h.c.Start = func(worker, _ int) (spawn.Worker, error) { return ws[worker], nil }
	return h.Run(ctx)
}

func serve(t *testing.T, cfg Config, w spawn.Worker) session.Outcome {
	t.Helper()
	return runWith(t.Context(), newHost(t, cfg), w)
}

// recorder is a view that remembers.
type recorder struct {
	mu     sync.Mutex
	shown  []string
	closed int
	on     func(view.Event)
}

func (r *recorder) Show(e view.Event) {
	if _, row := e.(view.Worker); row {
		return
	}
	r.mu.Lock()
	r.shown = append(r.shown, strings.TrimPrefix(fmt.Sprintf("%T", e), "view."))
	r.mu.Unlock()
	if r.on != nil {
		r.on(e)
	}
}

func (r *recorder) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed++
}

func TestInProcessWithFiles(t *testing.T) {
	dir, err := rundir.Create(filepath.Join(t.TempDir(), "run"), "fake", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	v := &recorder{}
	f := trainer{steps: 3, at: 2, before: func(c *control.Conn) { c.Send(control.Output{Text: "early,"}) }, end: func(c *control.Conn) { c.Send(control.Output{Text: "late"}) }}
	o := serve(t, Config{RunDir: dir, Console: Console{View: v, Output: &out}}, f.inProcess())
	if o.Err != nil || o.ExitStatus() != 0 {
		t.Fatal(o.Err)
	}
	if out.String() != "early,late" {
		t.Errorf("output is %q", out.String())
	}
	if want := []string{"Note", "Change", "Change", "Begin", "Step", "Step", "Step", "Change", "End"}; !reflect.DeepEqual(v.shown, want) || v.closed != 1 {
		t.Errorf("view was shown %v and closed %d times", v.shown, v.closed)
	}
	var sum rundir.Summary
	readJSON(t, dir.File("summary.json"), &sum)
	if sum.Steps != 3 || sum.ParamsSHA256 != "aa" || sum.StoppedBy != "" || len(sum.Workers) != 1 {
		t.Errorf("summary.json: %+v", sum)
	}
	if lines := readLines(t, dir.File("metrics.jsonl")); len(lines) != 3 {
		t.Errorf("metrics.jsonl has %d lines", len(lines))
	}
	if lines := readLines(t, dir.File("events.jsonl")); len(lines) != 3 {
		t.Errorf("events.jsonl has %d lines", len(lines))
	}
}

func readJSON(t *testing.T, path string, v any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// readLines returns the lines of a file that must hold whole lines of JSON.
func readLines(t *testing.T, path string) (lines []map[string]any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		t.Fatalf("%s ends in the middle of a line", path)
	}
	for l := range strings.SplitSeq(text, "\n") {
		var fields map[string]any
		if err := json.Unmarshal([]byte(l), &fields); err != nil {
			t.Errorf("%s: line %q: %v", path, l, err)
		}
		lines = append(lines, fields)
	}
	return lines
}

func TestRunWithoutAnything(t *testing.T) {
	if o := serve(t, Config{}, trainer{steps: 2}.inProcess()); o.Err != nil || o.Summary.Steps != 2 {
		t.Errorf("got %+v", o)
	}
}

func TestContextStopsAtTheNextCommit(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	a := newHost(t, Config{Console: Console{View: &recorder{on: func(e view.Event) {
		if s, ok := e.(view.Step); ok && s.Step == 2 {
			cancel()
		}
	}}}})
	o := runWith(ctx, a, trainer{steps: 100, at: -1}.inProcess())
	var stopped *session.StoppedError
	if !errors.As(o.Err, &stopped) || stopped.Reason != session.Cancelled || stopped.AtOnce || o.Summary.StoppedBy != "cancelled" {
		t.Errorf("got %+v, %v", o.Summary, o.Err)
	}
}

// A worker in this process that does not react cannot hold Serve for longer than a second.
func TestSecondStopLeavesAStuckFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		a := newHost(t, Config{})
		began := time.Now()
		o := runWith(t.Context(), a, trainer{steps: 9, at: 3, before: func(*control.Conn) {
			a.Stop(session.Interrupt)
			a.Stop(session.Interrupt)
			<-release
		}}.inProcess())
		if o.ExitStatus() != session.ExitInterrupted || o.Summary.Steps > 2 {
			t.Errorf("got %+v, %v", o.Summary, o.Err)
		}
		if waited := time.Since(began); waited != timing.Reap {
			t.Errorf("waited %v", waited)
		}
		close(release)
		synctest.Wait()
	})
}

func TestHelloTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := serve(t, Config{Settings: session.Settings{Program: "./x"}}, spawn.InProcess(func(ctx context.Context, _ net.Conn) { <-ctx.Done() }))
		var e *session.NoMainError
		if !errors.As(o.Err, &e) || !strings.Contains(e.Error(), "./x has not called trainer.Main within 30s") {
			t.Errorf("got %v", o.Err)
		}
	})
}

func TestGarbageIsAnError(t *testing.T) {
	o := serve(t, Config{}, spawn.InProcess(func(ctx context.Context, nc net.Conn) {
		io.WriteString(nc, "GET / HTTP/1.1\r\n\r\n")
		<-ctx.Done()
	}))
	var e *session.ProtocolError
	if !errors.As(o.Err, &e) {
		t.Errorf("got %v", o.Err)
	}
}

func TestValidateReportsAllFaults(t *testing.T) {
	_, err := New(Config{Start: func(int, int) (spawn.Worker, error) { return nil, nil }, Settings: session.Settings{Threads: -1, Reduction: 2, Zero: 3, HelloTimeout: -1, Stages: -1, Detect: time.Millisecond}})
	if err == nil || len(strings.Split(err.Error(), "\n")) != 6 {
		t.Errorf("got %v", err)
	}
}

// startWorker starts this test binary as a worker with a log.
func startWorker(t *testing.T, args ...string) (spawn.Worker, *rundir.Dir) {
	t.Helper()
	dir, err := rundir.Create(filepath.Join(t.TempDir(), "run"), "fake", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	log, err := dir.LogFile(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	w, err := spawn.Start(spawn.Command{Path: exe, Args: args, Log: log, Key: auth.NewKey()})
	if err != nil {
		t.Fatal(err)
	}
	return w, dir
}

func TestProcess(t *testing.T) {
	for _, c := range []struct {
		args   []string
		err    string
		exit   int
		output string
		detail string
	}{
		{args: []string{"train", "5"}},
		{args: []string{"print", "5"}, output: "func main()"},
		{args: []string{"die", "5"}, err: "worker 0 exited: signal: killed, at step 2 of 5", exit: 1, detail: "hello from the worker"},
		{args: []string{"exit", "3"}, err: "./fake ended without calling trainer.Main (exit status 3)", exit: 1, detail: "hello from the worker\ncannot find my socks"},
		{args: []string{"exit", "0"}, err: "./fake ended without calling trainer.Main (exit status 0)", exit: 1, detail: "hello from the worker\ncannot find my socks"},
		{args: []string{"usage"}, err: "--steps 0: give at least 1", exit: 2},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			w, dir := startWorker(t, c.args...)
			var out bytes.Buffer
			o := serve(t, Config{Settings: session.Settings{Program: "./fake"}, RunDir: dir, Console: Console{Output: &out}}, w)
			if msg := fmt.Sprint(o.Err); msg != c.err && !(o.Err == nil && c.err == "") {
				t.Errorf("error is %q, want %q", msg, c.err)
			}
			if o.ExitStatus() != c.exit || out.String() != c.output || o.Detail != c.detail {
				t.Errorf("exit status %d, output %q, detail %q", o.ExitStatus(), out.String(), o.Detail)
			}
			_, err := os.Stat(dir.File("summary.json"))
			if began := o.Summary != nil; began != (err == nil) {
				t.Errorf("training began: %v, summary.json: %v", began, err)
			}
			if o.Summary == nil {
				if _, err := os.Stat(dir.Path()); err == nil {
					t.Error("the directory of a run that never began is left")
				}
			}
		})
	}
}

// What a worker leaves behind ends with it.
func TestGroupEndsWithTheWorker(t *testing.T) {
	w, dir := startWorker(t, "child", "2")
	var out bytes.Buffer
	if o := serve(t, Config{RunDir: dir, Console: Console{Output: &out}}, w); o.Err != nil {
		t.Fatal(o.Err)
	}
	pid, err := strconv.Atoi(out.String())
	if err != nil {
		t.Fatal(err)
	}
	end, bound := t.Deadline()
	for alive(pid) {
		if bound && time.Until(end) < 5*time.Second {
			t.Fatalf("process %d lives on", pid)
		}
		time.Sleep(time.Millisecond)
	}
}

// alive reports whether a process runs; a zombie nobody has reaped yet does not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(b, []byte(") Z "))
}

func TestSignalsStopAProcess(t *testing.T) {
	for _, c := range []struct {
		signal syscall.Signal
		exit   int
	}{{syscall.SIGINT, 130}, {syscall.SIGTERM, 75}} {
		w, dir := startWorker(t, "forever", "100")
		a := newHost(t, Config{RunDir: dir, Console: Console{View: &recorder{on: func(e view.Event) {
			if s, ok := e.(view.Step); ok && s.Step == 2 {
				syscall.Kill(os.Getpid(), c.signal)
			}
		}}}})
		restore := a.CatchSignals()
		o := runWith(t.Context(), a, w)
		restore()
		if o.ExitStatus() != c.exit || o.Summary == nil || o.Summary.Steps != 2 {
			t.Errorf("%v: exit status %d, %v", c.signal, o.ExitStatus(), o.Err)
		}
		readLines(t, dir.File("metrics.jsonl"))
	}
}

func TestStopEndsAProcessThatNeverConnects(t *testing.T) {
	w, dir := startWorker(t, "sleep")
	a := newHost(t, Config{RunDir: dir, Workers: 1})
	a.c.Start = func(int, int) (spawn.Worker, error) {
		a.Stop(session.Interrupt)
		return w, nil
	}
	if o := a.Run(t.Context()); o.ExitStatus() != 130 {
		t.Errorf("got %v", o.Err)
	}
	select {
	case <-w.Exited():
	default:
		t.Error("the process was left behind")
	}
}

func TestStopBeforeTheStart(t *testing.T) {
	a := newHost(t, Config{Workers: 1})
	a.c.Start = func(int, int) (spawn.Worker, error) {
		t.Error("a worker was started")
		return nil, errors.New("stopped")
	}
	a.Stop(session.Interrupt)
	if o := a.Run(t.Context()); o.ExitStatus() != 130 {
		t.Errorf("got %v", o.Err)
	}
}

// A worker that was faster than Serve is heard all the same.
func TestWorkerThatEndedBeforeServe(t *testing.T) {
	w, dir := startWorker(t, "usage")
	<-w.Exited()
	if o := serve(t, Config{RunDir: dir}, w); o.ExitStatus() != 2 {
		t.Errorf("got %v", o.Err)
	}
}

// Commands are taken in after an error of the listener, such as too many open files.
func TestCommandsAfterAnError(t *testing.T) {
	c, err := listenForCommands()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.listener.SetDeadline(time.Unix(1, 0)); err != nil { // accepting fails
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		c.serve(t.Context(), func(c command) { c.reply(c.Message) })
	}()
	select {
	case <-served:
		t.Fatal("no command is taken in any more")
	case <-time.After(3 * timing.Retry):
	}
	_ = c.listener.SetDeadline(time.Time{})
	nc, err := socket.Dial(t.Context(), c.listener.Path())
	if err != nil {
		t.Fatal(err)
	}
	conn := control.New(nc)
	if err := conn.Send(control.Stop{}); err != nil {
		t.Error(err)
	}
	if m, err := conn.Receive(t.Context()); m != (control.Stop{}) {
		t.Errorf("got %v, %v", m, err)
	}
	_ = conn.Close()
	_ = c.close()
	<-served
}

// Where TMPDIR is longer than a socket's path may be, a run takes commands all the same.
func TestLongTemporaryDirectory(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 120))
	if err := os.Mkdir(long, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", long)
	w, dir := startWorker(t, "usage")
	if o := serve(t, Config{RunDir: dir}, w); o.ExitStatus() != 2 {
		t.Errorf("got %v", o.Err)
	}
	t.Setenv("TMPDIR", "/absent")
	if _, err := listenForCommands(); err == nil || !strings.Contains(err.Error(), "TMPDIR") || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v", err)
	}
}

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// The shell's side: the tick comes, and an agent that is held up itself blames nobody.
func TestSilence(t *testing.T) {
	for _, frozen := range []bool{false, true} { // the agent, for once
		synctest.Test(t, func(t *testing.T) {
			var a *Host
			v := &recorder{on: func(e view.Event) {
				if _, ok := e.(view.Begin); ok && frozen {
					<-time.After(time.Minute)
					a.Stop(session.Interrupt)
				}
			}}
			a = newHost(t, Config{Settings: session.Settings{Detect: time.Second}, Console: Console{View: v}})
			w := spawn.InProcess(func(ctx context.Context, nc net.Conn) {
				conn := control.New(nc)
				conn.Send(control.Identity{}.Hello())
				for range 20 {
					conn.Send(control.Beat{})
					<-time.After(timing.Heartbeat)
				}
				conn.Send(control.Ready{Job: rundir.Job{Steps: 3, GlobalBatch: 1, MicroBatch: 1}})
				conn.Receive(ctx) // Start
				conn.Receive(ctx) // the first order
				if frozen {
					m, _ := conn.Receive(ctx)
					conn.Send(control.Done{StoppedBy: m.(control.Stop).Reason})
					return
				}
				<-ctx.Done()
			})
			began := time.Now()
			o := runWith(t.Context(), a, w)
			var silent *session.SilentError
			if frozen != !errors.As(o.Err, &silent) || frozen && o.ExitStatus() != session.ExitInterrupted {
				t.Errorf("agent frozen %v: %v", frozen, o.Err)
			}
			if waited := time.Since(began); !frozen && (waited < 2900*time.Millisecond || waited > 13*time.Second) { // a second, and up to ten on a crowded machine
				t.Errorf("noticed after %v", waited)
			}
			synctest.Wait()
		})
	}
}

func startWorkers(t *testing.T, n int, args ...string) ([]spawn.Worker, *rundir.Dir) {
	t.Helper()
	dir, err := rundir.Create(filepath.Join(t.TempDir(), "run"), "fake", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	start := spawn.Starter(spawn.Command{Path: exe, Args: args}, dir.LogFile)
	var ws []spawn.Worker
	for worker := range n {
		w, err := start(worker, 0)
		if err != nil {
			t.Fatal(err)
		}
		ws = append(ws, w)
	}
	return ws, dir
}

func TestProcesses(t *testing.T) {
	for _, c := range []struct {
		arg, cause, how string
		mirrors, lost   int
	}{
		{"print", "", "", 1, 0},
		{"die-1", "worker 1 exited: signal: killed", "reap", 1, 1},
		{"freeze-2", "worker 2 has been silent for ", "silence", 1, 1}, // a second, and longer on a crowded machine
		{"die-1", "worker 1 exited: signal: killed", "reap", -1, 1},
	} {
		t.Run(fmt.Sprint(c.arg, c.mirrors), func(t *testing.T) {
			ws, dir := startWorkers(t, 3, c.arg, "5")
			v := &recorder{}
			a := newHost(t, Config{Settings: session.Settings{Program: "./fake", Detect: time.Second, Mirrors: c.mirrors}, RunDir: dir, Console: Console{View: v}})
			o := runWith(t.Context(), a, ws...)
			if o.Err != nil || o.ExitStatus() != 0 {
				t.Fatalf("exit status %d, %v, detail %q", o.ExitStatus(), o.Err, o.Detail)
			}
			for _, w := range ws {
				<-w.Exited()
			}
			var sum rundir.Summary
			readJSON(t, dir.File("summary.json"), &sum)
			if sum.Steps != 5 || len(sum.Workers) != 3 || sum.WorkersStarted != 3 || sum.WorkersLost != c.lost || len(sum.Recoveries) != c.lost {
				t.Errorf("summary: %+v", sum)
			}
			plans, metrics := readLines(t, dir.File("plans.jsonl")), readLines(t, dir.File("metrics.jsonl"))
			if len(plans) != 1+c.lost || metrics[len(metrics)-1]["plan"] != float64(1+c.lost) || metrics[len(metrics)-1]["workers"] != float64(3-c.lost) {
				t.Errorf("%d plans, last of %v", len(plans), metrics)
			}
			back := 0
			if c.mirrors < 0 {
				back = 1
			}
			if sum.Rollbacks != back || len(metrics) != 5+2*back {
				t.Errorf("%d rollbacks, %d lines of metrics", sum.Rollbacks, len(metrics))
			}
			if c.lost == 0 {
				return
			}
			r := sum.Recoveries[0]
			if !strings.HasPrefix(r.Cause, c.cause) || r.DiedAt != c.how || r.TotalMS <= 0 || r.EditMS != 0.001 || r.LinksOpened != 2 {
				t.Errorf("recovery: %+v", r)
			}
			if r.TotalMS-r.DetectMS-r.QueryMS-r.PlanMS-r.AgreeMS-r.EditMS-r.ResumeMS > 0.01 {
				t.Errorf("the phases do not add up: %+v", r)
			}
			kinds := make(map[any]map[string]any)
			for _, e := range readLines(t, dir.File("events.jsonl")) {
				kinds[e["kind"]] = e
			}
			if kinds["lost"]["reason"] != r.Cause || kinds["recovered"]["total_ms"] != r.TotalMS || kinds["recovered"]["plan"] != 2.0 || (kinds["rollback"] != nil) != (back > 0) {
				t.Errorf("events: %v", kinds)
			}
			if !slices.Contains(v.shown, "Recovered") || !slices.Contains(v.shown, "Plan") {
				t.Errorf("shown: %v", v.shown)
			}
		})
	}
}

// A program that was replaced while the workers were started is found out.
func TestProgramsDiffer(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(path, append(text, 0), 0o777); err != nil {
		t.Fatal(err)
	}
	var ws []spawn.Worker
	for id, path := range []string{exe, path} {
		w, err := spawn.Start(spawn.Command{Path: path, Args: []string{"train", "2"}, WorkerID: id, Key: auth.NewKey()})
		if err != nil {
			t.Fatal(err)
		}
		ws = append(ws, w)
	}
	a := newHost(t, Config{})
	o := runWith(t.Context(), a, ws...)
	var differ *session.DifferError
	if !errors.As(o.Err, &differ) || differ.Worker != 1 || differ.Field != "program_sha256" || o.ExitStatus() != 1 {
		t.Errorf("got %v", o.Err)
	}
}

// A run whose third worker cannot be started leaves no process and no file behind.
func TestStartErrorLeavesNothingBehind(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	full := errors.New("no room")
	h, err := New(Config{Workers: 3, Start: spawn.Starter(spawn.Command{Path: exe, Args: []string{"sleep"}}, func(worker, _ int) (*os.File, error) {
		if worker == 2 {
			return nil, full
		}
		return os.CreateTemp(t.TempDir(), "")
	})})
	if err != nil {
		t.Fatal(err)
	}
	var start *StartError
	if o := h.Run(t.Context()); !errors.As(o.Err, &start) || !errors.Is(o.Err, full) {
		t.Errorf("got %v", o.Err)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); left != nil {
		t.Errorf("left behind: %v", left)
	}
	var none syscall.WaitStatus
	if pid, err := syscall.Wait4(-1, &none, syscall.WNOHANG, nil); !errors.Is(err, syscall.ECHILD) {
		t.Errorf("child %d, %v", pid, err)
	}
}

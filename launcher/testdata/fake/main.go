// Command fake is a training program that trains nothing: it says to its agent what
// a real one would.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// raise sends this process a signal that it does not survive. It may take effect a little
// later, in which time nothing else must happen.
func raise(s syscall.Signal) {
	syscall.Kill(os.Getpid(), s)
	select {}
}

func main() {
	signal.Ignore(os.Interrupt)
	id, ok, err := control.Launched()
	if !ok || err != nil {
		fmt.Fprintln(os.Stderr, "not launched", err)
		os.Exit(1)
	}
	ctx := context.Background()
	conn, _, err := id.Connect(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	steps := flag.Int("steps", 5, "")
	hold := flag.Int("hold", 0, "step to stay in, 0 for none")
	stuck := flag.Bool("stuck", false, "do not listen to stop")
	fail := flag.String("fail", "", "kind of failure")
	who := flag.Int("who", 0, "worker that fails")
	layers := flag.Int("layers", 3, "layers of the model")
	flag.Parse()
	fmt.Printf("pid %d args %q\n", os.Getpid(), os.Args)

	if *steps < 1 {
		conn.Send(control.Failed{Kind: control.Usage, Text: fmt.Sprintf("--steps %d: give at least 1", *steps)})
		os.Exit(2)
	}
	go func() {
		for conn.Send(control.Beat{}) == nil {
			time.Sleep(timing.Heartbeat)
		}
	}()
	conn.Send(control.Note{Text: "reading data"})
	ready := control.Ready{
		Job:  rundir.Job{Program: "fake", Model: "none", Layers: *layers, Steps: *steps, Args: os.Args[1:], GlobalBatch: 8, MicroBatch: 1, Kernel: "none"},
		Addr: fmt.Sprintf("worker %d", id.WorkerID),
	}
	for i := range *layers {
		ready.Layers = append(ready.Layers, control.Layer{Name: fmt.Sprint(i), Tensors: []int{100}})
	}
	if id.WorkerID != *who {
		if *fail == "kill" || *fail == "freeze" || *fail == "crash" {
			*hold = 2 // no worker gets further without all
		}
		*fail = ""
	}
	if *fail == "seed" {
		ready.Job.Seed = 7
	}
	conn.Send(ready)
	for ordered := false; !ordered; { // a beat may come between the start and the first order
		m, err := conn.Receive(ctx)
		if err != nil {
			os.Exit(1)
		}
		_, ordered = m.(control.Order)
	}
	inbox := make(chan control.Message, 8)
	go func() {
		for {
			m, err := conn.Receive(ctx)
			if err != nil {
				os.Exit(1)
			}
			inbox <- m
		}
	}()
	step, reason, plan, first := 0, "", uint64(1), id.WorkerID == 0
	handle := func(m control.Message) {
		switch m := m.(type) {
		case control.Stop:
			if !*stuck {
				reason = m.Reason
			}
		case control.Query:
			var r control.Report
			r.Plan.Generation, r.Plan.N, r.Passed.Step = 1, int(plan), step
			conn.Send(control.Answer{Ballot: m.Ballot, Report: r})
		case control.Order:
			*hold, step, plan = -1, m.Passed.Step, uint64(m.Plan.Version.N)
			first = int(m.Plan.Collector().ID) == id.WorkerID
			conn.Send(control.Applied{Ballot: m.Ballot, Version: m.Plan.Version})
		}
	}
	for step < *steps && reason == "" {
		if *fail == "panic" && step == 2 {
			conn.Send(control.Failed{Kind: control.UserPanic, Text: "panic in step 3: boom", Stack: "goroutine 1 [running]:\nmain.main()", Step: 3})
			os.Exit(1)
		}
		if *fail == "escape" && step == 2 {
			fmt.Println("\x1b[2Jcleared")
			conn.Send(control.Failed{Kind: control.UserPanic, Text: "panic in step 3: \x1b[31mboom", Stack: "goroutine 1 [running]:\n\x1b]0;title\a", Step: 3})
			os.Exit(1)
		}
		if *fail == "kill" && step == 2 {
			raise(syscall.SIGKILL)
		}
		if *fail == "crash" && step == 2 {
			go panic("nobody catches this")
			select {}
		}
		if *fail == "freeze" && step == 2 {
			raise(syscall.SIGSTOP)
		}
		loss := 1 / float64(step+1)
		if *fail == "loss" && step == 2 {
			loss *= 2
		}
		step++
		conn.Send(control.Step{Step: step, Loss: loss, Tokens: 100, MS: 1, Time: time.Now(), Plan: plan, Forwards: int64(8 * step), Backwards: int64(8 * step)})
		for step == *hold && reason == "" {
			handle(<-inbox)
		}
	}
	conn.Send(control.Done{Steps: step, Loss: 1 / float64(step), ParamsSHA256: "aa", StoppedBy: reason, Worker: rundir.Worker{Forwards: int64(8 * step)}})
	for m := range inbox {
		if _, ok := m.(control.Release); ok {
			break
		}
		handle(m)
	}
	if !first {
		return
	}
	switch *fail {
	case "end":
		raise(syscall.SIGKILL)
	case "end frozen":
		raise(syscall.SIGSTOP)
	}
	conn.Send(control.Output{Text: "sampled text\n"})
}

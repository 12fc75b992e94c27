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

	"github.com/soliton-train/soliton/internal/control"
	"github.com/soliton-train/soliton/internal/rundir"
)

func main() {
	signal.Ignore(os.Interrupt)
	id, ok, err := control.Launched()
	if !ok || err != nil {
		fmt.Fprintln(os.Stderr, "not launched", err)
		os.Exit(1)
	}
	ctx := context.Background()
	conn, err := id.Dial(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	steps := flag.Int("steps", 5, "")
	hold := flag.Int("hold", 0, "step to stay in, 0 for none")
	stuck := flag.Bool("stuck", false, "do not listen to stop")
	fail := flag.String("fail", "", "kind of failure")
	flag.Parse()
	fmt.Printf("pid %d args %q\n", os.Getpid(), os.Args)

	if *steps < 1 {
		conn.Send(control.Failed{Kind: control.Usage, Text: fmt.Sprintf("--steps %d: give at least 1", *steps)})
		os.Exit(2)
	}
	conn.Send(control.Note{Text: "reading data"})
	conn.Send(control.Ready{Job: rundir.Job{Program: "fake", Model: "none", Steps: *steps, Args: os.Args[1:], GlobalBatch: 1, MicroBatch: 1, Kernel: "none"}})
	if _, err := conn.Receive(ctx); err != nil {
		os.Exit(1)
	}
	stop := make(chan string, 1)
	go func() {
		m, err := conn.Receive(ctx)
		if err != nil {
			os.Exit(1)
		}
		if s, ok := m.(control.Stop); ok && !*stuck {
			stop <- s.Reason
		}
		conn.Receive(ctx)
		os.Exit(1)
	}()
	step, reason := 0, ""
	for step < *steps && reason == "" {
		if *fail == "panic" && step == 2 {
			conn.Send(control.Failed{Kind: control.UserPanic, Text: "panic in step 3: boom", Stack: "goroutine 1 [running]:\nmain.main()", Step: 3})
			os.Exit(1)
		}
		if *fail == "kill" && step == 2 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		step++
		conn.Send(control.Step{Step: step, Loss: 1 / float64(step), Tokens: 100, MS: 1, Time: time.Now(), Plan: 1})
		if step == *hold {
			reason = <-stop
		}
	}
	conn.Send(control.Done{Steps: step, Loss: 1 / float64(step), ParamsSHA256: "aa", StoppedBy: reason})
	conn.Send(control.Output{Text: "sampled text\n"})
}

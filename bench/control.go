package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// controlLatency measures how long control takes while everything else is
// busy: a question from the agent to all workers whose compute threads never
// rest, and a small message on a link that bulk fills. The second is one way,
// by the clock that the two processes share.
func controlLatency(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("control", flag.ExitOnError)
	role := f.String("role", "", "of a process that this command starts: worker or link")
	workers := f.Int("workers", 8, "worker processes")
	threads := f.Int("threads", 1, "compute threads of each")
	how := f.String("threading", string(moving), "of a worker process: how its compute goroutine and the rest share its threads")
	rounds := f.Int("rounds", 500, "questions, each to all workers")
	messages := f.Int("messages", 2000, "small messages on the link")
	seed := f.Uint64("seed", 1, "of the pauses between rounds")
	if err := f.Parse(args); err != nil {
		return err
	}
	switch *role {
	case "worker":
		return answering(*threads, threading(*how))
	case "link":
		return linkEnd()
	}
	fmt.Printf("%d cores, kernel path %v\n", runtime.NumCPU(), kernel.Active())
	fmt.Printf("\na question to %d workers and all answers, %d rounds, %d compute threads each: ms\n", *workers, *rounds, *threads)
	for _, how := range []threading{moving, keeping, yielding} {
		for _, extra := range []int{1, 2} {
			if err := roundTrips(*workers, *threads, extra, how, *rounds, *seed, rec); err != nil {
				return err
			}
		}
	}
	return underBulk(*messages, *seed, rec)
}

// threading is how a worker's compute goroutine and the rest of it share threads.
type threading string

const (
	moving   threading = "compute moves between threads"
	keeping  threading = "compute keeps its thread"
	yielding threading = "and gives way" // as in a worker
)

// children are processes of this program, connected as workers are with
// their agent.
type children struct {
	cmds  []*exec.Cmd
	conns []*control.Conn
}

// startChildren starts n processes of a role and waits until each has said
// hello.
func startChildren(n int, role string, env []string, args ...string) (*children, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &children{}
	for i := range n {
		nc, theirs, err := control.Pair(auth.NewKey())
		if err != nil {
			return nil, errors.Join(err, c.close())
		}
		c.conns = append(c.conns, control.New(nc))
		cmd := exec.Command(self, append([]string{"control", "-role", role}, args...)...)
		cmd.Env = append(append(os.Environ(), env...), control.Identity{Conn: 3, WorkerID: i, Incarnation: 1}.Environ()...)
		cmd.ExtraFiles = []*os.File{theirs}
		cmd.Stderr = os.Stderr
		err = cmd.Start()
		_ = theirs.Close()
		if err != nil {
			return nil, errors.Join(err, c.close())
		}
		c.cmds = append(c.cmds, cmd)
	}
	for _, conn := range c.conns {
		if _, err := receive[control.Hello](conn); err != nil {
			return nil, errors.Join(err, c.close())
		}
	}
	return c, nil
}

// close ends the processes, which leave when their socket closes, and waits.
func (c *children) close() error {
	var faults []error
	for _, conn := range c.conns {
		faults = append(faults, conn.Close())
	}
	for _, cmd := range c.cmds {
		faults = append(faults, cmd.Wait())
	}
	return errors.Join(faults...)
}

// receive returns the next message of a kind; beats are passed over.
func receive[M control.Message](c *control.Conn) (M, error) {
	for {
		m, err := c.Receive(context.Background())
		if err != nil {
			var none M
			return none, err
		}
		if m, ok := m.(M); ok {
			return m, nil
		}
	}
}

// dialAgent is what a child begins with.
func dialAgent() (*control.Conn, error) {
	id, launched, err := control.Launched()
	if err != nil {
		return nil, err
	}
	if !launched {
		return nil, errors.New("control: -role is for the processes that this command starts itself")
	}
	conn, _, err := id.Connect(context.Background())
	return conn, err
}

// answering is a worker: compute threads that never rest, beats, and an answer
// to every question, until the socket closes. Where compute is not locked to a
// thread, Go moves it about, and the kernel lets a thread that has just computed
// wait its turn when it wakes for control. See [sched] for giving way.
func answering(threads int, how threading) error {
	c, err := dialAgent()
	if err != nil {
		return err
	}
	var tasks sync.WaitGroup
	stop := make(chan struct{})
	tasks.Go(func() {
		switch how {
		case keeping:
			runtime.LockOSThread()
		case yielding:
			platform.ComputeThread()
		}
		pool := kernel.NewPool(threads)
		defer pool.Close()
		const rows, in, out = 256, 256, 768
		a := kernel.Matrix(ramp(rows*in), rows, in)
		b := kernel.Matrix(ramp(in*out), in, out)
		sum := kernel.Matrix(make([]float32, rows*out), rows, out)
		for {
			select {
			case <-stop:
				return
			default:
				kernel.MatMul(pool, sum, a, b)
			}
		}
	})
	tasks.Go(func() {
		tick := time.NewTicker(timing.Heartbeat)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_ = c.Send(control.Beat{}) // if the socket is closed, the loop below ends all
			}
		}
	})
	report := control.Report{Result: make([]byte, 1<<10)} // of the size a real report has
	for err == nil {
		var q control.Query
		if q, err = receive[control.Query](c); err == nil {
			err = c.Send(control.Answer{Ballot: q.Ballot, Report: report})
		}
	}
	close(stop)
	tasks.Wait()
	return leftAlone(err)
}

func ramp(n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(i%17) - 8
	}
	return x
}

// leftAlone turns the end of the socket, which ends a child, into success.
func leftAlone(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return nil
	}
	return err
}

// roundTrips asks all workers and waits for all answers, many times.
func roundTrips(workers, threads, extra int, how threading, rounds int, seed uint64, rec *report.Recorder) (err error) {
	c, err := startChildren(workers, "worker", []string{fmt.Sprintf("GOMAXPROCS=%d", threads+extra)}, fmt.Sprintf("-threads=%d", threads), "-threading="+string(how))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	answers := make(chan error, workers)
	for _, conn := range c.conns {
		go func() {
			for {
				_, err := receive[control.Answer](conn)
				answers <- err
				if err != nil {
					return
				}
			}
		}()
	}
	r := rand.New(rand.NewPCG(seed, 1))
	var ms []float64
	const warm = 20
	for round := range warm + rounds {
		time.Sleep(time.Duration(r.Int64N(int64(40 * time.Millisecond))))
		began := time.Now()
		for _, conn := range c.conns {
			if err := conn.Send(control.Query{Ballot: id.Ballot{Term: 1, Attempt: uint64(round)}}); err != nil {
				return err
			}
		}
		for range c.conns {
			if err := <-answers; err != nil {
				return err
			}
		}
		if round >= warm {
			ms = append(ms, float64(time.Since(began).Nanoseconds())/1e6)
		}
	}
	row := report.Row{
		Comparison: "control", Case: fmt.Sprintf("a question to all workers and the answers, GOMAXPROCS = threads + %d", extra), Workers: workers, Threads: threads, Ours: string(how), Unit: "ms",
	}
	for _, x := range ms {
		row.Add(x, 0)
	}
	rec.Add(row)
	fmt.Printf("  GOMAXPROCS = threads + %d, %-30s %s\n", extra, how+":", lab.Spread(ms))
	return nil
}

// Messages on the link: bulk of bulkSize, bulkAhead at a time, each of a step
// of its own; small ones beyond all steps.
const (
	bulkSize   = 4 << 20
	bulkAhead  = 4
	smallStep  = 1 << 62
	smallSize  = 64
	echoes     = 1 // Key.Dir of what comes back
	bulkFamily = 2 // Key.Dir of bulk
)

func smallKey(i int, dir uint8) comm.Key {
	return comm.Key{Kind: comm.KindUser, Step: smallStep, Dir: dir, Lo: int64(i)}
}

func bulkKey(i uint64) comm.Key { return comm.Key{Kind: comm.KindUser, Step: i, Dir: bulkFamily} }

// monotonic is a clock that all processes of a machine share, in ns.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err) // Linux has it
	}
	return ts.Nano()
}

// linkEnd is the other end of the link: it takes bulk, and answers each small
// message with the time at which it came.
func linkEnd() error {
	c, err := dialAgent()
	if err != nil {
		return err
	}
	e, err := comm.Listen(comm.Config{Self: id.Session{Worker: 1, Incarnation: 1}, Transport: transport.TCP{}})
	if err != nil {
		return err
	}
	defer e.Close()
	if err := c.Send(control.Ready{Addr: e.Addr()}); err != nil {
		return err
	}
	order, err := receive[control.Order](c)
	if err != nil {
		return leftAlone(err)
	}
	peer := comm.Peer{Session: id.Session{Worker: 0, Incarnation: 1}, Addr: order.Peers[0].Addr}
	if err := e.SetMembers([]comm.Peer{peer}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() {
		var bufs [bulkAhead][]byte
		var posted [bulkAhead]*comm.Receiving
		for i := range uint64(math.MaxInt64) {
			at := i % bulkAhead
			if posted[at] == nil {
				bufs[at] = make([]byte, bulkSize)
			} else if _, _, err := posted[at].Wait(ctx); err != nil {
				return
			}
			if i > bulkAhead {
				e.Advance(i - bulkAhead)
			}
			posted[at] = e.Expect(bulkKey(i), bufs[at])
		}
	})
	tasks.Go(func() {
		buf := make([]byte, smallSize)
		for i := 0; ; i++ {
			if _, _, err := e.Receive(ctx, smallKey(i, 0), buf); err != nil {
				return
			}
			stamp := binary.LittleEndian.AppendUint64(nil, uint64(monotonic()))
			if err := e.Send(ctx, peer.Session, smallKey(i, echoes), stamp, comm.Control); err != nil {
				return
			}
		}
	})
	_, err = receive[control.Stop](c) // never comes: the socket closes
	cancel()
	tasks.Wait()
	return leftAlone(err)
}

// underBulk sends small messages of the highest priority beside bulk that
// fills the link, after the same without bulk.
func underBulk(messages int, seed uint64, rec *report.Recorder) (err error) {
	c, err := startChildren(1, "link", nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	ready, err := receive[control.Ready](c.conns[0])
	if err != nil {
		return err
	}
	e, err := comm.Listen(comm.Config{Self: id.Session{Worker: 0, Incarnation: 1}, Transport: transport.TCP{}})
	if err != nil {
		return err
	}
	defer e.Close()
	peer := comm.Peer{Session: id.Session{Worker: 1, Incarnation: 1}, Addr: ready.Addr}
	if err := e.SetMembers([]comm.Peer{peer}); err != nil {
		return err
	}
	if err := c.conns[0].Send(control.Order{Peers: []control.Peer{{Worker: plan.Worker{Incarnation: 1}, Addr: e.Addr()}}}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()

	next := 0
	r := rand.New(rand.NewPCG(seed, 2))
	ask := func(n int) (ms []float64, err error) {
		buf := make([]byte, 8)
		for range n {
			time.Sleep(time.Duration(r.Int64N(int64(4 * time.Millisecond))))
			echo := e.Expect(smallKey(next, echoes), buf)
			sent := monotonic()
			if err := e.Send(ctx, peer.Session, smallKey(next, 0), make([]byte, smallSize), comm.Control); err != nil {
				return nil, err
			}
			if _, _, err := echo.Wait(ctx); err != nil {
				return nil, err
			}
			next++
			ms = append(ms, float64(int64(binary.LittleEndian.Uint64(buf))-sent)/1e6)
		}
		return ms, nil
	}
	if _, err := ask(50); err != nil { // opens the link
		return err
	}
	idle, err := ask(messages / 4)
	if err != nil {
		return err
	}

	var taken atomic.Int64
	var bulk sync.WaitGroup
	bulkCtx, stopBulk := context.WithCancel(ctx)
	defer bulk.Wait()
	defer stopBulk()
	var bulkErr error
	bulk.Go(func() {
		data := make([]byte, bulkSize)
		var posted [bulkAhead]*comm.Sending
		for i := range uint64(math.MaxInt64) {
			if s := posted[i%bulkAhead]; s != nil {
				if err := s.Wait(bulkCtx); err != nil {
					bulkErr = err
					return
				}
				taken.Add(bulkSize)
			}
			posted[i%bulkAhead] = e.Post(peer.Session, bulkKey(i), data, comm.Bulk)
		}
	})
	if _, err := ask(50); err != nil {
		return err
	}
	before, began := taken.Load(), time.Now()
	loaded, err := ask(messages)
	rate := float64(taken.Load()-before) / time.Since(began).Seconds()
	stopBulk()
	bulk.Wait()
	if !errors.Is(bulkErr, context.Canceled) {
		err = errors.Join(err, bulkErr)
	}
	if err != nil {
		return err
	}
	const chunk = 256 << 10 // comm.Config's default
	bound := 1e3 * float64(transport.Unsent+transport.Unread+chunk) / rate
	within := 0
	for _, v := range loaded {
		if v <= bound+slices.Max(idle) {
			within++
		}
	}
	for _, figure := range []struct {
		name string
		ms   []float64
	}{{"no bulk", idle}, {"full bulk", loaded}} {
		row := report.Row{Comparison: "control", Case: "a small message on one link, one way", Workers: 2, Ours: figure.name, Unit: "ms"}
		for _, x := range figure.ms {
			row.Add(x, 0)
		}
		rec.Add(row)
	}
	fmt.Printf("\none small message on one link, one way: ms\n  no bulk:   %s\n  full bulk: %s\n", lab.Spread(idle), lab.Spread(loaded))
	fmt.Printf("  bulk at %.2f GB/s; what may go before: (Unsent %d + Unread %d + Chunk %d) / rate = %.3f ms, beside the slowest without bulk; %.1f %% within both\n",
		rate/1e9, transport.Unsent, transport.Unread, chunk, bound, 100*float64(within)/float64(len(loaded)))
	return nil
}

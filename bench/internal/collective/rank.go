package collective

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// crew is the ranks of one kind of links.
type crew struct{ ranks []*peers.Peer }

// startCrew starts n processes of this program and tells each the addresses of all.
func startCrew(n int, links, folder string, a group.Algorithm) (*crew, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &crew{}
	var addrs []string
	for i := range n {
		p, err := peers.StartProgram(self, "allreduce", "-role", "rank", "-rank", strconv.Itoa(i), "-links", links, "-folder", folder, "-algorithm", a.String())
		if err != nil {
			c.close()
			return nil, err
		}
		c.ranks, addrs = append(c.ranks, p), append(addrs, p.Hello)
	}
	for _, p := range c.ranks {
		if err := p.Tell("%s", strings.Join(addrs, " ")); err != nil {
			c.close()
			return nil, err
		}
	}
	return c, nil
}

func (c *crew) close() {
	for _, p := range c.ranks {
		p.Close()
	}
}

// ask has all ranks reduce, and returns for each round what a call took on the slowest.
func (c *crew) ask(elements, rounds, calls int) (ms []float64, err error) {
	for _, p := range c.ranks {
		if err := p.Tell("%d %d %d", elements, rounds, calls); err != nil {
			return nil, err
		}
	}
	ms = make([]float64, rounds)
	for _, p := range c.ranks {
		x, err := p.Answer()
		if err != nil {
			return nil, err
		}
		if len(x) != rounds {
			return nil, fmt.Errorf("a rank answers with %d rounds of %d", len(x), rounds)
		}
		for i := range ms {
			ms[i] = max(ms[i], x[i])
		}
	}
	return ms, nil
}

// rank is one process: it says its address, reads those of all ranks, and then reduces as each line asks, until its input ends.
func rank(self int, links, folder string, a group.Algorithm) error {
	in := bufio.NewScanner(os.Stdin)
	if links == "loopback" {
		return serveLoopback(self, in)
	}
	var via transport.Transport = transport.TCP{}
	if links != "tcp" {
		via = transport.Host{Folder: folder, Name: strconv.Itoa(self), Sockets: links == "sockets"}
	}
	session := func(i int) id.Session { return id.Session{Worker: id.WorkerID(i), Incarnation: 1} }
	e, err := comm.Listen(comm.Config{Self: session(self), Transport: via})
	if err != nil {
		return err
	}
	defer e.Close()
	fmt.Println(e.Addr())
	if !in.Scan() {
		return in.Err()
	}
	var members []comm.Peer
	var sessions []id.Session
	for i, addr := range strings.Fields(in.Text()) {
		members, sessions = append(members, comm.Peer{Session: session(i), Addr: addr}), append(sessions, session(i))
	}
	if err := e.SetMembers(members); err != nil {
		return err
	}
	g, err := group.New(e, 1)
	if err != nil {
		return err
	}
	defer g.Close()
	ctx := context.Background()
	call := group.Call{Version: id.Version{Generation: 1, N: 1}, Priority: comm.Bulk, Algorithm: a}
	if _, err := g.Edit(ctx, call.Version, sessions); err != nil {
		return err
	}
	return serve(in, func(elements, rounds, calls int) ([]float64, error) {
		return reduce(ctx, g, &call, self, len(members), elements, rounds, calls)
	})
}

// serve does what each line asks for, until the input ends: it prints how many milliseconds a call took in each round.
func serve(in *bufio.Scanner, do func(elements, rounds, calls int) ([]float64, error)) error {
	for in.Scan() {
		var elements, rounds, calls int
		if _, err := fmt.Sscan(in.Text(), &elements, &rounds, &calls); err != nil {
			return fmt.Errorf("%q: want elements, rounds and calls: %w", in.Text(), err)
		}
		ms, err := do(elements, rounds, calls)
		if err != nil {
			return err
		}
		fmt.Println(strings.Trim(fmt.Sprint(ms), "[]"))
	}
	return in.Err()
}

// reduce checks one sum, and returns what a call took in each round.
func reduce(ctx context.Context, g *group.Group, call *group.Call, self, n, elements, rounds, calls int) (ms []float64, err error) {
	buf := slices.Repeat([]float32{float32(self + 1)}, elements)
	next := func() error {
		call.Step++
		return g.AllReduce(ctx, *call, buf)
	}
	if err := next(); err != nil {
		return nil, err
	}
	if want := float32(n * (n + 1) / 2); slices.ContainsFunc(buf, func(x float32) bool { return x != want }) {
		return nil, errors.New("the sum is wrong")
	}
	clear(buf) // sums of zeros do not grow
	for range rounds {
		call.Step++
		if err := g.Barrier(ctx, *call); err != nil {
			return nil, err
		}
		began := time.Now()
		for range calls {
			if err := next(); err != nil {
				return nil, err
			}
		}
		ms = append(ms, time.Since(began).Seconds()*1e3/float64(calls))
	}
	return ms, nil
}

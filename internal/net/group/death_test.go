package group_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/commtest"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// envPeer makes this test binary a worker that others' tests may kill: worker 1
// in its first life, which admits worker 0 at the address the variable holds.
const envPeer = "COMM_TEST_PEER"

func peerProcess(addr string) {
	e, err := comm.Listen(comm.Config{Self: id.Session{Worker: 1, Incarnation: 1}, Transport: transport.TCP{}, Key: commtest.Key})
	if err == nil {
		err = e.SetMembers([]comm.Peer{{Session: id.Session{Worker: 0, Incarnation: 1}, Addr: addr}})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(e.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
}

// When a peer's process is killed, OnLink says that the link is lost, at once
// and not after a timeout, then that calls fail; that is another event than
// that of a peer who was never there. The edit that leaves it out opens no link.
func TestDeathOfAProcess(t *testing.T) {
	events := make(chan comm.LinkEvent, 1000)
	es, _ := commtest.Cluster(t, 2, comm.Config{OnLink: func(ev comm.LinkEvent) {
		select {
		case events <- ev:
		default:
		}
	}}, inTCP)
	e := es[0]
	third := comm.Peer{Session: id.Session{Worker: 2, Incarnation: 1}, Addr: es[1].Addr()} // an address where another session answers
	survivor, err := comm.Listen(comm.Config{Self: id.Session{Worker: 3, Incarnation: 1}, Transport: transport.TCP{}, Key: commtest.Key})
	if err != nil {
		t.Fatal(err)
	}
	defer survivor.Close()

	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), envPeer+"="+e.Addr())
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	peers := []comm.Peer{{Session: id.Session{Worker: 1, Incarnation: 1}, Addr: strings.TrimSpace(addr)}, third, {Session: survivor.Self(), Addr: survivor.Addr()}}
	if err := errors.Join(e.SetMembers(peers), survivor.SetMembers([]comm.Peer{{Session: e.Self(), Addr: e.Addr()}})); err != nil {
		t.Fatal(err)
	}
	next := func(of id.Session) comm.LinkEvent {
		for {
			if ev := <-events; ev.Peer == of {
				return ev
			}
		}
	}

	groups := []*group.Group{nil, nil}
	for i, e := range []*comm.Endpoint{e, survivor} {
		if groups[i], err = group.New(e, 1); err != nil {
			t.Fatal(err)
		}
	}
	members := []id.Session{e.Self(), survivor.Self()}
	if errs := editAll(t.Context(), groups, id.Version{Generation: 1, N: 1}, members); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	if _, err := e.Connect(t.Context(), id.Session{Worker: 1, Incarnation: 1}); err != nil {
		t.Fatal(err)
	}
	if ev := next(id.Session{Worker: 1, Incarnation: 1}); !ev.Up || ev.Link != 1 {
		t.Errorf("first %v", ev)
	}
	lost := e.Post(id.Session{Worker: 1, Incarnation: 1}, user(1), make([]byte, 1<<20), comm.Bulk)

	killed := time.Now()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if ev := next(id.Session{Worker: 1, Incarnation: 1}); ev.Up || ev.Link != 1 || !errors.Is(ev.Err, comm.ErrLink) {
		t.Errorf("after the kill %v", ev)
	}
	t.Logf("noticed after %v", time.Since(killed))
	if err := lost.Wait(t.Context()); !errors.Is(err, comm.ErrLink) {
		t.Errorf("a message to the dead: %v", err)
	}
	e.Post(id.Session{Worker: 1, Incarnation: 1}, user(2), nil, comm.Control)
	var ce *comm.Error
	if ev := next(id.Session{Worker: 1, Incarnation: 1}); ev.Up || ev.Link != 1 || errors.Is(ev.Err, comm.ErrLink) || !errors.As(ev.Err, &ce) || ce.Op != "dial" {
		t.Errorf("then %v", ev)
	}
	ctx, cancel := context.WithCancel(t.Context())
	connecting := make(chan error, 1)
	go func() {
		_, err := e.Connect(ctx, third.Session)
		connecting <- err
	}()
	if ev := next(third.Session); ev.Up || ev.Link != 0 || !errors.Is(ev.Err, comm.ErrRefused) {
		t.Errorf("of one who was never there: %v", ev)
	}
	cancel()
	<-connecting

	began := time.Now()
	if err := e.SetMembers([]comm.Peer{{Session: survivor.Self(), Addr: survivor.Addr()}}); err != nil {
		t.Fatal(err)
	}
	opened, err := groups[0].Edit(t.Context(), id.Version{Generation: 1, N: 2}, members)
	if err != nil || opened != 0 {
		t.Errorf("the edit opened %d links: %v", opened, err)
	}
	t.Logf("left out after %v", time.Since(began))
}

func user(i int) comm.Key { return comm.Key{Kind: comm.KindUser, Step: 1, Lo: int64(i)} }

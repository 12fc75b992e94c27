package comm

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
	"github.com/soliton-train/soliton/internal/net/transport"
)

// envPeer makes this test binary a worker that others' tests may kill: worker 1
// in its first life, which admits worker 0 at the address the variable holds.
const envPeer = "COMM_TEST_PEER"

func peerProcess(addr string) {
	e, err := Listen(Config{Self: id.Session{Worker: 1, Incarnation: 1}, Transport: transport.TCP{}})
	if err == nil {
		err = e.SetMembers([]Peer{{id.Session{Worker: 0, Incarnation: 1}, addr}})
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
	events := make(chan LinkEvent, 1000)
	es := cluster(t, 2, Config{OnLink: func(ev LinkEvent) {
		select {
		case events <- ev:
		default:
		}
	}}, inTCP)
	e := es[0]
	third := Peer{id.Session{Worker: 2, Incarnation: 1}, es[1].Addr()} // an address where another session answers
	survivor, err := Listen(Config{Self: id.Session{Worker: 3, Incarnation: 1}, Transport: transport.TCP{}})
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
	peers := []Peer{{id.Session{Worker: 1, Incarnation: 1}, strings.TrimSpace(addr)}, third, {survivor.Self(), survivor.Addr()}}
	if err := errors.Join(e.SetMembers(peers), survivor.SetMembers([]Peer{{e.Self(), e.Addr()}})); err != nil {
		t.Fatal(err)
	}
	next := func(of id.Session) LinkEvent {
		for {
			if ev := <-events; ev.Peer == of {
				return ev
			}
		}
	}

	groups := []*Group{nil, nil}
	for i, e := range []*Endpoint{e, survivor} {
		if groups[i], err = e.NewGroup(1); err != nil {
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
	lost := e.Post(id.Session{Worker: 1, Incarnation: 1}, user(1, 1), make([]byte, 1<<20), Bulk)

	killed := time.Now()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if ev := next(id.Session{Worker: 1, Incarnation: 1}); ev.Up || ev.Link != 1 || !errors.Is(ev.Err, ErrLink) {
		t.Errorf("after the kill %v", ev)
	}
	t.Logf("noticed after %v", time.Since(killed))
	if err := lost.Wait(t.Context()); !errors.Is(err, ErrLink) {
		t.Errorf("a message to the dead: %v", err)
	}
	e.Post(id.Session{Worker: 1, Incarnation: 1}, user(1, 2), nil, Control)
	var ce *Error
	if ev := next(id.Session{Worker: 1, Incarnation: 1}); ev.Up || ev.Link != 1 || errors.Is(ev.Err, ErrLink) || !errors.As(ev.Err, &ce) || ce.Op != "dial" {
		t.Errorf("then %v", ev)
	}
	ctx, cancel := context.WithCancel(t.Context())
	connecting := make(chan error, 1)
	go func() {
		_, err := e.Connect(ctx, third.Session)
		connecting <- err
	}()
	if ev := next(third.Session); ev.Up || ev.Link != 0 || !errors.Is(ev.Err, ErrRefused) {
		t.Errorf("of one who was never there: %v", ev)
	}
	cancel()
	<-connecting

	began := time.Now()
	if err := e.SetMembers([]Peer{{survivor.Self(), survivor.Addr()}}); err != nil {
		t.Fatal(err)
	}
	opened, err := groups[0].Edit(t.Context(), id.Version{Generation: 1, N: 2}, members)
	if err != nil || opened != 0 {
		t.Errorf("the edit opened %d links: %v", opened, err)
	}
	t.Logf("left out after %v", time.Since(began))
}

package ssh

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/ports"
)

// listen returns the address of a listener that does something with each caller.
func listen(t *testing.T, with func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			with(c)
		}
	}()
	return l.Addr().String()
}

func TestReach(t *testing.T) {
	const id = "the one"
	says := func(text string) func(net.Conn) {
		return func(c net.Conn) { io.WriteString(c, text); c.Close() }
	}
	good, other, ends := listen(t, says(id)), listen(t, says("another")), listen(t, says(""))
	var held []net.Conn
	silent := listen(t, func(c net.Conn) { held = append(held, c) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	for _, c := range []struct {
		addrs []string
		want  string
		at    string
	}{
		{[]string{silent, closed, good, other}, "", good},
		{[]string{silent, closed, other}, refused, closed},
		{[]string{silent, other}, otherMachine, other},
		{[]string{ends}, otherMachine, ends},
		{[]string{silent}, timedOut, silent},
		{nil, "it has no address", ""},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		r := Target{id, c.addrs}.reach(ctx)
		cancel()
		if r.OK != (c.want == "") || r.Error != c.want || r.Addr != c.at || r.OK && (r.MTU == 0 || r.MS <= 0) {
			t.Errorf("%v: %+v, not %q", c.addrs, r, c.want)
		}
	}
}

func TestProbe(t *testing.T) {
	in, say := io.Pipe()
	hear, out := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- Probe(t.Context(), ports.Range{}, in, out) }()
	lines := json.NewDecoder(bufio.NewReader(hear))
	var own Target
	if err := lines.Decode(&own); err != nil || own.ID == "" || len(own.Addrs) == 0 {
		t.Fatalf("%+v, %v", own, err)
	}
	go json.NewEncoder(say).Encode([]Target{own, {"x", own.Addrs}})
	var reached []Reach
	if err := lines.Decode(&reached); err != nil || len(reached) != 2 || !reached[0].OK || reached[1].Error != otherMachine {
		t.Errorf("%+v, %v", reached, err)
	}
	say.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

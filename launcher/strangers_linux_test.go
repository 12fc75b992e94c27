package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/admit"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Every TCP port that two machines of a run open is attacked while it trains: by callers with another secret or none, that replay a
// recorded session, announce 1 GiB, or read and write as slowly as they can, by 10,000 half-open connections, and by an agent that was
// replaced. All are cut off and counted in events.jsonl, no worker is lost, no other host leads, and the bits are the same.
func TestStrangersAtThePorts(t *testing.T) {
	built(t)
	t.Parallel()
	want := cutWant(t)
	all := gatheredFor(t, 2, append([]string{emulated, "--layer-ms", "6"}, cutJob...)...)
	first := all[0]
	await(t, "a step", func() bool {
		text, _ := os.ReadFile(filepath.Join(first.run, "metrics.jsonl"))
		return len(text) > 0
	})
	a := spied(t, first.ticket)
	secure, err := transport.TLSFromSecret(a.Secret)
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := transport.TLSFromSecret(bytes.Repeat([]byte("x"), 32))
	if err != nil {
		t.Fatal(err)
	}
	wrong.VerifyConnection = nil // it goes on although the other end has another secret
	link := a.Hosts[0].Link

	var attacks sync.WaitGroup
	var addrs []string
	for _, m := range all {
		for _, pid := range marked(t, m.mark) {
			addrs = append(addrs, listens(t, pid)...)
		}
	}
	slices.Sort(addrs)
	addrs = slices.Compact(addrs) // a launcher has the listeners of its agent as well
	if len(addrs) < 2*(1+2+2) {   // doors, agents, workers
		t.Fatal("ports: ", addrs)
	}
	for _, addr := range addrs {
		half := 100
		if addr == link {
			half = 10_000
		}
		for name, attack := range map[string]func(net.Conn) net.Conn{
			"no secret": func(c net.Conn) net.Conn {
				return tls.Client(c, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it is an attack
			},
			"another secret": func(c net.Conn) net.Conn { return tls.Client(c, wrong) },
			"1 GiB":          func(c net.Conn) net.Conn { return begun{c, append([]byte{0x40, 0, 0, 0}, make([]byte, 1<<16)...)} },
			"slow writer":    func(c net.Conn) net.Conn { return slow{c} },
			"slow reader":    func(c net.Conn) net.Conn { return begun{c, clientHello(t)} },
		} {
			attacks.Go(func() { cutOff(t, fmt.Sprintf("%s at %s", name, addr), addr, attack) })
		}
		attacks.Go(func() { halfOpen(t, addr, half) })
	}
	attacks.Go(func() {
		session := record(t, link, a.Hosts[1].Name, secure)
		cutOff(t, "a replay", link, func(c net.Conn) net.Conn { return begun{c, session} })
	})
	attacks.Go(func() {
		insider(t, "an agent that was replaced", link, secure, func(c net.Conn) error {
			return control.New(c).Send(control.Host{Protocol: control.Protocol, Host: 1, Server: a.Hosts[1].Name, Link: "127.0.0.1:1"})
		})
		insider(t, "1 GiB from one that has the secret", link, secure, func(c net.Conn) error {
			_, err := c.Write([]byte{0x40, 0, 0, 0})
			return err
		})
	})
	attacks.Wait()

	for i, m := range all {
		if status := m.end(t); status != 0 {
			t.Fatalf("machine %d: status %d\n%s", i, status, &m.errs)
		}
	}
	var sum rundir.Summary
	readJSON(t, filepath.Join(first.run, "summary.json"), &sum)
	if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.WorkersLost+sum.Rollbacks+sum.WorkersJoined > 0 {
		t.Errorf("%+v", sum)
	}
	counts := map[string]map[string]int64{} // the newest of each
	for _, e := range lines[rundir.Event](t, filepath.Join(first.run, "events.jsonl")) {
		switch e.Kind {
		case "rejected":
			counts[fmt.Sprint(e.Host, " ", e.Worker)] = e.Rejected
		case "lost", "evict", "hold", "lead":
			t.Errorf("%s: %s", e.Kind, e.Reason)
		}
	}
	leader := counts[fmt.Sprint(a.Hosts[0].Name, " -1")]
	for cause, least := range map[string]int64{"no secret": 8, "silent": 3, "crowded out": 9000, "outdated": 1, "malformed": 1} {
		if leader[cause] < least {
			t.Errorf("the agent that was attacked most has counted %d %s, not %d: %v", leader[cause], cause, least, leader)
		}
	}
	for _, h := range a.Hosts {
		for _, who := range append([]int{-1}, h.Workers...) {
			if c := counts[fmt.Sprint(h.Name, " ", who)]; c["no secret"] < 3 || c["silent"]+c["crowded out"] < 3 {
				t.Errorf("worker %d of %s (-1: its agent) has counted %v", who, h.Name, c)
			}
		}
	}
}

// spied is what a machine is told that has the ticket of a run, but does not take part.
func spied(t *testing.T, text string) (a assignment) {
	t.Helper()
	ticket, err := admit.ParseTicket(strings.TrimSpace(text))
	if err != nil {
		t.Fatal(err)
	}
	reply, err := ask(t.Context(), ticket, call{Name: "spy", Workers: 1, Agree: ":1", Link: ":1"})
	if err == nil {
		err = json.Unmarshal(reply, &a)
	}
	if err != nil || len(a.Hosts) != 2 {
		t.Fatal(a.Hosts, err)
	}
	return a
}

// cutOff attacks an address, and checks that the other end closes the connection, in bounded time, and says nothing to a stranger.
func cutOff(t *testing.T, name, addr string, attack func(net.Conn) net.Conn) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	x := attack(c)
	_, _ = x.Write([]byte("hello"))                     // it fails where a handshake does
	_ = c.SetDeadline(time.Now().Add(30 * time.Second)) // the slow one has set another
	_, err = io.Copy(io.Discard, x)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: not cut off", name)
	}
}

// begun is a connection on which bytes were sent.
type begun struct {
	net.Conn
	first []byte
}

func (b begun) Write([]byte) (int, error) { return b.Conn.Write(b.first) }

// slow is a connection that says very little, very slowly, and nothing that is wrong.
type slow struct{ net.Conn }

func (s slow) Write([]byte) (n int, err error) {
	for _, b := range []byte{0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03} {
		if _, err := s.Conn.Write([]byte{b}); err != nil {
			return 0, err
		}
		_ = s.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := s.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, err // it is cut off
		}
	}
	return 0, s.SetReadDeadline(time.Now().Add(30 * time.Second))
}

// clientHello is how a handshake begins.
func clientHello(t *testing.T) []byte {
	near, far := net.Pipe()
	defer far.Close()
	go func() {
		_ = tls.Client(near, &tls.Config{InsecureSkipVerify: true}).Handshake() //nolint:gosec // nothing answers
	}()
	b := make([]byte, 1<<12)
	n, err := far.Read(b)
	if err != nil {
		t.Error(err)
	}
	return b[:n]
}

// halfOpen leaves connections open until the other end closes them, or the test is over.
func halfOpen(t *testing.T, addr string, n int) {
	for range n {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			if n < 1000 {
				t.Error(err)
			}
			return // the system allows no more
		}
		t.Cleanup(func() { c.Close() })
	}
}

// record returns what a machine with the secret sends that asks whether it reaches another one.
func record(t *testing.T, addr, other string, secure *tls.Config) []byte {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Error(err)
		return nil
	}
	r := &recording{Conn: c}
	conn := control.New(tls.Client(r, secure))
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err = conn.Send(control.Reach{Protocol: control.Protocol, Host: other}); err == nil {
		_, err = conn.Receive(ctx)
	}
	if err != nil {
		t.Errorf("with the secret: %v", err)
	}
	return r.sent
}

type recording struct {
	net.Conn
	sent []byte
}

func (r *recording) Write(b []byte) (int, error) {
	r.sent = append(r.sent, b...)
	return r.Conn.Write(b)
}

// insider sends bytes from one that has the secret, and checks that the connection ends without an answer.
func insider(t *testing.T, name, addr string, secure *tls.Config, send func(net.Conn) error) {
	c, err := tls.Dial("tcp", addr, secure)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	if err := send(c); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	if n, err := io.Copy(io.Discard, c); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: %d bytes, %v", name, n, err)
	}
}

// listens returns the TCP addresses at which a process listens.
func listens(t *testing.T, pid string) (addrs []string) {
	t.Helper()
	own := make(map[string]bool) // inodes
	fds, _ := filepath.Glob("/proc/" + pid + "/fd/*")
	for _, fd := range fds {
		to, _ := os.Readlink(fd)
		own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
	}
	for _, table := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile("/proc/" + pid + "/net/" + table)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" || !own[f[9]] {
				continue
			}
			var port int
			if _, err := fmt.Sscanf(f[1][strings.LastIndexByte(f[1], ':')+1:], "%04X", &port); err != nil {
				t.Fatal(err)
			}
			addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", port))
		}
	}
	return addrs
}

package admit

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/transport"
	"github.com/soliton-train/soliton/internal/timing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// door is a server of a test, and the refusals that it has counted.
type door struct {
	*Server
	t    *testing.T
	addr string

	mu      sync.Mutex
	refused map[Cause]int
	asked   int
}

// echo replies with the request.
func echo(_ context.Context, _ net.Addr, request []byte) ([]byte, error) { return request, nil }

// open serves on a listener, or, for nil, at a free port.
func open(t *testing.T, l net.Listener, handle func(context.Context, net.Addr, []byte) ([]byte, error)) *door {
	t.Helper()
	var err error
	if l == nil {
		if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	d := &door{t: t, addr: l.Addr().String(), refused: map[Cause]int{}}
	d.Server, err = Serve(l, Config{
		Secret: auth.NewKey(),
		Handle: func(ctx context.Context, from net.Addr, request []byte) ([]byte, error) {
			d.mu.Lock()
			d.asked++
			d.mu.Unlock()
			return handle(ctx, from, request)
		},
		Refused: func(r Refusal) {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.refused[r.Cause]++; r.Count != d.refused[r.Cause] || r.From == nil {
				t.Errorf("%v is number %d of %v", r, d.refused[r.Cause], r.Cause)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func (d *door) ticket(addrs ...string) Ticket {
	d.t.Helper()
	if addrs == nil {
		addrs = []string{d.addr}
	}
	ticket, err := Issue(d.cfg.Secret, addrs, time.Hour)
	if err != nil {
		d.t.Fatal(err)
	}
	return ticket
}

// counted closes the server and compares what it has refused and how many requests it has handled.
func (d *door) counted(asked int, want map[Cause]int) {
	d.t.Helper()
	same := func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return fmt.Sprint(d.refused) == fmt.Sprint(want)
	}
	for began := time.Now(); !same() && time.Since(began) < 10*time.Second; { // callers may see their end before the count
		time.Sleep(time.Millisecond)
	}
	d.Close()
	if d.asked != asked || fmt.Sprint(d.refused) != fmt.Sprint(want) {
		d.t.Errorf("%d requests, refused %v; want %d, %v", d.asked, d.refused, asked, want)
	}
}

// memory is a network in memory, for tests with a clock of their own.
type memory struct{ *transport.Mem }

type memListener struct{ transport.Listener }

type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

func (l memListener) Addr() net.Addr { return memAddr(l.Listener.Addr()) }

func (m memory) listen(t *testing.T, addr string) net.Listener {
	l, err := m.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	return memListener{l}
}

func (m memory) connect(ctx context.Context, _, addr string) (net.Conn, error) {
	return m.Dial(ctx, addr)
}

func TestDial(t *testing.T) {
	d := open(t, nil, func(_ context.Context, from net.Addr, request []byte) ([]byte, error) {
		switch string(request) {
		case "large":
			return make([]byte, MaxReply), nil
		case "too large":
			return make([]byte, MaxReply+1), nil
		case "bad":
			return nil, errors.New("the platform is arm64,\n\tnot \x1b[2Jamd64" + strings.Repeat("é", maxLine))
		}
		return append([]byte(from.Network()+" "), request...), nil
	})
	ticket := d.ticket()
	for request, want := range map[string]string{"": "tcp ", "hello": "tcp hello", "large": string(make([]byte, MaxReply)), strings.Repeat("x", MaxRequest): "tcp " + strings.Repeat("x", MaxRequest)} {
		got, from, err := Dial(t.Context(), ticket, []byte(request))
		if err != nil || string(got) != want || from.String() != d.addr {
			t.Errorf("%.10q: %d bytes from %v, %v", request, len(got), from, err)
		}
	}
	var refused *RefusedError
	if _, _, err := Dial(t.Context(), ticket, []byte("bad")); !errors.As(err, &refused) || !strings.HasPrefix(refused.Text, "the platform is arm64, not ?[2Jamd64é") || len(refused.Text) > maxLine {
		t.Errorf("got %v", err)
	}
	if _, _, err := Dial(t.Context(), ticket, []byte("too large")); !errors.As(err, &refused) || refused.Text != "the reply has 16777217 bytes, more than 16777216" {
		t.Errorf("got %v", err)
	}
	if _, _, err := Dial(t.Context(), ticket, make([]byte, MaxRequest+1)); err == nil || !strings.Contains(err.Error(), "a request of 65537 bytes") {
		t.Errorf("got %v", err)
	}
	d.counted(6, nil)
}

// Only the run of the ticket gets to see its token.
func TestWrongFingerprint(t *testing.T) {
	run, other := open(t, nil, echo), open(t, nil, echo)
	ticket := run.ticket(other.addr)
	_, _, err := Dial(t.Context(), ticket, nil)
	var unreachable *UnreachableError
	if !errors.As(err, &unreachable) || !errors.Is(err, ErrFingerprint) || !strings.Contains(err.Error(), other.addr+": another run, or another program, answers there") {
		t.Errorf("got %v", err)
	}
	other.counted(0, map[Cause]int{Garbage: 1}) // it sees that its certificate is refused
	run.counted(0, nil)
}

func TestWrongToken(t *testing.T) {
	d := open(t, nil, echo)
	ticket := d.ticket()
	for i := range ticket.Token {
		wrong := ticket
		wrong.Token[i] ^= 1
		if _, _, err := Dial(t.Context(), wrong, []byte("in")); !errors.Is(err, ErrToken) {
			t.Errorf("got %v", err)
		}
	}
	if _, _, err := Dial(t.Context(), ticket, []byte("in")); err != nil {
		t.Error(err)
	}
	d.counted(1, map[Cause]int{WrongToken: len(ticket.Token)})
}

func TestExpiredToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memory{transport.NewMem()}
		d := open(t, m.listen(t, "a:1"), echo)
		ticket := d.ticket()
		join := func(want error) {
			t.Helper()
			if _, _, err := dial(t.Context(), m.connect, ticket, nil); !errors.Is(err, want) || (err == nil) != (want == nil) {
				t.Errorf("got %v, want %v", err, want)
			}
		}
		time.Sleep(time.Hour - time.Second)
		join(nil)
		time.Sleep(time.Second)
		join(ErrExpired)
		next := d.ticket()
		ticket = next
		join(nil)
		synctest.Wait()
		d.counted(2, map[Cause]int{ExpiredToken: 1})
	})
}

// recorded keeps what is written.
type recorded struct {
	net.Conn
	written bytes.Buffer
}

func (r *recorded) Write(p []byte) (int, error) {
	r.written.Write(p)
	return r.Conn.Write(p)
}

// All bytes of a joiner, sent once more, bring no request.
func TestReplay(t *testing.T) {
	d := open(t, nil, echo)
	var r *recorded
	if _, _, err := dial(t.Context(), func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		r = &recorded{Conn: c}
		return r, err
	}, d.ticket(), []byte("in")); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", d.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write(r.written.Bytes())
	_, _ = io.Copy(io.Discard, c)
	d.counted(1, map[Cause]int{Garbage: 1})
}

// Ten thousand connections that stay half open cost a bounded number of goroutines, and let a machine join.
func TestHalfOpen(t *testing.T) {
	d := open(t, nil, echo)
	ticket := d.ticket()
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	most := 0
	for i := range 10_000 {
		c, err := net.Dial("tcp", d.addr)
		if err != nil {
			t.Logf("the system allows %d connections: %v", i, err)
			break
		}
		conns = append(conns, c)
		if i%100 == 0 {
			most = max(most, runtime.NumGoroutine())
		}
		if i%1000 == 999 {
			if _, _, err := Dial(t.Context(), ticket, nil); err != nil {
				t.Error(err)
			}
		}
	}
	if most > 4*transport.MaxCallers {
		t.Errorf("%d goroutines", most)
	}
	if _, _, err := Dial(t.Context(), ticket, nil); err != nil {
		t.Error(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.refused[Crowded]; len(conns) == 10_000 && n < 9_000 || len(d.refused) > 1 {
		t.Errorf("refused %v", d.refused)
	}
}

// proven returns a connection that has shown the token of a ticket, if it is not nil.
func proven(t *testing.T, c net.Conn, ticket *Ticket) *tls.Conn {
	t.Helper()
	s := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
	t.Cleanup(func() { c.Close() })
	if err := s.Handshake(); err != nil {
		t.Fatal(err)
	}
	if ticket != nil {
		s.Write(slices.Concat([]byte(magic), ticket.Token[:]))
		if k, _, err := readFrame(s, admitted); k != admitted || err != nil {
			t.Fatal(k, err)
		}
	}
	return s
}

// gibibyte is a header that announces 1 GiB.
func gibibyte(k kind) []byte { return binary.LittleEndian.AppendUint32([]byte{byte(k)}, 1<<30) }

// What is no message of the protocol ends a connection before it takes memory.
func TestGarbage(t *testing.T) {
	d := open(t, nil, echo)
	ticket := d.ticket()
	connect := func() net.Conn {
		c, err := net.Dial("tcp", d.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	attacks := []func() net.Conn{
		func() net.Conn { c := connect(); c.Write([]byte("GET / HTTP/1.1\r\n\r\n")); return c },
		func() net.Conn { c := connect(); c.Write(bytes.Repeat([]byte{0xff}, 1000)); return c },
		func() net.Conn {
			c := proven(t, connect(), nil)
			c.Write(gibibyte(request))
			c.Write(make([]byte, 1000))
			return c
		},
		func() net.Conn { c := proven(t, connect(), &ticket); c.Write(gibibyte(request)); return c },
		func() net.Conn { c := proven(t, connect(), &ticket); c.Write(gibibyte(refused)); return c },
		func() net.Conn { c := proven(t, connect(), &ticket); c.Write(frame(reply, nil)); return c },
		func() net.Conn {
			return tls.Client(connect(), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12})
		},
	}
	for _, attack := range attacks {
		c := attack()
		if n, _ := io.Copy(io.Discard, c); n > 0 {
			t.Errorf("an answer of %d bytes", n)
		}
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 16<<20 {
		t.Errorf("%d bytes taken", grown)
	}
	d.counted(0, map[Cause]int{Garbage: len(attacks)})
}

// A server that holds the key of the run, but answers with nonsense, takes no memory either.
func TestGarbageReply(t *testing.T) {
	cert, err := transport.Certificate(auth.NewKey(), "admission")
	if err != nil {
		t.Fatal(err)
	}
	d := open(t, nil, echo) // for a ticket
	ticket := d.ticket()
	d.tls.Certificates = []tls.Certificate{cert}
	for _, answers := range [][][]byte{{gibibyte(admitted)}, {frame(reply, nil)}, {frame(admitted, nil), gibibyte(reply)}, {frame(admitted, nil), frame(admitted, nil)}, {frame(admitted, nil), frame(reply, []byte("cut"))[:6]}} {
		near, far := net.Pipe()
		var serve sync.WaitGroup
		serve.Go(func() {
			s := tls.Server(far, &tls.Config{Certificates: d.tls.Certificates, SessionTicketsDisabled: true})
			defer far.Close()
			b := make([]byte, helloSize)
			if _, err := io.ReadFull(s, b); err != nil {
				t.Error(err)
			}
			s.Write(answers[0])
			if len(answers) > 1 {
				_, _, _ = readFrame(s, request)
				s.Write(answers[1])
			}
		})
		c := tls.Client(near, &tls.Config{InsecureSkipVerify: true})
		if b, err := ask(c, ticket.Token, nil); !errors.Is(err, errGarbage) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q: %q, %v", answers, b, err)
		}
		near.Close()
		serve.Wait()
	}
}

// Callers that say nothing, or too little, or do not read, are cut off; a machine joins meanwhile.
func TestSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memory{transport.NewMem()}
		d := open(t, m.listen(t, "a:1"), func(context.Context, net.Addr, []byte) ([]byte, error) { return make([]byte, MaxReply), nil })
		ticket := d.ticket()
		connect := func() net.Conn {
			c, err := m.Dial(t.Context(), "a:1")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			return c
		}
		slow := map[string]net.Conn{
			"silent":      connect(),
			"no hello":    proven(t, connect(), nil),
			"no request":  proven(t, connect(), &ticket),
			"slow writer": connect(),
			"no reader":   proven(t, connect(), &ticket),
		}
		slow["no reader"].Write(frame(request, nil))
		go func() {
			c := slow["slow writer"]
			for _, err := c.Write([]byte{22, 3, 1, 1, 0}); err == nil; _, err = c.Write([]byte{1}) {
				time.Sleep(time.Second)
			}
		}()
		began := time.Now()
		if _, _, err := dial(t.Context(), m.connect, ticket, nil); err != nil || time.Since(began) > 0 {
			t.Errorf("joined after %v: %v", time.Since(began), err)
		}
		time.Sleep(timing.Handshake + time.Second)
		synctest.Wait()
		d.counted(2, map[Cause]int{Slow: len(slow)})
	})
}

// The first address that leads to the run is taken; the others have no say, whatever they do.
func TestManyAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memory{transport.NewMem()}
		d, other := open(t, m.listen(t, "run:1"), echo), open(t, m.listen(t, "other:1"), echo)
		silent := m.listen(t, "silent:1")
		defer silent.Close()
		go func() {
			for {
				c, err := silent.Accept()
				if err != nil {
					return
				}
				defer c.Close()
			}
		}()
		connect := func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == "hole:1" {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return m.connect(ctx, network, addr)
		}
		join := func(addrs ...string) (net.Addr, error) {
			_, from, err := dial(t.Context(), connect, d.ticket(addrs...), nil)
			return from, err
		}
		began := time.Now()
		for _, addrs := range [][]string{{"hole:1", "run:1"}, {"run:1", "dead:1"}, {"silent:1", "other:1", "dead:1", "run:1", "hole:1"}} {
			if from, err := join(addrs...); err != nil || from.String() != "run:1" {
				t.Errorf("%v: %v, %v", addrs, from, err)
			}
		}
		if d := time.Since(began); d > 0 {
			t.Errorf("joined after %v", d)
		}
		_, err := join("silent:1", "dead:1", "other:1", "hole:1")
		want := `admit: no address of the ticket leads to its run; silent:1: no answer in time: context deadline exceeded; ` +
			`dead:1: transport: dial "dead:1": connection refused; other:1: another run, or another program, answers there; hole:1: no answer in time: context deadline exceeded`
		if err == nil || err.Error() != want || time.Since(began) != timing.Handshake {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		synctest.Wait()
		if other.asked > 0 || len(d.refused) > 0 {
			t.Errorf("the other got %d requests; refused %v", other.asked, d.refused)
		}
	})
}

// The dead and the live address are real ones, and so is the error.
func TestDeadAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := l.Addr().String()
	l.Close()
	d := open(t, nil, echo)
	if _, from, err := Dial(t.Context(), d.ticket(dead, d.addr), nil); err != nil || from.String() != d.addr {
		t.Errorf("%v, %v", from, err)
	}
	if _, _, err := Dial(t.Context(), d.ticket(dead), nil); err == nil || err.Error() != "admit: no address of the ticket leads to its run; "+dead+": connect: connection refused" {
		t.Error(err)
	}
}

// A handler learns that its joiner has gone, and both ends learn that the other has stopped.
func TestEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memory{transport.NewMem()}
		handlers := make(chan error, 2)
		d := open(t, m.listen(t, "a:1"), func(ctx context.Context, _ net.Addr, _ []byte) ([]byte, error) {
			<-ctx.Done()
			handlers <- ctx.Err()
			return nil, ctx.Err()
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if _, _, err := dial(ctx, m.connect, d.ticket(), nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if err := <-handlers; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		go func() {
			time.Sleep(time.Hour)
			d.Close()
		}()
		if _, _, err := dial(t.Context(), m.connect, d.ticket(), nil); err == nil {
			t.Error("a reply of a closed server")
		}
		<-handlers
		synctest.Wait()
		d.counted(2, nil)
	})
}

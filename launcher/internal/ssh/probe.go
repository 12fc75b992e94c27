package ssh

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/net/admit"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/timing"
)

// Target is a listener on a machine.
type Target struct {
	ID    string   `json:"id"` // what it says to callers: an address such as docker0's is that of many machines
	Addrs []string `json:"addrs"`
}

// Reach says whether one machine reaches another.
type Reach struct {
	OK    bool    `json:"ok"`
	Addr  string  `json:"addr"` // where
	MS    float64 `json:"ms"`   // until the first byte
	MTU   int     `json:"mtu"`  // of the interface
	Error string  `json:"error"`
}

// Probe listens on a port of a range and says so in a line on out, dials the targets that come in a line on in, says in another line which of them
// it has reached, and listens until in ends.
func Probe(ctx context.Context, at ports.Range, in io.Reader, out io.Writer) error {
	var l net.Listener
	err := at.Listen(func(port int) (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf(":%d", port))
		return err
	})
	if err != nil {
		return err
	}
	own := Target{ID: rand.Text()}
	if own.Addrs, err = admit.Addrs(l.Addr(), nil); err != nil {
		return errors.Join(err, l.Close())
	}
	own.Addrs = admit.OneFamily(own.Addrs)
	var serving sync.WaitGroup
	serving.Go(func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			_, _ = io.WriteString(c, own.ID) // the caller says what went wrong
			_ = c.Close()
		}
	})
	defer serving.Wait()
	defer l.Close()
	if err := json.NewEncoder(out).Encode(own); err != nil {
		return err
	}
	lines := bufio.NewReader(io.LimitReader(in, maxLine))
	text, err := lines.ReadBytes('\n')
	if err != nil {
		return err
	}
	var targets []Target
	if err := json.Unmarshal(text, &targets); err != nil {
		return err
	}
	reached := make([]Reach, len(targets))
	var dialling sync.WaitGroup
	for i, t := range targets {
		dialling.Go(func() { reached[i] = t.reach(ctx) })
	}
	dialling.Wait()
	if err := json.NewEncoder(out).Encode(reached); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, lines)
	return nil
}

// reach dials all addresses of a target side by side, and keeps the first that leads there.
func (t Target) reach(ctx context.Context) Reach {
	ctx, cancel := context.WithTimeout(ctx, timing.Handshake)
	defer cancel()
	answers := make(chan Reach, len(t.Addrs))
	for _, addr := range t.Addrs {
		go func() { answers <- dial(ctx, addr, t.ID) }()
	}
	worst := Reach{Error: "it has no address"}
	var all []Reach
	for range t.Addrs {
		r := <-answers
		if r.OK {
			return r
		}
		all = append(all, r)
	}
	// What answers says more than what does not.
	for _, kind := range []string{timedOut, noRoute, otherMachine, refused} {
		if i := slices.IndexFunc(all, func(r Reach) bool { return r.Error == kind }); i >= 0 {
			worst = all[i]
		}
	}
	if worst.Addr == "" && len(all) > 0 {
		worst = all[0]
	}
	return worst
}

// What is said of an address that does not lead to its machine.
const (
	timedOut     = "timeout"
	refused      = "refused"
	noRoute      = "no route"
	otherMachine = "another machine answers"
)

func dial(ctx context.Context, addr, id string) (r Reach) {
	r.Addr = addr
	began := time.Now()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err == nil {
		defer c.Close()
		deadline, _ := ctx.Deadline()
		said := make([]byte, len(id))
		if err = c.SetReadDeadline(deadline); err == nil {
			_, err = io.ReadFull(c, said)
		}
		switch {
		case err == nil && string(said) == id:
			r.OK, r.MS = true, float64(time.Since(began).Microseconds())/1000
			r.MTU = mtuAt(c.LocalAddr())
			return r
		case err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			r.Error = otherMachine
			return r
		}
	}
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		r.Error = refused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		r.Error = noRoute
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		r.Error = timedOut
	default:
		r.Error = err.Error()
	}
	return r
}

// mtuAt returns the MTU of the interface that has an address; 0 if it is unknown.
func mtuAt(local net.Addr) int {
	at, err := netip.ParseAddrPort(local.String())
	if err != nil {
		return 0
	}
	interfaces, _ := net.Interfaces()
	for _, i := range interfaces {
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap() == at.Addr().Unmap().WithZone("") {
				return i.MTU
			}
		}
	}
	return 0
}

// Machine is what is known of a machine.
type Machine struct {
	Name    string `json:"name"`
	Version string `json:"version"` // of the launcher there
	Error   string `json:"error"`   // in the words of ssh
}

// Pair is whether machine From reaches machine To.
type Pair struct {
	From string `json:"from"`
	To   string `json:"to"`
	Reach
}

// Report is what machines can do for a run.
type Report struct {
	Machines []Machine `json:"machines"`
	Pairs    []Pair    `json:"pairs"`
}

// OK reports whether all machines can take part in one run.
func (r Report) OK() bool {
	return !slices.ContainsFunc(r.Machines, func(m Machine) bool { return m.Error != "" }) &&
		!slices.ContainsFunc(r.Pairs, func(p Pair) bool { return !p.OK })
}

// probing is a probe on one machine.
type probing struct {
	Host
	said  chan string // lines
	stdin *os.File    // our end
	ended chan error
}

// Check has every machine try to reach every other. The command is this launcher's that calls [Probe].
func Check(ctx context.Context, hosts []Host, command ...string) (r Report, err error) {
	l, err := Own()
	if err != nil {
		return r, err
	}
	own, _, err := Split(ctx, hosts)
	if err != nil {
		return r, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.Machines = make([]Machine, len(hosts))
	targets := make([]Target, len(hosts))
	probes := make([]*probing, len(hosts))
	each := func(f func(i int) error) {
		var all sync.WaitGroup
		for i := range hosts {
			if r.Machines[i].Error != "" {
				continue
			}
			all.Go(func() {
				if err := f(i); err != nil {
					r.Machines[i].Error = errorOf(hosts[i], err)
				}
			})
		}
		all.Wait()
	}
	for i, h := range hosts {
		r.Machines[i].Name = h.Name
	}
	each(func(i int) error {
		start := func(stdin io.Reader, line func(string), args ...string) error {
			if own != nil && hosts[i].Name == own.Name {
				return l.here(ctx, hosts[i], args, stdin, line)
			}
			return l.Run(ctx, hosts[i], args, func() io.Reader { return stdin }, line)
		}
		if err := start(nil, func(text string) { r.Machines[i].Version = text }, "version"); err != nil {
			return err
		}
		p, err := begin(hosts[i], start, command...)
		if err != nil {
			return err
		}
		probes[i] = p
		return p.next(&targets[i])
	})
	defer func() {
		for _, p := range probes {
			if p != nil {
				_ = p.stdin.Close()
				<-p.ended
			}
		}
	}()
	reached := make([][]Reach, len(hosts))
	each(func(i int) error {
		text, err := json.Marshal(targets)
		if err == nil {
			_, err = probes[i].stdin.Write(append(text, '\n'))
		}
		if err != nil {
			return err
		}
		if err := probes[i].next(&reached[i]); err != nil {
			return err
		}
		if len(reached[i]) != len(targets) {
			return errors.New("the launcher there said something else")
		}
		return nil
	})
	for i, from := range hosts {
		for j, to := range hosts {
			if i != j && r.Machines[i].Error == "" && r.Machines[j].Error == "" {
				r.Pairs = append(r.Pairs, Pair{from.Name, to.Name, reached[i][j]})
			}
		}
	}
	return r, nil
}

func errorOf(h Host, err error) string {
	var said *Error
	if errors.As(err, &said) && said.Host == h.Name {
		return said.Words
	}
	return err.Error()
}

// begin begins a probe.
func begin(h Host, start func(io.Reader, func(string), ...string) error, command ...string) (*probing, error) {
	there, stdin, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p := &probing{Host: h, said: make(chan string, 2), stdin: stdin, ended: make(chan error, 1)}
	go func() { // it ends with its process
		err := start(there, func(text string) {
			select {
			case p.said <- text:
			default: // it says two lines only
			}
		}, command...)
		_ = there.Close()
		close(p.said)
		p.ended <- err
	}()
	return p, nil
}

// next reads the next line of a probe.
func (p *probing) next(v any) error {
	text, ok := <-p.said
	if !ok {
		err := <-p.ended
		p.ended <- err
		if err == nil {
			err = errors.New("the launcher there ended early")
		}
		return err
	}
	if err := json.Unmarshal([]byte(text), v); err != nil {
		return fmt.Errorf("the launcher there said something else: %.80q", text)
	}
	return nil
}

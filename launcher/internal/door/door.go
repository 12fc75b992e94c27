// Package door is where other machines join a run at one of its machines. Every machine has a door, and a ticket for it in its run
// directory.
package door

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/admit"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// File is the name of the ticket in a run directory.
const File = "ticket"

// Life is how long a ticket is good: people take it to other machines.
const Life = time.Hour

// A Door is open until [Door.Close].
type Door struct {
	Ticket   admit.Ticket // the first one
	Rejected auth.Tally   // connections

	server  *admit.Server
	noted   *noting
	file    string
	issuing sync.WaitGroup
	closed  chan struct{}
}

// Open opens a door at an address, whose port 0 stands for one of a range. It writes a ticket with the machine's addresses, or those to advertise, into a file, and a new one
// before that has expired.
func Open(at string, in ports.Range, advertise []string, file string, c admit.Config) (*Door, error) {
	l, err := listen(at, in)
	if err != nil {
		return nil, err
	}
	d := &Door{noted: &noting{Listener: l, at: make(map[string]netip.Addr)}, file: file, closed: make(chan struct{})}
	addrs, err := admit.Addrs(l.Addr(), advertise)
	if err == nil {
		addrs = admit.OneFamily(addrs)
		d.Ticket, err = d.issue(c.Secret, addrs)
	}
	if err == nil {
		shown := c.Refused
		c.Refused = func(r admit.Refusal) {
			d.Rejected.Add(causes[r.Cause], 1)
			shown(r)
		}
		d.server, err = admit.Serve(d.noted, c)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	d.issuing.Go(func() {
		again := time.NewTicker(Life / 2)
		defer again.Stop()
		for {
			select {
			case <-again.C:
				_, _ = d.issue(c.Secret, addrs) // the one before is good for as long again
			case <-d.closed:
				return
			}
		}
	})
	return d, nil
}

func listen(at string, in ports.Range) (l net.Listener, err error) {
	host, port, err := net.SplitHostPort(at)
	if err != nil || port != "0" {
		return net.Listen("tcp", at)
	}
	err = in.Listen(func(port int) (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		return err
	})
	return l, err
}

var causes = map[admit.Cause]auth.Cause{
	admit.WrongToken: auth.NoSecret, admit.ExpiredToken: auth.Outdated, admit.Garbage: auth.NoSecret, admit.Slow: auth.Silent, admit.Crowded: auth.Crowded,
}

// issue writes a ticket into the file.
func (d *Door) issue(secret []byte, addrs []string) (admit.Ticket, error) {
	t, err := admit.Issue(secret, addrs, Life)
	if err != nil {
		return t, err
	}
	return t, rundir.WriteFile(d.file, []byte(t.Text()+"\n"))
}

// Close shuts the door, and removes the ticket, which lets no machine in then.
func (d *Door) Close() error {
	close(d.closed)
	d.issuing.Wait()
	return errors.Join(d.server.Close(), os.Remove(d.file))
}

// Own returns at which of this machine's addresses a caller came in.
func (d *Door) Own(from net.Addr) netip.Addr { return d.noted.of(from) }

// noting remembers at which of this machine's addresses callers came in.
type noting struct {
	net.Listener
	mu sync.Mutex
	at map[string]netip.Addr
}

func (n *noting) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if own, ok := c.LocalAddr().(*net.TCPAddr); ok {
		n.mu.Lock()
		defer n.mu.Unlock()
		if len(n.at) > maxNoted {
			clear(n.at)
		}
		n.at[c.RemoteAddr().String()] = own.AddrPort().Addr().Unmap()
	}
	return c, nil
}

const maxNoted = 1 << 12

func (n *noting) of(from net.Addr) netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.at[from.String()]
}

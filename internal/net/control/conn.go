package control

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/platform"
)

// Conn sends and receives messages over a network connection.
type Conn struct {
	nc net.Conn

	sending sync.Mutex // held over one frame's write

	in []byte // the part of the next frame that has arrived; of the receiving goroutine
}

// New wraps a connection, which belongs to the Conn from then on.
func New(nc net.Conn) *Conn { return &Conn{nc: nc} }

// Close ends the connection and every Send and Receive on it.
func (c *Conn) Close() error { return c.nc.Close() }

// Send writes one message. An error other than [ErrFrameSize] means that the
// connection is of no more use.
func (c *Conn) Send(m Message) error {
	body, err := Marshal(m)
	if err != nil {
		return err
	}
	frame := append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body))), body...)
	c.sending.Lock()
	defer c.sending.Unlock()
	if _, err := c.nc.Write(frame); err != nil {
		return fmt.Errorf("control: send %s: %w", m.kind(), err)
	}
	return nil
}

// Receive returns the next message. It returns ctx's error when ctx ends
// first, and may then be called again; every other error is final: [io.EOF]
// wrapped when the other side has closed, [ErrFrameSize], [ErrFormat], or the
// network's own.
func (c *Conn) Receive(ctx context.Context) (Message, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	expired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.nc.SetReadDeadline(time.Unix(1, 0)) // ends the Read that waits
		close(expired)
	})
	defer func() {
		if !stop() {
			<-expired
			_ = c.nc.SetReadDeadline(time.Time{})
		}
	}()

	if err := c.fill(4); err != nil {
		return nil, receiveError(ctx, err)
	}
	n := binary.BigEndian.Uint32(c.in)
	if n > MaxFrame {
		return nil, fmt.Errorf("%w: a length of %d arrived", ErrFrameSize, n)
	}
	if err := c.fill(4 + int(n)); err != nil {
		return nil, receiveError(ctx, err)
	}
	m, err := Unmarshal(c.in[4:])
	c.in = c.in[:0]
	return m, err
}

// fill reads until c.in holds n bytes. Room grows with what arrives, not with what
// a length promises.
func (c *Conn) fill(n int) error {
	for len(c.in) < n {
		have := len(c.in)
		room := min(n-have, 64<<10)
		c.in = slices.Grow(c.in, room)
		got, err := c.nc.Read(c.in[have : have+room])
		c.in = c.in[:have+got]
		if err != nil && len(c.in) < n {
			return err
		}
	}
	return nil
}

func receiveError(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		return ctx.Err()
	}
	return fmt.Errorf("control: receive: %w", err)
}

// Environment of a worker process.
const (
	EnvAgent  = "SOLITON_AGENT"  // the [Identity] as JSON
	EnvWorker = "SOLITON_WORKER" // its WorkerID, for scripts around a program
)

// Identity is what a worker process was started as.
type Identity struct {
	Conn        int // number of the file of the connection to the agent
	WorkerID    int
	Incarnation int
	Progress    int         // number of the file of a progress.Record; 0: there is none
	Canaries    [2]int      // numbers of the files of canaries, for platform.KeepCanary; 0: there are none
	Links       string      // folder of the sockets at which workers of this host reach each other
	Addr        string      // IP address at which workers of other hosts reach this one; "" where there are none
	Ports       ports.Range // to listen on there
}

// Launched returns the identity that an agent gave this process. ok is false if no agent started the process; an identity that no
// agent gives is an error.
func Launched() (id Identity, ok bool, err error) {
	text, ok := os.LookupEnv(EnvAgent)
	if !ok {
		return Identity{}, false, nil
	}
	var f faults.List
	f.Add(json.Unmarshal([]byte(text), &id))
	f.If(id.Conn < 3, "Conn is %d; it must be at least 3", id.Conn)
	f.If(id.WorkerID < 0 || id.Incarnation < 0, "WorkerID is %d and Incarnation %d; they must be at least 0", id.WorkerID, id.Incarnation)
	f.If(id.Links != "" && !filepath.IsAbs(id.Links), "Links is %q; it must be an absolute path", id.Links)
	if id.Addr != "" {
		_, err := netip.ParseAddr(id.Addr)
		f.Add(err)
	}
	if err := f.Err(); err != nil {
		return Identity{}, true, fmt.Errorf("control: %s=%q in the environment is set by the launcher only: %w", EnvAgent, text, err)
	}
	return id, true, nil
}

// Environ returns the environment variables of a worker process.
func (id Identity) Environ() []string {
	b, err := json.Marshal(id)
	if err != nil {
		panic(err) // numbers and strings always have an encoding
	}
	return []string{EnvAgent + "=" + string(b), EnvWorker + "=" + strconv.Itoa(id.WorkerID)}
}

// Hello returns the first message of the worker with this identity.
func (id Identity) Hello() Hello {
	return Hello{Protocol: Protocol, WorkerID: id.WorkerID, Incarnation: id.Incarnation, PID: os.Getpid()}
}

// Connect takes over the connection to the agent, says Hello, and returns the key of the run.
func (id Identity) Connect(ctx context.Context) (*Conn, auth.Key, error) {
	f := os.NewFile(uintptr(id.Conn), "agent")
	nc, err := net.FileConn(f) // a copy that children do not inherit
	_ = f.Close()
	if err != nil {
		return nil, nil, fmt.Errorf("control: connection to the agent: %w", err)
	}
	c := New(nc)
	if err := c.Send(id.Hello()); err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	m, err := c.Receive(ctx)
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	welcome, ok := m.(Welcome)
	if !ok || len(welcome.Key) != auth.KeySize {
		return nil, nil, errors.Join(fmt.Errorf("control: %s instead of a key as the agent's first message", m.kind()), c.Close())
	}
	return c, welcome.Key, nil
}

// Pair makes the connection between an agent and a worker process: the agent's end, on which Welcome is sent, and the file that
// the process inherits, which the caller closes. No other process can take part in it.
func Pair(key auth.Key) (agent net.Conn, worker *os.File, err error) {
	agent, worker, err = platform.SocketPair()
	if err != nil {
		return nil, nil, fmt.Errorf("control: %w", err)
	}
	if err := New(agent).Send(Welcome{Key: key}); err != nil {
		return nil, nil, errors.Join(err, agent.Close(), worker.Close())
	}
	return agent, worker, nil
}

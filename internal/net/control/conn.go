package control

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
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
	EnvAgent       = "SOLITON_AGENT"       // path of the agent's unix socket
	EnvWorker      = "SOLITON_WORKER"      // WorkerID
	EnvIncarnation = "SOLITON_INCARNATION" // incarnation
	EnvProgress    = "SOLITON_PROGRESS"    // number of the file of a progress.Record; may be missing
	EnvAddr        = "SOLITON_ADDR"        // IP address at which other workers reach this one; may be missing
	EnvCanary      = "SOLITON_CANARY"      // numbers of the files of two canaries, with a comma; may be missing
)

// Environment lists the variables that [Launched] reads.
func Environment() []string {
	return []string{EnvAgent, EnvWorker, EnvIncarnation, EnvProgress, EnvCanary, EnvAddr}
}

// Identity is what a worker process was started as.
type Identity struct {
	Socket      string // path of the agent's unix socket
	WorkerID    int
	Incarnation int
	Progress    int    // number of the file of a progress.Record; 0: there is none
	Canaries    [2]int // numbers of the files of canaries, for platform.KeepCanary; 0: there are none
	Addr        string // IP address at which other workers reach this one; "": one of the loopback interface
}

// Launched returns the identity an agent gave this process. ok is false
// when the process was not started by an agent; an environment that is only
// half there is an error.
func Launched() (id Identity, ok bool, err error) {
	id.Socket, ok = os.LookupEnv(EnvAgent)
	if !ok {
		return Identity{}, false, nil
	}
	var err1, err2 error
	if id.WorkerID, err1 = strconv.Atoi(os.Getenv(EnvWorker)); err1 != nil || id.WorkerID < 0 {
		err1 = fmt.Errorf("control: %s=%q in the environment is no worker number; it is set by the launcher only", EnvWorker, os.Getenv(EnvWorker))
	}
	if id.Incarnation, err2 = strconv.Atoi(os.Getenv(EnvIncarnation)); err2 != nil || id.Incarnation < 0 {
		err2 = fmt.Errorf("control: %s=%q in the environment is no incarnation; it is set by the launcher only", EnvIncarnation, os.Getenv(EnvIncarnation))
	}
	var err3 error
	if v, there := os.LookupEnv(EnvProgress); there {
		if err3 = number(v, &id.Progress); err3 != nil {
			err3 = fmt.Errorf("control: %s=%q in the environment is no file number; it is set by the launcher only", EnvProgress, v)
		}
	}
	var err4 error
	if v, there := os.LookupEnv(EnvCanary); there {
		one, two, _ := strings.Cut(v, ",")
		err4 = cmp.Or(number(one, &id.Canaries[0]), number(two, &id.Canaries[1]))
		if err4 != nil {
			err4 = fmt.Errorf("control: %s=%q in the environment is no two file numbers; it is set by the launcher only", EnvCanary, v)
		}
	}
	var err5 error
	if v, there := os.LookupEnv(EnvAddr); there {
		if _, err := netip.ParseAddr(v); err != nil {
			err5 = fmt.Errorf("control: %s=%q in the environment is no IP address; it is set by the launcher only", EnvAddr, v)
		}
		id.Addr = v
	}
	return id, true, errors.Join(err1, err2, err3, err4, err5)
}

// number reads the number of a file that was handed down.
func number(text string, to *int) (err error) {
	if *to, err = strconv.Atoi(text); err == nil && *to < 3 {
		err = strconv.ErrRange
	}
	return err
}

// Environ returns the environment variables that [Launched] reads.
func (id Identity) Environ() []string {
	env := []string{
		EnvAgent + "=" + id.Socket,
		EnvWorker + "=" + strconv.Itoa(id.WorkerID),
		EnvIncarnation + "=" + strconv.Itoa(id.Incarnation),
	}
	if id.Progress > 0 {
		env = append(env, EnvProgress+"="+strconv.Itoa(id.Progress))
	}
	if id.Canaries[0] > 0 {
		env = append(env, fmt.Sprintf("%s=%d,%d", EnvCanary, id.Canaries[0], id.Canaries[1]))
	}
	if id.Addr != "" {
		env = append(env, EnvAddr+"="+id.Addr)
	}
	return env
}

// Hello returns the first message of the worker with this identity.
func (id Identity) Hello() Hello {
	return Hello{Protocol: Protocol, WorkerID: id.WorkerID, Incarnation: id.Incarnation, PID: os.Getpid()}
}

// Dial connects to the agent and says Hello.
func (id Identity) Dial(ctx context.Context) (*Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", id.Socket)
	if err != nil {
		return nil, fmt.Errorf("control: connect to the agent: %w", err)
	}
	c := New(nc)
	if err := c.Send(id.Hello()); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// Package machines makes separate test machines on this one: each has a network, host name, process table, /tmp, home and other temporary
// folders of its own, and a cable to a switch that joins them. The folders of this repository are empty there. It takes root.
//
// A machine lives in Linux namespaces without a name, held by a process that ends with the test process, however that ends. So all of it is
// gone then: processes, files, noHost.
package machines

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/testkit/require"
)

// Machine is a test machine. Its methods report what goes wrong as errors of the test.
type Machine struct {
	Name string // also its host name, which all machines of the test can resolve

	t        testing.TB
	number   int    // from 1
	sw       *space // the switch
	own      *space
	network  os.FileInfo
	clock    time.Duration
	running  sync.WaitGroup // programs
	poweroff sync.Once
}

// Up starts machines m1, m2, ..., which are gone after the test. Where there can be none, it skips the test.
func Up(t testing.TB, n int) []*Machine {
	t.Helper()
	return UpAt(t, make([]time.Duration, n)...)
}

// UpAt starts a machine for each offset, by which its monotonic clock is ahead of this machine's. Their calendar time is the same.
func UpAt(t testing.TB, offsets ...time.Duration) (ms []*Machine) {
	t.Helper()
	sw, err := hold(noHost, unix.CLONE_NEWNET, 0)
	if err == nil {
		t.Cleanup(sw.end)
		_, err = sw.network("ip", "link", "add", "switch", "up", "type", "bridge")
	}
	require.Tool(t, "machines", err == nil, fmt.Sprintf("test machines take Linux, root and the command ip: %v", err))
	names := "127.0.0.1 localhost\n"
	for i := range offsets {
		names += fmt.Sprintf("%v m%d\n", addr(i+1), i+1)
	}
	for i, offset := range offsets {
		m := &Machine{Name: fmt.Sprint("m", i+1), t: t, number: i + 1, sw: sw, clock: offset}
		m.own, err = hold(m.Name, all, offset, hosts+"="+names, folders+"="+strings.Join(hidden(), ":"))
		require.Tool(t, "machines", err == nil, fmt.Sprintf("a test machine takes mounts and processes of its own, and for its own clock Linux 6.3: %v", err))
		t.Cleanup(m.PowerOff)
		m.network, err = os.Stat(fmt.Sprintf("/proc/%d/ns/net", m.PID()))
		m.report(err)
		m.run(m.sw, "ip", "link", "add", m.port(), "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(m.PID()))
		m.run(m.sw, "ip", "link", "set", m.port(), "master", "switch", "up")
		m.run(m.own, "ip", "addr", "add", m.Addr().String()+"/24", "dev", "eth0")
		if _, err := os.Stat("/proc/sys/net/ipv6"); err == nil {
			m.run(m.own, "ip", "addr", "add", m.Addr6().String()+"/64", "dev", "eth0", "nodad")
		}
		m.run(m.own, "ip", "link", "set", "eth0", "up")
		m.run(m.own, "ip", "link", "set", "lo", "up")
		ms = append(ms, m)
	}
	return ms
}

// Cmd is a program of a machine. It differs from an [exec.Cmd] in where it runs, and it is reaped by itself: use no pipes of the exec.Cmd.
type Cmd struct {
	*exec.Cmd
	m     *Machine
	ended chan struct{}
	err   error
}

// Command returns a program that is to run on the machine, with its home as working directory and an environment of its own. A name
// without a slash is looked up on this machine.
func (m *Machine) Command(name string, args ...string) *Cmd {
	c := &Cmd{Cmd: exec.Command(name, args...), m: m, ended: make(chan struct{})}
	c.Env = []string{"HOME=/root", "USER=root", "LANG=C.UTF-8", "PATH=" + os.Getenv("PATH")}
	c.Dir = "/root"
	if m.clock != 0 { // a process of several threads cannot go into another time
		c.Args = append([]string{"nsenter", "--time=/proc/1/ns/time", c.Cmd.Path}, args...)
		c.Cmd.Path, c.Err = exec.LookPath("nsenter")
	}
	return c
}

// Start starts the program.
func (c *Cmd) Start() error {
	if err := c.m.own.enter(all, c.Cmd.Start); err != nil {
		return fmt.Errorf("%s on %s: %w", c, c.m.Name, err)
	}
	c.m.running.Go(func() { // a machine is off when the last of its programs is reaped
		c.err = c.Cmd.Wait()
		close(c.ended)
	})
	return nil
}

// Wait waits for the end of the program.
func (c *Cmd) Wait() error {
	<-c.ended
	return c.err
}

// Run starts the program and waits for its end.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// CombinedOutput runs the program and returns what it writes.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var b bytes.Buffer
	c.Stdout, c.Stderr = &b, &b
	err := c.Run()
	return b.Bytes(), err
}

// PID returns the process of this machine that holds the machine's namespaces; there it is process 1.
func (m *Machine) PID() int { return m.own.cmd.Process.Pid }

// Addr returns the IPv4 address of the machine, Addr6 that of version 6.
func (m *Machine) Addr() netip.Addr { return addr(m.number) }

// Addr6 returns the IPv6 address of the machine, which it has if this machine has the protocol.
func (m *Machine) Addr6() netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 15: byte(m.number)})
}

func addr(number int) netip.Addr { return netip.AddrFrom4([4]byte{10, 77, 0, byte(number)}) }

// port is the name of the machine's cable at the switch; on the machine it is eth0.
func (m *Machine) port() string { return fmt.Sprint("port", m.number) }

// Path returns where this machine finds a file of the machine, while that is on.
func (m *Machine) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", m.PID()), path)
}

// CopyIn copies a file of this machine into the home there, and returns its path there.
func (m *Machine) CopyIn(path string) string {
	m.t.Helper()
	there := filepath.Join("/root", filepath.Base(path))
	text, err := os.ReadFile(path)
	info, statErr := os.Stat(path)
	if err = errors.Join(err, statErr); err == nil {
		err = os.WriteFile(m.Path(there), text, info.Mode().Perm())
	}
	m.report(err)
	return there
}

// Cut pulls the machine's cable out of the switch. It starts no process: where processors are short, that would take tens of
// milliseconds.
func (m *Machine) Cut() {
	m.t.Helper()
	m.report(m.sw.enter(unix.CLONE_NEWNET, func() error { return linkDown(m.port()) }))
}

// linkDown takes a network interface down.
func linkDown(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	dev, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, dev)
	}
	if err == nil {
		dev.SetUint16(dev.Uint16() &^ unix.IFF_UP)
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, dev)
	}
	if err != nil {
		return fmt.Errorf("%s down: %w", name, err)
	}
	return nil
}

// Direction is one of the two in which packets pass a cable.
type Direction int

// The directions, as the machine sees them.
const (
	Incoming Direction = iota
	Outgoing
)

// CutOneWay drops all packets in one direction.
func (m *Machine) CutOneWay(d Direction) { m.t.Helper(); m.queue(d, "blackhole") }

// Slow limits the cable, in each direction, to a rate in bytes per second, with a queue of 50 ms.
func (m *Machine) Slow(rate int) {
	m.t.Helper()
	for _, d := range []Direction{Incoming, Outgoing} {
		m.queue(d, "tbf", "rate", fmt.Sprint(rate, "bps"), "burst", fmt.Sprint(max(16<<10, rate/250)), "latency", "50ms")
	}
}

// Narrow has packets of more than so many bytes to and from the machine vanish on their way, without a word to who sends them, as a
// tunnel does of which neither end knows.
func (m *Machine) Narrow(mtu int) {
	m.t.Helper()
	const header = 14 // of Ethernet
	for _, d := range []Direction{Incoming, Outgoing} {
		m.queue(d, "tbf", "rate", "1gbit", "burst", fmt.Sprint(mtu+header), "latency", "50ms") // what is larger than a burst is dropped
	}
}

// queue sets the queue in which packets wait for the cable.
func (m *Machine) queue(d Direction, queue ...string) {
	m.t.Helper()
	end, dev := m.own, "eth0"
	if d == Incoming {
		end, dev = m.sw, m.port()
	}
	m.run(end, "tc", append([]string{"qdisc", "replace", "dev", dev, "root"}, queue...)...)
}

// Heal takes back Cut, CutOneWay, Slow and Narrow. When it returns, packets pass; peers look for an address once a second.
func (m *Machine) Heal() {
	m.t.Helper()
	for _, d := range []Direction{Incoming, Outgoing} {
		m.queue(d, "pfifo")
	}
	m.run(m.sw, "ip", "link", "set", m.port(), "up")
	for began := time.Now(); time.Since(began) < 10*time.Second; { // the kernel lets links up at most once a second
		const up = " state UP "
		far, _ := m.own.network("ip", "-o", "link", "show", "dev", "eth0")
		near, _ := m.sw.network("ip", "-o", "link", "show", "dev", m.port())
		if strings.Contains(far, up) && strings.Contains(near, up) {
			return
		}
	}
	m.t.Errorf("machine %s: the cable stays down", m.Name)
}

// KillAll kills all programs of the machine in one instant. The machine stays on, and closes their connections.
func (m *Machine) KillAll() { m.t.Helper(); m.signal("KILL") }

// Freeze stops all programs of the machine in one instant, until Thaw.
func (m *Machine) Freeze() { m.t.Helper(); m.signal("STOP") }

// Thaw lets the programs of a frozen machine continue.
func (m *Machine) Thaw() { m.t.Helper(); m.signal("CONT") }

// signal sends a signal to all processes but the first and the sender.
func (m *Machine) signal(name string) {
	m.t.Helper()
	m.report(m.Command("sh", "-c", "kill -"+name+" -1 2>/dev/null || :").Run()) // there may be none
}

// PowerOff cuts the cable and then kills all processes: their peers see neither RST nor FIN. The machine's files are gone as well.
func (m *Machine) PowerOff() {
	m.poweroff.Do(func() {
		m.t.Helper()
		m.Cut()
		m.own.end()
		m.running.Wait()
	})
}

// Processes returns the processes of this machine that are in the machine's network, beside the one that holds the machine.
func (m *Machine) Processes() (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range all {
		network, err := os.Stat(filepath.Join(p, "ns/net"))
		if pid, _ := strconv.Atoi(filepath.Base(p)); err == nil && pid != m.PID() && os.SameFile(network, m.network) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// run runs a command of this machine in the network of the switch or of the machine.
func (m *Machine) run(in *space, name string, args ...string) {
	m.t.Helper()
	_, err := in.network(name, args...)
	m.report(err)
}

func (m *Machine) report(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Errorf("machine %s: %v", m.Name, err)
	}
}

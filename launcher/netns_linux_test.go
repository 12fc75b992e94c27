package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// ip runs the command of that name.
func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// network is a bridge in a network namespace of its own, with a cable to each host in another. Nothing
// of it is in the machine's own.
type network struct {
	name  string // of the bridge's namespace, and the beginning of the others'
	hosts int
}

func (n network) host(h int) string { return fmt.Sprintf("%s-%d", n.name, h) }

// laid makes a network, which is taken away with the test. It goes on only where namespaces can be made.
func laid(t *testing.T, hosts int) network {
	t.Helper()
	n := network{fmt.Sprintf("soliton-%d", os.Getpid()), hosts}
	err := ip("netns", "add", n.name)
	require.Tool(t, "netns", err == nil, fmt.Sprint("network namespaces take root and the command ip: ", err))
	t.Cleanup(func() {
		if err := ip("netns", "del", n.name); err != nil {
			t.Error(err)
		}
	})
	must := func(args ...string) {
		t.Helper()
		if err := ip(args...); err != nil {
			t.Fatal(err)
		}
	}
	must("-n", n.name, "link", "add", "bridge", "type", "bridge")
	must("-n", n.name, "link", "set", "bridge", "up")
	for h := range hosts {
		space, port := n.host(h), fmt.Sprint("port", h)
		must("netns", "add", space)
		t.Cleanup(func() {
			if err := ip("netns", "del", space); err != nil {
				t.Error(err)
			}
		})
		must("link", "add", port, "netns", n.name, "type", "veth", "peer", "name", "eth0", "netns", space)
		must("-n", n.name, "link", "set", port, "master", "bridge", "up")
		must("-n", space, "addr", "add", fmt.Sprintf("%v/24", n.addr(h)), "dev", "eth0")
		must("-n", space, "link", "set", "eth0", "up")
		must("-n", space, "link", "set", "lo", "up")
	}
	return n
}

func (n network) addr(h int) netip.Addr { return netip.AddrFrom4([4]byte{10, 77, 0, byte(h + 1)}) }

// plug pulls the cable of a host at the bridge, or puts it in again.
func (n network) plug(h int, in bool) error {
	state := map[bool]string{true: "up", false: "down"}[in]
	return ip("-n", n.name, "link", "set", fmt.Sprint("port", h), state)
}

// places are the namespaces of the hosts.
func (n network) places() (places []place) {
	for h := range n.hosts {
		places = append(places, place{n.addr(h), func(f func() error) error { return inside(filepath.Join("/run/netns", n.host(h)), f) }})
	}
	return places
}

// inside calls a function on a thread that is in another network namespace.
func inside(path string, f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer home.Close()
	space, err := os.Open(path)
	if err != nil {
		return err
	}
	defer space.Close()
	if err := unix.Setns(int(space.Fd()), unix.CLONE_NEWNET); err != nil {
		return err
	}
	err = f()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		runtime.LockOSThread() // nothing else may run on this thread
		return back
	}
	return err
}

// leadingProcess returns the process of the agent that answers for a run, 0 for none.
func leadingProcess(dir string) (pid int) {
	run, err := rundir.ReadWorkers(dir)
	if err != nil {
		return 0
	}
	c, err := net.Dial("unix", run.Agent)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(peer.Pid)
		}
	})
	return pid
}

// leads returns the host whose agent answers for the run, -1 for none.
func (s *supervisor) leads(dir string) int {
	pid := leadingProcess(dir)
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.IndexFunc(s.agents, func(p *agentProcess) bool { return p.cmd.Process.Pid == pid })
}

// Three hosts, each with a network of its own and one cable to the others: the cable of the one that leads is
// pulled until it holds and the others have gone on, and put in again. It is as in TestCut, without
// anything of ours between the hosts.
func TestNetworkNamespaces(t *testing.T) {
	t.Parallel()
	n := laid(t, 3)
	want := cutWant(t)
	dir, err := rundir.Create(filepath.Join(t.TempDir(), "run"), "emulated", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	f := runFlags{workers: 6, hosts: 3, stages: 1, threads: 1, mirrors: 1, least: 1, detect: time.Second, reduction: "exact", zero: 2, digests: true, plain: true}
	s := newSupervisor(f, binary, n.places(), view.Tee(), io.Discard)
	var stderr bytes.Buffer
	ended := make(chan error, 1)
	var training sync.WaitGroup
	defer training.Wait()
	training.Go(func() {
		ended <- s.train(program{given: emulated, name: "emulated"}, emulated, append([]string{"--layer-ms", "5"}, cutJob...), dir, t.TempDir(), nil, make(chan session.Reason, maxStops), &stderr)
	})

	t.Cleanup(func() { logFiles(t, dir.Path()) })
	events := func(kind string, host int) (n int) {
		text, _ := os.ReadFile(filepath.Join(dir.Path(), "events.jsonl"))
		for line := range bytes.Lines(text) {
			for w := 2 * host; w < 2*host+2; w++ {
				if bytes.Contains(line, fmt.Appendf(nil, `"kind":%q,"worker":%d,`, kind, w)) {
					n++
				}
			}
		}
		return n
	}
	await(t, "step 5", func() bool {
		text, _ := os.ReadFile(filepath.Join(dir.Path(), "metrics.jsonl"))
		return bytes.Contains(text, []byte(`{"step":5,`))
	})
	host := -1
	await(t, "an agent that leads", func() bool { host = s.leads(dir.Path()); return host >= 0 })
	if err := n.plug(host, false); err != nil {
		t.Fatal(err)
	}
	await(t, "a host that holds, and others that go on", func() bool {
		return events("lost", host) == 2 && saysItHolds(t, dir.Path(), fmt.Sprint("host-", host))
	})
	if err := n.plug(host, true); err != nil {
		t.Fatal(err)
	}
	await(t, "workers that join", func() bool { return events("joined", host) >= 2 })
	if err := <-ended; err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	var sum rundir.Summary
	readJSON(t, filepath.Join(dir.Path(), "summary.json"), &sum)
	if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss {
		t.Errorf("loss %v, parameters %s; want those of a run in peace, %v, %s", sum.Loss, sum.ParamsSHA256, want.Loss, want.ParamsSHA256)
	}
	oneHistory(t, dir.Path())
	for h := range n.hosts {
		if left, err := exec.Command("ip", "netns", "pids", n.host(h)).Output(); err != nil || len(left) > 0 {
			t.Errorf("left behind at host-%d: %s%v", h, left, err)
		}
	}
}

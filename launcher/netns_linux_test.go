package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// places are the networks of the machines.
func places(ms []*machines.Machine) (places []place) {
	for _, m := range ms {
		places = append(places, place{m.Addr(), func(f func() error) error { return inside(fmt.Sprintf("/proc/%d/ns/net", m.PID()), f) }})
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

// Three hosts, each in the network of a test machine: the cable of the one that leads is
// pulled until it holds and the others have gone on, and put in again. It is as in TestCut, without
// anything of ours between the hosts.
func TestNetworkNamespaces(t *testing.T) {
	t.Parallel()
	_, err := exec.LookPath("ip")
	require.Tool(t, "netns", err == nil && os.Geteuid() == 0, "network namespaces take root and the command ip")
	ms := machines.Up(t, 3)
	want := cutWant(t)
	dir, err := rundir.Create(filepath.Join(t.TempDir(), "run"), "emulated", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	f := runFlags{workers: 6, hosts: 3, stages: 1, threads: 1, mirrors: 1, least: 1, detect: time.Second, reduction: "exact", zero: 2, digests: true, plain: true}
	s := newSupervisor(f, binary, places(ms), view.Tee(), io.Discard)
	var stderr bytes.Buffer
	ended := make(chan error, 1)
	var training sync.WaitGroup
	defer training.Wait()
	training.Go(func() {
		ended <- s.train(dir, nil, make(chan session.Reason, maxStops), &stderr, func() error {
			return s.start(program{given: emulated, name: "emulated"}, emulated, append([]string{"--layer-ms", "5"}, cutJob...), dir, t.TempDir())
		})
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
	ms[host].Cut()
	await(t, "a host that holds, and others that go on", func() bool {
		return events("lost", host) == 2 && saysItHolds(t, dir.Path(), fmt.Sprint("host-", host))
	})
	ms[host].Heal()
	await(t, "workers that join", func() bool { return events("joined", host) >= 2 })
	if err := <-ended; err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	var sum rundir.Summary
	readJSON(t, filepath.Join(dir.Path(), "summary.json"), &sum)
	if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Loss != want.Loss {
		t.Errorf("loss %v, parameters %s; want those of an undisturbed run, %v, %s", sum.Loss, sum.ParamsSHA256, want.Loss, want.ParamsSHA256)
	}
	oneHistory(t, dir.Path())
	for _, m := range ms {
		if left := m.Processes(); left != nil {
			t.Errorf("left behind at %s: %v", m.Name, left)
		}
	}
}

// Where the loopback interface is down, a run with hosts ends at once.
func TestHostsWithoutLoopback(t *testing.T) {
	built(t)
	require.Tool(t, "netns", os.Geteuid() == 0, "a network namespace takes root")
	cmd := launch(t, "run", "--plain", "--emulate-hosts", "3", "--workers", "3", "--run-dir", "run", fake)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	const want = "launcher: --emulate-hosts 3: 127.1.0.1 cannot be reached (connect: network is unreachable): set the loopback interface up\n"
	if status, _, errs := result(t, cmd); status != 1 || errs != want {
		t.Errorf("status %d, %q, want %q", status, errs, want)
	}
}

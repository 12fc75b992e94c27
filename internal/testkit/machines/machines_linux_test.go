package machines

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test binary is also the program that runs on the machines.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "program" {
		if err := program(os.Args[2], os.Args[3:]...); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	m.Run()
}

const short = 500 * time.Millisecond // until a call counts as unanswered

func program(name string, args ...string) error {
	switch name {
	case "serve": // echoes what it gets over TCP, and prints what it gets over UDP
		l, err := net.Listen("tcp", ":7")
		if err != nil {
			return err
		}
		packets, err := net.ListenPacket("udp", ":7")
		if err != nil {
			return err
		}
		go func() {
			b := make([]byte, 100)
			for n, _, err := packets.ReadFrom(b); err == nil; n, _, err = packets.ReadFrom(b) {
				fmt.Printf("%s\n", b[:n])
			}
		}()
		fmt.Println("serving")
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go io.Copy(c, c)
		}
	case "send": // over UDP
		c, err := net.Dial("udp", args[0])
		if err != nil {
			return err
		}
		_, err = c.Write([]byte(args[1]))
		return err
	case "call": // sends some bytes over TCP and waits for their echo
		c, err := net.DialTimeout("tcp", args[0], short)
		if err != nil {
			return err
		}
		size, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		go c.Write(make([]byte, size))
		for at := 0; at < size; {
			c.SetReadDeadline(time.Now().Add(short))
			n, err := c.Read(make([]byte, 64<<10))
			if at += n; err != nil {
				return err
			}
		}
		if len(args) > 2 { // stays, and says how the connection ends
			fmt.Println("connected")
			c.SetReadDeadline(time.Now().Add(4 * short))
			_, err := c.Read(make([]byte, 1))
			return err
		}
	}
	return nil
}

// site is machines that serve.
type site struct {
	*testing.T
	ms      []*Machine
	servers []*Cmd
	out     []*lines
}

// lines is what a program writes.
type lines struct {
	*io.PipeWriter
	said chan string
}

func newLines() *lines {
	r, w := io.Pipe()
	l := &lines{w, make(chan string, 100)}
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			l.said <- s.Text()
		}
		close(l.said)
	}()
	return l
}

func open(t *testing.T, n int) *site {
	s := &site{T: t, ms: Up(t, n)}
	for _, m := range s.ms {
		m.CopyIn(os.Args[0])
		c := s.program(m, "serve")
		l := newLines()
		t.Cleanup(func() { l.Close() })
		c.Stdout = l
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		if said := <-l.said; said != "serving" {
			t.Fatal(said)
		}
		s.servers, s.out = append(s.servers, c), append(s.out, l)
	}
	return s
}

func (s *site) program(m *Machine, args ...string) *Cmd {
	return m.Command(filepath.Join("/root", filepath.Base(os.Args[0])), append([]string{"program"}, args...)...)
}

func (s *site) call(from int, host string, size int) error {
	out, err := s.program(s.ms[from], "call", net.JoinHostPort(host, "7"), strconv.Itoa(size)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// reaches checks which machines reach m1 and are reached by it.
func (s *site) reaches(want bool, when string) {
	s.Helper()
	for i := 1; i < len(s.ms); i++ {
		there, back := s.call(0, s.ms[i].Name, 1), s.call(i, "m1", 1)
		for tries := 0; want && (there != nil || back != nil) && tries < 20; tries++ { // an address is looked for once a second
			there, back = s.call(0, s.ms[i].Name, 1), s.call(i, "m1", 1)
		}
		if (there == nil) != want || (back == nil) != want {
			s.Errorf("%s: m1 to %s: %v; back: %v", when, s.ms[i].Name, there, back)
		}
	}
}

func sh(t *testing.T, m *Machine, script string) string {
	t.Helper()
	out, err := m.Command("sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Errorf("%s on %s: %v: %s", script, m.Name, err, out)
	}
	return strings.TrimSpace(string(out))
}

// Machines share no name, file, process, environment or network interface with each other and this one.
func TestApart(t *testing.T) {
	t.Setenv("SOLITON_TEST_SECRET", "seen")
	ms := Up(t, 2)
	if err := ms[1].Command("sleep", "1000").Start(); err != nil {
		t.Fatal(err)
	}
	repository, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"/tmp", "/root", "/run", "/dev/shm"} {
		sh(t, ms[1], "touch "+folder+"/mine")
	}
	for script, want := range map[string]string{
		"uname -n": "m1",
		"find /tmp /root /run /dev/shm -name mine":                          "",
		"ls -A " + repository + " 2> /dev/null || true":                     "",
		"cat /proc/[0-9]*/comm | grep -x sleep || echo none":                "none",
		"echo $HOME $(pwd) ${SOLITON_TEST_SECRET:-unseen}":                  "/root /root unseen",
		"cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' ' | sort | xargs": "eth0 lo",
	} {
		if got := sh(t, ms[0], script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	if err := ms[0].Command("false").Run(); err == nil {
		t.Error("a failure is not seen")
	}
	if err := ms[0].Command("/root/none").Run(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestCables(t *testing.T) {
	s := open(t, 3)
	s.reaches(true, "at first")
	if _, err := os.Stat("/proc/sys/net/ipv6"); err == nil {
		if err := s.call(0, s.ms[1].Addr6().String(), 1); err != nil {
			t.Error(err)
		}
	}
	s.ms[0].Cut()
	s.reaches(false, "cut")
	if err := s.call(1, "m3", 1); err != nil {
		t.Error(err)
	}
	s.ms[0].Heal()
	s.reaches(true, "healed")

	send := func(from, to int, text string) {
		if out, err := s.program(s.ms[from], "send", fmt.Sprint(s.ms[to].Addr(), ":7"), text).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
	for d, want := range map[Direction]int{Incoming: 1, Outgoing: 0} { // where a packet arrives
		s.ms[0].CutOneWay(d)
		s.reaches(false, "cut one way")
		send(0, 1, "from m1")
		send(1, 0, "from m2")
		if said := <-s.out[want].said; said != fmt.Sprint("from m", 2-want) {
			t.Errorf("m%d got %q", want+1, said)
		}
		s.ms[0].Heal()
		s.reaches(true, "healed")
		select {
		case said := <-s.out[1-want].said:
			t.Errorf("m%d got %q", 2-want, said)
		default:
		}
	}

	s.ms[0].Narrow(576)
	for from, to := range []string{0: "m2", 1: "m1"} {
		if few, many := s.call(from, to, 100), s.call(from, to, 10_000); few != nil || many == nil {
			t.Errorf("small packets to %s: %v; large ones: %v", to, few, many)
		}
	}
	s.ms[0].Heal()

	s.ms[0].Slow(1 << 20)
	began := time.Now()
	if err := s.call(1, "m1", 1<<20); err != nil || time.Since(began) < 900*time.Millisecond {
		t.Errorf("1 MiB at 1 MiB/s took %v, %v", time.Since(began), err)
	}
	s.ms[0].Heal()
	s.reaches(true, "healed")
}

func TestProcesses(t *testing.T) {
	s := open(t, 2)
	s.ms[0].Freeze()
	if err := s.call(1, "m1", 1); err == nil {
		t.Error("a frozen machine answers")
	}
	s.ms[0].Thaw()
	s.reaches(true, "thawed")
	sh(t, s.ms[0], "setsid sleep 1000 >/dev/null 2>&1 &") // has no parent there
	s.ms[0].KillAll()
	var exit *exec.ExitError
	if err := s.servers[0].Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("got %v", err)
	}
	for began := time.Now(); s.ms[0].Processes() != nil; { // the kernel may be ending them still
		if time.Since(began) > 10*time.Second {
			t.Fatalf("alive: %v", s.ms[0].Processes())
		}
	}
	sh(t, s.ms[0], "true")
	if err := s.call(1, "m1", 1); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("got %v", err)
	}
}

// A machine without power leaves no process behind, and its peers hear nothing of it.
func TestPowerOff(t *testing.T) {
	s := open(t, 2)
	sh(t, s.ms[0], "setsid sleep 1000 >/dev/null 2>&1 &")
	peer := s.program(s.ms[1], "call", "m1:7", "1", "stay")
	l := newLines()
	defer l.Close()
	peer.Stdout = l
	if err := peer.Start(); err != nil {
		t.Fatal(err)
	}
	if said := <-l.said; said != "connected" {
		t.Fatal(said)
	}
	if n := len(s.ms[0].Processes()); n != 2 {
		t.Errorf("%d processes", n)
	}
	s.ms[0].PowerOff()
	if left := s.ms[0].Processes(); left != nil {
		t.Errorf("left: %v", left)
	}
	if said := <-l.said; !strings.Contains(said, "timeout") {
		t.Errorf("the connection ended with %s", said)
	}
	if err := s.servers[0].Wait(); err == nil {
		t.Error("a program of a machine that is off has succeeded")
	}
}

func TestClocks(t *testing.T) {
	ms := UpAt(t, 0, time.Hour)
	var uptime [2]float64
	for i, m := range ms {
		if _, err := fmt.Sscan(sh(t, m, "cat /proc/uptime"), &uptime[i]); err != nil {
			t.Fatal(err)
		}
	}
	if ahead := uptime[1] - uptime[0]; ahead < 3599.5 || ahead > 3660 {
		t.Errorf("m2 is %v s ahead", ahead)
	}
}

// A test process that is killed leaves nothing behind.
func TestKilledTest(t *testing.T) {
	const role = "SOLITON_TEST_ABANDON"
	if os.Getenv(role) != "" {
		m := Up(t, 1)[0]
		sh(t, m, "setsid sleep 1000 >/dev/null 2>&1 &")
		fmt.Println(m.PID(), m.sw.cmd.Process.Pid, m.Processes())
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	Up(t, 1) // or skip
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledTest$")
	cmd.Env = append(os.Environ(), role+"=1")
	out, err := cmd.Output()
	left := strings.Fields(strings.Trim(string(out), "[]\n"))
	if err == nil || len(left) != 3 {
		t.Fatalf("%v: %s", err, out)
	}
	gone := func(pid string) bool {
		_, err := os.Stat("/proc/" + strings.Trim(pid, "[]"))
		return errors.Is(err, os.ErrNotExist)
	}
	for deadline := time.Now().Add(10 * time.Second); ; {
		if left = slices.DeleteFunc(left, gone); len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left: %v", left)
		}
	}
}

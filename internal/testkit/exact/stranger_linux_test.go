package exact

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// A process of the same user that has not read the key of a run, but knows all else, forges hellos of every session to every
// address of the workers, with boundary tensors for coming steps behind them, and a process of another user tries to connect: the
// run ends as an undisturbed one does, and no worker is lost. Only workers that have others on other hosts speak to another user.
func TestStrangers(t *testing.T) {
	launcher, gpt := programs(t)
	program := append([]string{gpt}, strings.Fields(struckFlags+" --steps 120")...)
	want, metrics := launch(t, launcher, append([]string{"--workers", "1"}, program...)...)
	const workers = 4
	for _, hosts := range []int{1, 2} {
		t.Run(fmt.Sprint(hosts, " hosts"), func(t *testing.T) {
			r := startRun(t, launcher, append([]string{"--workers", fmt.Sprint(workers), "--emulate-hosts", fmt.Sprint(hosts), "--stages", "2", "--detect", "5s"}, program...)...)
			if err := os.Chmod(filepath.Dir(r.temp), 0o711); err != nil { // the folder of the sockets alone keeps others out
				t.Fatal(err)
			}
			r.await(t, 2)
			run, err := rundir.ReadWorkers(r.dir)
			if err != nil || len(run.Workers) != workers {
				t.Fatal(run, err)
			}
			var callers sync.WaitGroup
			for _, to := range run.Workers {
				var challenges atomic.Int64
				for _, addr := range listening(t, to.PID) {
					for from := range workers {
						if from == to.ID {
							continue
						}
						c, err := net.Dial(addr.Network(), addr.String())
						if err != nil {
							t.Fatal(err)
						}
						defer c.Close() // they stay, and hold what they have got
						callers.Go(func() {
							_, _ = c.Write(forgery(from, to.ID))
							_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
							b := make([]byte, challengeSize+1)
							n, _ := io.ReadFull(c, b[:challengeSize])
							if speaks(b[:n]) {
								challenges.Add(1)
							}
							_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
							if m, _ := c.Read(b[n:]); m > 0 {
								t.Errorf("worker %d answers at %v", to.ID, addr)
							}
						})
					}
					callers.Wait()
					if hears, may := asAnother(t, addr), hosts > 1 && addr.Network() == "tcp"; hears && !may {
						t.Errorf("worker %d speaks to another user at %v", to.ID, addr)
					}
				}
				if n := challenges.Load(); n < workers-1 {
					t.Errorf("worker %d has got %d forged hellos", to.ID, n)
				}
			}
			r.end(t, want, metrics, 0)
		})
	}
}

// challengeSize is the size of what a worker says to everybody that can connect.
const challengeSize = 16 + 40

// speaks reports whether bytes are what a worker says to a caller.
func speaks(b []byte) bool { return len(b) >= 24 && string(b[16:24]) == "SLTNKEY1" }

// asAnother reports whether another user can connect to an address of a worker, and hears it.
func asAnother(t *testing.T, addr net.Addr) (hears bool) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Log("only root can become another user")
		return false
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread ends with the goroutine
		const other = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, other, other, other); errno != 0 {
			t.Errorf("become another user: %v", errno)
			return
		}
		c, err := net.Dial(addr.Network(), addr.String())
		if err != nil {
			if !errors.Is(err, fs.ErrPermission) {
				t.Error(err)
			}
			return
		}
		defer c.Close()
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		b := make([]byte, challengeSize)
		n, _ := io.ReadFull(c, b)
		hears = speaks(b[:n])
	}()
	<-done
	return hears
}

// forgery is what a worker would send that takes a link over, and has computed boundary tensors already.
func forgery(from, to int) []byte {
	session := func(worker int) id.Session { return id.Session{Worker: id.WorkerID(worker)} }
	b := comm.Frame{Type: comm.FrameHello, From: session(from), To: session(to), Link: 1 << 40, Pool: 1 << 20}.Append(nil)
	const size = 32 * 64 * 4
	message := uint64(0)
	for step := 3; step < 60; step++ {
		message++
		k := key.Boundary(key.Attempt{Step: step}, key.Tensor{Boundary: 2, Micro: step % 16, Back: message%2 == 0})
		b = comm.Frame{Type: comm.FrameOpen, ID: message, Key: k, Size: size, Eager: true}.Append(b)
		b = comm.Frame{Type: comm.FrameData, ID: message, Len: size}.Append(b)
		for range size / 4 {
			b = binary.LittleEndian.AppendUint32(b, 0x3f000000)
		}
	}
	return b
}

// listening returns the addresses at which a process listens.
func listening(t *testing.T, pid int) (addrs []net.Addr) {
	t.Helper()
	own := make(map[string]bool) // inodes
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); strings.HasPrefix(to, "socket:[") {
			own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
		}
	}
	for _, f := range table(t, pid, "tcp") {
		if len(f) < 10 || f[3] != "0A" || !own[f[9]] {
			continue
		}
		var ip uint32
		var port int
		if _, err := fmt.Sscanf(f[1], "%08X:%04X", &ip, &port); err != nil {
			t.Fatal(err)
		}
		addrs = append(addrs, &net.TCPAddr{IP: binary.NativeEndian.AppendUint32(nil, ip), Port: port})
	}
	for _, f := range table(t, pid, "unix") {
		if len(f) == 8 && f[3] == "00010000" && own[f[6]] {
			addrs = append(addrs, &net.UnixAddr{Name: f[7], Net: "unix"})
		}
	}
	return addrs
}

// table returns the fields of the kernel's table of sockets of a kind.
func table(t *testing.T, pid int, kind string) (lines [][]string) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, kind))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		lines = append(lines, strings.Fields(line))
	}
	return lines
}

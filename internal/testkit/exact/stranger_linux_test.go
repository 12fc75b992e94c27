package exact

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// A process of the same user that has not read the key of a run, but knows all else, forges hellos of every session to every port
// of the workers, with boundary tensors for coming steps behind them: the run ends as an undisturbed one does, and no worker is
// lost.
func TestStrangers(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs processes: not with -short")
	}
	bin := t.TempDir()
	launcher, gpt := build(t, bin, "../../../launcher"), build(t, bin, "../../../examples/gpt")
	program := append([]string{gpt}, strings.Fields(struckFlags+" --steps 60")...)
	want, metrics := launch(t, launcher, append([]string{"--workers", "1"}, program...)...)
	const workers = 4
	r := startRun(t, launcher, append([]string{"--workers", fmt.Sprint(workers), "--stages", "2", "--detect", "1m"}, program...)...)
	r.await(t, 2)
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil || len(run.Workers) != workers {
		t.Fatal(run, err)
	}
	said, reached := 0, 0
	for _, to := range run.Workers {
		for _, addr := range listening(t, to.PID) {
			for from := range workers {
				if from == to.ID {
					continue
				}
				c, err := net.Dial("tcp", addr)
				if err != nil {
					t.Fatal(err)
				}
				reached++
				_, _ = c.Write(forgery(from, to.ID))
				_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
				b := make([]byte, 1<<10)
				n, _ := c.Read(b)
				if n > 0 && comm.FrameType(b[0]) == comm.FrameWelcome {
					said++
				}
				defer c.Close() // they stay, and hold what they have got
			}
		}
	}
	if said > 0 || reached == 0 {
		t.Errorf("%d of %d forged links are welcome", said, reached)
	}
	r.end(t, want, metrics, 0)
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

// listening returns the addresses of TCP at which a process listens.
func listening(t *testing.T, pid int) (addrs []string) {
	t.Helper()
	own := make(map[string]bool) // inodes
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); strings.HasPrefix(to, "socket:[") {
			own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
		}
	}
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != "0A" || !own[f[9]] {
			continue
		}
		var ip uint32
		var port int
		if _, err := fmt.Sscanf(f[1], "%08X:%04X", &ip, &port); err != nil {
			t.Fatal(err)
		}
		at := binary.NativeEndian.AppendUint32(nil, ip)
		addrs = append(addrs, fmt.Sprintf("%v:%d", net.IP(at), port))
	}
	return addrs
}

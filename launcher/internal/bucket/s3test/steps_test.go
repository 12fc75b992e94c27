package s3test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

const (
	benchTurns = 3
	faultAfter = 5 // steps, from which on the target is at fault
)

var every = flag.Int("every", 5, "steps from one checkpoint to the next")

// benchSteps returns the steps of a run: two checkpoints are due while the target is at fault, or more.
func benchSteps() int { return faultAfter + max(35, 2**every) }

// BenchmarkSteps tells by how much longer steps take while a target is at fault that was well when the run began: median and range over turns of
// the mean step of a run, each kind once in a turn. A checkpoint is due every five steps, of 0.3 s each; -args -every N has it less often.
//
//	cd launcher/internal/bucket/s3test && go test -run '^$' -bench Steps -benchtime 1x -v -timeout 1h
func BenchmarkSteps(b *testing.B) {
	launcher, gpt := build(b, "gpt")
	text := filepath.Join(b.TempDir(), "text")
	if err := os.WriteFile(text, bytes.Repeat([]byte("To keep what was learned, write it down. "), 4096), 0o600); err != nil {
		b.Fatal(err)
	}
	kinds := []string{"no target", "well", "stopped", "refuses", "slow", "full", "killed"}
	means, servers := make(map[string][]float64), make(map[string][]float64)
	began, all := time.Now(), benchTurns*len(kinds)
	for i := range all {
		kind := kinds[i%len(kinds)]
		ms, server := meanStep(b, launcher, gpt, text, kind)
		means[kind], servers[kind] = append(means[kind], ms), append(servers[kind], server)
		left := time.Since(began) / time.Duration(i+1) * time.Duration(all-i-1)
		fmt.Fprintf(os.Stderr, "%2d of %d, %-9s %6.1f ms, %v left\n", i+1, all, kind, ms, left.Round(time.Second)) // the log comes in the end
	}
	plain := median(means["no target"])
	for _, kind := range kinds {
		x := means[kind]
		b.Logf("%-10s mean step %6.1f ms (%.1f to %.1f), %.3f of that without a target; the server takes %.1f ms of a processor a step, on the same machine",
			kind, median(x), slices.Min(x), slices.Max(x), median(x)/plain, median(servers[kind]))
	}
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return (x[(len(x)-1)/2] + x[len(x)/2]) / 2
}

// meanStep trains and returns the mean of the steps from faultAfter on, and what the server takes of a processor for each step, in ms.
func meanStep(b *testing.B, launcher, gpt, text, kind string) (ms, used float64) {
	b.Helper()
	cwd := b.TempDir()
	args := []string{"run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", "run"}
	var s *server
	strike := func() {}
	if kind != "no target" {
		folder := b.TempDir()
		if kind == "full" {
			if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=256m"); err != nil {
				b.Fatalf("mounting a small disk needs root: %v", err)
			}
			b.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
		}
		s = startIn(b, folder)
		url := s.url("a")
		ended := make(chan struct{})
		defer func() {
			s.kill()
			used = s.used.Seconds() * 1000 / float64(benchSteps())
		}()
		var work sync.WaitGroup
		defer work.Wait()
		defer close(ended)
		switch kind {
		case "stopped":
			strike = func() { _ = s.cmd.Process.Signal(syscall.SIGSTOP) }
		case "refuses":
			strike = s.kill
		case "full":
			strike = func() {
				_, _ = exec.Command("dd", "if=/dev/zero", "of="+filepath.Join(folder, "ballast"), "bs=1M").CombinedOutput() // fails when it is full
			}
		case "killed":
			strike = func() {
				work.Go(func() {
					for {
						select {
						case <-ended:
							return
						case <-time.After(700 * time.Millisecond):
							s.kill()
							s.begin()
						}
					}
				})
			}
		case "slow":
			p := newProxy(b, s.addr)
			url = strings.Replace(url, s.addr, p.addr, 1)
			strike = p.slow
		}
		args = append(args, "--checkpoints", url)
	}
	args = append(args, gpt, "--data", text, "--layers", "4", "--width", "256", "--heads", "8", "--context", "64", "--dropout", "0",
		"--steps", fmt.Sprint(benchSteps()), "--eval-every", "0", "--checkpoint-every", fmt.Sprint(*every))
	cmd := exec.Command(launcher, args...)
	cmd.Dir = cwd
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	over := make(chan error, 1)
	go func() { over <- cmd.Wait() }()
	struck, trained := false, false
	for {
		select {
		case err := <-over:
			if err != nil && !trained {
				b.Fatalf("%v\n%s", err, &out)
			}
			var sum float64
			all := steps(b, cwd)
			for _, m := range all[faultAfter:] {
				sum += m.MS
			}
			return sum / float64(len(all)-faultAfter), 0
		case <-time.After(10 * time.Millisecond):
			text, _ := os.ReadFile(filepath.Join(cwd, "run", "metrics.jsonl"))
			n := bytes.Count(text, []byte("\n"))
			if !struck && n >= faultAfter {
				struck = true
				strike()
			}
			if !trained && n == benchSteps() { // what follows is up to five minutes in which the last checkpoint waits for the target
				trained = true
				_ = cmd.Process.Kill()
			}
		}
	}
}

func steps(b *testing.B, cwd string) (all []rundir.Metrics) {
	b.Helper()
	text, err := os.ReadFile(filepath.Join(cwd, "run", "metrics.jsonl"))
	for d := json.NewDecoder(bytes.NewReader(text)); err == nil && d.More(); {
		var m rundir.Metrics
		err = d.Decode(&m)
		all = append(all, m)
	}
	if err != nil || len(all) != benchSteps() {
		b.Fatalf("%d steps, %v", len(all), err)
	}
	return all
}

// proxy passes bytes to a server, and from a moment on slowly.
type proxy struct {
	addr string

	mu  sync.Mutex
	one time.Duration // for 64 KiB
}

func newProxy(b *testing.B, to string) *proxy {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	p := &proxy{addr: l.Addr().String()}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", to)
			if err != nil {
				c.Close()
				continue
			}
			go p.pass(s, c)
			go p.pass(c, s)
		}
	}()
	return p
}

// slow lets 1 MB through in a second from now on.
func (p *proxy) slow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.one = 64 * time.Millisecond
}

func (p *proxy) pass(to io.WriteCloser, from io.ReadCloser) {
	defer to.Close()
	defer from.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		p.mu.Lock()
		pause := p.one * time.Duration(n) / (64 << 10)
		p.mu.Unlock()
		time.Sleep(pause)
		if _, werr := to.Write(b[:n]); cmp.Or(err, werr) != nil {
			return
		}
	}
}

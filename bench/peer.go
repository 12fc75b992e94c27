package main

import (
	"bufio"
	"embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

//go:embed peers/*.py
var scripts embed.FS

// peer is a Python process that answers a line of a question with a line of
// numbers.
type peer struct {
	hello string // what it says of itself
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	dir   string
}

// startPeer runs a script of the folder peers with the system's Python, which
// is the one that Debian's python3-torch serves.
func startPeer(script string, env ...string) (*peer, error) {
	dir, err := os.MkdirTemp("", "soliton-bench")
	if err != nil {
		return nil, err
	}
	if err := os.CopyFS(dir, scripts); err != nil {
		return nil, err
	}
	p := &peer{dir: dir, cmd: exec.Command("/usr/bin/python3", filepath.Join(dir, "peers", script))}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("peer %s: %w", script, err)
	}
	p.out = bufio.NewReader(out)
	if p.hello, err = p.line(); err != nil {
		p.close()
		return nil, fmt.Errorf("peer %s did not start: %w", script, err)
	}
	return p, nil
}

func (p *peer) line() (string, error) {
	s, err := p.out.ReadString('\n')
	return strings.TrimSpace(s), err
}

// ask sends one line and returns the numbers of the answer.
func (p *peer) ask(format string, args ...any) ([]float64, error) {
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		return nil, err
	}
	s, err := p.line()
	if err != nil {
		return nil, fmt.Errorf("peer: no answer: %w", err)
	}
	var x []float64
	for _, f := range strings.Fields(s) {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil, fmt.Errorf("peer answered %q", s)
		}
		x = append(x, v)
	}
	return x, nil
}

// close ends the process and waits for it.
func (p *peer) close() {
	p.in.Close()
	_ = p.cmd.Wait() // its output has told all there is
	os.RemoveAll(p.dir)
}

func best(x []float64) float64 { return slices.Max(x) }

func median(x []float64) float64 {
	s := slices.Sorted(slices.Values(x))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

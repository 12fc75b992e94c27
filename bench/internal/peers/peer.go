// Package peers runs the programs of other projects that Soliton is compared with.
package peers

import (
	"bufio"
	"embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

//go:embed *.py
var scripts embed.FS

// Peer is a Python process that answers a line of a question with a line of
// numbers.
type Peer struct {
	Hello string // what it says of itself
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	dir   string
}

// Python is the interpreter of all peers but torchrun: the system's, which is the one that Debian's python3-torch serves.
var Python = "/usr/bin/python3"

// StartPeer runs a script of the folder peers.
func StartPeer(script string, env ...string) (*Peer, error) {
	dir, err := os.MkdirTemp("", "soliton-bench")
	if err != nil {
		return nil, err
	}
	if err := os.CopyFS(dir, scripts); err != nil {
		return nil, err
	}
	p := &Peer{dir: dir, cmd: exec.Command(Python, filepath.Join(dir, script))}
	p.cmd.Env = append(os.Environ(), env...)
	return p.start(script)
}

// StartProgram runs a program that talks as the scripts do.
func StartProgram(name string, args ...string) (*Peer, error) {
	p := &Peer{cmd: exec.Command(name, args...)}
	return p.start(filepath.Base(name))
}

func (p *Peer) start(name string) (_ *Peer, err error) {
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("peer %s: %w", name, err)
	}
	p.out = bufio.NewReader(out)
	if p.Hello, err = p.line(); err != nil {
		p.Close()
		return nil, fmt.Errorf("peer %s did not start: %w", name, err)
	}
	return p, nil
}

func (p *Peer) line() (string, error) {
	s, err := p.out.ReadString('\n')
	return strings.TrimSpace(s), err
}

// Ask sends one line and returns the numbers of the answer.
func (p *Peer) Ask(format string, args ...any) ([]float64, error) {
	if err := p.Tell(format, args...); err != nil {
		return nil, err
	}
	return p.Answer()
}

// Tell sends one line.
func (p *Peer) Tell(format string, args ...any) error {
	_, err := fmt.Fprintf(p.in, format+"\n", args...)
	return err
}

// Answer reads the numbers of one line.
func (p *Peer) Answer() ([]float64, error) {
	s, err := p.line()
	if err != nil {
		return nil, fmt.Errorf("peer: no answer: %w", err)
	}
	return parse(s)
}

// parse reads numbers.
func parse(s string) (x []float64, err error) {
	for _, f := range strings.Fields(s) {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil, fmt.Errorf("peer answered %q", s)
		}
		x = append(x, v)
	}
	return x, nil
}

// Close ends the process and waits for it.
func (p *Peer) Close() {
	p.in.Close()
	_ = p.cmd.Wait() // its output has told all there is
	if p.dir != "" {
		os.RemoveAll(p.dir)
	}
}

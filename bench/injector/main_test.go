//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain lets the test's processes be this binary: one that waits to be killed, and
// the injector.
func TestMain(m *testing.M) {
	switch {
	case os.Getenv("SOLITON_WORKER") != "":
		_, _ = io.Copy(io.Discard, os.Stdin)
	case len(os.Args) > 1 && os.Args[1] == "-run":
		main()
	default:
		os.Exit(m.Run())
	}
}

func TestParse(t *testing.T) {
	faults, err := parse("kill:3@1500,freeze:0@+20,kill:1@plan+30")
	if err != nil || len(faults) != 3 {
		t.Fatal(faults, err)
	}
	if f := faults[1]; f.worker != 0 || f.signal != syscall.SIGSTOP || !f.after || f.at != 20*time.Microsecond {
		t.Errorf("%+v", f)
	}
	if f := faults[2]; !f.plan || f.after || f.at != 30*time.Microsecond {
		t.Errorf("%+v", f)
	}
	for _, s := range []string{"kill:3", "kill:3@plan", "kill@3", "slay:3@1", "kill:-1@1", "kill:1@-1", "kill:1@1,", "kill:1@1000000000000000"} {
		if f, err := parse(s); err == nil {
			t.Errorf("%s: %+v", s, f)
		}
	}
}

// The injector kills the child with the worker's number, sees it end, and tells of
// the recovery that the run writes down.
func TestWatch(t *testing.T) {
	dir := t.TempDir()
	worker := exec.Command(os.Args[0])
	worker.Env = append(os.Environ(), "SOLITON_WORKER=2")
	hold, err := worker.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	if err := worker.Start(); err != nil {
		t.Fatal(err)
	}
	events, err := os.Create(filepath.Join(dir, "events.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	write := func(line string) {
		if _, err := events.WriteString(line + "\n"); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"kind":"start"}`)
	b := exec.Command(os.Args[0], "-run", dir, "-launcher", strconv.Itoa(os.Getpid()), "-faults", "kill:2@1000,kill:5@+1")
	end, err := b.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var faults bytes.Buffer
	b.Stderr = &faults
	out, err := b.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(out)
	type line struct {
		Fault     string
		PID       int
		AtNS      int64
		Error     string
		Gone      *int
		Recovered json.RawMessage
		SeenNS    int64
	}
	var seen []line
	for len(seen) < 4 {
		if len(seen) == 3 {
			write(`{"kind":"recovered","total_ms":1}`)
		}
		var l line
		if err := d.Decode(&l); err != nil {
			t.Fatalf("%v\n%s", err, &faults)
		}
		seen = append(seen, l)
	}
	_ = worker.Wait()
	_ = end.Close()
	if err := b.Wait(); err != nil {
		t.Errorf("%v\n%s", err, &faults)
	}
	if got := seen[0]; got.Fault != "kill:2@1000" || got.PID != worker.Process.Pid || got.Error != "" {
		t.Errorf("%+v", got)
	}
	gone := 0
	for _, l := range seen[1:3] {
		switch {
		case l.Gone != nil && *l.Gone == 2 && l.AtNS >= seen[0].AtNS:
			gone++
		case l.Fault != "kill:5@+1" || l.Error == "":
			t.Errorf("%+v", l)
		}
	}
	if gone != 1 || !strings.Contains(string(seen[3].Recovered), "total_ms") || seen[3].SeenNS <= seen[0].AtNS {
		t.Errorf("%+v", seen)
	}
	if s := worker.ProcessState.Sys().(syscall.WaitStatus); s.Signal() != syscall.SIGKILL {
		t.Errorf("the worker ended with %v", worker.ProcessState)
	}
}

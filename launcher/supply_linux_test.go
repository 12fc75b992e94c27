package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
	"github.com/soliton-train/soliton/launcher/internal/door"
)

// Where the first of three machines alone has the data, the others get them, one of them in the middle of the run, and all train to the bits
// of one machine. Data that no machine has end the run, and one line says which. All listen at the ports of --ports only.
func TestDataTravel(t *testing.T) {
	built(t)
	texts := map[string][]byte{
		"texts/1.txt": bytes.Repeat([]byte("the quick brown fox\n"), 3000), "texts/2.txt": bytes.Repeat([]byte("jumps over the lazy dog\n"), 3000),
		"held.txt": []byte("the quick brown dog jumps over the lazy fox, and so on, and so on\n"),
	}
	write := func(folder string) {
		for name, text := range texts {
			path := filepath.Join(folder, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
	}
	args := []string{"--data", "texts/*.txt", "--held", "held.txt", "--steps", "1000"} // for long enough that a third machine joins
	ms := machines.Up(t, 3)
	alone := launch(t, append([]string{"run", "--plain", "--run-dir", "run", "--workers", "1", "--threads", "1", reads}, args...)...)
	write(alone.Dir)
	if status, _, errs := result(t, alone); status != 0 {
		t.Fatal(errs)
	}
	var want rundir.Summary
	readJSON(t, filepath.Join(alone.Dir, "run/summary.json"), &want)

	outs := make(map[string]*output)
	defer func() {
		for name, out := range outs {
			if t.Failed() {
				t.Logf("%s:\n%s", name, out)
			}
		}
	}()
	for _, m := range ms {
		m.CopyIn(binary)
	}
	begin := func(i int, run string, args ...string) *machines.Cmd {
		cmd := ms[i].Command("/root/launcher", append(args[:1:1], append([]string{"--plain", "--ports", "21000-21011", "--run-dir", "/tmp/" + run}, args[1:]...)...)...)
		out := new(output)
		outs[ms[i].Name+" "+run], cmd.Stdout, cmd.Stderr = out, out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	join := func(i int, run string) *machines.Cmd {
		var ticket []byte
		await(t, "a ticket", func() bool {
			ticket, _ = os.ReadFile(ms[0].Path(filepath.Join("/tmp", run, door.File)))
			return len(ticket) > 0
		})
		return begin(i, run, "join", strings.TrimSpace(string(ticket)))
	}
	program := []string{"run", "--listen", "--wait-hosts", "2", "--workers", "1", "--threads", "1", ms[0].CopyIn(reads)}

	all := []*machines.Cmd{begin(0, "none", append(program, args...)...), join(1, "none")}
	for i, cmd := range all {
		out := outs[ms[i].Name+" none"].String
		if cmd.Wait() == nil || !strings.Contains(out(), "texts/*.txt: no file matches, nor on m") {
			t.Errorf("%s trains without data:\n%s", ms[i].Name, out())
		}
	}

	write(ms[0].Path("/root"))
	all = []*machines.Cmd{begin(0, "run", append(program, args...)...), join(1, "run")}
	await(t, "a step", func() bool {
		text, _ := os.ReadFile(ms[0].Path("/tmp/run/metrics.jsonl"))
		return bytes.Contains(text, []byte("\n"))
	})
	all = append(all, join(2, "run"))
	for _, m := range ms[:2] {
		if at := listening(t, m); len(at) < 8 || slices.Min(at) < 21000 || slices.Max(at) > 21011 {
			t.Errorf("%s listens at %v", m.Name, at)
		}
	}
	for i, cmd := range all {
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%s: %v", ms[i].Name, err)
		}
		var sum rundir.Summary
		readJSON(t, ms[i].Path("/tmp/run/summary.json"), &sum)
		if sum.StateSHA256 != want.StateSHA256 || sum.DataSHA256 != want.DataSHA256 || sum.WorkersLost > 0 || sum.WorkersJoined != 1 {
			t.Errorf("%s: %+v", ms[i].Name, sum)
		}
		copies, _ := filepath.Glob(ms[i].Path("/root/.cache/soliton/files/*/*"))
		if got := len(copies); got != len(texts) && i > 0 || got != 0 && i == 0 {
			t.Errorf("%s: %v", ms[i].Name, copies)
		}
	}
}

// listening returns the ports at which other machines reach programs of a machine, those of UDP among them.
func listening(t *testing.T, m *machines.Machine) (at []int) {
	t.Helper()
	for file, state := range map[string]string{"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", m.PID(), file))
		if err != nil {
			continue // without IPv6
		}
		for line := range strings.Lines(string(text)) {
			var n, port int
			var addr, peer, is string
			if _, err := fmt.Sscanf(line, "%d: %s %s %s", &n, &addr, &peer, &is); err != nil || is != state || strings.HasPrefix(addr, "0100007F:") {
				continue
			}
			if _, err := fmt.Sscanf(addr[strings.LastIndex(addr, ":"):], ":%x", &port); err != nil {
				t.Fatal(err)
			}
			at = append(at, port)
		}
	}
	return at
}

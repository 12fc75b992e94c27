package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/launcher/internal/door"
)

// Machines with networks, processes and files of their own train one job to the bits of an undisturbed run, whichever of them is
// lost: one without a word, as after a power failure, and one whose kernel says that its processes are gone. Nor does it matter that
// large packets to and from one vanish from a moment on while small ones pass: then no machine is lost.
func TestSeparateMachines(t *testing.T) {
	built(t)
	for _, c := range []struct {
		name string
		lost int
		lose func(*machines.Machine)
	}{
		{"the first is powered off", 0, (*machines.Machine).PowerOff},
		{"all processes of the second are killed", 1, (*machines.Machine).KillAll},
		{"large packets to the third vanish", -1, func(m *machines.Machine) { m.Narrow(576) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.lost < 0 {
				require.Asked(t, "machines")
			}
			hostBaseline.Do(func() { hostBaseline.sum, _ = trainOnHosts(t, "--workers", "1") })
			ms := machines.Up(t, 3)
			struck := c.lost
			workersLost := 2
			if struck < 0 {
				struck, workersLost = 2, 0
			}
			command, program := ms[0].CopyIn(binary), ms[0].CopyIn(mlp)
			var cmds []*machines.Cmd
			outs := make([]output, len(ms))
			defer func() {
				for i := range outs {
					if t.Failed() {
						t.Logf("%s:\n%s", ms[i].Name, &outs[i])
					}
				}
			}()
			begin := func(i int, args ...string) {
				cmd := ms[i].Command(command, append(args, "--plain", "--run-dir", "/tmp/run")...)
				cmd.Stdout, cmd.Stderr = &outs[i], &outs[i]
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				cmds = append(cmds, cmd)
			}
			first := ms[0].Command(command, "run", "--plain", "--run-dir", "/tmp/run", "--listen", "--wait-hosts", "3", "--workers", "2", "--threads", "1",
				program, "--steps", "150", "--micro-batch", "4", "--eval-every", "0")
			first.Stdout, first.Stderr = &outs[0], &outs[0]
			if err := first.Start(); err != nil {
				t.Fatal(err)
			}
			cmds = append(cmds, first)
			var ticket []byte
			await(t, "a ticket", func() (there bool) {
				var err error
				ticket, err = os.ReadFile(filepath.Join(ms[0].Path("/tmp/run"), door.File))
				return err == nil
			})
			for i := 1; i < len(ms); i++ {
				ms[i].CopyIn(binary)
				begin(i, "join", strings.TrimSpace(string(ticket)))
			}
			await(t, "20 steps", func() bool {
				text, _ := os.ReadFile(ms[struck].Path("/tmp/run/metrics.jsonl"))
				return bytes.Count(text, []byte("\n")) > 20
			})
			c.lose(ms[struck])
			for i, cmd := range cmds {
				err := cmd.Wait()
				if i == c.lost {
					continue
				}
				if err != nil {
					t.Fatalf("%s: %v\n%s", ms[i].Name, err, &outs[i])
				}
				var sum rundir.Summary
				readJSON(t, ms[i].Path("/tmp/run/summary.json"), &sum)
				if sum.ParamsSHA256 != hostBaseline.sum.ParamsSHA256 || sum.StateSHA256 != hostBaseline.sum.StateSHA256 || sum.Rollbacks > 0 || sum.WorkersLost != workersLost {
					t.Errorf("%s: %+v", ms[i].Name, sum)
				}
				if _, err := os.Stat(ms[i].Path("/tmp/run/model.safetensors")); (err == nil) != (sum.ModelHost == ms[i].Name) ||
					(sum.ModelHost == ms[0].Name) != (c.lost != 0) || !strings.Contains(outs[i].String(), "the model is in the run directory of "+sum.ModelHost+"\n") {
					t.Errorf("%s: the model is on %q: %v", ms[i].Name, sum.ModelHost, err)
				}
				for _, r := range sum.Recoveries {
					t.Logf("%s: %s: %.0f ms", ms[i].Name, r.Cause, r.TotalMS)
				}
			}
		})
	}
}

// Every machine of a run is replaced once while it goes on: another one joins, at a machine that is still there, and gets a vote, and one of
// the first is powered off.
func TestMachinesAreReplaced(t *testing.T) {
	require.Asked(t, "machines")
	built(t)
	want := cutWant(t)
	ms := machines.Up(t, 6)
	var cmds []*machines.Cmd
	outs := make([]output, len(ms))
	defer func() {
		for i := range outs {
			if t.Failed() {
				t.Logf("%s:\n%s", ms[i].Name, &outs[i])
			}
		}
	}()
	begin := func(i int, args ...string) {
		cmd := ms[i].Command(ms[i].CopyIn(binary), append(args, "--plain", "--run-dir", "/tmp/run")...)
		cmd.Stdout, cmd.Stderr = &outs[i], &outs[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, cmd)
	}
	join := func(i, at int) {
		var ticket []byte
		await(t, "a ticket", func() bool {
			ticket, _ = os.ReadFile(ms[at].Path(filepath.Join("/tmp/run", door.File)))
			return len(ticket) > 0
		})
		begin(i, "join", strings.TrimSpace(string(ticket)))
	}
	events := func(i int, part string) int {
		text, _ := os.ReadFile(ms[i].Path("/tmp/run/events.jsonl"))
		return bytes.Count(text, []byte(part))
	}
	program := append([]string{ms[0].CopyIn(emulated), "--layer-ms", "12"}, cutJob...)
	first := ms[0].Command(ms[0].CopyIn(binary), append([]string{"run", "--plain", "--run-dir", "/tmp/run", "--listen", "--wait-hosts", "3", "--workers", "1", "--threads", "1"}, program...)...)
	first.Stdout, first.Stderr = &outs[0], &outs[0]
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	cmds = append(cmds, first)
	join(1, 0)
	join(2, 0)
	await(t, "a first plan, which is of these three", func() bool {
		text, _ := os.ReadFile(ms[0].Path("/tmp/run/plans.jsonl"))
		return bytes.Contains(text, []byte("\n"))
	})
	for n := range 3 {
		last := n + 3 // which joins
		join(last, n)
		await(t, "its worker", func() bool { return events(last-1, `"kind":"joined"`) == n+1 })
		ms[n].PowerOff()
		await(t, "its vote", func() bool { return events(last-1, ms[last].Name+" votes") == 1 })
	}
	for i, cmd := range cmds {
		if err := cmd.Wait(); i < 3 {
			continue
		} else if err != nil {
			t.Fatalf("%s: %v\n%s", ms[i].Name, err, &outs[i])
		}
		var sum rundir.Summary
		readJSON(t, ms[i].Path("/tmp/run/summary.json"), &sum)
		if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.Rollbacks > 0 || sum.WorkersLost != 3 || sum.WorkersJoined != 3 {
			t.Errorf("%s: %+v", ms[i].Name, sum)
		}
		for _, r := range sum.Recoveries {
			t.Logf("%s: %s: %.0f ms", ms[i].Name, r.Cause, r.TotalMS)
		}
	}
}

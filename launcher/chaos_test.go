package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/internal/timing"
)

// chaosSteps is long enough for what happens to be over before the end.
const chaosSteps = 12

// train runs a real job in real processes and returns its summary.
func train(t *testing.T, flags ...string) (sum rundir.Summary, stdout, dir string) {
	t.Helper()
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, flags...)
	cmd := launch(t, append(args, mlp, "--steps", strconv.Itoa(chaosSteps), "--micro-batch", "4", "--eval-every", "0")...)
	mark := "LAUNCHER_TEST=" + cmd.Dir
	cmd.Env = append(os.Environ(), mark)
	status, stdout, stderr := result(t, cmd)
	if status != 0 {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	if left := marked(t, mark); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	dir = filepath.Join(cmd.Dir, "run")
	readJSON(t, filepath.Join(dir, "summary.json"), &sum)
	return sum, stdout, dir
}

var peace struct {
	sync.Once
	sum rundir.Summary
}

// sameBits compares a run with an undisturbed one.
func sameBits(t *testing.T, got rundir.Summary) {
	t.Helper()
	peace.Do(func() { peace.sum, _, _ = train(t, "--workers", "1") })
	want := peace.sum
	if len(want.ParamsSHA256) != 64 || got.ParamsSHA256 != want.ParamsSHA256 || got.StateSHA256 != want.StateSHA256 || got.Loss != want.Loss || got.Steps != chaosSteps {
		t.Errorf("steps %d, loss %v, parameters %s, state %s; want %d, %v, %s, %s",
			got.Steps, got.Loss, got.ParamsSHA256, got.StateSHA256, chaosSteps, want.Loss, want.ParamsSHA256, want.StateSHA256)
	}
}

// Each worker in turn is killed in a phase, or in each where all is asked for: the others go on in that step or the next, and the
// account of it begins with the moment of the kill.
func TestChaosKill(t *testing.T) {
	built(t)
	for w := range 4 {
		for i, phase := range []string{"/forward", "/backward", "/reduce", "/commit", "/gather", "", "+2.5"} {
			if (w+i)%2 == 0 && !require.All() {
				continue
			}
			spec := fmt.Sprintf("kill:%d@3%s", w, phase)
			t.Run(spec, func(t *testing.T) {
				t.Parallel()
				sum, stdout, _ := train(t, "--workers", "4", "--stages", "2", "--detect", "5s", "--chaos", spec)
				sameBits(t, sum)
				if !strings.Contains(stdout, "chaos: "+spec+"\n") {
					t.Errorf("the schedule is not printed:\n%s", stdout)
				}
				if sum.WorkersLost != 1 || len(sum.Recoveries) != 1 {
					t.Fatalf("%d workers lost, recoveries: %+v", sum.WorkersLost, sum.Recoveries)
				}
				r := sum.Recoveries[0]
				cause := fmt.Sprintf("worker %d exited: signal: killed", w)
				if strings.HasPrefix(r.Cause, "the link between ") && strings.HasSuffix(r.Cause, "; "+cause) {
					t.Log("the machine is so busy that a broken link was known of half a second before the worker's end")
					return
				}
				if r.DiedAt != "kill" || r.TotalMS <= 0 || r.DetectMS <= 0 || r.LinksOpened != 0 || r.Cause != cause {
					t.Errorf("recovery: %+v", r)
				}
				// In gather the step is committed, as a rule: the dead one may have been the only one who knew.
				if phase != "+2.5" && r.Step != 3 && !(phase == "/gather" && r.Step == 4) {
					t.Errorf("step %d was struck, want 3, or 4 in gather", r.Step)
				}
			})
		}
	}
}

// Sums that depend on their order are the same on all who hold them, although what was reduced before a loss is reduced
// once more after it.
func TestChaosKillFast(t *testing.T) {
	built(t)
	for _, spec := range []string{"kill:1@3/commit", "kill:2@4/reduce"} {
		t.Run(spec, func(t *testing.T) {
			t.Parallel()
			sum, _, _ := train(t, "--workers", "6", "--stages", "2", "--reduction", "fast", "--chaos", spec)
			if sum.Steps != chaosSteps || sum.WorkersLost != 1 || sum.Rollbacks != 0 {
				t.Errorf("steps %d, %d workers lost, %d rollbacks", sum.Steps, sum.WorkersLost, sum.Rollbacks)
			}
		})
	}
}

func TestChaosFreeze(t *testing.T) {
	built(t)
	t.Parallel()
	sum, _, _ := train(t, "--workers", "4", "--stages", "2", "--chaos", "freeze:2@3/backward")
	sameBits(t, sum)
	for _, r := range sum.Recoveries {
		if strings.Contains(r.Cause, "worker 2 is stopped by a signal") {
			if r.DiedAt != "kill" || r.TotalMS <= 0 || r.DetectMS < ms(timing.Halt) {
				t.Errorf("recovery: %+v", r)
			}
			return
		}
	}
	t.Errorf("worker 2 was not found: %+v", sum.Recoveries)
}

func TestChaosSlowsAndLeave(t *testing.T) {
	built(t)
	for _, spec := range []string{"slow:1@2:0.1,slow:1@6:1", "leave:1@3", "leave:3@2/commit,slow:0@4:0.25", "slowlink:0-2@2:0.01,slowlink:0-2@8:1"} {
		t.Run(spec, func(t *testing.T) {
			t.Parallel()
			sum, _, _ := train(t, "--workers", "4", "--stages", "2", "--chaos", spec)
			sameBits(t, sum)
		})
	}
}

// What random draws is told, and is the same every time.
func TestChaosRandom(t *testing.T) {
	built(t)
	t.Parallel()
	const spec = "random:7:0.5:kill+slow"
	sum, stdout, dir := train(t, "--workers", "4", "--stages", "2", "--mirrors", "2", "--chaos", spec)
	sameBits(t, sum)
	drawn := regexp.MustCompile(`(?m)^chaos: (.*)$`).FindStringSubmatch(stdout)
	if drawn == nil || strings.Contains(drawn[1], "random") || !strings.Contains(drawn[1], "kill:") {
		t.Fatalf("no faults are printed:\n%s", stdout)
	}
	events, err := os.ReadFile(filepath.Join(dir, "events.jsonl"))
	if err != nil || !strings.Contains(string(events), `"kind":"chaos","worker":-1,"plan":1,"reason":"`+drawn[1]+`"`) {
		t.Errorf("events: %s, %v", events, err)
	}
	sum, again, _ := train(t, "--workers", "4", "--stages", "2", "--mirrors", "2", "--chaos", drawn[1])
	sameBits(t, sum)
	if !strings.Contains(again, drawn[0]+"\n") {
		t.Errorf("%q is another schedule the second time:\n%s", drawn[0], again)
	}
}

// A bit that flips is found by the worker itself, before it counts.
func TestChaosFlip(t *testing.T) {
	built(t)
	specs := []string{"own", "mirror", "copy", "moment"}
	for i, target := range specs {
		for j, p := range []string{"", "/forward", "/backward", "/commit", "/gather"} {
			if (i+j)%2 == 0 && !require.All() {
				continue
			}
			spec := fmt.Sprintf("flip:1@3%s:%s", p, target)
			t.Run(spec, func(t *testing.T) {
				t.Parallel()
				workers := "2"
				if target == "copy" {
					workers = "4" // two would mirror all of each other
				}
				// What flips after the check and is written again at once changes nothing, and of moments
				// come parameters. A flip waits until nothing reads or writes there, which may be that late.
				var lines [][]string
				quiet := p == "/commit" && target == "copy"
				for range 3 {
					sum, _, dir := train(t, "--workers", workers, "--chaos", spec)
					sameBits(t, sum)
					events, err := os.ReadFile(filepath.Join(dir, "events.jsonl"))
					if err != nil {
						t.Fatal(err)
					}
					lines = regexp.MustCompile(`"kind":"repaired","worker":(\d+),.*"target":"(\w+)"`).FindAllStringSubmatch(string(events), -1)
					if len(lines) == 1 || quiet && len(lines) == 0 {
						break
					} else if target != "copy" {
						t.Fatalf("events:\n%s", events)
					}
				}
				if len(lines) != 1 && !(quiet && len(lines) == 0) {
					t.Fatalf("found in three runs: %v", lines)
				}
				for _, l := range lines {
					if l[1] != "1" || l[2] != target && !(p == "/commit" && l[2] == "own") {
						t.Errorf("%s", l[0])
					}
				}
			})
		}
	}
}

// Who computes with altered memory and is killed before it finds out leaves traces in what others have
// computed: the step is done again.
func TestChaosFlipAndKill(t *testing.T) {
	built(t)
	for _, phase := range []string{"backward", "reduce", "commit"} {
		spec := fmt.Sprintf("flip:0@3/forward:own,kill:0@3/%s", phase)
		t.Run(spec, func(t *testing.T) {
			t.Parallel()
			sum, _, dir := train(t, "--workers", "2", "--stages", "2", "--chaos", spec)
			sameBits(t, sum)
			events, err := os.ReadFile(filepath.Join(dir, "events.jsonl"))
			if err != nil {
				t.Fatal(err)
			}
			if phase == "backward" {
				return // the other one may not have got anything that is wrong yet
			}
			if !regexp.MustCompile(`"kind":"repaired","worker":1,.*step 3 is done again.*"target":"passed"`).Match(events) {
				t.Errorf("no worker found out:\n%s", events)
			}
		})
	}
}

// Emulated devices give the bits of the job too, whatever is done to them.
func TestEmulated(t *testing.T) {
	built(t)
	t.Parallel()
	var want string
	for _, flags := range [][]string{
		{"--workers", "1"},
		{"--workers", "6", "--stages", "3", "--chaos", "kill:4@3/backward,slow:1@2:0.2,slowlink:0-2@2:0.0001"},
	} {
		cmd := launch(t, append(append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run"}, flags...),
			emulated, "--layers", "6", "--layer-ms", "0.2", "--global-batch", "12", "--steps", "6")...)
		status, stdout, stderr := result(t, cmd)
		var sum rundir.Summary
		if status != 0 || !strings.Contains(stdout, "emulated devices") {
			t.Fatalf("status %d\n%s%s", status, stdout, stderr)
		}
		readJSON(t, filepath.Join(cmd.Dir, "run", "summary.json"), &sum)
		if want == "" {
			want = sum.StateSHA256
		}
		if sum.StateSHA256 != want {
			t.Errorf("%s: state %s, want %s", flags, sum.StateSHA256, want)
		}
	}
}

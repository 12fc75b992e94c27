package recovery

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
)

// A machineFault is what happens to one of several machines.
type machineFault struct {
	name   string
	inject func(*machines.Machine)
	after  time.Duration // until undo; 0 for never
	undo   func(*machines.Machine)
	lost   bool // the machine does not come back
	stays  bool // it is not to be evicted
}

// slowRate is that of a slow cable, in bytes per second.
const slowRate = 1 << 20

var machineFaults = []machineFault{
	{name: "power", inject: (*machines.Machine).PowerOff, lost: true},
	{name: "cut-power", inject: (*machines.Machine).Cut, after: 300 * time.Millisecond, undo: (*machines.Machine).PowerOff, lost: true},
	{name: "kill", inject: (*machines.Machine).KillAll, lost: true},
	{name: "freeze", inject: (*machines.Machine).Freeze, after: 5 * time.Second, undo: (*machines.Machine).Thaw},
	{name: "cut-heal", inject: (*machines.Machine).Cut, after: 5 * time.Second, undo: (*machines.Machine).Heal},
	{name: "in-heal", inject: func(m *machines.Machine) { m.CutOneWay(machines.Incoming) }, after: 5 * time.Second, undo: (*machines.Machine).Heal},
	{name: "out-heal", inject: func(m *machines.Machine) { m.CutOneWay(machines.Outgoing) }, after: 5 * time.Second, undo: (*machines.Machine).Heal},
	{name: "slow", inject: func(m *machines.Machine) { m.Slow(slowRate) }, stays: true},
	{name: "none", inject: func(*machines.Machine) {}, stays: true},
}

// Machines injects faults into one of three machines that share nothing but a network, in turn into another one than the leader's and into
// the leader's, and lists how long it was from just before the fault until all survivors had applied a plan without the machine, that time less what the update of the step committed
// before took of it, from the end of the fault until workers of the machine were in a plan again, and by how much longer the struck step took than those before it. Every run must end
// with the bits of the undisturbed one.
func Machines(args []string) error {
	f := flag.NewFlagSet("machines", flag.ExitOnError)
	runs := f.Int("runs", 20, "runs of each fault and place")
	var names []string
	for _, k := range machineFaults[:len(machineFaults)-1] {
		names = append(names, k.name)
	}
	kinds := f.String("faults", strings.Join(names, ","), "faults, separated by commas; none runs without one")
	places := f.String("places", "other,leader", "machines that get them")
	steps := f.Int("steps", 200, "steps of a run")
	ms := f.Float64("layer-ms", 5, "milliseconds of a pass of a layer; steps take 12 times that")
	flags := f.String("flags", "", "further flags of launcher run")
	program := f.String("program", "", "further flags of examples/emulated, as --hidden 1356000 for 1 GB of parameters and optimizer state")
	seed := f.Uint64("seed", 1, "of the moments and machines")
	each := f.Bool("each", false, "also print each recovery and each return, with its phases")
	if err := f.Parse(args); err != nil {
		return err
	}
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(l.Dir)
	build := exec.Command("go", "build", "-o", l.Dir+"/", "./examples/emulated")
	build.Dir = l.Root
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	t := machineTrial{dir: l.Dir, steps: *steps, flags: strings.Fields(*flags), program: []string{"--layers", "2", "--global-batch", "12",
		"--steps", fmt.Sprint(*steps), "--layer-ms", fmt.Sprint(*ms)}, r: rand.New(rand.NewPCG(*seed, 15))}
	t.program = append(t.program, strings.Fields(*program)...)
	if err := t.undisturbed(); err != nil {
		return err
	}
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Printf("3 machines with 2 workers each, %d steps of about %.0f ms, params_sha256 %.8s; load average %s; ms\n", *steps, 12**ms, t.want.ParamsSHA256, strings.Join(strings.Fields(string(load))[:3], " "))
	fmt.Println("     fault   place  runs  median     p95     max   less update: median     p95   back: median     p95  stall: median     p95   evicted wrongly")
	for name := range strings.SplitSeq(*kinds, ",") {
		i := slices.IndexFunc(machineFaults, func(k machineFault) bool { return k.name == name })
		if i < 0 {
			return fmt.Errorf("-faults: %q is none of %s", name, strings.Join(append(names, "none"), ", "))
		}
		for place := range strings.SplitSeq(*places, ",") {
			var took, less, back, stalls []float64
			wrong := 0
			for range *runs {
				o, err := t.run(machineFaults[i], place == "leader")
				if err != nil {
					return fmt.Errorf("%s, %s: %w", name, place, err)
				}
				if *each && o.first != nil {
					rec := o.first
					fmt.Printf("%18s %6.0f total %6.1f detect %6.1f query %6.1f plan %5.1f agree %5.1f edit %5.1f update %5.1f resume %5.1f stall %.0f\n",
						rec.Cause, o.took[0], rec.TotalMS, rec.DetectMS, rec.QueryMS, rec.PlanMS, rec.AgreeMS, rec.EditMS, rec.UpdateMS, rec.ResumeMS, o.stall)
				}
				if *each && len(o.back) > 0 {
					fmt.Printf("%18s %6.0f total, ready to join %6.0f, its state is there %6.0f\n", "back:", o.back[0], o.ready, o.level)
				}
				if *each && o.wrong > 0 {
					for _, e := range o.events {
						fmt.Println("    ", e.Time.Sub(o.at).Round(time.Millisecond), e.Kind, e.Host, e.Reason)
					}
				}
				for _, ms := range o.took {
					less = append(less, ms-o.first.UpdateMS)
				}
				took, back, wrong = append(took, o.took...), append(back, o.back...), wrong+o.wrong
				stalls = append(stalls, o.stall...)
			}
			fmt.Printf("%10s %7s %5d %s %s %s %s %8d\n", name, place, *runs, machineTimes(took, true), machineTimes(less, false), machineTimes(back, false), machineTimes(stalls, false), wrong)
		}
	}
	return nil
}

// machineTimes prints median and p95, and the maximum.
func machineTimes(ms []float64, most bool) string {
	if len(ms) == 0 {
		return strings.Repeat("       -", map[bool]int{true: 3, false: 2}[most])
	}
	s := slices.Sorted(slices.Values(ms))
	p95 := s[(95*len(s)+99)/100-1]
	if !most {
		return fmt.Sprintf("%12.0f %7.0f", lab.Median(s), p95)
	}
	return fmt.Sprintf("%7.0f %7.0f %7.0f", lab.Median(s), p95, s[len(s)-1])
}

// machineTrial makes runs over machines.
type machineTrial struct {
	dir     string
	steps   int
	flags   []string
	program []string
	r       *rand.Rand
	want    rundir.Summary
}

// undisturbed runs the program on this machine alone.
func (t *machineTrial) undisturbed() error {
	dir := filepath.Join(t.dir, "undisturbed")
	out, err := exec.Command(filepath.Join(t.dir, "launcher"), append([]string{"run", "--plain", "--threads", "1", "--workers", "1", "--run-dir", dir, filepath.Join(t.dir, "emulated")}, append(t.program, "--layer-ms", "0")...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("the undisturbed run: %w\n%s", err, out)
	}
	return readSummary(filepath.Join(dir, "summary.json"), &t.want)
}

func readSummary(file string, sum *rundir.Summary) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, sum)
}

// machineOutcome is what a run shows.
type machineOutcome struct {
	took, back   []float64
	ready, level float64 // after the end of the fault: the first worker of the machine could join, and what it is to hold was there
	wrong        int     // workers that were lost without a fault
	first        *rundir.Recovery
	stall        []float64 // of first, in milliseconds; none if it is not known
	events       []rundir.Event
	at           time.Time // of the fault
}

const machineRun = "/tmp/run"

// run makes a run with a fault.
func (t *machineTrial) run(k machineFault, leads bool) (o machineOutcome, err error) {
	tb := &trial{}
	defer func() { err = errors.Join(err, tb.end()) }()
	ms := machines.Up(tb, 3)
	if tb.err != nil {
		return o, tb.err
	}
	cmds, outs := make([]*machines.Cmd, len(ms)), make([]bytes.Buffer, len(ms))
	begin := func(i int, args ...string) error {
		cmds[i] = ms[i].Command(ms[i].CopyIn(filepath.Join(t.dir, "launcher")), args...)
		cmds[i].Stdout, cmds[i].Stderr = &outs[i], &outs[i]
		return cmds[i].Start()
	}
	said := func() (all string) {
		for i := range outs {
			all += fmt.Sprintf("%s:\n%s", ms[i].Name, &outs[i])
		}
		return all
	}
	args := append([]string{"run", "--plain", "--run-dir", machineRun, "--listen", "--wait-hosts", "3", "--workers", "2", "--threads", "1"}, t.flags...)
	if err := begin(0, append(append(args, ms[0].CopyIn(filepath.Join(t.dir, "emulated"))), t.program...)...); err != nil {
		return o, err
	}
	var ticket []byte
	if !await(30*time.Second, func() bool {
		ticket, err = os.ReadFile(ms[0].Path(machineRun + "/ticket"))
		return err == nil
	}) {
		return o, fmt.Errorf("no ticket\n%s", said())
	}
	for i := 1; i < len(ms); i++ {
		if err := begin(i, "join", "--plain", "--run-dir", machineRun, strings.TrimSpace(string(ticket))); err != nil {
			return o, err
		}
	}
	early := max(min(t.steps, 500)/10, 1)
	step := early + t.r.IntN(early)
	leader, victim := -1, t.r.IntN(2)
	if !await(time.Minute, func() bool {
		text, _ := os.ReadFile(ms[0].Path(machineRun + "/metrics.jsonl"))
		leader = leading(ms)
		return leader >= 0 && bytes.Count(text, []byte("\n")) >= step
	}) {
		return o, fmt.Errorf("no step %d\n%s", step, said())
	}
	switch {
	case leads:
		victim = leader
	case victim >= leader:
		victim++
	}
	time.Sleep(time.Duration(t.r.IntN(100)) * time.Millisecond)
	at, healed := time.Now(), time.Time{}
	k.inject(ms[victim])
	if k.after > 0 {
		time.Sleep(k.after)
		healed = time.Now()
		k.undo(ms[victim])
	}
	var sum rundir.Summary
	var events []rundir.Event
	for i, c := range cmds {
		if i == victim && k.lost {
			continue
		}
		ended := make(chan error, 1)
		go func() { ended <- c.Wait() }()
		select {
		case err := <-ended:
			if err != nil && i != victim {
				return o, fmt.Errorf("%s: %w\n%s", ms[i].Name, err, said())
			}
		case <-time.After(2*time.Minute + time.Duration(t.steps)*time.Second/4):
			return o, fmt.Errorf("%s does not end\n%s", ms[i].Name, said())
		}
		if i == victim {
			continue
		}
		if err := readSummary(ms[i].Path(machineRun+"/summary.json"), &sum); err != nil {
			return o, err
		}
		if sum.ParamsSHA256 != t.want.ParamsSHA256 || sum.StateSHA256 != t.want.StateSHA256 || sum.Steps != t.want.Steps || sum.Rollbacks > 0 {
			return o, fmt.Errorf("%s: params_sha256 %s after %d steps and %d rollbacks, want %s\n%s", ms[i].Name, sum.ParamsSHA256, sum.Steps, sum.Rollbacks, t.want.ParamsSHA256, said())
		}
		text, err := os.ReadFile(ms[i].Path(machineRun + "/events.jsonl"))
		if err != nil {
			return o, err
		}
		events = nil
		for line := range bytes.Lines(text) {
			var e rundir.Event
			if err := json.Unmarshal(line, &e); err != nil {
				return o, err
			}
			events = append(events, e)
		}
	}
	lost, on := 0, make(map[int]string) // the hosts of workers that were lost with them, perhaps after they were lost by themselves
	for _, e := range events {
		if e.Kind == "lost" && e.Host != "" {
			on[e.Worker] = e.Host
		}
	}
	o.events, o.at = events, at
	for _, e := range events {
		since := float64(e.Time.Sub(at).Microseconds()) / 1000
		switch {
		case e.Kind == "lost":
			if lost++; on[e.Worker] != ms[victim].Name || k.stays || e.Time.Before(at) {
				o.wrong++
			}
		case e.Recovery != nil && e.Time.After(at) && len(o.took) == 0:
			o.took, o.first = append(o.took, since), e.Recovery
		case e.Kind == "note" && !healed.IsZero() && e.Time.After(healed) && strings.Contains(e.Reason, "is ready to join") && o.ready == 0:
			o.ready = float64(e.Time.Sub(healed).Microseconds()) / 1000
		case e.Kind == "note" && o.ready > 0 && strings.HasPrefix(e.Reason, "propose plan") && strings.Contains(e.Reason, "join") && len(o.back) == 0:
			o.level = float64(e.Time.Sub(healed).Microseconds()) / 1000
		case e.Kind == "joined" && !healed.IsZero() && e.Time.After(healed) && len(o.back) == 0:
			o.back = append(o.back, float64(e.Time.Sub(healed).Microseconds())/1000)
		}
	}
	for _, rec := range sum.Recoveries {
		if o.first != nil && rec.Step == o.first.Step && rec.StallMS != nil {
			o.stall = []float64{*rec.StallMS}
		}
	}
	if !k.stays && lost == 0 {
		return o, fmt.Errorf("no worker was lost\n%s", said())
	}
	return o, nil
}

// leading returns the machine whose agent leads, -1 if that is not known yet: the one that the newest event says, or the first one that has
// reserved space for the run's files.
func leading(ms []*machines.Machine) int {
	leader := -1
	for i, m := range ms {
		if _, err := os.Stat(m.Path(machineRun + "/.reserve")); err == nil {
			leader = i
		}
	}
	text, _ := os.ReadFile(ms[0].Path(machineRun + "/events.jsonl"))
	for line := range bytes.Lines(text) {
		var e rundir.Event
		if json.Unmarshal(line, &e) == nil && e.Kind == "lead" {
			leader = slices.IndexFunc(ms, func(m *machines.Machine) bool { return strings.HasPrefix(e.Reason, m.Name+" ") })
		}
	}
	return leader
}

// await waits until something is so, for a time at most.
func await(limit time.Duration, is func() bool) bool {
	for began := time.Now(); time.Since(began) < limit; time.Sleep(5 * time.Millisecond) {
		if is() {
			return true
		}
	}
	return false
}

// trial is a test as far as package machines needs one.
type trial struct {
	testing.TB
	cleanups []func()
	err      error
}

func (t *trial) Helper()          {}
func (t *trial) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }
func (t *trial) Errorf(format string, args ...any) {
	t.err = errors.Join(t.err, fmt.Errorf(format, args...))
}
func (t *trial) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (t *trial) Skipf(format string, args ...any)  { panic(fmt.Sprintf(format, args...)) }

// end makes the machines go, and returns what went wrong with them.
func (t *trial) end() error {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
	return t.err
}

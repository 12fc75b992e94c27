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
	"syscall"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
)

// A machineStory is what happens to the machines of a run while it trains.
type machineStory struct {
	name  string
	spare int                            // machines that take no part at the beginning
	five  bool                           // on five machines only
	long  int                            // times as many steps as others; 0 is 1
	flags []string                       // of launcher run
	tell  func(*field, *rand.Rand) []int // returns the machines that are gone or have left
}

// once is a story of a fault of one machine, which it does not survive or from which it comes back.
func once(pick func(*field, *rand.Rand) int, fault string) func(*field, *rand.Rand) []int {
	return func(f *field, r *rand.Rand) []int {
		k := machineFaults[slices.IndexFunc(machineFaults, func(k machineFault) bool { return k.name == fault })]
		victim := pick(f, r)
		k.inject(f.ms[victim])
		if k.after > 0 {
			time.Sleep(k.after)
			k.undo(f.ms[victim])
		}
		if k.lost {
			return []int{victim}
		}
		return nil
	}
}

func first(*field, *rand.Rand) int       { return 0 }
func leads(f *field, _ *rand.Rand) int   { return max(0, leading(f.ms)) }
func follows(f *field, r *rand.Rand) int { return f.other(r, leads(f, r)) }
func anyone(f *field, r *rand.Rand) int  { return r.IntN(f.take) }
func (f *field) other(r *rand.Rand, x int) int {
	return (x + 1 + r.IntN(f.take-1)) % f.take
}

var machineStories = []machineStory{
	{name: "all of a machine killed", tell: once(follows, "kill")},
	{name: "cable cut, then all of the machine killed", tell: once(follows, "cut-power")},
	{name: "all of the first machine killed", tell: once(first, "kill")},
	{name: "the first machine powered off", tell: once(first, "power")},
	{name: "all of the leader killed", tell: once(leads, "kill")},
	{name: "the leader powered off", tell: once(leads, "power")},
	{name: "two of five powered off at once", five: true, flags: []string{"--mirrors", "2"}, tell: func(f *field, r *rand.Rand) []int {
		x := leads(f, r)
		gone := []int{x, f.other(r, x)}
		ended := make(chan struct{})
		for _, i := range gone {
			go func() { f.ms[i].PowerOff(); ended <- struct{}{} }()
		}
		<-ended
		<-ended
		return gone
	}},
	{name: "cut off for 5 s", tell: once(anyone, "cut-heal")},
	{name: "frozen for 5 s", tell: once(anyone, "freeze")},
	{name: "nothing comes in for 5 s", tell: once(anyone, "in-heal")},
	{name: "nothing goes out for 5 s", tell: once(anyone, "out-heal")},
	{name: "a cable of 8 MiB/s", tell: func(f *field, r *rand.Rand) []int {
		f.ms[anyone(f, r)].Slow(8 << 20)
		return nil
	}},
	{name: "another machine joins", spare: 1, tell: func(f *field, _ *rand.Rand) []int {
		f.join(f.take, 0)
		return nil
	}},
	{name: "drained by SIGTERM", tell: func(f *field, r *rand.Rand) []int {
		x := anyone(f, r)
		for _, pid := range f.ms[x].Processes() {
			if text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); bytes.Contains(text, []byte("launcher\x00run\x00")) || bytes.Contains(text, []byte("launcher\x00join\x00")) {
				f.err = errors.Join(f.err, syscall.Kill(pid, syscall.SIGTERM))
				break
			}
		}
		return []int{x}
	}},
	{name: "every machine replaced, one after the other", spare: 3, long: 3, tell: func(f *field, r *rand.Rand) (gone []int) {
		for x := range f.take {
			next := f.take + x
			f.join(next, next-1)
			// The lines of those before may be lost with a leader.
			f.until("worker of machine "+f.ms[next].Name, func() bool {
				return f.count(next, fmt.Sprintf(`"kind":"joined","worker":%d,`, 2*next)) > 0 && f.count(next, fmt.Sprintf(`"kind":"joined","worker":%d,`, 2*next+1)) > 0
			})
			f.ms[x].PowerOff()
			gone = append(gone, x)
			f.until("vote of machine "+f.ms[next].Name, func() bool { return f.count(next, f.ms[next].Name+" votes") > 0 })
		}
		return gone
	}},
}

// Trials tells each story of several machines once on three and once on five that share nothing but a network and train a GPT, 2 workers
// each, and says how it ended: whether with the bits of an undisturbed run, how many workers were lost and joined, rollbacks, and processes
// that are left.
func Trials(args []string) error {
	f := flag.NewFlagSet("trials", flag.ExitOnError)
	sizes := f.String("machines", "3,5", "how many machines, separated by commas")
	only := f.String("only", "", "stories whose name has this text")
	steps := f.Int("steps", 120, "steps of a run")
	seed := f.Uint64("seed", 1, "of the moments and machines")
	if err := f.Parse(args); err != nil {
		return err
	}
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(l.Dir)
	build := exec.Command("go", "build", "-o", l.Dir+"/", "./examples/gpt")
	build.Dir = l.Root
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(l.Root, "docs/architecture.md"))
	if err != nil {
		return err
	}
	data := filepath.Join(l.Dir, "text.txt")
	if err := os.WriteFile(data, text, 0o644); err != nil {
		return err
	}
	t := gptTrial{dir: l.Dir, data: data, want: make(map[int]rundir.Summary)}
	t.program = []string{"--width", "64", "--heads", "4", "--context", "64", "--layers", "4", "--global-batch", "40", "--micro-batch", "2"}
	if _, err := t.undisturbed(*steps); err != nil {
		return err
	}
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Printf("a GPT of 4 layers, width 64, dropout 0.1, %d steps of 40 samples, 2 workers a machine; undisturbed params_sha256 %s; load average %s\n", *steps, t.want[*steps].ParamsSHA256, strings.Join(strings.Fields(string(load))[:3], " "))
	fmt.Println("machines  lost  joined  rollbacks  steps    params_sha256  left behind  story")
	failed := 0
	for size := range strings.SplitSeq(*sizes, ",") {
		var n int
		if _, err := fmt.Sscan(size, &n); err != nil || n < 3 || n > 9 {
			return fmt.Errorf("-machines: %q is no number from 3 to 9", size)
		}
		for _, s := range machineStories {
			if !strings.Contains(s.name, *only) || s.five && n < 5 {
				continue
			}
			r := rand.New(rand.NewPCG(*seed, uint64(len(s.name)+n)))
			steps := *steps * max(1, s.long)
			want, err := t.undisturbed(steps)
			if err != nil {
				return err
			}
			sum, left, err := t.run(n, s, steps, r)
			equal := "equal"
			if err == nil && (sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256) {
				equal = "OTHER BITS"
			}
			if err != nil || left > 0 || equal != "equal" || sum.Steps != steps {
				failed++
			}
			fmt.Printf("%8d %5d %7d %10d %6d %16s %12d  %s\n", n, sum.WorkersLost, sum.WorkersJoined, sum.Rollbacks, sum.Steps, equal, left, s.name)
			if err != nil {
				fmt.Println("   ", err)
			}
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d trials failed", failed)
	}
	return nil
}

// gptTrial makes runs of a GPT over machines.
type gptTrial struct {
	dir, data string
	program   []string
	want      map[int]rundir.Summary // of undisturbed runs, by their steps
}

// undisturbed returns how an undisturbed run of so many steps ends.
func (t *gptTrial) undisturbed(steps int) (sum rundir.Summary, err error) {
	if sum, ok := t.want[steps]; ok {
		return sum, nil
	}
	dir := filepath.Join(t.dir, fmt.Sprintf("undisturbed-%d", steps))
	args := []string{"run", "--plain", "--threads", "1", "--workers", "1", "--run-dir", dir, filepath.Join(t.dir, "gpt"), "--data", t.data, "--steps", fmt.Sprint(steps)}
	if out, err := exec.Command(filepath.Join(t.dir, "launcher"), append(args, t.program...)...).CombinedOutput(); err != nil {
		return sum, fmt.Errorf("the undisturbed run: %w\n%s", err, out)
	}
	err = readSummary(filepath.Join(dir, "summary.json"), &sum)
	t.want[steps] = sum
	return sum, err
}

// field is the machines of a run: the first take of them begin it.
type field struct {
	dir  string
	take int
	ms   []*machines.Machine
	cmds []*machines.Cmd // nil: takes no part
	outs []bytes.Buffer
	err  error
}

// begin starts a launcher.
func (f *field) begin(i int, args ...string) {
	f.cmds[i] = f.ms[i].Command(f.ms[i].CopyIn(filepath.Join(f.dir, "launcher")), args...)
	f.cmds[i].Stdout, f.cmds[i].Stderr = &f.outs[i], &f.outs[i]
	f.err = errors.Join(f.err, f.cmds[i].Start())
}

// join brings a machine into the run, with the ticket of another one.
func (f *field) join(i, at int) {
	var ticket []byte
	f.until("ticket", func() (there bool) {
		ticket, _ = os.ReadFile(f.ms[at].Path(machineRun + "/ticket"))
		return len(ticket) > 0
	})
	f.begin(i, "join", "--plain", "--run-dir", machineRun, strings.TrimSpace(string(ticket)))
}

// until waits for something, for two minutes at most.
func (f *field) until(what string, is func() bool) {
	if f.err == nil && !await(2*time.Minute, is) {
		f.err = fmt.Errorf("no %s\n%s", what, f.said())
	}
}

// count counts the lines of a machine's events that have a text.
func (f *field) count(i int, part string) int {
	text, _ := os.ReadFile(f.ms[i].Path(machineRun + "/events.jsonl"))
	return bytes.Count(text, []byte(part))
}

// said is what all launchers have printed.
func (f *field) said() (all string) {
	for i := range f.outs {
		all += fmt.Sprintf("%s:\n%s", f.ms[i].Name, &f.outs[i])
	}
	return all
}

// run tells a story on n machines. left is how many processes of the run are there after its end.
func (t *gptTrial) run(n int, s machineStory, steps int, r *rand.Rand) (sum rundir.Summary, left int, err error) {
	tb := &trial{}
	defer func() { err = errors.Join(err, tb.end()) }()
	spare := s.spare
	if spare > 1 {
		spare = n // one for each
	}
	f := &field{dir: t.dir, take: n, ms: machines.Up(tb, n+spare)}
	if tb.err != nil {
		return sum, 0, tb.err
	}
	f.cmds, f.outs = make([]*machines.Cmd, len(f.ms)), make([]bytes.Buffer, len(f.ms))
	args := append([]string{"run", "--plain", "--run-dir", machineRun, "--listen", "--wait-hosts", fmt.Sprint(n), "--workers", "2", "--threads", "1"}, s.flags...)
	args = append(args, f.ms[0].CopyIn(filepath.Join(t.dir, "gpt")), "--data", f.ms[0].CopyIn(t.data))
	f.begin(0, append(append(args, "--steps", fmt.Sprint(steps)), t.program...)...)
	for i := 1; i < n; i++ {
		f.join(i, 0)
	}
	step := steps/10 + r.IntN(steps/10)
	f.until(fmt.Sprintf("step %d", step), func() bool {
		text, _ := os.ReadFile(f.ms[0].Path(machineRun + "/metrics.jsonl"))
		return leading(f.ms) >= 0 && bytes.Count(text, []byte("\n")) >= step
	})
	if f.err != nil {
		return sum, 0, f.err
	}
	time.Sleep(time.Duration(r.IntN(100)) * time.Millisecond)
	gone := s.tell(f, r)
	for i, c := range f.cmds {
		if f.err != nil {
			break
		}
		if c == nil || slices.Contains(gone, i) && c.Process == nil {
			continue
		}
		ended := make(chan error, 1)
		go func() { ended <- c.Wait() }()
		select {
		case err := <-ended:
			if err != nil && !slices.Contains(gone, i) {
				f.err = fmt.Errorf("%s: %w\n%s", f.ms[i].Name, err, f.said())
			}
		case <-time.After(4 * time.Minute):
			f.err = fmt.Errorf("%s does not end\n%s", f.ms[i].Name, f.said())
		}
	}
	for i := range f.ms {
		if f.err != nil || f.cmds[i] == nil || slices.Contains(gone, i) {
			continue
		}
		var own rundir.Summary
		if f.err = readSummary(f.ms[i].Path(machineRun+"/summary.json"), &own); f.err != nil {
			break
		}
		if sum.Steps > 0 && (own.ParamsSHA256 != sum.ParamsSHA256 || own.StateSHA256 != sum.StateSHA256) {
			f.err = fmt.Errorf("%s has params_sha256 %s, another one %s", f.ms[i].Name, own.ParamsSHA256, sum.ParamsSHA256)
		}
		sum = own
		f.err = errors.Join(f.err, f.whole(i))
		f.until("end of all processes of "+f.ms[i].Name, func() bool { left = len(f.programs(i)); return left == 0 })
	}
	return sum, left, f.err
}

// whole checks that a machine's metrics have every step once, but for those that a rollback repeats.
func (f *field) whole(i int) error {
	text, err := os.ReadFile(f.ms[i].Path(machineRun + "/metrics.jsonl"))
	if err != nil {
		return err
	}
	want := 1
	for line := range bytes.Lines(text) {
		var m struct{ Step int }
		if err := json.Unmarshal(line, &m); err != nil {
			return err
		}
		if m.Step != want {
			return fmt.Errorf("%s: metrics.jsonl has step %d after %d", f.ms[i].Name, m.Step, want-1)
		}
		want++
	}
	return nil
}

// programs are the processes of a machine's run.
func (f *field) programs(i int) (all []string) {
	for _, pid := range f.ms[i].Processes() {
		if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && len(text) > 0 {
			all = append(all, string(bytes.ReplaceAll(text, []byte{0}, []byte{' '})))
		}
	}
	return all
}

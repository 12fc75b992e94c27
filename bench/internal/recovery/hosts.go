package recovery

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Hosts kills emulated hosts, agent and workers, with SIGKILL from outside: in turn the one whose
// agent leads, and another one. It lists how long it was from just before the signal until
// the last survivor had applied the plan, by the clock of this process and the time
// of the event; and the phases by the run's own account.
func Hosts(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("hosts", flag.ExitOnError)
	runs := f.Int("runs", 10, "runs of each of the two kinds")
	n := f.Int("hosts", 3, "emulated hosts")
	workers := f.Int("workers", 6, "worker processes")
	steps := f.Int("steps", 60, "steps of a run")
	detect := f.Duration("detect", time.Second, "budget of detection")
	seed := f.Uint64("seed", 1, "of steps and hosts")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *runs < 1 || *n < 3 || *workers < *n || *steps < 20 {
		return fmt.Errorf("-runs %d, -hosts %d, -workers %d, -steps %d: give at least 1 run, 3 hosts, as many workers, and 20 steps", *runs, *n, *workers, *steps)
	}
	r := rand.New(rand.NewPCG(*seed, 2))
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(l.Dir)
	t := lab.Trial{
		Flags:   strings.Fields(fmt.Sprintf("--workers %d --emulate-hosts %d --threads 1 --detect %v", *workers, *n, *detect)),
		Program: strings.Fields(fmt.Sprintf("--layers 2 --width 128 --heads 4 --context 64 --global-batch 16 --micro-batch 1 --steps %d --eval-every 0", *steps)),
		Limit:   2 * time.Minute,
	}
	want, err := l.Run(t)
	if err != nil {
		return err
	}
	if wrong := want.Differs(&want); wrong != "" {
		return fmt.Errorf("the undisturbed run: %s\n%s", wrong, want.Output)
	}
	fmt.Printf("%d workers on %d hosts, detection budget %v; undisturbed: %.2f s, params_sha256 %s; ms\n", *workers, *n, *detect, want.Sum.Seconds, want.Sum.ParamsSHA256)
	fmt.Println("  host  leads   step  from the kill   total  detect  query   plan  agree   edit resume")
	var took [2][]float64
	for range *runs {
		for kind, leads := range []bool{true, false} {
			k := hostKill{dir: filepath.Join(l.Dir, fmt.Sprintf("run-%d", l.Runs+1)), leads: leads, step: *steps/4 + r.IntN(*steps/4), pick: r.IntN(*n - 1), hosts: *n}
			done, stop := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				k.kill(stop)
			}()
			o, err := l.Run(t)
			close(stop)
			<-done
			if err = errors.Join(err, k.err); err != nil {
				return err
			}
			if wrong := o.Differs(&want); wrong != "" {
				return fmt.Errorf("a run whose %s was killed: %s\n%s", k.host, wrong, o.Output)
			}
			ms, got := k.recovered(o.Events)
			if got == nil {
				return fmt.Errorf("a run whose %s was killed tells of no recovery", k.host)
			}
			took[kind] = append(took[kind], ms)
			fmt.Printf("%6s  %5v %6d %14.1f %7.1f %7.1f %6.1f %6.1f %6.1f %6.1f %6.1f\n", k.host, leads, got.Step, ms, got.TotalMS, got.DetectMS, got.QueryMS, got.PlanMS, got.AgreeMS, got.EditMS, got.ResumeMS)
		}
	}
	for kind, name := range []string{"the leader's host", "another host"} {
		row := report.Row{Comparison: "hosts", Case: fmt.Sprintf("death of one of %d emulated hosts, from the kill until all continue", *n), Workers: *workers, Threads: 1, Ours: name, Unit: "ms"}
		for _, ms := range took[kind] {
			row.Add(ms, 0)
		}
		rec.Add(row)
	}
	fmt.Printf("  the leader's host, from the kill until all go on: %s (bound 600)\n", lab.List(took[0]))
	fmt.Printf("  another host: %s (bound 250)\n", lab.List(took[1]))
	fmt.Printf("  medians: %.1f and %.1f; all %d runs ended with the bits of the undisturbed one\n", lab.Median(took[0]), lab.Median(took[1]), 2**runs)
	return nil
}

// hostKill is the death of a host.
type hostKill struct {
	dir         string
	leads       bool
	step        int
	pick, hosts int

	host string
	at   time.Time
	err  error
}

// kill waits for the step and kills the host.
func (k *hostKill) kill(stop <-chan struct{}) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			k.err = errors.New("the run had ended before a host could be killed")
			return
		case <-tick.C:
		}
		text, _ := os.ReadFile(filepath.Join(k.dir, "metrics.jsonl"))
		if bytes.Count(text, []byte("\n")) >= k.step {
			break
		}
	}
	leader, err := leadingAgent(k.dir)
	if err != nil {
		k.err = err
		return
	}
	for _, pid := range lab.Marked(k.dir) {
		name, ok := agentName(pid)
		if !ok || (pid == leader) != k.leads {
			continue
		}
		if k.leads || k.pick == 0 || len(k.host) > 0 {
			k.host = name
			break
		}
		k.pick--
	}
	if k.host == "" {
		k.host = "host-" + strconv.Itoa(k.hosts-1)
	}
	for _, pid := range lab.Marked(k.dir) {
		if name, ok := agentName(pid); !ok || name != k.host {
			continue
		}
		all := append([]int{pid}, offspring(pid)...)
		k.at = time.Now()
		for _, p := range all {
			_ = syscall.Kill(p, syscall.SIGKILL)
		}
		return
	}
	k.err = fmt.Errorf("%s has no agent", k.host)
}

// recovered returns the recovery from the kill, and the milliseconds that it took.
func (k *hostKill) recovered(events []rundir.Event) (ms float64, rec *rundir.Recovery) {
	for _, e := range events {
		if e.Recovery != nil && e.Time.After(k.at) {
			return float64(e.Time.Sub(k.at).Microseconds()) / 1000, e.Recovery
		}
	}
	return 0, nil
}

// agentName returns the host of an agent's process.
func agentName(pid int) (string, bool) {
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	words := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	if len(words) != 3 || words[1] != "agent" {
		return "", false
	}
	return words[2], true
}

func offspring(pid int) (pids []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for word := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(word); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// leadingAgent returns the process that listens where workers.json says.
func leadingAgent(dir string) (int, error) {
	run, err := rundir.ReadWorkers(dir)
	if err != nil {
		return 0, err
	}
	table, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return 0, err
	}
	inode := ""
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) == 8 && f[7] == run.Agent && inode == "" {
			inode = f[6]
		}
	}
	for _, pid := range lab.Marked(dir) {
		if _, ok := agentName(pid); !ok {
			continue
		}
		links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, l := range links {
			if to, _ := os.Readlink(l); inode != "" && to == "socket:["+inode+"]" {
				return pid, nil
			}
		}
	}
	return 0, fmt.Errorf("no agent listens at %s", run.Agent)
}

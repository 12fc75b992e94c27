package recovery

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
)

// Soak runs random schedules of faults on small jobs, done from outside with kill(2) but for bits
// that workers flip in themselves, with workers that join and leave meanwhile, and compares what each run ends with with the undisturbed run of its job. A schedule is
// a function of -seed, its number and how fast the machine is: its moments are shares of an
// undisturbed run. So a failure is printed with all that was done and when.
func Soak(args []string) error {
	f := flag.NewFlagSet("soak", flag.ExitOnError)
	schedules := f.Int("schedules", 300, "schedules to run")
	first := f.Int("first", 0, "number of the first schedule, to go on or to repeat one")
	seed := f.Uint64("seed", 1, "of the schedules")
	limit := f.Duration("limit", time.Minute, "how long a run may take before it counts as hung")
	kindList := f.String("kinds", "freeze,leave,add,respawn,flip,plan,hosts", "what is drawn besides kill, from these `words`")
	again := f.String("faults", "", "repeat the schedule -first with these `faults` instead of its own, as a failure prints them, -schedules times")
	if err := f.Parse(args); err != nil {
		return err
	}
	kinds := make(map[string]bool)
	for k := range strings.SplitSeq(*kindList, ",") {
		kinds[k] = true
	}
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	jobs, err := soakJobs(l, *limit)
	if err != nil {
		return err
	}
	fmt.Printf("%d schedules from %d on, seed %d, in %s\n", *schedules, *first, *seed, l.Dir)
	failed, injected, recoveries, rollbacks, joined, repaired := 0, 0, 0, 0, 0, 0
	for i := *first; i < *first+*schedules; i++ {
		n := i
		if *again != "" {
			n = *first
		}
		s := draw(*seed, n, jobs, kinds)
		if *again != "" {
			s.faults = *again
		}
		o, err := l.Run(lab.Trial{Flags: s.flags, Program: s.job.flags, Faults: s.faults, Limit: *limit})
		if err != nil {
			return err
		}
		hit := 0
		for _, h := range o.Injected {
			if h.Error == "" && !strings.HasPrefix(h.Fault, "add:") {
				hit++
			}
		}
		injected += hit
		recoveries += len(o.Sum.Recoveries)
		rollbacks += o.Sum.Rollbacks
		joined += o.Sum.WorkersJoined
		for _, e := range o.Events {
			if e.Kind == "repaired" {
				repaired++
			}
		}
		wrong := o.Differs(&s.job.want)
		if wrong == "" && o.Sum.WorkersLost > hit+s.flips && !s.hosts { // a host has several
			wrong = fmt.Sprintf("%d workers lost, and %d had a fault", o.Sum.WorkersLost, hit+s.flips)
		}
		if wrong == "" {
			fmt.Printf("ok   %4d  %s  %s: %d faults, %d joined, %d recoveries, %d rollbacks, %.1f s\n", i, strings.Join(s.flags, " "), s.faults,
				hit, o.Sum.WorkersJoined, len(o.Sum.Recoveries), o.Sum.Rollbacks, o.Sum.Seconds)
			if err := os.RemoveAll(o.Dir); err != nil {
				return err
			}
			continue
		}
		failed++
		fmt.Printf("FAIL %4d  %s\n  again: go run ./bench soak -seed %d -kinds %s -first %d -schedules 20 -faults %s\n  launcher run %s gpt %s\n", i, wrong, *seed, *kindList, n, s.faults,
			strings.Join(s.flags, " "), strings.Join(s.job.flags, " "))
		for _, h := range o.Injected {
			fmt.Printf("  %s: process %d at %s %s\n", h.Fault, h.PID, time.Unix(0, h.WallNS).UTC().Format("15:04:05.000000"), h.Error)
		}
		if err := os.MkdirAll(o.Dir, 0o777); err != nil { // the launcher may not have come to it
			return err
		}
		if err := os.WriteFile(filepath.Join(o.Dir, "launcher.log"), []byte(o.Output), 0o644); err != nil {
			return err
		}
		fmt.Printf("  kept: %s\n", o.Dir)
		if !o.Hung {
			last := strings.Split(strings.TrimSpace(o.Output), "\n")
			fmt.Printf("  launcher: %s\n", strings.Join(last[max(0, len(last)-5):], "\n            "))
		}
	}
	fmt.Printf("%d schedules, %d faults, %d repairs, %d joined, %d recoveries, %d rollbacks, %d failed\n",
		*schedules, injected, repaired, joined, recoveries, rollbacks, failed)
	if failed > 0 {
		return fmt.Errorf("soak: %d of %d schedules failed", failed, *schedules)
	}
	return os.RemoveAll(l.Dir)
}

// soakJob is a job with what its undisturbed run ends with.
type soakJob struct {
	flags []string
	want  lab.Outcome
	one   float64 // seconds, with one worker
	eight float64 // with eight
}

// soakJobs runs the jobs undisturbed.
func soakJobs(l *lab.Lab, limit time.Duration) ([]*soakJob, error) {
	var jobs []*soakJob
	for _, flags := range []string{
		"--layers 2 --width 64 --heads 4 --context 32 --global-batch 16 --micro-batch 1 --steps 16 --eval-every 2",
		"--layers 3 --width 48 --heads 3 --context 20 --global-batch 21 --micro-batch 3 --steps 24 --eval-every 10",
		"--layers 2 --width 96 --heads 3 --context 50 --global-batch 32 --micro-batch 2 --steps 8 --eval-every 4",
		// Long enough for plans that follow what was measured.
		"--layers 2 --width 64 --heads 2 --context 32 --global-batch 32 --micro-batch 2 --steps 60 --eval-every 25",
	} {
		j := &soakJob{flags: strings.Fields(flags)}
		var err error
		if j.want, err = l.Run(lab.Trial{Flags: strings.Fields("--workers 1 --threads 1"), Program: j.flags, Limit: limit}); err != nil {
			return nil, err
		}
		j.one = j.want.Sum.Seconds
		many, err := l.Run(lab.Trial{Flags: strings.Fields("--workers 8 --stages 2 --threads 1"), Program: j.flags, Limit: limit})
		if err != nil {
			return nil, err
		}
		j.eight = many.Sum.Seconds
		for _, o := range []*lab.Outcome{&j.want, &many} {
			if wrong := o.Differs(&j.want); wrong != "" {
				return nil, fmt.Errorf("the undisturbed run of %s: %s\n%s", flags, wrong, o.Output)
			}
		}
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// schedule is a run with its faults.
type schedule struct {
	job    *soakJob
	flags  []string
	faults string // from outside
	flips  int    // that workers do to themselves
	hosts  bool   // the run has several hosts, and they have faults
}

// draw makes a schedule. One of the first workers is spared by all that is fatal; the others
// may get several faults where each worker is replaced.
func draw(seed uint64, i int, jobs []*soakJob, kinds map[string]bool) schedule {
	r := rand.New(rand.NewPCG(seed, uint64(i)))
	if kinds["hosts"] && r.IntN(4) == 0 {
		return drawHosts(r, jobs)
	}
	reshaped := kinds["plan"] && r.IntN(4) == 0
	s := schedule{job: jobs[r.IntN(len(jobs)-1)]}
	workers := 2 + r.IntN(7)
	stages := 1 + r.IntN(min(3, workers))
	if reshaped {
		workers, stages = 4+r.IntN(5), 2+r.IntN(2)
	}
	mirrors := 1 + r.IntN(2)
	s.flags = strings.Fields(fmt.Sprintf("--workers %d --stages %d --mirrors %d --threads 1", workers, stages, mirrors))
	if r.IntN(4) == 0 {
		s.flags = append(s.flags, "--zero", "1")
	}
	var chaos []string
	if reshaped { // a slow worker has layers and workers move
		s.job = jobs[len(jobs)-1]
		chaos = append(chaos, fmt.Sprintf("slow:%d@3:%.1f", r.IntN(workers), 0.3+0.4*r.Float64()))
	}
	seconds := s.job.one + (s.job.eight-s.job.one)*float64(workers-1)/7
	order := r.Perm(workers)
	spared, victims := order[0], order[1:]
	n := 1 + r.IntN(4)
	respawn := kinds["respawn"] && r.IntN(3) == 0
	if respawn {
		s.flags = append(s.flags, "--respawn")
		victims = append(victims, victims[r.IntN(len(victims))])
	}
	span := int64(1e6 * seconds)
	at := r.Int64N(span)
	var faults []string
	later := func() string {
		if reshaped && (len(faults) == 0 || r.IntN(3) == 0) { // as a plan goes live, or in the steps after it
			return fmt.Sprintf("plan+%d", r.Int64N([]int64{5000, 150000}[r.IntN(2)]))
		}
		if len(faults) == 0 {
			return fmt.Sprint(at)
		}
		if r.IntN(2) == 0 { // while the one before is recovered from
			return fmt.Sprintf("+%d", r.Int64N(3000))
		}
		return fmt.Sprintf("+%d", r.Int64N(span/2))
	}
	if kinds["add"] && r.IntN(3) == 0 {
		more := 1 + r.IntN(2)
		at /= 2
		faults = append(faults, fmt.Sprintf("add:%d@%s", more, later()))
		for w := workers; w < workers+more; w++ {
			victims = append(victims, w)
		}
		r.Shuffle(len(victims), func(i, j int) { victims[i], victims[j] = victims[j], victims[i] })
	}
	slow := len(chaos)
	for _, w := range victims[:min(n, len(victims))] {
		switch {
		case kinds["flip"] && w < workers && r.IntN(6) == 0:
			phase := []string{"", "/forward", "/backward", "/commit", "/gather"}[r.IntN(5)]
			target := []string{"own", "mirror", "copy", "moment"}[r.IntN(4)]
			chaos = append(chaos, fmt.Sprintf("flip:%d@%d%s:%s", w, 1+r.IntN(s.job.want.Sum.Steps-1), phase, target))
		case kinds["freeze"] && r.IntN(6) == 0:
			faults = append(faults, fmt.Sprintf("freeze:%d@%s", w, later()))
		case kinds["leave"] && r.IntN(4) == 0:
			faults = append(faults, fmt.Sprintf("leave:%d@%s", w, later()))
			if r.IntN(4) == 0 { // it dies on the way out
				faults = append(faults, fmt.Sprintf("kill:%d@%s", w, later()))
			}
		default:
			faults = append(faults, fmt.Sprintf("kill:%d@%s", w, later()))
		}
	}
	if kinds["flip"] && r.IntN(12) == 0 && n < len(victims) { // a spared worker survives that as well, if it is not left alone
		chaos = append(chaos, fmt.Sprintf("flip:%d@%d:%s", spared, 1+r.IntN(s.job.want.Sum.Steps-1), []string{"own", "copy"}[r.IntN(2)]))
	}
	if len(chaos) > 0 {
		s.flags = append(s.flags, "--chaos", strings.Join(chaos, ","))
	}
	s.flips = len(chaos) - slow
	s.faults = strings.Join(faults, ",")
	return s
}

// drawHosts makes a schedule of a run of several emulated hosts. A minority of them is killed, frozen for a while, or cut off
// from the others for a while, and some workers are killed.
func drawHosts(r *rand.Rand, jobs []*soakJob) schedule {
	hosts := 3 + 2*r.IntN(2)
	workers := hosts + r.IntN(4)
	s := schedule{job: jobs[len(jobs)-1], hosts: true}
	s.flags = strings.Fields(fmt.Sprintf("--workers %d --emulate-hosts %d --stages %d --mirrors %d --threads 1", workers, hosts, 1+r.IntN(2), 1+r.IntN(2)))
	if r.IntN(2) == 0 {
		s.flags = append(s.flags, "--respawn")
	}
	var faults, chaos []string
	span := int64(1e6 * s.job.eight)
	at := r.Int64N(span / 2)
	add := func(kind string, of int) {
		faults = append(faults, fmt.Sprintf("%s:%d@%d", kind, of, at))
		at += r.Int64N(span / 2)
	}
	for _, h := range r.Perm(hosts)[:1+r.IntN(hosts/2)] {
		switch r.IntN(4) {
		case 0:
			add("freezehost", h)
			at += 2e6 // longer than it takes to be found
			add("thawhost", h)
		case 1:
			chaos = append(chaos, fmt.Sprintf("cut:%d@%d:%d", h, 2+r.IntN(s.job.want.Sum.Steps/2), 1+r.IntN(4)))
		default:
			add("killhost", h)
		}
	}
	if r.IntN(2) == 0 {
		add("kill", r.IntN(workers))
	}
	if len(chaos) > 0 {
		s.flags = append(s.flags, "--chaos", strings.Join(chaos, ","))
	}
	s.faults = strings.Join(faults, ",")
	return s
}

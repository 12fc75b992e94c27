package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
)

// What all writes, below the root of the module.
const (
	pageFile  = "docs/benchmarks.md"
	plotsDir  = "docs/benchmarks"
	rawDir    = "bench/results/all"
	stateRoot = ".bin/bench" // git ignores it
)

// maxLoad is the share of the processors that other programs may use.
const maxLoad = 0.05

// session is one call of all.
type session struct {
	root, state   string // folders: of the module, and of what was measured
	commit        string
	dirty         bool
	quick, force  bool
	rounds        int
	limit         time.Duration
	machine       report.Machine
	tools         []report.Tool
	can           []report.Comparison // that run with these tools
	skipped       []report.Skip
	done          []report.Run
	failed        []string
	self, drawing string // binaries: this one, and that which draws plots
}

// all runs every comparison.
func all(args []string) error {
	f := flag.NewFlagSet("all", flag.ExitOnError)
	s := session{machine: lab.Machine()}
	only := f.String("only", "", "comparisons to run, separated by commas (default all)")
	f.IntVar(&s.rounds, "rounds", 3, "rounds of each comparison, at least 3")
	f.BoolVar(&s.quick, "quick", false, "one round with small sizes, to try the command; writes nothing")
	f.BoolVar(&s.force, "force", false, "write the page in spite of a changed work tree or other programs, and say so there")
	f.DurationVar(&s.limit, "limit", time.Hour, "time limit of a round of a comparison")
	_ = f.Parse(args) // it exits
	if s.quick {
		s.rounds = 1
	} else if s.rounds < 3 {
		return fmt.Errorf("-rounds %d: give at least 3, or -quick for a trial", s.rounds)
	}
	if f.NArg() > 0 || s.limit <= 0 {
		return fmt.Errorf("all takes flags only, and a -limit above 0; see go doc ./bench")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var every, chosen []report.Comparison
	for _, c := range comparisons {
		every = append(every, c.Comparison)
	}
	chosen, err := report.Choose(every, *only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	if err := s.locate(); err != nil {
		return err
	}
	if s.tools, err = peers.Tools(); err != nil {
		return err
	}
	s.can, s.skipped = report.Split(every, s.tools)
	if err := s.read(); err != nil {
		return err
	}
	fmt.Printf("commit %s; %v\n%s", s.commit, s.machine, report.Peers(s.tools, s.skipped))
	if !s.quick {
		if err := s.ready(ctx); err != nil {
			return err
		}
	}
	runnable, _ := report.Split(chosen, s.tools)
	if err := s.measure(ctx, runnable); err != nil {
		return err
	}
	return s.conclude()
}

// locate finds the module, its commit, and the folder of what was measured.
func (s *session) locate() (err error) {
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return fmt.Errorf("go env GOMOD: %w", err)
	}
	s.root = filepath.Dir(strings.TrimSpace(string(mod)))
	if s.self, err = os.Executable(); err != nil {
		return err
	}
	if s.commit, s.dirty, err = s.tree(); err != nil && !s.quick {
		return fmt.Errorf("the commit is unknown, and figures without one are worth little; -quick is for a trial: %w", err)
	}
	s.commit = cmp.Or(s.commit, "unknown")
	name := s.commit
	if s.dirty {
		name += "-changed"
	}
	if s.quick {
		name += "-quick"
	}
	s.state = filepath.Join(s.root, stateRoot, name)
	if s.dirty || s.quick { // it may be of another tree, or of other sizes
		if err := os.RemoveAll(s.state); err != nil {
			return err
		}
	}
	return os.MkdirAll(s.state, 0o755)
}

// tree returns the commit of the work tree, and whether it has changes beside what all writes itself.
func (s *session) tree() (commit string, dirty bool, err error) {
	git := func(args ...string) (string, error) {
		cmd := exec.Command("git", args...)
		cmd.Dir = s.root
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("git %s: %w", args[0], err)
		}
		return strings.TrimSpace(string(out)), nil
	}
	if commit, err = git("rev-parse", "--short=12", "HEAD"); err != nil {
		return "", false, err
	}
	changes, err := git("status", "--porcelain", "--", ".", ":!"+pageFile, ":!"+plotsDir, ":!"+rawDir)
	return commit, changes != "", err
}

// read reads the runs that were made before. A run counts if it had the peers that are there now, and if other programs left it alone or with
// -force.
func (s *session) read() error {
	files, err := filepath.Glob(filepath.Join(s.state, "*.json"))
	if err != nil {
		return err
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		var r report.Run
		if err := json.Unmarshal(text, &r); err != nil {
			return fmt.Errorf("%s: %w; remove it to measure again", name, err)
		}
		quiet := r.Others >= 0 && r.Others <= maxLoad
		if r.Current(s.can, s.tools) && (quiet || s.force) {
			s.done = append(s.done, r)
		}
	}
	return nil
}

// ready says why the page could not be written, before hours are spent, and builds what draws the plots.
func (s *session) ready(ctx context.Context) error {
	if s.dirty && !s.force {
		return fmt.Errorf("the work tree differs from commit %s: commit first, or give -force for a page that says so, or -quick for a trial", s.commit)
	}
	if !s.force {
		w := lab.NewWatch()
		select {
		case <-time.After(3 * time.Second):
		case <-ctx.Done():
		}
		if share := w.Share(); share < 0 || share > maxLoad {
			return fmt.Errorf("other programs use %s, at most %.0f %% may be: end them, or give -force for a page that says so, or -quick for a trial", said(share), 100*maxLoad)
		}
	}
	s.drawing = filepath.Join(s.state, "plots")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", s.drawing, ".")
	cmd.Dir = filepath.Join(s.root, "bench/plots")
	cmd.Env = append(os.Environ(), "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("the module bench/plots, which draws the plots, does not build: %w\n%s", err, out)
	}
	return nil
}

// said prints a share of the processors.
func said(share float64) string {
	if share < 0 {
		return "an unknown share of the processors"
	}
	return fmt.Sprintf("%.1f %% of the processors", 100*share)
}

// measure runs what is left of some comparisons, one after the other.
func (s *session) measure(ctx context.Context, chosen []report.Comparison) error {
	tasks := report.Tasks(chosen, s.rounds, s.done)
	all := len(chosen) * s.rounds
	if len(tasks) < all {
		fmt.Fprintf(os.Stderr, "%d of %d rounds are measured already\n", all-len(tasks), all)
	}
	for i, t := range tasks {
		if commit, dirty, err := s.tree(); err == nil && (commit != s.commit || dirty != s.dirty) {
			return fmt.Errorf("the work tree is no longer that of commit %s: restore it and run all again, which continues here", s.commit)
		}
		long := ""
		if !s.quick { // the guesses are for full sizes
			long = fmt.Sprintf(": about %v; all that is left about %v", s.about(tasks[i:i+1]), s.about(tasks[i:]))
		}
		fmt.Fprintf(os.Stderr, "[%d/%d] %s, round %d%s\n", all-len(tasks)+i+1, all, t.Comparison.Name, t.Round, long)
		r, err := s.run(ctx, t)
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; what is measured is kept, and the same command continues")
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "  failed: %v; its output is %s\n", err, s.file(t, ".txt"))
			s.failed = append(s.failed, fmt.Sprintf("%s round %d: %v", t.Comparison.Name, t.Round, err))
			continue
		}
		fmt.Fprintf(os.Stderr, "  took %.0f s; others used %s\n", r.Seconds, said(r.Others))
		s.done = append(s.done, r)
	}
	return nil
}

func (s *session) about(tasks []report.Task) time.Duration {
	return report.Takes(tasks, s.done).Round(time.Second)
}

// file returns where a round is kept.
func (s *session) file(t report.Task, ending string) string {
	return filepath.Join(s.state, fmt.Sprintf("%s-%d%s", t.Comparison.Name, t.Round, ending))
}

// grace is how long a round may take to end after it was interrupted.
const grace = 10 * time.Second

// run runs one round in a process of its own, with its own folder of temporary files, and keeps its output and its rows.
func (s *session) run(ctx context.Context, t report.Task) (r report.Run, err error) {
	args := t.Comparison.Args(fmt.Sprint(t.Round), s.quick)
	r = report.Run{Comparison: t.Comparison.Name, Round: t.Round, Command: "go run ./bench " + quoted(args), Peers: report.PeersOf(t.Comparison, s.tools)}
	temp, err := os.MkdirTemp("", "sb") // short, since sockets are in it
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(temp)
	out, err := os.Create(s.file(t, ".txt"))
	if err != nil {
		return r, err
	}
	defer out.Close()
	r.Began = time.Now()
	fmt.Fprintf(out, "$ %s\ncommit %s%s; %v; %s\n\n", r.Command, s.commit, map[bool]string{true: " with changes"}[s.dirty], s.machine, r.Began.UTC().Format(time.RFC3339))
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	rows := filepath.Join(temp, "rows.json")
	cmd := exec.CommandContext(ctx, s.self, append([]string{"-rows", rows}, args...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.root, out, out
	cmd.Env = append(os.Environ(), lab.Ours, "TMPDIR="+temp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = grace
	w := lab.NewWatch()
	err = cmd.Start()
	if err == nil {
		err = cmd.Wait()
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what it has left running would be beside the next one
	}
	r.Others, r.Seconds = w.Share(), time.Since(r.Began).Seconds()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return r, fmt.Errorf("it took longer than -limit %v", s.limit)
	}
	if err != nil {
		return r, err
	}
	text, err := os.ReadFile(rows)
	if err == nil {
		err = json.Unmarshal(text, &r.Rows)
	}
	if err != nil {
		return r, fmt.Errorf("its rows: %w", err)
	}
	if len(r.Rows) == 0 {
		return r, errors.New("it measured nothing")
	}
	fmt.Fprintf(out, "\ntook %.0f s; other programs used %s\n", r.Seconds, said(r.Others))
	if text, err = json.Marshal(r); err != nil {
		return r, err
	}
	// The rename makes it whole, so that an interrupt leaves all or nothing.
	part := s.file(t, ".part")
	if err := os.WriteFile(part, text, 0o644); err != nil {
		return r, err
	}
	return r, os.Rename(part, s.file(t, ".json"))
}

// quoted joins arguments as a shell takes them.
func quoted(args []string) string {
	var words []string
	for _, a := range args {
		if strings.Contains(a, " ") {
			a = "'" + a + "'"
		}
		words = append(words, a)
	}
	return strings.Join(words, " ")
}

// conclude prints what is measured, and writes the page if it is all.
func (s *session) conclude() error {
	slices.SortStableFunc(s.done, func(a, b report.Run) int { return cmp.Compare(a.Round, b.Round) })
	s.done = slices.DeleteFunc(s.done, func(r report.Run) bool { return r.Round > s.rounds })
	p := report.Page{
		Machine: s.machine, Commit: s.commit, Dirty: s.dirty, MaxLoad: maxLoad, Quick: s.quick, Rounds: s.rounds,
		Tools: s.tools, Compared: s.can, Skipped: s.skipped, Runs: s.done,
	}
	for _, section := range p.Sections() {
		fmt.Printf("\n%s", section.Text())
	}
	warnings := p.Warnings()
	for _, w := range warnings {
		fmt.Printf("\n%s\n", w)
	}
	if len(s.failed) > 0 {
		return fmt.Errorf("%d rounds failed: %s", len(s.failed), strings.Join(s.failed, "; "))
	}
	if s.quick {
		return nil
	}
	if left := report.Incomplete(s.can, s.rounds, s.done); len(left) > 0 {
		fmt.Printf("\n%s is not written: %s are not measured yet at this commit; go run ./bench all measures them\n", pageFile, strings.Join(left, ", "))
		return nil
	}
	if len(warnings) > 0 && !s.force {
		return fmt.Errorf("%s is not written: %s Run all again, which measures these rounds again, or give -force", pageFile, strings.Join(warnings, " "))
	}
	return s.write(p)
}

// write writes the page, its plots and the outputs of all rounds.
func (s *session) write(p report.Page) error {
	var plots []report.Plot
	for _, section := range p.Sections() {
		plots = append(plots, section.Plots()...)
	}
	text, err := json.Marshal(plots)
	if err != nil {
		return err
	}
	path := func(name string) string { return filepath.Join(s.root, name) }
	if err := errors.Join(os.RemoveAll(path(plotsDir)), os.RemoveAll(path(rawDir)), os.MkdirAll(path(rawDir), 0o755)); err != nil {
		return err
	}
	cmd := exec.Command(s.drawing, "-out", path(plotsDir))
	cmd.Stdin = strings.NewReader(string(text))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("bench/plots: %w\n%s", err, out)
	}
	for _, r := range p.Runs {
		name := fmt.Sprintf("%s-%d.txt", r.Comparison, r.Round)
		raw, err := os.ReadFile(filepath.Join(s.state, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(path(rawDir), name), raw, 0o644); err != nil {
			return err
		}
	}
	rows, err := json.MarshalIndent(p.Runs, "", "\t")
	if err != nil {
		return err
	}
	if err := errors.Join(
		os.WriteFile(filepath.Join(path(rawDir), "rows.json"), append(rows, '\n'), 0o644),
		os.WriteFile(path(pageFile), []byte(p.Markdown("../"+rawDir, filepath.Base(plotsDir))), 0o644)); err != nil {
		return err
	}
	fmt.Printf("\nwrote %s, %s and %s\n", pageFile, plotsDir, rawDir)
	return nil
}

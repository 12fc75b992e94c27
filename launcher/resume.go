package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/session/change"
	"github.com/soliton-train/soliton/internal/net/admit"
	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
	"github.com/soliton-train/soliton/launcher/internal/bucket"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ship"
	"github.com/soliton-train/soliton/launcher/internal/ssh"
	"github.com/soliton-train/soliton/launcher/internal/torch"
)

// changed is what a run is resumed with that was otherwise before.
type changed struct {
	program string   // PROGRAM; "" for the one of before
	args    []string // of the program
}

func newResume() *cobra.Command {
	var f runFlags
	var with changed
	cmd := &cobra.Command{
		Use:   "resume [flags] RUN_DIR|URL [program flags]",
		Short: "Resume a run that has ended",
		Long: `resume continues the run of a run directory from its newest whole checkpoint,
with the program and the program's flags of before, which job.json has. It need not
have as many workers or stages: the result is the same, bit for bit.

Flags of the program after RUN_DIR replace those of before. A run that has done all its steps
can be resumed with more: --steps 400. What else changes a result has to be allowed, by its
name: with another learning rate, --allow lr. The names are ` + strings.Join(change.Names(), ", ") + `; the
program is another one when it was built again from other code or by another version of Go.
What has changed is named, and job.json keeps what the run was before, and up to which step.
Only another shape of the state is refused.

A run whose checkpoints go to a folder or bucket (launcher run --checkpoints) is resumed from
that as well, also on a machine that has nothing of it: in a new run directory, or in --run-dir.

A checkpoint that was altered or cut off is refused, and the one before it used. The line files
of the run directory grow on: steps after the checkpoint appear in metrics.jsonl once more, with
a higher plan, and the last line of a step counts.

A run over several machines is resumed by as many as have its newest checkpoint together,
with --listen and launcher join, or with --hosts: they get from each other what they lack. What
is missing is named, with the machines that had it. Resume it where metrics.jsonl has most steps.`,
		Example: `  launcher resume runs/latest
  launcher resume runs/gpt-20260102-150405 --workers 2 --stages 1
  launcher resume runs/latest --steps 400
  launcher resume --allow program,lr runs/latest --lr 1e-4 --steps 400
  launcher resume s3://bucket/run
  launcher resume --listen --wait-hosts 3 runs/latest        and on two other machines of the run
  launcher join TICKET`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("RUN_DIR is missing: give the directory of a run, such as runs/latest")
			}
			if len(args) > 1 && !strings.HasPrefix(args[1], "-") {
				return fmt.Errorf("unexpected argument %q: give RUN_DIR and flags; another PROGRAM is given with --program", args[1])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			own, rest := cli.Split(args[1:], cmd.Flags())
			if err := cmd.ParseFlags(own); err != nil {
				return cli.FlagError(cmd, err)
			}
			if with.args = rest; slices.Contains(rest, "--help") {
				return cmd.Help()
			}
			if done, err := f.detach.Hand(cmd); done {
				return err
			}
			return resume(cmd, f, args[0], with)
		},
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows RUN_DIR is looked at later
	flags.SortFlags = false
	flags.StringVar(&f.runDir, "run-dir", "", "run `directory` of a run that is resumed from a URL (default runs/PROGRAM-TIME)")
	flags.StringVar(&with.program, "program", "", "`PROGRAM`, where it is not the one of before (default as before)")
	sharedFlags(flags, &f)
	machineFlags(cmd, &f)
	zero := map[string]string{"int": "0", "string": "", "bool": "false", "duration": "0s"}
	for _, name := range []string{"workers", "stages", "zero", "reshape", "mirrors", "min-workers", "respawn", "detect", "call-timeout", "digests", "verify", "keep", "keep-every", "keep-best", "checkpoints"} {
		flag := flags.Lookup(name)
		flag.Usage, flag.DefValue = flag.Usage+" (default as before)", zero[flag.Value.Type()]
	}
	flags.Lookup("python").Usage = "`interpreter` of a Python PROGRAM (default as before, or the first python3 in PATH)"
	return cmd
}

// resume takes the run directory and trains on.
func resume(cmd *cobra.Command, f runFlags, path string, with changed) error {
	url := ""
	if bucket.Holds(path) {
		url = path
		from, err := bucket.Open(path)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if path, err = bucket.Restore(cmd.Context(), from, f.runDir, f.notes(cmd.ErrOrStderr())); err != nil {
			return cli.Fail(err)
		}
	} else if f.runDir != "" {
		return fmt.Errorf("--run-dir is for a run that is resumed from a URL; %s is the directory", path)
	}
	dir, was, err := rundir.Resume(path)
	switch {
	case errors.Is(err, rundir.ErrNoRun), errors.Is(err, rundir.ErrInUse):
		return err
	case err != nil:
		return cli.Fail(err)
	}
	defer dir.Close() // for the returns before Serve, which closes it
	job := was.Job
	finished := allDone(was)
	if finished && len(with.args)+len(f.allow) == 0 && with.program == "" {
		return cli.Fail(fmt.Errorf("%s: nothing to resume: all %d steps are done; give --steps with more", path, job.Steps))
	}
	if job.Command == "" {
		return cli.Fail(fmt.Errorf("%s: job.json has no command: a run that was started by trainer.Run cannot be resumed", path))
	}
	machines, err := f.machines(cmd.Flags().Changed)
	if err != nil {
		return err
	}
	job.Workers = (job.Workers + machines - 1) / machines
	if err := f.inherit(job, cmd.Flags().Changed); err != nil {
		return cli.Fail(fmt.Errorf("%s: job.json: %w", path, err))
	}
	if url != "" && !cmd.Flags().Changed("checkpoints") {
		f.target = url
	}
	if err := f.overSSH(cmd); err != nil {
		return err
	}
	if err := f.validate(cmd); err != nil {
		return err
	}
	job = was.Job
	again, err := f.again(cmd.Context(), dir, was, cmd.ErrOrStderr())
	if err != nil {
		return cli.Fail(fmt.Errorf("%s: %w", path, err))
	}
	again.Finished, again.Allow = finished, f.allow
	if again.Committed, err = rundir.Committed(dir.Path()); err != nil {
		return cli.Fail(fmt.Errorf("%s: %w", path, err))
	}
	p, err := programAgain(path, job, with.program)
	if err != nil {
		return err
	}
	return trainIn(cmd.Context(), f, p, cli.Override(job.Args, with.args), dir, again, cmd.OutOrStdout(), cmd.ErrOrStderr())
}

// auto is the only value of --resume: a run that is started again continues from its run directory, or begins if it has not.
const auto = "auto"

// runAgain trains the program: from the newest checkpoint in the run directory, from the beginning where the run there has none yet, and
// in a new directory where there is no run. A supervisor starts the same command as often as it likes.
func runAgain(ctx context.Context, f runFlags, p program, args []string, stdout, stderr io.Writer) error {
	path := cmp.Or(f.runDir, filepath.Join(rundir.Parent, p.name))
	dir, was, err := rundir.Resume(path)
	if errors.Is(err, rundir.ErrNoRun) && f.target != "" {
		from, wrong := bucket.OfRun(f.target)
		if wrong != nil {
			return wrong
		}
		if _, err = bucket.Restore(ctx, from, path, f.notes(stderr)); err == nil {
			dir, was, err = rundir.Resume(path)
		} else if errors.Is(err, archive.ErrNoRun) || errors.Is(err, bucket.ErrNothing) {
			err = rundir.ErrNoRun
		}
	}
	if errors.Is(err, rundir.ErrNoRun) {
		if dir, err = rundir.CreateAgain(path); err != nil {
			return cli.Report(session.Outcome{Err: err}, stdout, stderr)
		}
		defer dir.Close()
		return trainIn(ctx, f, p, args, dir, nil, stdout, stderr)
	}
	if err != nil {
		return cli.Fail(err)
	}
	defer dir.Close() // for the returns before Serve, which closes it
	job := was.Job
	if f.reduction != cmp.Or(job.Reduction, f.reduction) {
		return fmt.Errorf("--reduction %s: the run in %s began with %s", f.reduction, path, job.Reduction)
	}
	finished := allDone(was)
	if finished && slices.Equal(job.Args, args) && len(f.allow) == 0 {
		fmt.Fprintf(stdout, "%s: all %d steps are done\n", path, job.Steps)
		return nil
	}
	again, err := f.again(ctx, dir, was, stderr)
	if errors.Is(err, errNothing) && job.Floor() == 0 {
		again, err = &session.Resume{Job: job, Note: was.Notes}, nil
	}
	if err != nil {
		return cli.Fail(fmt.Errorf("%s: %w", path, err))
	}
	again.Finished, again.Allow, again.OrBegin = finished, f.allow, job.Floor() == 0
	if again.Committed, err = rundir.Committed(dir.Path()); err != nil {
		return cli.Fail(fmt.Errorf("%s: %w", path, err))
	}
	return trainIn(ctx, f, p, args, dir, again, stdout, stderr)
}

// notes returns what tells the user of a run that has not begun.
func (f *runFlags) notes(stderr io.Writer) func(string) {
	return func(text string) { fmt.Fprintf(stderr, "launcher: %s\n", text) }
}

// allDone reports whether a run has ended with all its steps.
func allDone(was rundir.Record) bool {
	s := was.Summary
	return s != nil && s.Steps == was.Job.Steps && s.ParamsSHA256 != ""
}

// again says where a run goes on whose directory is there.
func (f *runFlags) again(ctx context.Context, dir *rundir.Dir, was rundir.Record, stderr io.Writer) (again *session.Resume, err error) {
	if f.listen != "" {
		again = &session.Resume{Job: was.Job, Note: was.Notes, Gather: true}
		if was.Last != nil {
			again.Step = was.Last.Step
		}
	} else if again, err = newest(ctx, dir, was.Job, was.Notes, stderr); err != nil {
		return nil, err
	}
	again.Calls = was.Calls
	if again.Plan = was.Plan; was.Last != nil {
		again.Number = was.Last.Plan
	}
	again.Data, err = dir.ReadData()
	return again, err
}

// errNothing means that no checkpoint was ever finished.
var errNothing = errors.New("nothing to resume from: there is no whole checkpoint; start again with launcher run")

// inherit takes over from the run before what was not changed.
func (f *runFlags) inherit(job rundir.Job, changed func(flag string) bool) error {
	f.reduction, f.hosts = cmp.Or(job.Reduction, "exact"), 1
	_, err := session.ParseReduction(f.reduction)
	if _, err2 := controller.ParseReshape(cmp.Or(job.Reshape, "full")); err != nil || err2 != nil {
		return fmt.Errorf("job.json: %w", cmp.Or(err, err2))
	}
	inherit(changed("workers"), &f.workers, job.Workers)
	inherit(changed("stages"), &f.stages, min(job.Stages, max(f.workers, 1)))
	inherit(changed("zero"), &f.zero, job.Zero)
	inherit(changed("reshape"), &f.reshape, cmp.Or(job.Reshape, "full"))
	inherit(changed("mirrors"), &f.mirrors, job.Mirrors)
	inherit(changed("min-workers"), &f.least, min(job.MinWorkers, max(f.workers, 1)))
	inherit(changed("respawn"), &f.respawn, job.Respawn)
	inherit(changed("digests"), &f.digests, !job.NoDigests)
	inherit(changed("verify"), &f.verify, job.Verify)
	inherit(changed("checkpoints"), &f.target, job.Checkpoints)
	if job.SkipBad && !changed("bad-samples") {
		f.badSamples = "skip"
	}
	python := job.Python
	if strings.ContainsRune(python, filepath.Separator) && !filepath.IsAbs(python) {
		python = filepath.Join(job.Dir, python)
	}
	if _, err := exec.LookPath(python); err == nil { // elsewhere it may be the default one
		inherit(changed("python"), &f.python, python)
	}
	if err := cli.InheritKeep(&f.keep, job, changed); err != nil {
		return err
	}
	if !changed("call-timeout") {
		calls, err := time.ParseDuration(cmp.Or(job.CallTimeout, timing.Call.String()))
		if err != nil {
			return fmt.Errorf("call_timeout is %q: give a time such as 1m", job.CallTimeout)
		}
		f.calls = calls
	}
	if !changed("detect") {
		detect, err := time.ParseDuration(job.Detect)
		if err != nil {
			return fmt.Errorf("detect is %q: give a time such as 1s", job.Detect)
		}
		if f.detect = detect; detect == 0 { // a run without the launcher has none
			f.detect = time.Second
		}
	}
	return nil
}

// inherit sets a flag as before, unless it was given.
func inherit[T any](given bool, flag *T, before T) {
	if !given {
		*flag = before
	}
}

// newest finds the checkpoint to resume from, and reports those that cannot be used, after notes.
func newest(ctx context.Context, dir *rundir.Dir, job rundir.Job, notes []string, stderr io.Writer) (*session.Resume, error) {
	r, refused, err := checkpoint.Newest(ctx, dir.Path(), job.Eras())
	again := &session.Resume{Job: job, Note: notes}
	for _, text := range notes {
		fmt.Fprintf(stderr, "launcher: %s\n", text)
	}
	for _, fault := range refused {
		if errors.Is(fault, checkpoint.ErrUnfinished) {
			continue // the run ended meanwhile
		}
		text := fmt.Sprintf("%v; the checkpoint is not used", fault)
		fmt.Fprintf(stderr, "launcher: %s\n", text)
		again.Note = append(again.Note, text)
	}
	if errors.Is(err, checkpoint.ErrNone) {
		if slices.ContainsFunc(refused, func(fault *checkpoint.Error) bool { return errors.Is(fault, checkpoint.ErrMissing) }) {
			return nil, errors.New("nothing to resume from: there is no whole checkpoint; if other machines have the rest, give --listen")
		}
		if len(again.Note) > len(notes) {
			return nil, errors.New("nothing to resume from: no checkpoint can be used; start again with launcher run")
		}
		return nil, errNothing
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	m := r.Manifest()
	if again.Step, again.Tensors, again.ValLoss = m.Step, m.Tensors, m.ValLoss; m.Loss != nil {
		again.Loss = *m.Loss
	}
	return again, nil
}

// machines returns how many machines the flags name, at least 1.
func (f *runFlags) machines(given func(flag string) bool) (int, error) {
	all, err := ssh.Of(given, f.over.list, f.over.file)
	switch {
	case err != nil:
		return 1, err
	case all != nil:
		return len(all), nil
	case f.listen != "":
		return max(f.waitHosts, 1), nil
	}
	return 1, nil
}

// programAgain returns the program of a run as it was given, from the directory in which it was given, or from the one of now. If it is
// not here, it is the copy that this machine got when it joined the run. Another program is one of the directory of now.
func programAgain(path string, job rundir.Job, other string) (program, error) {
	if other != "" {
		return resolve(other)
	}
	script := filepath.Base(job.Command) // of a Python program
	if name, pack := strings.CutSuffix(script, torch.PackSuffix); pack {
		script = name + ".py"
	}
	copied, err := filepath.Abs(filepath.Join(path, "first", torch.Unpacked, script))
	if err != nil {
		return program{}, cli.Fail(err)
	}
	err = os.Chdir(job.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		if p, err := resolve(job.Command); err == nil && p.pkg != job.Command { // an import path is of anywhere
			return p, nil
		}
	}
	var p program
	if err != nil {
		err = cli.Fail(fmt.Errorf("%s: job.json: the dir in which PROGRAM was given: %w", path, err))
	} else {
		p, err = resolve(job.Command)
	}
	if err == nil {
		return p, nil
	}
	if p, err := resolve(copied); err == nil {
		p.given = job.Command
		return p, nil
	}
	cache, none := os.UserCacheDir()
	if none != nil || job.ProgramSHA256 == "" {
		return p, err
	}
	files, _ := filepath.Glob(filepath.Join(cache, "soliton", "programs", job.ProgramSHA256, "*"))
	if len(files) != 1 {
		return p, err
	}
	return program{given: job.Command, name: filepath.Base(files[0]), file: files[0]}, nil
}

// records ask the machine at which a run is resumed for what this one lacks of its records.
type records struct {
	Has []rundir.Mark `json:"has"`
}

// maxRecord bounds a part of a record in bytes, so that all parts together fit into a reply.
const maxRecord = 1 << 20

func (g *gathering) records(r records) ([]byte, error) {
	parts, err := rundir.NewCopier(g.dir, r.Has).Next(maxRecord)
	if err != nil {
		return nil, err
	}
	return json.Marshal(parts)
}

// fetchRecords makes the records in a run directory those of the machine at which the run is resumed: any machine may lead, and
// continues them.
func fetchRecords(ctx context.Context, t admit.Ticket, dir string) error {
	for {
		marks, err := rundir.Marks(dir)
		if err != nil {
			return err
		}
		reply, err := ask(ctx, t, call{Records: &records{marks}})
		var parts []rundir.Part
		if err == nil {
			err = json.Unmarshal(reply, &parts)
		}
		if err != nil {
			return err
		}
		more := false
		for _, p := range parts {
			if err := rundir.Keep(dir, p); err != nil {
				return err
			}
			more = more || len(p.Data) >= maxRecord
		}
		if !more { // what comes now is copied during the run
			return nil
		}
	}
}

// openRunDir returns the run directory for a machine that joins. Of a run that is resumed, it is the one that the machine has of it, if
// there is any, with the records of the first machine.
func openRunDir(ctx context.Context, f *runFlags, t admit.Ticket, a *assignment) (*rundir.Dir, error) {
	again := a.Settings.Resume
	if again == nil {
		return f.createRunDir(a.Program)
	}
	dir, err := findRun(f.runDir, again.Job)
	if err == nil && dir == nil {
		dir, err = f.createRunDir(a.Program)
	}
	if err != nil {
		return nil, err
	}
	if err := fetchRecords(ctx, t, dir.Path()); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// createRunDir makes the run directory of a machine that joins.
func (f *runFlags) createRunDir(p ship.Program) (*rundir.Dir, error) {
	if f.resume == auto && f.runDir != "" {
		return rundir.CreateAgain(f.runDir)
	}
	return rundir.Create(f.runDir, strings.TrimSuffix(p.Name, torch.PackSuffix), time.Now())
}

// findRun takes the directory of a run, which path names or which is below runs; nil if there is none.
func findRun(path string, job rundir.Job) (*rundir.Dir, error) {
	same := func(other rundir.Job) bool {
		return job.Plain().Descends(other.Plain().ID()) && other.Started.Equal(job.Started)
	}
	if path == "" {
		entries, _ := os.ReadDir(rundir.Parent)
		for _, e := range slices.Backward(entries) { // the names end with times
			at := filepath.Join(rundir.Parent, e.Name())
			if e.IsDir() {
				if r, err := rundir.Read(at); err == nil && !r.Running && same(r.Job) {
					path = at
					break
				}
			}
		}
		if path == "" {
			return nil, nil
		}
	}
	if _, err := os.Lstat(filepath.Join(path, "job.json")); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	dir, was, err := rundir.Resume(path)
	if err != nil {
		return nil, err
	}
	if !same(was.Job) {
		return nil, errors.Join(fmt.Errorf("--run-dir %s: it is of another run than the one that is resumed", path), dir.Close())
	}
	return dir, nil
}

// beginAgain removes what a run has left in its directory that would contradict its continuation.
func beginAgain(dir *rundir.Dir) error {
	if err := os.RemoveAll(dir.File("agreement")); err != nil {
		return err
	}
	if err := os.Remove(dir.File("summary.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

//go:build linux

package main

import (
	"bytes"
	"errors"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// python is the system's Python, which is the one that Debian's python3-torch serves.
const python = "/usr/bin/python3"

// torchBuilt skips a test where there is no PyTorch.
func torchBuilt(t *testing.T) {
	t.Helper()
	built(t)
	out, err := exec.Command(python, "-c", "import torch").CombinedOutput()
	require.Tool(t, "torch", err == nil, python+" cannot import torch (Debian: python3-torch): "+string(out))
}

// torchAsked skips a test where there is no PyTorch, or where it is not asked for: the machine of CI may have it, and these take minutes.
func torchAsked(t *testing.T) {
	t.Helper()
	require.Asked(t, "torch")
	torchBuilt(t)
}

// trainTorch runs a Python program to its end, in a directory of its own, and returns that and the summary.
func trainTorch(t *testing.T, flags []string, program ...string) (dir string, sum *rundir.Summary) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "run")
	args := append([]string{"run", "--plain", "--python", python, "--run-dir", dir}, flags...)
	cmd := launch(t, append(args, program...)...)
	if status, out, errs := result(t, cmd); status != 0 {
		t.Fatalf("%v: exit status %d\n%s%s", flags, status, out, errs)
	}
	noneLeft(t, cmd.Dir)
	run, err := rundir.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir, run.Summary
}

// torchWhole has the undisturbed runs of testdata/torch/train.py, by steps.
var torchWhole = struct {
	sync.Mutex
	sums map[int]*rundir.Summary
}{sums: make(map[int]*rundir.Summary)}

// undisturbed returns the summary of a run of testdata/torch/train.py with one worker, which it trains once.
func undisturbed(t *testing.T, steps int) *rundir.Summary {
	t.Helper()
	torchWhole.Lock()
	defer torchWhole.Unlock()
	if torchWhole.sums[steps] == nil {
		_, torchWhole.sums[steps] = trainTorch(t, []string{"--workers", "1"}, testdata(t, "torch/train.py"), "--steps", strconv.Itoa(steps))
	}
	return torchWhole.sums[steps]
}

// A PyTorch model gets the same bits under every layout, whatever happens to workers and to Python processes: those of plain PyTorch.
func TestTorchSameBits(t *testing.T) {
	torchBuilt(t)
	program := testdata(t, "torch/train.py")
	first, want := trainTorch(t, []string{"--workers", "1"}, program)
	metrics := measured(t, first)
	m := metrics[10]
	if want.ValLoss == nil || len(metrics) != 12 || len(metrics[1]) != 2 || len(m) != 4 || !(m["right/val"] >= 0 && m["right/val"] <= 1) || !(m["same_loss/val"] > 1) {
		t.Errorf("steps and evaluations found %v", metrics)
	}
	for _, line := range metricsSoFar(first) {
		if same := metrics[line.Step]["same_loss"]; math.Abs(same-line.Loss) > 1e-6*same {
			t.Errorf("step %d has the loss %v, and %v as a metric", line.Step, line.Loss, same)
		}
	}
	for i, flags := range []string{
		"--workers 4 --stages 2",
		"--workers 4 --stages 2 --zero 1 --chaos kill:1@4/backward,join@6",
		"--workers 2 --stages 2 --emulate-hosts 2 --chaos killhost:1@4",
		"--workers 3 --stages 1 --zero 1",
		"--workers 2 --stages 2 --verify 1",
		"--workers 3 --stages 3 --chaos freeze:2@5",
	} {
		t.Run(flags, func(t *testing.T) {
			if t.Parallel(); i >= 3 {
				require.Asked(t, "torch")
			}
			dir, got := trainTorch(t, strings.Fields(flags), program)
			if now := measured(t, dir); !maps.EqualFunc(now, metrics, maps.Equal[map[string]float64]) {
				t.Errorf("metrics %v, want %v", now, metrics)
			}
			if got.StateSHA256 != want.StateSHA256 || *got.ValLoss != *want.ValLoss {
				t.Errorf("state %s, val_loss %v; want %s, %v", got.StateSHA256, *got.ValLoss, want.StateSHA256, *want.ValLoss)
			}
		})
	}
	t.Run("a gigabyte printed, and a process forked", func(t *testing.T) {
		t.Parallel()
		dir, got := trainTorch(t, []string{"--workers", "1"}, program, "--bad", "prints-and-forks")
		if got.StateSHA256 != want.StateSHA256 {
			t.Errorf("state %s, want %s", got.StateSHA256, want.StateSHA256)
		}
		log, err := os.ReadFile(filepath.Join(dir, "log", "worker-0.0.log"))
		if err != nil || len(log) > 17<<20 {
			t.Errorf("the log has %d bytes, want 16 MiB: %v", len(log), err)
		}
		for _, text := range []string{"soliton: the Python processes of this worker have printed 16 MiB", "soliton: the program has forked"} {
			if !bytes.Contains(log, []byte(text)) {
				t.Errorf("the log does not say %q", text)
			}
		}
	})
	t.Run("Python processes killed and stopped", func(t *testing.T) {
		t.Parallel()
		faults, log := t.TempDir(), filepath.Join(t.TempDir(), "log")
		_, got := trainTorch(t, []string{"--workers", "2", "--stages", "2"}, program, "--faults", faults, "--log", log)
		text, err := os.ReadFile(log)
		if err != nil || !regexp.MustCompile(`(?s)^1/12 \d\S* False\n.*\n5/12 \S* True\n.*\n12/12 \S* True\nend \d+\n$`).Match(text) {
			t.Errorf("on_step and on_end wrote %q: %v", text, err)
		}
		if got.StateSHA256 != want.StateSHA256 || got.WorkersLost > suspended(got) {
			t.Errorf("state %s and recoveries %+v, want %s and no worker that is lost with its Python process", got.StateSHA256, got.Recoveries, want.StateSHA256)
		}
		if injected, _ := os.ReadDir(faults); len(injected) != 3 {
			t.Errorf("%d faults were injected, want 3", len(injected))
		}
	})
}

// Layers on a GPU need copies of what the shared memory has. The same copies on the CPU change no bit, whatever fails.
func TestTorchCopies(t *testing.T) {
	torchAsked(t)
	program := testdata(t, "torch/train.py")
	_, want := trainTorch(t, []string{"--workers", "1"}, program)
	t.Setenv("SOLITON_TEST_COPIES", "1")
	for _, flags := range []string{
		"--workers 1",
		"--workers 4 --stages 2 --zero 1 --chaos kill:1@4/backward,join@6",
		"--workers 3 --stages 3 --chaos freeze:2@5",
		"--workers 2 --chaos flip:1@3:copy,flip:0@5/backward:own,flip:1@7/forward:copy",
		"--workers 2 --stages 2 --verify 1 --emulate-hosts 2 --chaos killhost:1@4",
	} {
		dir, got := trainTorch(t, strings.Fields(flags), program)
		if got.StateSHA256 != want.StateSHA256 || *got.ValLoss != *want.ValLoss {
			t.Errorf("%s: state %s, val_loss %v; want %s, %v", flags, got.StateSHA256, *got.ValLoss, want.StateSHA256, *want.ValLoss)
		}
		if run, err := rundir.Read(dir); err != nil || !bytes.Contains(run.Job.ModelConfig, []byte(`"cpu with copies"`)) {
			t.Errorf("%s: %s, %v", flags, run.Job.ModelConfig, err)
		}
	}
	_, got := trainTorch(t, []string{"--workers", "2"}, program, "--set", "data_workers=2", "--bad", "readers", "--faults", t.TempDir())
	if got.StateSHA256 != want.StateSHA256 {
		t.Errorf("with processes that are killed, state %s, want %s", got.StateSHA256, want.StateSHA256)
	}
	for bad, says := range map[string]string{
		"write": "layer 1.Block writes to its parameters; only the optimizer may",
		"raise": `in Forward of layer "1.Block": ValueError: boom`,
	} {
		status, out, errs := result(t, launch(t, "run", "--plain", "--workers", "2", "--python", python, "--run-dir", "run", program, "--bad", bad))
		if status != 1 || !strings.Contains(errs, says) {
			t.Errorf("--bad %s: exit status %d\n%s%s", bad, status, out, errs)
		}
	}
}

// Processes that read samples may be killed and stopped at any time, and what they read is the same.
func TestTorchDataWorkers(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	program, faults := testdata(t, "torch/train.py"), t.TempDir()
	_, want := trainTorch(t, []string{"--workers", "1"}, program)
	_, got := trainTorch(t, []string{"--workers", "2"}, program, "--set", "data_workers=2", "--bad", "readers", "--faults", faults)
	if got.StateSHA256 != want.StateSHA256 || got.WorkersLost > suspended(got) {
		t.Errorf("state %s and recoveries %+v, want %s and no worker that is lost with its Python process", got.StateSHA256, got.Recoveries, want.StateSHA256)
	}
	if injected, _ := os.ReadDir(faults); len(injected) != 3 {
		t.Errorf("%d faults were injected, want 3", len(injected))
	}
}

// A program whose micro-batches a function makes of samples of any kind has the same bits on every worker that makes them.
func TestTorchCollate(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	program := testdata(t, "torch/encoder.py")
	_, want := trainTorch(t, []string{"--workers", "1"}, program)
	for _, readers := range []string{"0", "2"} {
		_, got := trainTorch(t, strings.Fields("--workers 3 --stages 2 --verify 1 --chaos kill:1@3/backward"), program, readers)
		if got.StateSHA256 != want.StateSHA256 || want.ValLoss == nil || got.ValLoss == nil || *got.ValLoss != *want.ValLoss || got.WorkersLost != 1 {
			t.Errorf("with %s data workers %+v, want %+v", readers, got, want)
		}
	}
}

// Where each process makes another model, all train the one of the first process, also those that come later.
func TestTorchFirstValues(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	program := testdata(t, "torch/train.py")
	dir, want := trainTorch(t, strings.Fields("--workers 3 --stages 2 --chaos kill:1@3/forward,join@4"), program, "--values", "own", "--steps", "8")
	values := filepath.Join(dir, "first", "values.pt")
	again, got := trainTorch(t, []string{"--workers", "1"}, program, "--steps", "8", "--init-from", values)
	if got.StateSHA256 != want.StateSHA256 {
		t.Errorf("state %s from the same values, want %s", got.StateSHA256, want.StateSHA256)
	}
	state := filepath.Join(t.TempDir(), "state")
	if status, _, errs := result(t, launch(t, "export", "--optimizer", "--output", state, dir)); status != 0 {
		t.Fatal(errs)
	}
	next, _ := trainTorch(t, []string{"--workers", "2"}, program, "--steps", "1", "--init-from", state, "--init-optimizer", state)
	if run, err := rundir.Read(next); err != nil || run.Job.InitUpdates != 8 {
		t.Errorf("the optimizer's state came with %d updates: %v", run.Job.InitUpdates, err)
	}
	one, err := os.ReadFile(values)
	other, err2 := os.ReadFile(filepath.Join(again, "first", "values.pt"))
	if err != nil || err2 != nil || len(one) == 0 || len(other) == 0 {
		t.Errorf("the files of first values: %d bytes, %v; %d bytes, %v", len(one), err, len(other), err2)
	}
}

// A Python program trains on machines of which only the first has it, and makes another model in each process.
func TestTorchMachines(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	folder := t.TempDir()
	text, err := os.ReadFile(testdata(t, "torch/train.py"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"main.py": "import inner.train\n", "inner/__init__.py": "", "inner/train.py": string(text)} {
		path := filepath.Join(folder, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	all := gatheredFor(t, 2, "--workers", "1", "--python", python, filepath.Join(folder, "main.py"), "--values", "own", "--steps", "3")
	var sums [2]rundir.Summary
	var values [2]string
	for i, m := range all {
		if status := m.end(t); status != 0 {
			t.Fatalf("machine %d: status %d\n%s%s", i, status, &m.out, &m.errs)
		}
		readJSON(t, filepath.Join(m.run, "summary.json"), &sums[i])
		b, err := os.ReadFile(filepath.Join(m.run, "first", "values.pt"))
		if err != nil {
			t.Error(err)
		}
		values[i] = string(b)
	}
	if sums[0].StateSHA256 == "" || sums[0].StateSHA256 != sums[1].StateSHA256 || sums[0].WorkersStarted != 2 || values[0] != values[1] {
		t.Errorf("%+v\n%+v; equal values: %v", sums[0], sums[1], values[0] == values[1])
	}
	m := startMachine(t, "", "run", "--plain", "--listen=127.0.0.1:0", "--wait-hosts", "2", "--python", python, filepath.Join(folder, "main.py"), "--bad", "job")
	const wrong = "/inner/train.py:"
	if status := m.end(t); status != 1 && status != 2 || !strings.Contains(m.errs.String(), "NameError: name 'undefined_name' is not defined ("+folder+wrong) {
		t.Errorf("a program that makes no job: status %d, %q", status, m.errs.String())
	}
}

// suspended counts the workers without which a run continued for a while, since a call that all others waited for took long: on a busy
// machine, one that begins with a new Python process does.
func suspended(sum *rundir.Summary) (n int) {
	for _, r := range sum.Recoveries {
		if strings.Contains(r.Cause, " has not returned for ") {
			n++
		}
	}
	return n
}

// measured returns the metrics of all steps and, under their names with /val, those of the evaluations that followed.
func measured(t *testing.T, dir string) map[int]map[string]float64 {
	t.Helper()
	found := make(map[int]map[string]float64)
	for _, m := range metricsSoFar(dir) {
		found[m.Step] = maps.Clone(m.TrainMetrics)
		for name, x := range m.Metrics {
			found[m.Step][name+"/val"] = x
		}
	}
	return found
}

// The examples agree with their reference in plain PyTorch, bit for bit.
func TestTorchReference(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	folder, err := filepath.Abs("../examples/torch")
	if err != nil {
		t.Fatal(err)
	}
	data, err := filepath.Abs("../examples/custom")
	if err != nil {
		t.Fatal(err)
	}
	same := func(t *testing.T, flags []string, program ...string) (dir string) {
		program[0] = filepath.Join(folder, program[0])
		dir, _ = trainTorch(t, flags, program...)
		if out, err := exec.Command(python, filepath.Join(folder, "reference.py"), dir).CombinedOutput(); err != nil {
			t.Errorf("reference.py: %v\n%s", err, out)
		}
		return dir
	}
	t.Run("text", func(t *testing.T) {
		dir := same(t, []string{"--workers", "2", "--stages", "2"}, "train.py", "--data", data, "--layers", "2", "--width", "32", "--context", "16", "--steps", "6")
		load := exec.Command(python, "-c", "import soliton, sys; s = soliton.load(sys.argv[1]); print(len(s), s['0.token.weight'] is s['3.out.weight'], s['0.token.weight'].shape)", dir)
		load.Env = append(os.Environ(), "PYTHONPATH=internal/torch/python")
		if out, err := load.CombinedOutput(); err != nil || string(out) != "29 True torch.Size([256, 32])\n" {
			t.Errorf("soliton.load: %v\n%s", err, out)
		}
	})
	t.Run("images", func(t *testing.T) {
		out, err := exec.Command(python, "-c", "import torchvision").CombinedOutput()
		require.Tool(t, "torchvision", err == nil, python+" cannot import torchvision (Debian: python3-torchvision): "+string(out))
		same(t, []string{"--workers", "2", "--stages", "2"}, "train_images.py", "--widths", "16,24,32,48", "--depths", "1,1,2,1", "--steps", "3")
	})
}

// A run that was stopped goes on under another layout, with the interpreter of before.
func TestTorchResume(t *testing.T) {
	torchBuilt(t)
	t.Parallel()
	program := testdata(t, "torch/train.py")
	want := undisturbed(t, 30)
	cmd := launch(t, "run", "--plain", "--workers", "2", "--stages", "2", "--python", python, "--run-dir", "run", program, "--steps", "30")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	dir := filepath.Join(cmd.Dir, "run")
	await(t, "some steps", func() bool { return len(metricsSoFar(dir)) > 5 })
	cmd.Process.Signal(os.Interrupt)
	if cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
		t.Fatalf("the run that was interrupted: %v", cmd.ProcessState)
	}
	if status, out, errs := result(t, launch(t, "resume", "--plain", "--zero", "1", "--workers", "3", "--stages", "1", dir)); status != 0 {
		t.Fatalf("resume: exit status %d\n%s%s", status, out, errs)
	}
	run, err := rundir.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if run.Summary.StateSHA256 != want.StateSHA256 {
		t.Errorf("state %s, want %s", run.Summary.StateSHA256, want.StateSHA256)
	}
}

// Without the launcher, a program is a run of one worker, and says what flags it has.
func TestTorchAlone(t *testing.T) {
	torchAsked(t)
	t.Parallel()
	run := func(args ...string) string {
		cmd := exec.Command(python, append([]string{testdata(t, "torch/train.py")}, args...)...)
		cmd.Dir = t.TempDir()
		cmd.Env = append(os.Environ(), "SOLITON_LAUNCHER="+binary, "PYTHONPATH="+testdata(t, "../internal/torch/python"), "PYTHONDONTWRITEBYTECODE=1")
		out, err := cmd.Output()
		if err != nil {
			t.Errorf("%v: %v", args, err)
		}
		return string(out)
	}
	if out := run("--steps", "2"); !strings.Contains(out, "done: 2 steps") || !strings.Contains(out, "the end of train-") {
		t.Errorf("a run printed %q", out)
	}
	out := run("--help")
	for _, want := range []string{"usage: train.py", "--log LOG", "file for a line a step", "\nStandard flags:\n", "(default 12)"} {
		if !strings.Contains(out, want) {
			t.Errorf("--help printed %q, want %q", out, want)
		}
	}
}

// A program that cannot be trained ends with one line that says what is wrong, and where.
func TestTorchBadPrograms(t *testing.T) {
	torchBuilt(t)
	program := testdata(t, "torch/train.py")
	for _, c := range []struct {
		args   string
		status int
		stderr string
	}{
		{"--bad job", 2, "NameError: name 'undefined_name' is not defined (" + program + ":"},
		{"--bad raise", 1, `panic in step 2, in Forward of layer "1.Block": ValueError: boom (` + program + ":"},
		{"--bad status", 5, "it called sys.exit(5) (" + program + ":"},
		{"--bad sample-exit", 2, "it called sys.exit(0) (" + program + ":"},
		{"--bad nan", 1, `step 2: the loss is not finite (from layer "1.Block" on)`},
		{"--bad leak", 1, "you tried to allocate 1073741824 bytes. Error code 12 (Cannot allocate memory) (" + program + ":"},
		{"--bad exit", 1, `in Forward of layer "1.Block": it called sys.exit(3) (` + program + ":"},
		{"--bad os-exit", 1, `the Python process exited 3 times in Forward of layer "1.Block" (status 7)`},
		{"--bad no-fork", 1, "panic before the first step: the Python process exited 3 times (status 9)"},
		{"--bad write", 1, `the Python process exited 3 times in Forward of layer "1.Block" (SIG`},
		{"--bad tuple", 2, "layer 4.Head returns a tuple with an int; a layer must return a tensor, or a tuple of tensors\n"},
		{"--bad random", 2, "layer 1.Block gives other bits for the same input and the same seeds"},
		{"--bad batchnorm", 2, "layer 2 (BatchNorm1d) is a BatchNorm1d, whose running mean and variance"},
		{"--init-from nowhere", 2, "--init-from (Job.init_from) nowhere cannot be read: [Errno 2] No such file or directory: 'nowhere'; give a run directory"},
		{"--init-from fifo", 2, "--init-from (Job.init_from) fifo cannot be read: it is not a regular file; give a run directory"},
		{"--set init_from=5", 2, "Job.init_from is 5; give the path of a file or run directory\n"},
		{"--set clip_norm=float('nan')", 2, "Job.clip_norm is nan; give a finite number\n"},
		{"--set clip_norm='x'", 2, "Job.clip_norm is 'x'; give a finite number\n"},
		{"--set steps=10**30", 2, "Job.steps is 1000000000000000000000000000000; it must be below 2**31 in magnitude\n"},
		{"--set eval_samples=-1", 2, "Job.eval_samples is -1; it must be 0 (all) or more\n"},
		{"--set optimizer=soliton.SGD(1,momentum='x')", 2, "momentum of Job.optimizer is 'x'; give a finite number\n"},
		{"--set optimizer=soliton.AdamW(1,betas=(1,))", 2, "betas of Job.optimizer is (1,); give two finite numbers\n"},
		{"--set optimizer=soliton.AdamW((10**400).__mul__)", 2, "the learning rate of step 1 is 1000000000000000000000000000000000000000...; the function"},
		{"--set optimizer=soliton.SGD(float('inf'))", 2, "lr of Job.optimizer has the rate inf; give a finite number\n"},
		{"--set no_decay=5", 2, "Job.no_decay is an int; give a list of parameters, or a function of name and parameter\n"},
		{"--set metrics={'m'*100000:len}", 2, "Job.metrics has the name 'mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm...; give up to 40"},
		{"--wrong", 2, "error: unrecognized arguments: --wrong\n"},
		{"--micro-batch 5", 2, "--micro-batch (Job.MicroBatch) is 5, which does not divide the global batch of 12"},
	} {
		t.Run(c.args, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"run", "--plain", "--workers", "1", "--python", python, program}, strings.Fields(c.args)...)
			cmd := launch(t, args...)
			if err := unix.Mkfifo(filepath.Join(cmd.Dir, "fifo"), 0o600); err != nil {
				t.Fatal(err)
			}
			if status, _, errs := result(t, cmd); status != c.status || !strings.HasPrefix(errs, "launcher: ") || !strings.Contains(errs, c.stderr) {
				t.Errorf("exit status %d, %q; want %d, %q", status, errs, c.status, c.stderr)
			}
			noneLeft(t, cmd.Dir)
		})
	}
	t.Run("unlike", func(t *testing.T) {
		t.Parallel()
		args := []string{"run", "--plain", "--workers", "2", "--stages", "1", "--verify", "1", "--python", python, program, "--bad", "unlike"}
		const stderr = `of layer "1.Block" for micro-batch`
		if status, _, errs := result(t, launch(t, args...)); status != 1 || !strings.Contains(errs, stderr) || !strings.Contains(errs, "is not the same on workers") {
			t.Errorf("exit status %d, %q; want 1, %q", status, errs, stderr)
		}
	})
}

// noneLeft waits until no process is left that works in a directory, where a command of launch and all below it do.
func noneLeft(t *testing.T, dir string) {
	t.Helper()
	await(t, "the end of all processes in "+dir, func() bool {
		folders, err := filepath.Glob("/proc/[0-9]*/cwd")
		return err == nil && !slices.ContainsFunc(folders, func(folder string) bool {
			target, err := os.Readlink(folder)
			return err == nil && target == dir
		})
	})
}

// A mistake that shows before PyTorch is loaded, and PyTorch that is not there, end with one line.
func TestTorchNotThere(t *testing.T) {
	built(t)
	_, err := exec.LookPath(python)
	require.Tool(t, "torch", err == nil, python+" is not there")
	dir := t.TempDir()
	wrong, right, binary := filepath.Join(dir, "wrong.py"), filepath.Join(dir, "right.py"), filepath.Join(dir, "binary.py")
	for path, text := range map[string]string{
		binary:                                  "\x00\x00",
		wrong:                                   "import soliton\n\ndef job(args)\n    pass\n",
		right:                                   "import soliton\n",
		filepath.Join(dir, "torch/__init__.py"): `raise ImportError("there is none")`,
		filepath.Join(dir, "a/torch/__init__.py"): `raise OSError("libc10.so: cannot open shared object file")`,
		filepath.Join(dir, "b/torch/__init__.py"): "import os\nprint('my last words', flush=True)\nos._exit(7)",
		filepath.Join(dir, "c/torch/__init__.py"): "import os\nos.abort()",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ program, torch, stderr string }{
		{binary, "", "launcher: " + binary + ": ValueError: source code string cannot contain null bytes (" + binary + ")\n"},
		{wrong, "", "launcher: " + wrong + ": SyntaxError: expected ':' (" + wrong + ":3)\n"},
		{right, "", "launcher: " + right + ": " + python + " cannot import torch: there is none; give the interpreter that has it with --python\n"},
		{right, "a", "launcher: " + right + ": " + python + " cannot import torch: libc10.so: cannot open shared object file; give the interpreter that has it with --python\n"},
		{right, "b", "launcher: " + right + ": " + python + " exited before the job was made (exit status 7): my last words\n"},
		{right, "c", "launcher: " + right + ": " + python + " exited before the job was made (signal: aborted): Fatal Python error: Aborted\n"},
	} {
		cmd := launch(t, "run", "--plain", "--workers", "1", "--python", python, c.program)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(dir, c.torch))
		if status, _, errs := result(t, cmd); status != 2 || errs != c.stderr {
			t.Errorf("exit status %d, %q; want 2, %q", status, errs, c.stderr)
		}
	}
}

// An interpreter that is none is named.
func TestPythonInterpreter(t *testing.T) {
	built(t)
	program := testdata(t, "torch/train.py")
	for _, c := range []struct{ python, stderr string }{
		{"/bin/false", "launcher: PROGRAM " + program + ": --python /bin/false: it does not run Python"},
		{"no-such-python", "launcher: PROGRAM " + program + ": --python no-such-python: "},
	} {
		if status, _, errs := result(t, launch(t, "run", "--plain", "--python", c.python, program)); status != 1 || !strings.HasPrefix(errs, c.stderr) {
			t.Errorf("exit status %d, %q; want 1, %q", status, errs, c.stderr)
		}
	}
}

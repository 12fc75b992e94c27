package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// The binary under test, and programs for it: built by the first test that runs one.
var binary, fake, blocked, mlp, emulated, custom, calls, reads, unread, alike string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "launcher-test-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	binary, fake, mlp = filepath.Join(dir, "launcher"), filepath.Join(dir, "fake"), filepath.Join(dir, "mlp")
	emulated, custom, calls = filepath.Join(dir, "emulated"), filepath.Join(dir, "custom"), filepath.Join(dir, "calls")
	blocked, reads = filepath.Join(dir, "blocked"), filepath.Join(dir, "reads")
	unread, alike = filepath.Join(dir, "unread"), filepath.Join(dir, "alike")
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue { // tests of processes wait most of the time
		_ = flag.Set(f.Name, strconv.Itoa(2*runtime.GOMAXPROCS(0)))
	}
	return m.Run()
}

var buildAll = sync.OnceValue(func() error {
	out, err := exec.Command("go", "build", "-o", filepath.Dir(binary)+"/", ".", "./testdata/fake", "./testdata/blocked", "./testdata/calls", "./testdata/reads", "./testdata/unread", "./testdata/alike", "../examples/mlp", "../examples/emulated", "../examples/custom").CombinedOutput()
	if err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
})

// built has the programs built for a test that runs them, and skips it with -short: the race detector does not see processes.
func built(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs processes: not with -short")
	}
	if err := buildAll(); err != nil {
		t.Fatal(err)
	}
}

// launch returns the built binary's command, in a folder of its own.
func launch(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	built(t)
	cmd := exec.Command(binary, args...)
	dir := t.TempDir()
	// Whose launcher was killed writes for a moment yet.
	t.Cleanup(func() { await(t, "the end of what writes into "+dir, func() bool { return os.RemoveAll(dir) == nil }) })
	cmd.Dir = dir
	return cmd
}

// result runs a command to its end.
func result(t *testing.T, cmd *exec.Cmd) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func testdata(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestExitStatuses(t *testing.T) {
	built(t)
	for _, c := range []struct {
		name   string
		args   []string
		status int
		stdout string // what they contain
		stderr string
		left   bool // a run directory is left
	}{
		{"all steps", []string{"run", fake}, 0, "sampled text\n", "", true},
		{"flags of the program", []string{"run", "--plain", fake, "--steps", "2"}, 0, "done: 2 steps", "", true},
		{"program's wrong usage", []string{"run", fake, "--steps", "0"}, 2, "", "launcher: --steps 0: give at least 1\n", false},
		{"panic", []string{"run", "--workers", "1", fake, "--fail", "panic"}, 1, "", "launcher: panic in step 3: boom\n    goroutine 1 [running]:\n    main.main()\n", true},
		{"one of many panics", []string{"run", fake, "--fail", "panic", "--who", "3"}, 1, "", "launcher: worker 3: panic in step 3: boom\n    goroutine 1 [running]:\n    main.main()\n", true},
		{"panic that is not caught", []string{"run", "--workers", "3", "--stages", "2", fake, "--fail", "crash", "--who", "1"}, 1, "",
			"launcher: worker 1 exited: exit status 2 after a panic, at step 2 of 5\n    panic: ", true},
		{"worker killed", []string{"run", "--workers", "1", fake, "--fail", "kill"}, 1, "", "launcher: worker 0 exited: signal: killed, at step 2 of 5\n    pid ", true},
		{"one of many killed", []string{"run", "--workers", "3", fake, "--fail", "kill", "--who", "0"}, 0,
			"sampled text\n", "", true},
		{"one of many frozen", []string{"run", "--workers", "3", "--detect", "1500ms", fake, "--fail", "freeze", "--who", "1"}, 0,
			"worker 1 stopped · training again after ", "", true},
		{"killed after all steps", []string{"run", "--workers", "3", fake, "--fail", "end"}, 0, "done: 5 steps",
			"launcher: worker 0 exited: signal: killed after all was written; what the program does at the end of a run may be missing\n", true},
		{"frozen after all steps", []string{"run", "--workers", "2", "--detect", "1500ms", fake, "--fail", "end frozen"}, 0, "done: 5 steps",
			"s after all was written; what the program does at the end of a run may be missing\n", true},
		{"too few", []string{"run", "--workers", "3", "--min-workers", "4", "--mirrors", "-1", fake}, 2, "",
			"launcher: --mirrors -1: give at least 0\nlauncher: --min-workers 4: the run begins with 3; use --min-workers 3 or fewer, or --workers 4\n", false},
		{"another seed", []string{"run", "--workers", "2", fake, "--fail", "seed", "--who", "1"}, 1, "",
			"launcher: worker 1 has another seed than worker 0 (7, not 0): all workers must run the same PROGRAM on the same data\n", false},
		{"another loss", []string{"run", "--workers", "2", fake, "--fail", "loss", "--who", "1"}, 1, "", "reports another loss for step 3 than worker", true},
		{"another program", []string{"run", "--workers", "3", otherProgram(t)}, 1, "",
			"launcher: worker 2 has another program_sha256 than worker 0: all workers must run the same PROGRAM on the same data\n", false},
		{"stages", []string{"run", "--workers", "5", "--stages", "3", fake}, 0, "first plan: 5 workers in 3 stages, 8 micro-batches per step\n", "", true},
		{"stages above workers", []string{"run", "--workers", "2", "--stages", "3", fake}, 2, "",
			"launcher: --stages 3: every stage needs a worker; use --stages 2 or fewer, or --workers 3\n", false},
		{"stages above layers", []string{"run", "--workers", "4", "--stages", "4", fake}, 2, "", "launcher: --stages 4: every stage needs a layer and the model has 3 layers; use --stages 3 or fewer\n", false},
		{"no command", nil, 2, "", "launcher: no command given", false},
		{"unknown command", []string{"fly"}, 2, "", `launcher: there is no command "fly"`, false},
		{"unknown flag", []string{"run", "--fly", fake}, 2, "", "launcher: unknown flag: --fly; flags of the program stand behind PROGRAM\n", false},
		{"negative worker", []string{"kill", "r", "-1"}, 2, "", "launcher: -1: there is no such flag, and no number below 0 is wanted\n", false},
		{"two tickets", []string{"join", "a", "b"}, 2, "", "launcher: 2 arguments: give one TICKET, or - to read it from standard input\n", false},
		{"no names to allow", []string{"run", "--resume", "auto", "--allow", ",", fake}, 2, "", "launcher: --allow \"\": give some of program,model,data,lr,schedule", false},
		{"no program", []string{"run"}, 2, "", "launcher: PROGRAM is missing", false},
		{"all faults", []string{"run", "--workers", "0", "--stages", "0", "--threads", "0", "--detect", "1ms", "--call-timeout", "1ms", "--reduction", "x", "--zero", "3", "--reshape", "some", "--run-dir", "", fake}, 2, "",
			"launcher: --workers 0: give at least 1\nlauncher: --stages 0: give at least 1\nlauncher: --detect 1ms: give at least 300ms, three heartbeats\nlauncher: --call-timeout 1ms: give at least 1s, or 0 for never\nlauncher: --threads 0: give at least 1\nlauncher: --reduction x: give exact or fast\nlauncher: --zero 3: give 1 or 2\nlauncher: --reshape some: give full, dataflow or off\nlauncher: --run-dir: give the name of a directory\nTry", false},
		{"nothing to choose", []string{"run", "--bad-samples=", "--reduction=", "--reshape=", "--keep-best=", "--notice=", "--resume=", "--clocks=", fake}, 2, "",
			"launcher: --keep-best \"\": give val_loss, loss or none\nlauncher: --notice \"\": give aws, gcp, azure, or the URL of a metadata server\n" +
				"launcher: --bad-samples \"\": give fail or skip\nlauncher: --reduction \"\": give exact or fast\nlauncher: --clocks \"\": give off, auto or emulated\n" +
				"launcher: --resume \"\": give auto; launcher resume continues a run of a given directory\nlauncher: --reshape \"\": give full, dataflow or off\n", false},
		{"skipping without digests", []string{"run", "--bad-samples", "skip", "--digests=false", fake}, 2, "", "launcher: --bad-samples skip needs digests, which show whether all of a step is made of the same samples: give --digests=true\nTry", false},
		{"chaos that is none", []string{"run", "--chaos", "kil:1@3,kill:1@3/lunch", fake}, 2, "",
			"launcher: --chaos: part 1, \"kil:1@3\": \"kil\" is not a kind of fault", false},
		{"chaos that is not there yet", []string{"run", "--chaos", "join@2,kill:1@1,random:1:0.5:kill+cut", fake}, 2, "",
			"launcher: --chaos: random:1:0.5:kill+cut: cut needs --emulate-hosts 2 or more; on one host, give kill, freeze, leave, flip, slow, join or slowlink\nTry", false},
		{"too many workers", []string{"run", "--workers", "2147483648", fake}, 2, "", "launcher: --workers 2147483648: give at most 4096\nTry", false},
		{"too much of all", []string{"run", "--emulate-hosts", "65", "--stages", "5000", "--mirrors", "5000", "--min-workers", "5000", "--detect", "25h", fake}, 2, "",
			"launcher: --emulate-hosts 65: give at most 64\nlauncher: --stages 5000: give at most 4096\nlauncher: --mirrors 5000: give at most 4096\nlauncher: --min-workers 5000: give at most 4096\nlauncher: --detect 25h0m0s: give at most 24h0m0s\nTry", false},
		{"no number", []string{"run", "--workers", "4x", fake}, 2, "", "launcher: --workers 4x: give a whole number\nTry", false},
		{"a number that no integer holds", []string{"run", "--workers", "99999999999999999999", fake}, 2, "", "launcher: --workers 99999999999999999999: give a whole number\nTry", false},
		{"an empty number", []string{"run", "--workers=", fake}, 2, "", "launcher: --workers \"\": give a whole number\nTry", false},
		{"a number with a line end", []string{"run", "--workers", "4\n", fake}, 2, "", "launcher: --workers \"4\\n\": give a whole number\nTry", false},
		{"a page nowhere", []string{"run", "--ui=127.0.0.1", fake}, 2, "", "launcher: --ui=127.0.0.1: give HOST:PORT or :PORT\nTry", false},
		{"a page at a long address", []string{"run", "--ui=" + strings.Repeat("a", 9999), fake}, 2, "", "launcher: --ui=\"" + strings.Repeat("a", 80) + "\"...: give HOST:PORT or :PORT\nTry", false},
		{"nowhere to listen", []string{"run", "--listen=", "--advertise", "0.0.0.0", fake}, 2, "", "launcher: --listen=\"\": give HOST:PORT or :PORT\nlauncher: --advertise 0.0.0.0: give the IP address", false},
		{"a page nowhere at a join", []string{"join", "--ui=x", "--workers", "0", "soliton-1-x"}, 2, "", "launcher: --ui=x: give HOST:PORT or :PORT\nlauncher: --workers 0: give at least 1\nTry", false},
		{"an absent program with a line end", []string{"run", "./a\nb"}, 2, "", "launcher: PROGRAM \"./a\\nb\" is not there", false},
		{"no time", []string{"run", "--detect", "1", fake}, 2, "", "launcher: --detect 1: give a time, such as 1s\nTry", false},
		{"a panic with escape sequences", []string{"run", "--workers", "1", fake, "--fail", "escape"}, 1, "", "launcher: panic in step 3: \\u001b[31mboom\n    goroutine 1 [running]:\n    \\u001b]0;title\\u0007\n", true},
		{"chaos for a worker that does not exist", []string{"run", "--workers", "2", "--chaos", "slow:2@1:0.5", fake}, 2, "", "launcher: --chaos: slow:2@1:0.5: there is no worker 2: want one from 0 to 1\nTry", false},
		{"chaos too late", []string{"run", "--chaos", "kill:1@9,freeze:1@7+1", fake}, 2, "",
			"launcher: --chaos: kill:1@9 comes too late: the run has 5 steps; --chaos: freeze:1@7+1 comes too late: the run has 5 steps\n", false},
		{"chaos for the last one", []string{"run", "--workers", "1", "--chaos", "random:1:0.5:kill+freeze", fake}, 2, "", "has nothing to draw from in a run of 1 workers", false},
		{"threads", []string{"run", "--threads", "4097", fake}, 2, "", "launcher: --threads 4097: give at most 4096\n", false},
		{"run directory", []string{"run", "--run-dir", "/proc/x", fake}, 1, "", "launcher: --run-dir /proc/x: cannot be made or written", false},
		{"absent program", []string{"run", "./absent"}, 2, "", "launcher: PROGRAM ./absent is not there", false},
		{"an address as the program", []string{"run", "--listen", "127.0.0.1:0", "./absent"}, 2, "", "launcher: PROGRAM 127.0.0.1:0 is not there: an address", false},
		{"a text", []string{"run", "/etc/passwd"}, 2, "", "PROGRAM /etc/passwd is not an executable file", false},
		{"a source file", []string{"run", testdata(t, "fake/main.go")}, 2, "", "give its folder", false},
		{"does not build", []string{"run", testdata(t, "broken")}, 1, "building", "undefined: undefined\n", false},
		{"no such package", []string{"run", "soliton-train.invalid/x"}, 1, "", "does not build\n", false},
		{"no program but a library", []string{"run", testdata(t, "library")}, 1, "", "library does not build\n", false},
		{"never calls trainer.Main", []string{"run", testdata(t, "nomain")}, 1, "", "nomain ended without calling trainer.Main (exit status 0)\n    nothing to do\n", false},
		{"help", []string{"run", "--help"}, 0, "Examples:", "", false},
		{"help of status", []string{"status", "--help"}, 0, "launcher status runs/small --json", "", false},
		{"help of logs", []string{"logs", "--help"}, 0, "launcher logs 2 -f", "", false},
		{"status of nothing", []string{"status"}, 2, "", "launcher: runs/latest holds no run: give the directory of a run, such as runs/latest\n", false},
		{"status of too much", []string{"status", "a", "b"}, 2, "", `launcher: unexpected argument "b": give [RUN_DIR]`, false},
		{"logs of nothing", []string{"logs", "3"}, 2, "", "launcher: runs/latest holds no run", false},
		{"logs of no worker", []string{"logs", "runs", "x"}, 2, "", `launcher: W is "x": give the number of a worker`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cmd := launch(t, c.args...)
			mark := "LAUNCHER_TEST=" + cmd.Dir
			cmd.Env = append(os.Environ(), mark)
			status, stdout, stderr := result(t, cmd)
			if left := marked(t, mark); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			// One line says what is wrong; details are indented, and usage may name several faults.
			if n := len(regexp.MustCompile(`(?m)^\S`).FindAllString(stderr, -1)); c.status == 1 && n != 1 && !strings.HasPrefix(stderr, "    ") {
				t.Errorf("%d lines of error: %s", n, stderr)
			}
			if status != c.status || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) || (c.stderr == "") != (stderr == "") {
				t.Errorf("status %d, stdout:\n%s\nstderr:\n%s", status, stdout, stderr)
			}
			if strings.ContainsRune(stdout+stderr, '\x1b') {
				t.Error("escape codes without a terminal")
			}
			if _, err := os.Stat(filepath.Join(cmd.Dir, "runs")); (err == nil) != c.left {
				t.Errorf("runs: %v", err)
			}
		})
	}
}

// otherProgram returns a program that is another one for worker 2.
func otherProgram(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	code, err := os.ReadFile(fake)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "other"), append(code, "other"...), 0o700)
	}
	script := filepath.Join(dir, "program")
	if err == nil {
		err = os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\n[ $SOLITON_WORKER = 2 ] && exec %s/other \"$@\"\nexec %s \"$@\"\n", dir, fake), 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	return script
}

// marked returns the processes with a variable in their environment.
func marked(t *testing.T, variable string) (pids []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		// Those that cannot be read are others' or gone.
		if env, err := os.ReadFile(f); err == nil && bytes.Contains(append(env, 0), []byte(variable+"\x00")) {
			pids = append(pids, filepath.Base(filepath.Dir(f)))
		}
	}
	return pids
}

func TestPackageIsBuiltAndItsRunDirectoryKept(t *testing.T) {
	cmd := launch(t, "run", "--threads", "3", testdata(t, "fake"), "--steps", "4")
	status, stdout, stderr := result(t, cmd)
	if status != 0 {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	dir := filepath.Join(cmd.Dir, "runs", "latest")
	var sum rundir.Summary
	readJSON(t, filepath.Join(dir, "summary.json"), &sum)
	if sum.Steps != 4 || sum.StoppedBy != "" {
		t.Errorf("summary: %+v", sum)
	}
	var job rundir.Job
	readJSON(t, filepath.Join(dir, "job.json"), &job)
	if job.Threads != 3 || len(job.ProgramSHA256) != 64 || fmt.Sprint(job.Args) != "[--steps 4]" {
		t.Errorf("job: %+v", job)
	}
	log, err := os.ReadFile(filepath.Join(dir, "log", "worker-0.0.log"))
	if err != nil || !regexp.MustCompile(`args \["/[^"]*/runs/fake-[0-9-]+/bin/fake" "--steps" "4"\]`).Match(log) {
		t.Errorf("log: %s, %v", log, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "bin")); err == nil {
		t.Error("the built program is left")
	}
	if !strings.HasSuffix(stdout, "sampled text\n") {
		t.Errorf("output does not come last: %s", stdout)
	}
}

func readJSON(t *testing.T, path string, v any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// running is a launcher with a worker that stays in a step.
type running struct {
	*exec.Cmd
	lines   *bufio.Scanner
	workers []int // process ids
	errs    bytes.Buffer
}

// held is the number of workers of such a launcher.
const held = 3

// survivors counts the workers that run.
func (r *running) survivors() (n int) {
	for _, pid := range r.workers {
		if alive(pid) {
			n++
		}
	}
	return n
}

func startHeld(t *testing.T, args ...string) *running {
	t.Helper()
	return startHeldWith(t, nil, args...)
}

// startHeldWith is startHeld with flags of the launcher, too.
func startHeldWith(t *testing.T, flags []string, args ...string) *running {
	t.Helper()
	all := append([]string{"run", "--workers", strconv.Itoa(held), "--stages", "2", "--run-dir", "run"}, flags...)
	r := &running{Cmd: launch(t, append(append(all, fake, "--hold", "2", "--steps", "9"), args...)...)}
	out, err := r.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Cmd.Stderr = &r.errs
	r.Env = append(os.Environ(), "LAUNCHER_TEST="+r.Dir)
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Process.Kill(); r.Wait() })
	r.lines = bufio.NewScanner(out)
	r.await(t, "step 2/9")
	for id := range held {
		log, err := os.ReadFile(filepath.Join(r.Dir, "run", "log", fmt.Sprintf("worker-%d.0.log", id)))
		if err != nil {
			t.Fatal(err)
		}
		pid := 0
		if _, err := fmt.Sscanf(string(log), "pid %d", &pid); err != nil {
			t.Fatal(err)
		}
		r.workers = append(r.workers, pid)
	}
	return r
}

// await reads lines until one has the text.
func (r *running) await(t *testing.T, text string) {
	t.Helper()
	for r.lines.Scan() {
		if strings.Contains(r.lines.Text(), text) {
			return
		}
	}
	t.Fatalf("no line with %q\n%s", text, &r.errs)
}

// end waits for the launcher's end and returns its exit status.
func (r *running) end() int {
	for r.lines.Scan() {
	}
	r.Wait()
	return r.ProcessState.ExitCode()
}

func TestSignals(t *testing.T) {
	built(t)
	for _, c := range []struct {
		name      string
		args      []string
		signals   []syscall.Signal
		status    int
		stoppedBy string
		hash      string
	}{
		{"interrupt", nil, []syscall.Signal{syscall.SIGINT}, 130, "interrupt", "aa"},
		{"terminate", nil, []syscall.Signal{syscall.SIGTERM}, 75, "terminated", "aa"},
		{"interrupt twice", []string{"--stuck"}, []syscall.Signal{syscall.SIGINT, syscall.SIGINT}, 130, "interrupt", ""},
		{"terminate twice", []string{"--stuck"}, []syscall.Signal{syscall.SIGTERM, syscall.SIGTERM}, 75, "terminated", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := startHeld(t, c.args...)
			for i, s := range c.signals {
				r.Process.Signal(s)
				if i == 0 {
					r.await(t, "stopping")
				}
			}
			if status := r.end(); status != c.status {
				t.Errorf("status %d: %s", status, &r.errs)
			}
			if n := strings.Count(r.errs.String(), "\n"); n != 1 {
				t.Errorf("%d lines of error: %s", n, &r.errs)
			}
			var sum rundir.Summary
			readJSON(t, filepath.Join(r.Dir, "run", "summary.json"), &sum)
			if sum.Steps != 2 || sum.StoppedBy != c.stoppedBy || sum.ParamsSHA256 != c.hash {
				t.Errorf("summary: %+v", sum)
			}
			metrics, err := os.ReadFile(filepath.Join(r.Dir, "run", "metrics.jsonl"))
			if err != nil || bytes.Count(metrics, []byte("\n")) != 2 || !bytes.HasSuffix(metrics, []byte("}\n")) {
				t.Errorf("metrics: %q, %v", metrics, err)
			}
			if n := r.survivors(); n > 0 {
				t.Errorf("%d workers outlived the launcher", n)
			}
			if len(sum.Workers) != held || sum.WorkersLost != 0 {
				t.Errorf("summary: %+v", sum)
			}
		})
	}
}

// Who interrupts the build is left with neither its processes nor its files.
func TestInterruptedBuild(t *testing.T) {
	built(t)
	for _, listens := range []bool{true, false} {
		t.Run(fmt.Sprint("listens ", listens), func(t *testing.T) {
			t.Parallel()
			bin := t.TempDir()
			// A go command with a compiler.
			script := "#!/bin/sh\n" + map[bool]string{true: "trap 'kill $!; exit 1' INT", false: "trap '' INT"}[listens] +
				"\n: > \"$GOTMPDIR/half\"\nsh -c 'while :; do sleep 60; done' &\necho $$ $! > \"$0.pids\"\nwhile :; do wait; done\n"
			if err := os.WriteFile(filepath.Join(bin, "go"), []byte(script), 0o777); err != nil {
				t.Fatal(err)
			}
			cmd := launch(t, "run", testdata(t, "fake"))
			temp := t.TempDir()
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "GOTMPDIR=", "TMPDIR="+temp)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
			var pids [2]int
			until(t, func() bool {
				b, _ := os.ReadFile(filepath.Join(bin, "go.pids"))
				n, _ := fmt.Sscan(string(b), &pids[0], &pids[1])
				return n == 2 && strings.HasSuffix(string(b), "\n")
			})
			cmd.Process.Signal(os.Interrupt)
			cmd.Wait()
			if status := cmd.ProcessState.ExitCode(); status != 130 {
				t.Errorf("status %d", status)
			}
			until(t, func() bool { return !alive(pids[0]) && !alive(pids[1]) })
			if _, err := os.Lstat(filepath.Join(cmd.Dir, "runs")); err == nil {
				t.Error("a run directory is left")
			}
			if names, err := os.ReadDir(temp); err != nil || len(names) > 0 {
				t.Errorf("temporary files are left: %v, %v", names, err)
			}
		})
	}
}

// until waits for a condition, up to a minute.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	for !ok() {
		if time.Now().After(end) {
			t.Fatal("not within a minute")
		}
		time.Sleep(time.Millisecond)
	}
}

// A reader that goes away, as in launcher run | head, does not end the run.
func TestReaderGoesAway(t *testing.T) {
	cmd := launch(t, "run", "--run-dir", "run", fake)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	out.Close()
	if err := cmd.Run(); err != nil {
		t.Error(err)
	}
	var sum rundir.Summary
	readJSON(t, filepath.Join(cmd.Dir, "run", "summary.json"), &sum)
	if sum.Steps != 5 || sum.StoppedBy != "" {
		t.Errorf("summary: %+v", sum)
	}
}

// Not even SIGKILL, which leaves the launcher no time, leaves a worker.
func TestKilledLauncherTakesItsWorkerAlong(t *testing.T) {
	r := startHeld(t)
	r.Process.Kill()
	r.end()
	until(t, func() bool { return r.survivors() == 0 })
	// The lock is gone with the launcher, and what there is is valid.
	if _, err := os.Stat(filepath.Join(r.Dir, "run", "job.json")); err != nil {
		t.Error(err)
	}
}

// A terminal's Ctrl-C goes to its whole process group; the worker is not in it.
func TestWorkerHasItsOwnGroup(t *testing.T) {
	r := startHeld(t)
	for _, pid := range r.workers {
		group, err := unix.Getpgid(pid)
		if err != nil || group != pid {
			t.Errorf("worker %d is in group %d, %v", pid, group, err)
		}
	}
}

// A frozen worker is killed all the same when its launcher is.
func TestKilledLauncherTakesAFrozenWorkerAlong(t *testing.T) {
	r := startHeld(t)
	syscall.Kill(r.workers[1], syscall.SIGSTOP)
	r.Process.Kill()
	r.end()
	until(t, func() bool { return r.survivors() == 0 })
	cmd := exec.Command(binary, "status", "run", "--json")
	cmd.Dir = r.Dir
	if _, stdout, _ := result(t, cmd); !strings.Contains(stdout, `"state": "died"`) {
		t.Errorf("status: %s", stdout)
	}
}

// The others go on when one is killed from outside, without replicas from the beginning.
func TestOthersGoOn(t *testing.T) {
	for mirrors, rollbacks := range []int{1, 0} {
		r := startHeldWith(t, []string{"--mirrors", strconv.Itoa(mirrors)})
		syscall.Kill(r.workers[2], syscall.SIGKILL)
		if status := r.end(); status != 0 || r.survivors() > 0 {
			t.Fatalf("status %d, %d survivors: %s", status, r.survivors(), &r.errs)
		}
		var sum rundir.Summary
		readJSON(t, filepath.Join(r.Dir, "run", "summary.json"), &sum)
		if sum.StoppedBy != "" || sum.WorkersLost != 1 || len(sum.Workers) != held || sum.Steps != 9 || len(sum.Recoveries) != 1 || sum.Rollbacks != rollbacks {
			t.Errorf("summary: %+v", sum)
		}
		cmd := exec.Command(binary, "status", "run")
		cmd.Dir = r.Dir
		_, text, _ := result(t, cmd)
		for _, want := range []string{"plan 1.2, worker 2 exited: signal: killed: ", "workers lost: 1, recoveries: 1, the last in ", "  worker 2 exited: signal: killed\n"} {
			if !strings.Contains(text, want) {
				t.Errorf("no %q in\n%s", want, text)
			}
		}
	}
}

func TestCommands(t *testing.T) {
	r := startHeld(t)
	say := func(args ...string) (status int, text string) {
		t.Helper()
		cmd := exec.Command(binary, args...)
		cmd.Dir = r.Dir
		status, stdout, stderr := result(t, cmd)
		return status, stdout + stderr
	}
	for _, c := range []struct {
		args string
		want string
	}{
		{"kill run", "W is missing"},
		{"kill", "RUN_DIR is missing"},
		{"kill run x 7", "launcher: W is \"x\": give the number of a worker\nlauncher: there is no worker 7: "},
		{"stop", "RUN_DIR is missing"},
		{"slow run 1", "FACTOR is missing"},
		{"slow run x 2", "launcher: W is \"x\": give the number of a worker\nlauncher: FACTOR: the factor \"2\" is wrong: want a share"},
		{"slow run 7 0.5", "launcher: there is no worker 7: "},
	} {
		if status, text := say(strings.Fields(c.args)...); status != 2 || !strings.Contains(text, c.want) {
			t.Errorf("%s: status %d, %s", c.args, status, text)
		}
	}
	for _, args := range []string{"slow run 1 0.5", "slow run 2 0.25", "slow run 2 1", "kill run 0"} {
		if status, text := say(strings.Fields(args)...); status != 0 || text != "" {
			t.Fatalf("%s: status %d, %s", args, status, text)
		}
	}
	if status := r.end(); status != 0 {
		t.Fatalf("status %d: %s", status, &r.errs)
	}
	var sum rundir.Summary
	readJSON(t, filepath.Join(r.Dir, "run", "summary.json"), &sum)
	if len(sum.Recoveries) != 1 || sum.Recoveries[0].DiedAt != "kill" || sum.Recoveries[0].DetectMS <= 0 || sum.WorkersLost != 1 {
		t.Errorf("summary: %+v", sum)
	}
	if status, text := say("kill", "run", "1"); status != 1 || text != "launcher: run is no run that is under way\n" {
		t.Errorf("after the end: status %d, %s", status, text)
	}

	r = startHeld(t)
	if status, text := say("stop", "run"); status != 0 || text != "" {
		t.Errorf("stop: status %d, %s", status, text)
	}
	if status := r.end(); status != 1 || r.errs.String() != "launcher: stopped after step 2 of 9\n" {
		t.Errorf("status %d: %s", status, &r.errs)
	}
	if left, _ := filepath.Glob(filepath.Join(r.Dir, "run", "*workers*")); left != nil {
		t.Errorf("left behind: %v", left)
	}

	r = startHeld(t)
	if status, text := say("freeze", "run", "1"); status != 0 || text != "" {
		t.Fatalf("freeze: status %d, %s", status, text)
	}
	// Before the next command has started, the run may have gone on without the frozen worker, and may have ended, which kills it.
	until(t, func() bool { return frozen(r.workers[1]) || ended(r.workers[1]) })
	status, text := say("thaw", "run", "1")
	if until(t, func() bool { return !frozen(r.workers[1]) }); status != 0 && !ended(r.workers[1]) {
		t.Errorf("thaw: status %d, %s", status, text)
	}
	r.Process.Kill()
	r.end()
}

func TestStatusAndLogs(t *testing.T) {
	r := startHeld(t)
	say := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(binary, args...)
		cmd.Dir = r.Dir
		code, stdout, stderr := result(t, cmd)
		if code != 0 {
			t.Fatalf("%v: status %d: %s", args, code, stderr)
		}
		return stdout
	}
	text := say("status", "run")
	for _, want := range []string{"run: fake, running\n", "step 2 of 9, loss 0.5000\n", "plan 1.1, first plan: 3 workers in 2 stages, 8 micro-batches per step\n", "worker 2  stages "} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	var s inspect.Status
	if err := json.Unmarshal([]byte(say("status", "--json", "run")), &s); err != nil {
		t.Fatal(err)
	}
	if s.State != "running" || s.Step != 2 || s.Steps != 9 || *s.Loss != 0.5 || s.Stages != 2 || len(s.Workers) != held || len(s.Workers[0].Layers) == 0 {
		t.Errorf("status: %+v", s)
	}

	follow := exec.Command(binary, "logs", "run", "-f")
	follow.Dir = r.Dir
	out, err := follow.StdoutPipe()
	if err == nil {
		err = follow.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for id := range held {
		if !lines.Scan() || !strings.HasPrefix(lines.Text(), fmt.Sprintf("%d| pid %d args", id, r.workers[id])) {
			t.Errorf("line %q", lines.Text())
		}
	}
	r.Process.Signal(os.Interrupt)
	r.end()
	for lines.Scan() {
		t.Errorf("another line %q", lines.Text())
	}
	if err := follow.Wait(); err != nil {
		t.Error(err)
	}
	if got := say("logs", "run", "1"); !strings.HasPrefix(got, fmt.Sprintf("pid %d", r.workers[1])) || strings.Count(got, "\n") != 1 {
		t.Errorf("logs of worker 1: %q", got)
	}
	if got := say("status", "run"); !strings.Contains(got, "fake, stopped by: interrupt\n") || !strings.Contains(got, "16 forwards") {
		t.Errorf("status at the end:\n%s", got)
	}
	cmd := exec.Command(binary, "logs", "run", "7")
	cmd.Dir = r.Dir
	if code, _, stderr := result(t, cmd); code != 2 || !strings.Contains(stderr, "worker 7 has no log in run\n") {
		t.Errorf("status %d: %s", code, stderr)
	}
}

func TestOneRunADirectory(t *testing.T) {
	r := startHeld(t)
	cmd := exec.Command(binary, "run", "--run-dir", "run", fake)
	cmd.Dir = r.Dir
	if status, _, stderr := result(t, cmd); status != 2 || !strings.Contains(stderr, "is in use by another run") {
		t.Errorf("status %d: %s", status, stderr)
	}
	r.Process.Signal(os.Interrupt)
	r.end()
	cmd = exec.Command(binary, "run", "--run-dir", "run", fake)
	cmd.Dir = r.Dir
	if status, _, stderr := result(t, cmd); status != 2 || !strings.Contains(stderr, "already holds a run") {
		t.Errorf("status %d: %s", status, stderr)
	}
}

// alive reports whether a process runs; a zombie that is not reaped yet does not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(b, []byte(") Z "))
}

// frozen reports whether a signal has stopped a process.
func frozen(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && bytes.Contains(b, []byte(") T "))
}

// ended reports whether a process has ended, though it may not have been reaped.
func ended(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || bytes.Contains(b, []byte(") Z "))
}

func TestDoctor(t *testing.T) {
	status, stdout, stderr := result(t, launch(t, "doctor", "--json"))
	var findings []inspect.Finding
	if err := json.Unmarshal([]byte(stdout), &findings); err != nil || status != 0 {
		t.Fatalf("status %d, %v\n%s%s", status, err, stdout, stderr)
	}
	for _, f := range findings {
		if f.Check == "" || f.Found == "" || (f.Mark == "ok") != (f.Advice == "") {
			t.Errorf("finding %+v", f)
		}
	}

	cmd := launch(t, "doctor")
	cmd.Env = append(os.Environ(), "SOLITON_KERNEL=abacus")
	if err := os.WriteFile(filepath.Join(cmd.Dir, "runs"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	status, stdout, _ = result(t, cmd)
	if status != 1 || !regexp.MustCompile(`(?m)^fail +kernels`).MatchString(stdout) || !regexp.MustCompile(`(?m)^fail +run directory`).MatchString(stdout) {
		t.Errorf("status %d\n%s", status, stdout)
	}
}

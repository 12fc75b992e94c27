package python

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Torch trains the examples of PyTorch models under layouts and faults, and says whether the hashes are equal: those of the runs, and that
// of reference.py.
func Torch(args []string) error {
	f := flag.NewFlagSet("torch", flag.ExitOnError)
	model := f.String("model", "", "gpt or convnext (default both)")
	steps := f.Int("steps", 8, "steps of each run")
	most := f.Int("runs", 12, "runs of each model, at most")
	small := f.Bool("small", false, "narrow models, to try the command")
	limit := f.Duration("limit", 10*time.Minute, "for a run")
	if err := f.Parse(args); err != nil {
		return err
	}
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(l.Dir)
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	m := matrix{lab: l, steps: *steps, most: *most, limit: *limit}
	gpt := []string{"train.py", "--data", filepath.Join(strings.TrimSpace(string(goroot)), "src/encoding"), "--micro-batch", "4"}
	convnext := []string{"train_images.py"}
	if *small {
		gpt = append(gpt, "--layers", "2", "--width", "32", "--context", "16")
		convnext = append(convnext, "--widths", "16,24,32,48", "--depths", "1,1,2,1")
	}
	apart := 0
	for _, program := range [][]string{gpt, convnext} {
		name := map[string]string{"train.py": "gpt", "train_images.py": "convnext"}[program[0]]
		if *model != "" && *model != name {
			continue
		}
		fmt.Printf("%s: examples/torch/%s\n", name, strings.Join(program, " "))
		n, err := m.run(program)
		if err != nil {
			return err
		}
		apart += n
	}
	if apart > 0 {
		return fmt.Errorf("%d hashes are not equal", apart)
	}
	return nil
}

// matrix makes runs of one length.
type matrix struct {
	lab         *lab.Lab
	steps, most int
	limit       time.Duration
	runs        int
}

// run makes the runs of a program, and returns how many of them have other hashes than the undisturbed one.
func (m *matrix) run(program []string) (apart int, err error) {
	want, dir, err := m.train(combination{workers: 1, stages: 1, zero: 1}, program)
	if err != nil {
		return 0, err
	}
	fmt.Printf("  1 worker: state_sha256 %.16s, params_sha256 %.16s, loss %v\n", want.StateSHA256, want.ParamsSHA256, want.Loss)
	out, err := exec.Command(peers.Python, filepath.Join(m.lab.Root, "examples/torch/reference.py"), "--torch", dir).CombinedOutput()
	fmt.Printf("  %s\n", strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\n  "))
	if exit := new(exec.ExitError); errors.As(err, &exit) && exit.ExitCode() == 1 && bytes.Contains(out, []byte("params_sha256")) {
		apart++
	} else if err != nil {
		return apart, fmt.Errorf("reference.py: %w", err)
	}
	all := pairwise()
	for i, c := range all[:min(len(all), m.most)] {
		began := time.Now()
		sum, _, err := m.train(c, program)
		said := "equal"
		switch {
		case err != nil:
			said = err.Error()
			apart++
		case sum.StateSHA256 != want.StateSHA256 || sum.ParamsSHA256 != want.ParamsSHA256:
			said = fmt.Sprintf("NOT EQUAL: state_sha256 %.16s", sum.StateSHA256)
			apart++
		}
		if err == nil {
			said += fmt.Sprintf("; %d lost, %d joined, %d rollbacks", sum.WorkersLost, sum.WorkersJoined, sum.Rollbacks)
		}
		fmt.Printf("  %2d  %v: %s (%.0f s)\n", i+1, c, said, time.Since(began).Seconds())
	}
	return apart, nil
}

// train makes one run, and returns its summary and directory.
func (m *matrix) train(c combination, program []string) (sum rundir.Summary, dir string, err error) {
	m.runs++
	dir = filepath.Join(m.lab.Dir, fmt.Sprintf("torch-%d", m.runs))
	args := []string{
		"run", "--plain", "--python", peers.Python, "--run-dir", dir, "--threads", "1",
		"--workers", strconv.Itoa(c.workers), "--stages", strconv.Itoa(c.stages), "--zero", strconv.Itoa(c.zero),
	}
	if f := c.faults(); f != "" {
		args = append(args, "--chaos", f)
	}
	args = append(args, filepath.Join(m.lab.Root, "examples/torch", program[0]))
	args = append(append(args, program[1:]...), "--steps", strconv.Itoa(m.steps))
	status, err := m.launch(dir, c.resume, args...)
	if err == nil && c.resume && status == stopped {
		w, s := c.after()
		status, err = m.launch("", false, "resume", "--plain", "--python", peers.Python, "--workers", strconv.Itoa(w), "--stages", strconv.Itoa(s), dir)
	}
	if err == nil && status != 0 {
		err = fmt.Errorf("exit status %d", status)
	}
	if err != nil {
		return sum, dir, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err == nil {
		err = json.Unmarshal(text, &sum)
	}
	return sum, dir, err
}

// stopped is the exit status of a run that Ctrl-C has stopped.
const stopped = 130

// launch runs the launcher, and returns its status. With stop, the run in dir is interrupted when it has done more than half of its steps.
func (m *matrix) launch(dir string, stop bool, args ...string) (status int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), m.limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(m.lab.Dir, "launcher"), args...)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err = cmd.Wait()
	}()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
wait:
	for {
		select {
		case <-ended:
			break wait
		case <-tick.C:
			if !stop {
				continue
			}
			lines, _ := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
			if bytes.Count(lines, []byte("\n")) > m.steps/2 {
				_ = cmd.Process.Signal(os.Interrupt) // it may have ended
				stop = false
			}
		}
	}
	if exit := new(exec.ExitError); errors.As(err, &exit) && (exit.ExitCode() == stopped || ctx.Err() == nil) {
		if exit.ExitCode() != stopped {
			lines := strings.Split(strings.TrimSpace(text.String()), "\n")
			return exit.ExitCode(), fmt.Errorf("exit status %d: %s", exit.ExitCode(), lines[len(lines)-1])
		}
		return stopped, nil
	}
	if ctx.Err() != nil {
		return 0, fmt.Errorf("it took longer than %v", m.limit)
	}
	return 0, err
}

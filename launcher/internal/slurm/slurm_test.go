package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func env(pairs ...string) func(string) string {
	return func(name string) string {
		for _, p := range pairs {
			if k, v, _ := strings.Cut(p, "="); k == name {
				return v
			}
		}
		return ""
	}
}

func TestOf(t *testing.T) {
	step := []string{"SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_PROCID=2", "SLURM_STEP_NODELIST=m[3-5]", "SLURM_STEP_NUM_TASKS=3"}
	task, err := Of(env(step...))
	if err != nil || *task != (Task{"7", "0", 2, 3, "m3"}) {
		t.Errorf("%+v, %v", task, err)
	}
	for name, pairs := range map[string][]string{
		"no Slurm":       nil,
		"a batch script": {"SLURM_JOB_ID=7", "SLURM_PROCID=0", "SLURM_NTASKS=3", "SLURM_JOB_NUM_NODES=3"},
		"one task":       append([]string{"SLURM_STEP_NUM_TASKS=1"}, step...),
	} {
		if task, err := Of(env(pairs...)); task != nil || err != nil {
			t.Errorf("%s: %+v, %v", name, task, err)
		}
	}
	for _, wrong := range []string{"SLURM_PROCID=x", "SLURM_PROCID=3", "SLURM_PROCID=-1", "SLURM_STEP_NUM_TASKS=x", "SLURM_STEP_NUM_TASKS=65", "SLURM_STEP_NODELIST=m[1"} {
		if task, err := Of(env(append([]string{wrong}, step...)...)); err == nil {
			t.Errorf("%s: %+v", wrong, task)
		}
	}
	if n, ok := Batch(env("SLURM_JOB_ID=7", "SLURM_PROCID=0", "SLURM_JOB_NUM_NODES=3")); !ok || n != 3 {
		t.Errorf("a batch script: %d, %v", n, ok)
	}
	for _, pairs := range [][]string{nil, {"SLURM_JOB_ID=7", "SLURM_JOB_NUM_NODES=1"}, append([]string{"SLURM_JOB_NUM_NODES=3"}, step...)} {
		if _, ok := Batch(env(pairs...)); ok {
			t.Errorf("%v is taken as a batch script", pairs)
		}
	}
}

func TestPorts(t *testing.T) {
	a, b := &Task{Job: "7", Step: "0", First: "m3"}, &Task{Job: "7", Step: "1"}
	if slices.Equal(a.Ports(), b.Ports()) || len(a.Addrs()) != 4 || a.Addrs()[0] != fmt.Sprintf("m3:%d", a.Ports()[0]) {
		t.Errorf("%v, %v: %v", a.Ports(), b.Ports(), a.Addrs())
	}
	for range 2 { // the second finds the first port taken
		l, err := a.Listen()
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
}

// Credentials of other users, jobs and statements prove nothing.
func TestCheck(t *testing.T) {
	said := errors.New("replayed credential")
	task := &Task{Job: "7", Step: "0"}
	mine := "STATUS:  Success (0)\nUID: 12\n\n" + task.context()
	for out, want := range map[string]error{
		mine + "hello": nil,
		mine + "hell":  errStatement,
		mine:           errStatement,
		"":             errStatement,
		"STATUS:  Success (0)\nUID: 13\n\n" + task.context() + "hello": errUser,
		"STATUS:  Success (0)\n\nUID: 12\n\nhello":                     errUser,
		"STATUS:  Success (0)\nUID: 12\n\nhello":                       errStatement,
		"replayed":                                                     said,
	} {
		p := Prover{task, 12, func(_ context.Context, input []byte, name string, args ...string) ([]byte, error) {
			if name != "unmunge" || !bytes.Equal(input, []byte("proof")) || strings.Contains(fmt.Sprint(args), "proof") {
				t.Errorf("%s %v", name, args)
			}
			if out == "replayed" {
				return nil, said
			}
			return []byte(out), nil
		}}
		if err := p.Check(t.Context(), "hello", []byte("proof")); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", out, err, want)
		}
	}
}

func TestNodeLoss(t *testing.T) {
	if NodeLoss(env()) == "" || NodeLoss(env("SBATCH_NO_KILL=1")) != "" {
		t.Error("the advice is wrong")
	}
}

// The steps of other jobs are found in what squeue prints.
func TestBegun(t *testing.T) {
	list := "7.0 m1\n8.batch m2\n8.0 m[2-3]\n8.1 m3\n9.extern m1\n10.0 m[4,6]\n"
	for job, want := range map[string][]Task{
		"":   {{Job: "8", Step: "0", First: "m2"}, {Job: "8", Step: "1", First: "m3"}, {Job: "10", Step: "0", First: "m4"}},
		"10": {{Job: "10", Step: "0", First: "m4"}},
		"7":  nil, // its own
		"11": nil,
	} {
		tasks, err := begun(list, "7", job)
		var got []Task
		for _, task := range tasks {
			got = append(got, *task)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %+v, %v", job, got, err)
		}
	}
	for _, wrong := range []string{"8.0 m[1", "8.0", strings.Repeat("8.0 m1\n", maxListed+1)} {
		if tasks, err := begun(wrong, "7", ""); err == nil {
			t.Errorf("%.20q: %v", wrong, tasks)
		}
	}
}

func TestRequeued(t *testing.T) {
	for want, pairs := range map[bool][][]string{
		true:  {{"SLURM_JOB_ID=7", "SLURM_RESTART_COUNT=1"}},
		false: {nil, {"SLURM_JOB_ID=7"}, {"SLURM_JOB_ID=7", "SLURM_RESTART_COUNT=0"}, {"SLURM_RESTART_COUNT=1"}},
	} {
		for _, p := range pairs {
			if Requeued(env(p...)) != want {
				t.Errorf("%v: not %v", p, want)
			}
		}
	}
}

// The run directory of a job is the same when the job is started again, and another one in each step.
func TestRunName(t *testing.T) {
	for want, pairs := range map[string][]string{
		"":              {"SLURM_STEP_ID=1"},
		"gpt-slurm-7":   {"SLURM_JOB_ID=7", "SLURM_RESTART_COUNT=1"},
		"gpt-slurm-7-0": {"SLURM_JOB_ID=7", "SLURM_STEP_ID=0"},
		"gpt-slurm-7-1": {"SLURM_JOB_ID=7", "SLURM_STEP_ID=1", "SLURM_RESTART_COUNT=1"},
	} {
		for _, program := range []string{"./examples/gpt", "/a/gpt.py", "gpt"} {
			if got := RunName(env(pairs...), program); got != want {
				t.Errorf("%s, %v: %q, not %q", program, pairs, got, want)
			}
		}
	}
	if got := RunName(env("SLURM_JOB_ID=../7"), "gpt"); got != "" {
		t.Error(got)
	}
}

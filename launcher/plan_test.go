package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

func TestPlan(t *testing.T) {
	var out, errs strings.Builder
	args := []string{"plan", "--workers", "8", "--stages", "2", "--layers", "16", "--micro-batches", "32"}
	if code := execute(append(args, "--slow", "3:0.5", "--json"), &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	var got struct {
		inspect.WhatIf
		Plan struct{ Stages []any } `json:"plan"`
	}
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatal(err)
	}
	if got.StepMS <= 0 || got.IdealMS/got.StepMS < 0.94 || len(got.Workers) != 8 || len(got.Critical) == 0 || len(got.Plan.Stages) != 2 {
		t.Errorf("%s", out.String())
	}
	out.Reset()
	if code := execute(append(args, "--lose", "1"), &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	for _, want := range []string{"1 worker lost (1)", "step ", "critical path", "bubble ms"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if code := execute([]string{"plan", "--workers", "2", "--slow", "5:1", "--slow", "1:7", "--lose", "x"}, &out, &errs); code != 2 {
		t.Errorf("exit %d", code)
	}
	for _, want := range []string{"--slow 5:1: the workers are 0 to 1\n", "--slow 1:7: it is WORKER:SPEED, with a speed above 0 and at most 1\n", "--lose x: the workers are 0 to 1\n"} {
		if !strings.Contains(errs.String(), want) {
			t.Errorf("no %q in\n%s", want, errs.String())
		}
	}
}

// A report that cannot be written is a failure.
func TestLostReport(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	for _, args := range []string{"plan", "plan --json", "version", "ls ."} {
		var errs strings.Builder
		if code := execute(strings.Fields(args), full, &errs); code != 1 || errs.String() != "launcher: write /dev/full: no space left on device\n" {
			t.Errorf("%s: exit %d: %s", args, code, &errs)
		}
	}
}

// What is too large to simulate is refused at once, with the flags that make it so.
func TestPlanIsBounded(t *testing.T) {
	for want, args := range map[string][]string{
		"--workers 2147483648: it must be from 1 to 4096\n":                                        {"--workers", "2147483648"},
		"--workers 4096 --layers 4096 --micro-batches 4096: a step would add 4110417920 gradients": {"--workers", "4096", "--layers", "4096", "--micro-batches", "4096"},
		"--stages 64 --layers 4096: give at most 4 stages for so many layers, or fewer layers":     {"--workers", "4096", "--layers", "4096", "--stages", "64"},
		"--horizon 99999999999: it must be from 1 to 2147483647":                                   {"--horizon", "99999999999"},
		"--bandwidth +Inf: it must be from 0 to 1e9\n":                                             {"--bandwidth", "Inf"},
	} {
		var out, errs strings.Builder
		if code := execute(append([]string{"plan"}, args...), &out, &errs); code != 2 || !strings.Contains(errs.String(), want) {
			t.Errorf("%v: exit %d: %s", args, code, &errs)
		}
	}
}

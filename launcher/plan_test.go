package main

import (
	"encoding/json"
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

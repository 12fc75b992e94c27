package trainer_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/trainer"
)

// Each run begins the file again, and only steps write to it.
func TestLineWriter(t *testing.T) {
	lines := trainer.LineWriter{Path: filepath.Join(t.TempDir(), "x.csv"), Header: "step"}
	if err := lines.Printf(trainer.StepInfo{Step: 1}, "1"); err == nil {
		t.Error("a line is written outside of a run")
	}
	for range 2 {
		job := smallJob()
		job.OnStep = func(s trainer.StepInfo) error { return lines.Printf(s, "%d", s.Step) }
		run(t, job)
		if text, err := os.ReadFile(lines.Path); err != nil || string(text) != "step\n1\n2\n3\n4\n5\n" {
			t.Errorf("the file holds %q, %v", text, err)
		}
	}
	job := smallJob()
	other := trainer.LineWriter{Path: filepath.Join(lines.Path, "y.csv")}
	job.OnStep = func(s trainer.StepInfo) error {
		_ = other.Printf(s, "%d", s.Step)
		return nil
	}
	if _, err := trainer.Run(context.Background(), job); err == nil || !strings.Contains(err.Error(), "OnStep of step 1") || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("a line is lost without an error: %v", err)
	}
}

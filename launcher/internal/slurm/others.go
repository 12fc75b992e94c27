package slurm

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
)

// maxListed bounds the list of steps that squeue prints, in lines.
const maxListed = 1 << 10

// InStep reports whether this process is a task of a job step, and returns its rank.
func InStep(getenv func(string) string) (rank string, ok bool) {
	rank = getenv("SLURM_PROCID")
	return rank, rank != "" && getenv("SLURM_STEP_ID") != "" && getenv("SLURM_STEP_NODELIST") != ""
}

// Requeued reports whether this process is of a job that Slurm has started again.
func Requeued(getenv func(string) string) bool {
	n := getenv("SLURM_RESTART_COUNT")
	return n != "" && n != "0" && getenv("SLURM_JOB_ID") != ""
}

// RunName returns the name of the run directory of a program in a job: the same when the job is started again, whose steps are counted
// from 0 again; "" outside of a job.
func RunName(getenv func(string) string, program string) string {
	job, step := getenv("SLURM_JOB_ID"), getenv("SLURM_STEP_ID")
	if !digits.MatchString(job) {
		return ""
	}
	if digits.MatchString(step) {
		job += "-" + step
	}
	if full, err := filepath.Abs(program); err == nil { // it may be "."
		program = full
	}
	return strings.TrimSuffix(filepath.Base(program), ".py") + "-slurm-" + job
}

var digits = regexp.MustCompile(`^[0-9]{1,18}$`)

// Begun returns the tasks that may have begun a run in other jobs of this user: the first of each of their steps. job is the only
// job that counts, "" for all.
func Begun(ctx context.Context, getenv func(string) string, job string) ([]*Task, error) {
	out, err := pipe(ctx, nil, "squeue", "--me", "--steps", "--noheader", "--format", "%i %N")
	if err != nil {
		return nil, err
	}
	return begun(string(out), getenv("SLURM_JOB_ID"), job)
}

// begun reads the list of steps.
func begun(list, own, job string) (tasks []*Task, err error) {
	lines := 0
	for line := range strings.Lines(list) {
		if lines++; lines > maxListed {
			return nil, errors.New("squeue: too many steps; give --job")
		}
		id, nodes, _ := strings.Cut(strings.TrimSpace(line), " ")
		of, step, ok := strings.Cut(id, ".")
		if !ok || strings.Trim(step, "0123456789") != "" || of == own || job != "" && of != job {
			continue // a batch script, or the like
		}
		all, err := Nodes(strings.TrimSpace(nodes))
		if err != nil {
			return nil, fmt.Errorf("squeue: step %.80q: %w", id, err)
		}
		tasks = append(tasks, &Task{Job: of, Step: step, First: all[0]})
	}
	return tasks, nil
}

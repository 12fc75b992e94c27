package trainer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// StoppedError is the error of a run that was stopped before its last step.
type StoppedError = host.StoppedError

// Run trains a job in this process and returns its summary.
//
// When ctx ends, the run stops at the next commit, its files are written, and
// Run returns the summary of the steps done with a [*StoppedError] that wraps
// ctx's cause. Other errors: [*ValidationError], [*DataError],
// [*NonFiniteError], [*PanicError], and errors of files and of the job's own
// functions.
func Run(ctx context.Context, job Job) (Summary, error) {
	if f := threadsFault(job.Threads); f != nil {
		return Summary{}, &ValidationError{f}
	}
	var dir *rundir.Dir
	if job.RunDir != "" {
		var err error
		if dir, err = rundir.Create(job.RunDir, program(), time.Now()); err != nil {
			return Summary{}, err
		}
	}
	out, err := runInProcess(ctx, host.Config{
		Settings: host.Settings{Program: program(), Threads: job.Threads},
		RunDir:   dir, Output: os.Stdout, Executable: executable(),
	}, job, nil)
	if err == nil {
		err = out.Err
	}
	var stopped *StoppedError
	if errors.As(err, &stopped) && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", err, context.Cause(ctx))
	}
	if out.Summary == nil {
		return Summary{}, err
	}
	return *out.Summary, err
}

// runInProcess runs an agent and a worker in this process. prepareAgent, which
// may be nil, gets the agent before it serves. err is the worker's own error
// where that is the reason for the outcome's.
func runInProcess(ctx context.Context, cfg host.Config, job Job, prepareAgent func(*host.Agent) (restore func())) (out host.Outcome, err error) {
	a, err := host.New(cfg)
	if err != nil {
		return out, err
	}
	if prepareAgent != nil {
		defer prepareAgent(a)()
	}
	failed := make(chan error, 1)
	w := host.InProcess(func(ctx context.Context, nc net.Conn) {
		conn := control.New(nc)
		if conn.Send(control.Identity{}.Hello()) != nil {
			return
		}
		if err := process.New(conn, process.Alone()).Serve(ctx, maker(func() (Job, error) { return job, nil })); err != nil {
			failed <- err
		}
	})
	out = a.Serve(ctx, w)
	var told *host.FailedError
	if errors.As(out.Err, &told) {
		select {
		case err = <-failed:
		default:
		}
	}
	return out, err
}

func program() string { return filepath.Base(os.Args[0]) }

// lasting returns the path of an executable that is there tomorrow, "" for one that go run made.
func lasting(path string) string {
	if strings.Contains(path, string(filepath.Separator)+"go-build") {
		return ""
	}
	return path
}

func workingDir() string {
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	return dir
}

// executable returns the path of the running program, "" if unknown.
func executable() string {
	path, err := os.Executable()
	if err != nil {
		return ""
	}
	return path
}

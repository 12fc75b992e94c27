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
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/process"
)

// StoppedError is the error of a run that was stopped before its last step.
type StoppedError = session.StoppedError

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
	cfg := host.Config{
		Settings: session.Settings{Program: program(), Threads: job.Threads},
		RunDir:   dir, Console: host.Console{Output: os.Stdout},
	}
	if dir != nil {
		cfg.Executable, _ = os.Executable()
	}
	out, err := runInProcess(ctx, cfg, job, nil)
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

// runInProcess runs a host and a worker in this process. prepare, which
// may be nil, gets the host before it runs. err is the worker's own error
// where that is the reason for the outcome's.
func runInProcess(ctx context.Context, cfg host.Config, job Job, prepare func(*host.Host) (restore func())) (out session.Outcome, err error) {
	failed := make(chan error, 1)
	cfg.Fixed = true
	cfg.Start = func(int, int) (spawn.Worker, error) {
		return spawn.InProcess(func(ctx context.Context, nc net.Conn) {
			conn := control.New(nc)
			if conn.Send(control.Identity{}.Hello()) != nil {
				return
			}
			if err := process.New(conn, process.Alone()).Serve(ctx, maker(func() (Job, error) { return job, nil })); err != nil {
				failed <- err
			}
		}), nil
	}
	h, err := host.New(cfg)
	if err != nil {
		return out, err
	}
	if prepare != nil {
		defer prepare(h)()
	}
	out = h.Run(ctx)
	var told *session.FailedError
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

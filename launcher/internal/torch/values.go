package torch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/process"
	"github.com/soliton-train/soliton/trainer"
)

// Values is in the place of Worker where the process only writes the file of first values, if it is not there.
const Values = "torch-values"

// What is in the folder of a program in the run directory: the file of first values, and the folder for what is in a pack.
const (
	First    = rundir.FirstName
	Unpacked = "program"
)

// writeValues makes the job, which writes the first values. It prints what is wrong, and returns the exit status.
func (c command) writeValues() int {
	say := os.Stdout
	os.Stdout = os.Stderr // the program's
	p, err := start(c)
	if err == nil {
		p.close()
		return 0
	}
	done := new(trainer.Done)
	f, exit := new(failure), new(process.ExitError)
	switch err = ended(err, c.setup.Script); {
	case errors.As(err, &done):
		fmt.Fprint(say, done.Text)
		return helped
	case errors.As(err, &exit):
		fmt.Fprint(say, err)
		return exit.Status
	case errors.As(err, &f) && f.Refused:
		fmt.Fprint(say, err)
		return refused
	}
	fmt.Fprint(say, err)
	return 1
}

// Exit statuses of a process that writes first values, besides those of programs.
const (
	refused = 2
	helped  = 3
)

// ValuesError says why a program makes no job.
type ValuesError struct {
	Text   string
	Status int // of the launcher; 0 where Text is what the user has asked for
}

func (e *ValuesError) Error() string { return e.Text }

// maxSaid bounds what is read of what a process says that writes first values.
const maxSaid = 1 << 20

// Installed is a Python program as this machine runs it.
type Installed struct {
	Values string // file of first values, which the first worker of the run writes if it is not there

	python, script string
}

// Install finds the interpreter for a script, which may be a pack: the given one, or the first in PATH if that is "". folder, in the
// run directory, gets what is in a pack, and first values.
func Install(ctx context.Context, interpreter, script, folder string) (p Installed, err error) {
	p.Values, p.script = filepath.Join(folder, First), script
	if p.python, err = Interpreter(ctx, interpreter); err == nil && strings.HasSuffix(script, PackSuffix) {
		p.script, err = unpack(script, filepath.Join(folder, Unpacked))
	}
	return p, err
}

// Command returns the program and the arguments of workers: this launcher, which starts the interpreter.
func (p Installed) Command(args []string) (file string, all []string, err error) {
	return p.command(Worker, args)
}

func (p Installed) command(kind string, args []string) (file string, all []string, err error) {
	folder, err := unpackPackage()
	if err != nil {
		return "", nil, err
	}
	file, err = os.Executable()
	return file, append([]string{kind, p.python, folder, p.Values, p.script}, args...), err
}

// MakeValues has a process of its own make the job and write first values, unless they are there. Its errors are of type
// [*ValuesError] where the program is at fault.
func (p Installed) MakeValues(ctx context.Context, args []string) error {
	if _, err := os.Stat(p.Values); err == nil {
		return nil
	}
	log, err := os.OpenFile(filepath.Join(filepath.Dir(p.Values), "log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	file, all, err := p.command(Values, args)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, file, all...)
	said, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr, cmd.SysProcAttr = log, platform.ChildAttr(syscall.SIGKILL)
	if err := platform.StartChild(cmd); err != nil {
		return err
	}
	text, err := io.ReadAll(io.LimitReader(said, maxSaid))
	_, _ = io.Copy(io.Discard, said) // or it would wait
	if wrong := cmd.Wait(); wrong == nil || err != nil {
		return err
	}
	status := cmd.ProcessState.ExitCode()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case status == helped:
		return &ValuesError{string(text), 0}
	case status <= 0 || len(text) == 0:
		return fmt.Errorf("the process that makes first values: %v: %s", cmd.ProcessState, spawn.LastLines(log, 0, 1))
	}
	return &ValuesError{string(text), status}
}

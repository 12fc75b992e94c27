package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ship"
	"github.com/soliton-train/soliton/launcher/internal/torch"
)

// program is what PROGRAM stands for.
type program struct {
	given string // as people gave it
	name  string // base name, for the run directory

	file string // executable file; "" for a package
	pkg  string // Go package to build
	dir  string // where to build it; "" for the working directory

	script string          // Python file, or a pack of Python files
	python torch.Installed // in this run, for a script
}

// resolve finds out what PROGRAM is.
func resolve(given string) (program, error) {
	p := program{given: given, name: filepath.Base(given)}
	info, err := os.Stat(given)
	switch {
	case err == nil && info.IsDir():
		abs, err := filepath.Abs(given)
		if err != nil {
			return p, cli.Fail(err)
		}
		// Built inside its folder, a package of another module than the working
		// directory's works as well.
		p.name, p.pkg, p.dir = filepath.Base(abs), ".", abs
		return p, nil
	case err == nil && strings.HasSuffix(given, ".go"):
		return p, fmt.Errorf("PROGRAM %s is a Go file: give its folder, %s", given, folder(given))
	case err == nil && info.Mode().IsRegular() && strings.HasSuffix(given, ".py"):
		p.name, p.script = strings.TrimSuffix(p.name, ".py"), given
		return p, nil
	case err == nil && info.Mode().IsRegular() && strings.HasSuffix(given, torch.PackSuffix):
		p.name, p.script = strings.TrimSuffix(p.name, torch.PackSuffix), given
		return p, nil
	case err == nil && (!info.Mode().IsRegular() || info.Mode()&0o111 == 0):
		return p, fmt.Errorf("PROGRAM %s is not an executable file: give a Go package path or an executable file", faults.Value(given))
	case err == nil:
		p.file = given
		return p, nil
	case filepath.IsAbs(given), strings.HasPrefix(given, "."), given == "":
		return p, fmt.Errorf("PROGRAM %s is not there: give a Go package path, such as ./examples/gpt, or an executable file", faults.Value(given))
	case strings.Contains(given, ":"): // no import path has one
		return p, fmt.Errorf("PROGRAM %s is not there: an address stands behind its flag and =, such as --listen=:7000", faults.Value(given))
	}
	p.pkg = given // an import path, or the go command says why not
	return p, nil
}

// folder is the folder of a file in the form of a Go package path.
func folder(file string) string {
	dir := filepath.Dir(file)
	if dir == "." || filepath.IsAbs(dir) || strings.HasPrefix(dir, "..") {
		return dir
	}
	return "./" + dir
}

// buildError is what the go command said.
type buildError struct{ output string }

func (e *buildError) Error() string { return e.output }

// buildGrace is how long the go command and its compilers may take to end when interrupted.
const buildGrace = 2 * time.Second

// build compiles the package into the run directory and returns the executable's path.
func (p program) build(ctx context.Context, dir *rundir.Dir) (string, error) {
	bin, err := dir.MakeBin()
	if err != nil {
		return "", err
	}
	// A folder as the target makes the go command refuse packages that are no
	// program, and name the file as it always does.
	// Without a stamp of the repository's state, the same code makes the same file, as
	// resume wants it.
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", bin+string(filepath.Separator), p.pkg)
	cmd.Dir = p.dir
	// An interrupted go command leaves its compilers, which must hear of it too, and its
	// files.
	temp, err := os.MkdirTemp(os.Getenv("GOTMPDIR"), "soliton-build-")
	if err != nil {
		return "", fmt.Errorf("a folder to build in: %w; set TMPDIR or GOTMPDIR to a directory you may write to", err)
	}
	defer os.RemoveAll(temp)
	cmd.Env = append(cmd.Environ(), "GOTMPDIR="+temp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = buildGrace
	defer func() {
		if cmd.Process != nil && ctx.Err() != nil {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // compilers that ignored the interrupt
		}
	}()
	if out, err := cmd.CombinedOutput(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return "", &buildError{"there is no go command in PATH; install Go, or give an executable file"}
		}
		text := strings.TrimSpace(string(out))
		if text == "" {
			text = err.Error()
		}
		return "", &buildError{text}
	}
	files, err := os.ReadDir(bin)
	if err != nil {
		return "", err
	}
	if len(files) != 1 {
		return "", &buildError{fmt.Sprintf("%s names %d programs: give one", p.pkg, len(files))}
	}
	return filepath.Join(bin, files[0].Name()), nil
}

// untilStop calls a function, and returns the reason to stop if one came first, which ends its context.
func untilStop(ctx context.Context, stops <-chan session.Reason, work func(context.Context) error) (reason session.Reason, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = work(ctx)
	}()
	select {
	case <-done:
	case reason = <-stops:
	}
	if reason != "" {
		cancel()
		<-done
	}
	return reason, err
}

// install makes a script ready to run with an interpreter, or the first in PATH if that is "", and returns the command of its workers.
func (p *program) install(ctx context.Context, interpreter string, args []string, dir *rundir.Dir) (file string, all []string, err error) {
	folder, err := dir.MakeFirst()
	if err != nil {
		return "", nil, err
	}
	if p.python, err = torch.Install(ctx, interpreter, p.script, folder); err != nil {
		return "", nil, err
	}
	return p.python.Command(args)
}

// ship describes a script, once it is installed and has its first values, for other machines.
func (p *program) ship(interpreter string, dir *rundir.Dir) (ship.Program, error) {
	pack := p.script
	if !strings.HasSuffix(pack, torch.PackSuffix) {
		bin, err := dir.MakeBin()
		if err != nil {
			return ship.Program{}, err
		}
		pack = filepath.Join(bin, p.name+torch.PackSuffix)
		if err := p.packTo(pack); err != nil {
			return ship.Program{}, err
		}
	}
	return ship.DescribePython(pack, p.python.Values, interpreter)
}

// packTo writes the pack of a script.
func (p *program) packTo(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(torch.Pack(file, p.script), file.Close())
}

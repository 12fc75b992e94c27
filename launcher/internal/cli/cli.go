// Package cli has what all commands of the launcher share: how they fail, and how they name a run.
package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Exit ends the command with a status after everything was said.
type Exit int

func (e Exit) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// Failure is an error other than wrong usage: its lines are printed, and the exit status is 1.
type Failure struct{ Err error }

func (f Failure) Error() string { return f.Err.Error() }

// Fail returns a [Failure], nil for no error.
func Fail(err error) error {
	if err == nil {
		return nil
	}
	return Failure{err}
}

// Unwrap returns the error.
func (f Failure) Unwrap() error { return f.Err }

// Latest is the run directory where none is given.
var Latest = filepath.Join(rundir.Parent, rundir.Latest)

// ReadRun reads a run directory. A directory without a run is wrong usage.
func ReadRun(path string) (rundir.Record, error) {
	r, err := rundir.Read(path)
	if err != nil && !errors.Is(err, rundir.ErrNoRun) {
		err = Fail(err)
	}
	return r, err
}

// AtMost accepts at most n arguments, which are what.
func AtMost(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > n {
			return fmt.Errorf("unexpected argument %q: give %s", args[n], what)
		}
		return nil
	}
}

// NeedRun accepts a run directory and further arguments, which are named in the order in which they have to be there.
func NeedRun(more ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		missing := append([]string{"RUN_DIR is missing: give the directory of a run, such as runs/latest"}, more...)
		if len(args) < len(missing) {
			return errors.New(missing[len(args)])
		}
		return nil
	}
}

// Print prints a value: as indented JSON, or with text, which need not look at errors of its writes.
func Print(out io.Writer, v any, asJSON bool, text func(io.Writer) error) error {
	if !asJSON {
		var all bytes.Buffer
		if err := text(&all); err != nil {
			return Fail(err)
		}
		_, err := out.Write(all.Bytes())
		return Fail(err)
	}
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return Fail(enc.Encode(v))
}

// Report prints how a run ended, and returns what the command ends with.
func Report(o session.Outcome, stdout, stderr io.Writer) error {
	o.Report(stdout, stderr, "launcher")
	if status := o.ExitStatus(); status != session.ExitDone {
		return Exit(status)
	}
	return nil
}

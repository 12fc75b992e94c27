package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// maxCredential bounds a credential of munge and what it contains, in bytes.
const maxCredential = 4 << 10

// Errors of a proof by munge.
var (
	errUser      = errors.New("its munge credential is of another user")
	errStatement = errors.New("its munge credential is of another job, step or connection")
)

// Prove implements meet.Prover: the proof is a credential of munge, which only this user can read.
func (p Prover) Prove(ctx context.Context, statement string) ([]byte, error) {
	proof, err := p.run(ctx, []byte(p.task.context()+statement), "munge", "--restrict-uid", fmt.Sprint(p.uid))
	return bytes.TrimSpace(proof), err
}

// Check implements meet.Prover.
func (p Prover) Check(ctx context.Context, statement string, proof []byte) error {
	out, err := p.run(ctx, proof, "unmunge", "--numeric", "--keys", "STATUS,UID")
	if err != nil {
		return err
	}
	head, payload, ok := bytes.Cut(out, []byte("\n\n"))
	if !ok {
		return errStatement
	}
	user := ""
	for line := range strings.Lines(string(head)) {
		if key, value, ok := strings.Cut(line, ":"); ok && key == "UID" {
			user = strings.TrimSpace(value)
		}
	}
	switch {
	case user != fmt.Sprint(p.uid):
		return fmt.Errorf("%w: %.20q, not %d", errUser, user, p.uid)
	case string(payload) != p.task.context()+statement:
		return errStatement
	}
	return nil
}

// pipe runs a command of munge. What goes through it is in no argument.
func pipe(ctx context.Context, input []byte, name string, args ...string) ([]byte, error) {
	if len(input) > maxCredential {
		return nil, fmt.Errorf("%s: %d bytes, more than %d", name, len(input), maxCredential)
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = bytes.NewReader(input)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		err = fmt.Errorf("%s", strings.TrimSpace(string(exit.Stderr[:min(len(exit.Stderr), maxCredential)])))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return out, nil
}

package torch

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
)

// Interpreter returns the path of a Python interpreter: given, or the one that is first in PATH if that is "".
func Interpreter(ctx context.Context, given string) (string, error) {
	names := []string{given}
	if given == "" {
		names = []string{"python3", "python"}
	}
	var path string
	var err error
	for _, name := range names {
		if path, err = exec.LookPath(name); err == nil {
			break
		}
	}
	switch {
	case err != nil && given == "":
		return "", errors.New("there is no python3 in PATH; give the interpreter with --python")
	case err != nil:
		return "", fmt.Errorf("--python %s: %w", given, err)
	}
	out, err := exec.CommandContext(ctx, path, "-c", "import sys; print(sys.version_info >= (3, 9))").Output()
	if err != nil {
		return "", fmt.Errorf("--python %s: it does not run Python: %w", path, err)
	}
	if string(out) != "True\n" {
		return "", fmt.Errorf("--python %s: it is older than Python 3.9", path)
	}
	return path, nil
}

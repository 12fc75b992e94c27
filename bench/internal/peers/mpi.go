package peers

import (
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

//go:embed mpi/allreduce.c
var allreduce []byte

// MPI is OpenMPI with a program of ours.
type MPI struct {
	Version string
	program string
}

// CompileMPI compiles the program into a folder.
func CompileMPI(dir string) (*MPI, error) {
	source := filepath.Join(dir, "allreduce.c")
	if err := os.WriteFile(source, allreduce, 0o600); err != nil {
		return nil, err
	}
	m := &MPI{program: filepath.Join(dir, "allreduce-mpi")}
	if out, err := exec.Command("mpicc", "-O3", "-o", m.program, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mpicc: %w %s", err, bytes.TrimSpace(out))
	}
	out, err := m.run(1, "self")
	m.Version = out
	return m, err
}

// run runs the program with so many ranks. Ranks may be more than cores; OpenMPI then yields where it waits, by itself.
func (m *MPI) run(ranks int, btl string, args ...string) (string, error) {
	cmd := exec.Command("mpirun", append([]string{
		"--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", btl, "-np", strconv.Itoa(ranks), m.program,
	}, args...)...)
	var fault bytes.Buffer
	cmd.Stderr = &fault
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("mpirun: %w %s", err, bytes.TrimSpace(fault.Bytes()))
	}
	return strings.TrimSpace(string(out)), nil
}

// Ask returns, for each round, the milliseconds of an all-reduce in a row of calls.
func (m *MPI) Ask(ranks int, btl string, elements, rounds, calls int) ([]float64, error) {
	out, err := m.run(ranks, btl, strconv.Itoa(elements), strconv.Itoa(rounds), strconv.Itoa(calls))
	if err != nil {
		return nil, err
	}
	return parse(out)
}

package peers

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/report"
)

// Names of what comparisons need.
const (
	OpenBLAS = "OpenBLAS"
	PyTorch  = "PyTorch"
	Torchrun = "torchrun and Gloo"
	OpenMPI  = "OpenMPI"
)

// probes say how each is looked for, and what brings it. A probe prints the version; it may import the scripts.
var probes = []struct {
	name, install, python string
}{
	{
		OpenBLAS, "apt install libopenblas0-pthread python3-numpy",
		"import ctypes, numpy; l = ctypes.CDLL('libopenblas.so.0'); l.openblas_get_config.restype = ctypes.c_char_p; print(l.openblas_get_config().decode())",
	},
	{PyTorch, "apt install python3-torch libopenblas0-pthread", "import torch, fast_blas; fast_blas.check(); print(torch.__version__)"},
	{
		Torchrun, "apt install python3-torch",
		"import torch, torch.distributed as d, torch.distributed.run; assert d.is_gloo_available(); print('of PyTorch', torch.__version__)",
	},
}

// Tools looks for what comparisons need.
func Tools() (all []report.Tool, err error) {
	dir, err := os.MkdirTemp("", "sb")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, scripts); err != nil {
		return nil, err
	}
	for _, p := range probes {
		t := report.Tool{Name: p.name, Install: p.install}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := exec.CommandContext(ctx, Python, "-c", p.python)
		cmd.Dir = dir
		if out, err := cmd.Output(); err == nil {
			t.Found = strings.Join(strings.Fields(string(out)), " ")
		}
		cancel()
		all = append(all, t)
	}
	mpi := report.Tool{Name: OpenMPI, Install: "apt install openmpi-bin libopenmpi-dev"}
	if _, err := exec.LookPath("mpicc"); err == nil {
		if out, err := exec.Command("mpirun", "--version").Output(); err == nil {
			mpi.Found, _, _ = strings.Cut(string(out), "\n")
		}
	}
	return append(all, mpi), nil
}

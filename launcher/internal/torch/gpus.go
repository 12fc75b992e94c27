package torch

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/soliton-train/soliton/internal/dvfs/nvml"
)

// Workers returns how many workers a program has by itself on this machine: one for each GPU that it may use, if it is a Python program, and
// otherwise 0, which leaves it open.
func Workers(program string) int {
	if filepath.Ext(program) != ".py" {
		return 0
	}
	lib, err := nvml.Open()
	if err != nil {
		return 0 // there is none that it could use
	}
	defer lib.Close()
	visible, restricted := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if !restricted {
		return len(lib.Cards())
	}
	return min(named(visible), len(lib.Cards()))
}

// named returns how many GPUs a value of CUDA_VISIBLE_DEVICES names: those before the first that is not valid.
func named(visible string) (n int) {
	for _, name := range strings.Split(visible, ",") {
		if name = strings.TrimSpace(name); name == "" || strings.HasPrefix(name, "-") {
			break
		}
		n++
	}
	return n
}

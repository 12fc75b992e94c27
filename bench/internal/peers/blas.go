package peers

import (
	"errors"
	"os"

	"golang.org/x/sys/cpu"
)

// coreType is the variable by which OpenBLAS is told which kernels to use.
const coreType = "OPENBLAS_CORETYPE"

// cacheSize is the one by which it is told how large the cache is.
const cacheSize = "OPENBLAS_L2_SIZE"

// TuneBLAS has OpenBLAS use the kernels for the widest vectors of this processor, in every process that this one starts, also where the
// environment has others, which would go unseen into a ratio. OpenBLAS knows processors by their model: on one
// that is newer than itself it takes kernels of 2004, which multiply at a quarter of the speed.
func TuneBLAS() error {
	name := core(cpu.X86.HasAVX2 && cpu.X86.HasFMA, cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VL)
	if name == "" {
		return nil
	}
	return errors.Join(os.Setenv(coreType, name), os.Unsetenv(cacheSize))
}

// core names the kernels of OpenBLAS for a processor, or nothing where they are not known.
func core(avx2, avx512 bool) string {
	switch {
	case avx512:
		return "SKYLAKEX"
	case avx2:
		return "HASWELL"
	}
	return ""
}

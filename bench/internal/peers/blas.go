package peers

import (
	"os"

	"golang.org/x/sys/cpu"
)

// coreType is the variable by which OpenBLAS is told which kernels to use.
const coreType = "OPENBLAS_CORETYPE"

// TuneBLAS has OpenBLAS use the kernels for the widest vectors of this processor, in every process that this one starts, unless the
// environment chooses. OpenBLAS knows processors by their model: on one that is newer than itself it takes kernels of 2004, which multiply at a
// quarter of the speed.
func TuneBLAS() error {
	name := core(cpu.X86.HasAVX2 && cpu.X86.HasFMA, cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VL)
	if _, chosen := os.LookupEnv(coreType); chosen || name == "" {
		return nil
	}
	return os.Setenv(coreType, name)
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

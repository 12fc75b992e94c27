package trainer

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/soliton-train/soliton/internal/compute/tensor"
)

// availableMemory returns how many bytes the machine can give to programs, or
// false where that is unknown.
func availableMemory() (bytes float64, ok bool) {
	f, err := os.Open("/proc/meminfo") // of Linux
	if err != nil {
		return 0, false
	}
	defer f.Close()
	return parseMeminfo(f)
}

func parseMeminfo(r io.Reader) (bytes float64, ok bool) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && fields[0] == "MemAvailable:" && fields[2] == "kB" {
			n, err := strconv.ParseUint(fields[1], 10, 63)
			return 1024 * float64(n), err == nil
		}
	}
	return 0, false
}

// needs estimates the bytes that a job takes at least, all workers together:
// arrays values of every parameter, the gradient of the largest layer on its
// way into the tree, and a micro-batch of samples. Activations come on top. It
// is a float64, which does not overflow.
func needs(m *Model, params *parameters, arrays, microBatch int) float64 {
	largest := 0
	for _, l := range params.layers {
		largest = max(largest, l.Size())
	}
	sample := float64(tensor.Size(m.Input.Shape)) + float64(tensor.Size(m.Target.Shape))
	return 4 * (float64(arrays)*float64(params.count()) + float64(largest) + float64(microBatch)*sample)
}

// memoryFault says that a valid model does not fit into the available bytes,
// or nothing. arrays and microBatch are as for needs.
func memoryFault(m *Model, params *parameters, arrays, microBatch int, available float64) []Fault {
	need := needs(m, params, arrays, microBatch)
	if need <= available {
		return nil
	}
	text := fmt.Sprintf("takes at least %s of memory, and this machine has %s to spare; ", gigabytes(need), gigabytes(available))
	if batch := needs(m, params, 0, microBatch) - needs(m, params, 0, 0); batch > need/2 {
		text += fmt.Sprintf("use micro-batches of less than %d samples, or smaller samples", microBatch)
	} else {
		text += fmt.Sprintf("use fewer or narrower layers: it has %d parameters, and not much more than %.2g fit", params.count(), available/float64(4*arrays))
	}
	return []Fault{{"Model", "", text}}
}

func gigabytes(bytes float64) string { return fmt.Sprintf("%.1f GB", bytes/1e9) }

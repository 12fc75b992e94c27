// Command bench compares Soliton with its peers in one run, and measures what
// has a bound:
//
//	go run ./bench all        every comparison below that measures a ratio, and docs/benchmarks.md
//	go run ./bench matmul     the matrix product with OpenBLAS
//	go run ./bench step       the training step of a GPT with PyTorch
//	go run ./bench scale      workers and threads against one of each, and against DistributedDataParallel
//	go run ./bench reduce     exact with fast reduction between workers, and that with a bare ring
//	go run ./bench allreduce  the all-reduce between processes with OpenMPI and Gloo
//	go run ./bench protect    steps with mirrors and digests and without
//	go run ./bench traces     steps with traces and metrics and without
//	go run ./bench keep       steps under checkpoints, their speed, and that of reading data
//	go run ./bench data       steps with data in a bucket whose answers take 50 ms, against data on the disk
//	go run ./bench control    how long control takes while all else is busy
//	go run ./bench survive    recovery from SIGKILL with torchrun and a Gloo rebuild
//	go run ./bench hosts      recovery when one of several hosts dies
//	go run ./bench machines   recovery when one of several machines loses its power or network; takes root
//	go run ./bench trials     what can happen to three and five machines, and whether the bits are still the same; takes root
//	go run ./bench gossip     what a member of the gossip ring costs, in rings of up to 1,000
//	go run ./bench clocks     what clocks save after a loss, and the most that they could; emulated
//	go run ./bench soak       random faults, and whether the bits are still the same
//	go run ./bench migrate    a layer that moves under training, against stop and copy, and contiguous shards
//	go run ./bench failslow   slow workers, in how many steps they are found, and false alarms without a fault
//	go run ./bench load       workers where processors are short: none may be evicted
//	go run ./bench losses     throughput after losses, against the ideal and the best plan for what is left
//	go run ./bench model      steps as the cost model predicts them and as they are
//	go run ./bench versions   steps, recoveries and plans against an older commit
//	go run ./bench bridge     the Python processes beside workers, against plain PyTorch and DistributedDataParallel
//	go run ./bench torch      PyTorch models under layouts and faults: whether the hashes are equal
//
// Both sides take turns, so that a machine whose speed drifts does not favour
// one. Results are ratios; the raw figures stand beside them. Kept outputs lie
// in bench/results. With -rows FILE before the command, a comparison also writes
// its figures as JSON. Peers are Debian's packages libopenblas0-pthread,
// python3-numpy, python3-torch, openmpi-bin and libopenmpi-dev. Nothing else should run beside it.
//
// all runs one comparison after the other, each three times, and prints the median and the range of each ratio. It tells which peers it finds
// and how to install the rest; comparisons whose peers are missing are left out, and listed. -only NAME,... chooses some, -quick is a trial
// with small sizes, which is marked as such and writes nothing. What was measured of a commit is kept below .bin/bench, so that all goes on
// where it was interrupted, or where a peer was installed since. When all that can run here has been measured, it writes docs/benchmarks.md with
// plots in docs/benchmarks, and the output of each round into bench/results/all. It refuses to where the work tree differs from the commit or
// other programs used more than 5 % of the processors; with -force it writes, and the page says so.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
)

func main() {
	f := flag.NewFlagSet("bench", flag.ExitOnError)
	rows := f.String("rows", "", "file that gets the figures of a comparison as JSON")
	f.Usage = usage
	_ = f.Parse(os.Args[1:]) // it exits
	err := peers.TuneBLAS()
	switch run := find(f.Arg(0)); {
	case err != nil:
	case f.Arg(0) == "all" && *rows == "":
		err = all(f.Args()[1:])
	case run == nil:
		usage()
		os.Exit(2)
	case *rows == "":
		err = run(f.Args()[1:], nil)
	default:
		err = record(*rows, func(rec *report.Recorder) error { return run(f.Args()[1:], rec) })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func usage() {
	names := slices.Sorted(maps.Keys(checks))
	for i, c := range comparisons {
		names = slices.Insert(names, i, c.Name)
	}
	fmt.Fprintf(os.Stderr, "usage: go run ./bench [-rows FILE] all|%s [flags]; see go doc ./bench\n", strings.Join(names, "|"))
}

// record writes what a comparison has measured, when it succeeds.
func record(file string, run func(rec *report.Recorder) error) error {
	rec := &report.Recorder{Rows: []report.Row{}}
	if err := run(rec); err != nil {
		return err
	}
	text, err := json.Marshal(rec.Rows)
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}

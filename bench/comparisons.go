package main

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/bench/internal/collective"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/planning"
	"github.com/soliton-train/soliton/bench/internal/python"
	"github.com/soliton-train/soliton/bench/internal/recovery"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/bench/internal/training"
)

// comparison is a command that measures rows; all runs it.
type comparison struct {
	report.Comparison
	run func(args []string, rec *report.Recorder) error
}

// comparisons are in the order of the page.
var comparisons = []comparison{
	{report.Comparison{
		Name: "matmul", About: "The matrix product with OpenBLAS", Needs: []string{peers.OpenBLAS},
		Quick: []string{"-rounds", "2", "-seconds", "0.005"}, Takes: 45 * time.Second,
	}, training.Matmul},
	{report.Comparison{
		Name: "step", About: "The training step of a GPT with PyTorch", Needs: []string{peers.PyTorch},
		Flags: []string{"-rounds", "3"},
		Quick: []string{"-rounds", "1", "-steps", "2"}, Takes: 70 * time.Second,
	}, training.Step},
	{report.Comparison{
		Name: "scale", About: "Training a GPT with several workers and threads, and with DistributedDataParallel", Uses: []string{peers.PyTorch, peers.Torchrun},
		Flags: []string{"-turns", "1"},
		Quick: []string{"-turns", "1", "-steps", "4", "-batch", "16", "-layers", "1", "-width", "64"}, Takes: 4 * time.Minute,
	}, training.Scale},
	{report.Comparison{
		Name: "reduce", About: "Exact with fast reduction between workers, and that with a bare ring",
		Flags: []string{"-rounds", "20", "-pairs", "2"},
		Quick: []string{"-rounds", "3", "-pairs", "1", "-steps", "3", "-model", "--layers 1 --width 64"}, Takes: 140 * time.Second,
	}, training.Reduce},
	{report.Comparison{
		Name: "allreduce", About: "The all-reduce between processes with OpenMPI and Gloo", Uses: []string{peers.OpenMPI, peers.Torchrun},
		Flags: []string{"-turns", "2"},
		Quick: []string{"-ranks", "2", "-sizes", "1024,65536", "-turns", "2"}, Takes: 200 * time.Second,
	}, collective.AllReduce},
	{report.Comparison{
		Name: "protect", About: "Steps with mirrors and digests and without",
		Flags: []string{"-pairs", "3"},
		Quick: []string{"-pairs", "1", "-steps", "4", "-workers", "2", "-model", "--layers 1 --width 64"}, Takes: 135 * time.Second,
	}, training.Protect},
	{report.Comparison{
		Name: "traces", About: "Steps with traces and metrics and without",
		Flags: []string{"-pairs", "3"},
		Quick: []string{"-pairs", "1", "-steps", "4", "-workers", "2", "-model", "--layers 1 --width 64"}, Takes: 160 * time.Second,
	}, training.Traces},
	{report.Comparison{
		Name: "keep", About: "Steps under checkpoints, the speed of checkpoints with dd, and reading data with plain readers",
		Flags: []string{"-state", "512", "-samples", "100000", "-steps", "14"},
		Quick: []string{"-parts", "disk,input", "-state", "20", "-samples", "2000"}, Takes: 3 * time.Minute,
	}, training.Keep},
	{report.Comparison{
		Name: "survive", About: "Recovery from SIGKILL with torchrun and a Gloo rebuild", Uses: []string{peers.Torchrun}, Flags: []string{"-seed", "{round}", "-kills", "20", "-turns", "2", "-rebuilds", "5", "-restarts", "1"},
		Quick: []string{"-kills", "2", "-turns", "1", "-rebuilds", "1", "-restarts", "1", "-workers", "3", "-ranks", "2", "-torch-workers", "2"}, Takes: 5 * time.Minute,
	}, recovery.Survive},
	{report.Comparison{
		Name: "hosts", About: "Recovery when one of several emulated hosts dies", Flags: []string{"-seed", "{round}", "-runs", "4"},
		Quick: []string{"-runs", "1", "-workers", "3", "-steps", "20"}, Takes: 80 * time.Second,
	}, recovery.Hosts},
	{report.Comparison{
		Name: "migrate", About: "A layer that moves under training with stop and copy, and interleaved with contiguous shards",
		Flags: []string{"-rounds", "2"},
		Quick: []string{"-rounds", "1", "-params", "65536"}, Takes: 100 * time.Second,
	}, planning.Migrate},
	{report.Comparison{
		Name: "control", About: "How long control takes while all else is busy", Flags: []string{"-seed", "{round}"},
		Quick: []string{"-workers", "2", "-rounds", "20", "-messages", "100"}, Takes: 2 * time.Minute,
	}, controlLatency},
	{report.Comparison{
		Name: "bridge", About: "PyTorch models in workers with a plain PyTorch script and DistributedDataParallel", Needs: []string{peers.PyTorch, peers.Torchrun},
		Flags: []string{"-turns", "2", "-kills", "4"},
		Quick: []string{"-turns", "1", "-steps", "2", "-kills", "0", "-batch", "8", "-width", "64"}, Takes: 3 * time.Minute,
	}, python.Bridge},
}

// checks are the commands without a second side: they hold a bound, or look for faults.
var checks = map[string]func(args []string) error{
	"gossip": recovery.Gossip, "machines": recovery.Machines, "trials": recovery.Trials, "soak": recovery.Soak, "failslow": recovery.Failslow, "load": recovery.Load, "versions": recovery.Versions,
	"losses": planning.Losses, "model": planning.Model, "clocks": planning.Clocks, "torch": python.Torch, "data": training.Data,
}

// find returns the command of a name.
func find(name string) func(args []string, rec *report.Recorder) error {
	for _, c := range comparisons {
		if c.Name == name {
			return c.run
		}
	}
	if run := checks[name]; run != nil {
		return func(args []string, rec *report.Recorder) error {
			if rec != nil {
				return fmt.Errorf("%s measures no rows: leave out -rows", name)
			}
			return run(args)
		}
	}
	return nil
}

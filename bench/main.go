// Command bench compares Soliton with its peers in one run, and measures what
// has a bound:
//
//	go run ./bench matmul     the matrix product with OpenBLAS
//	go run ./bench step       the training step of a GPT with PyTorch
//	go run ./bench reduce     exact with fast reduction between workers, and that with a bare ring
//	go run ./bench protect    steps with mirrors and digests and without
//	go run ./bench traces     steps with traces and metrics and without
//	go run ./bench keep       steps under checkpoints, their speed, and that of reading data
//	go run ./bench control    how long control takes while all else is busy
//	go run ./bench survive    recovery from SIGKILL with torchrun and a Gloo rebuild
//	go run ./bench hosts      recovery when one of several hosts dies
//	go run ./bench machines   recovery when one of several machines loses its power or network; takes root
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
// in bench/results. Peers are Debian's packages libopenblas0-pthread,
// python3-numpy and python3-torch. Nothing else should run beside it.
package main

import (
	"fmt"
	"os"

	"github.com/soliton-train/soliton/bench/internal/planning"
	"github.com/soliton-train/soliton/bench/internal/python"
	"github.com/soliton-train/soliton/bench/internal/recovery"
	"github.com/soliton-train/soliton/bench/internal/training"
)

func main() {
	commands := map[string]func([]string) error{"matmul": training.Matmul, "step": training.Step, "reduce": training.Reduce, "protect": training.Protect, "traces": training.Traces, "keep": training.Keep, "control": controlLatency, "survive": recovery.Survive, "hosts": recovery.Hosts, "gossip": recovery.Gossip, "machines": recovery.Machines, "soak": recovery.Soak, "failslow": recovery.Failslow, "load": recovery.Load, "losses": planning.Losses, "model": planning.Model, "migrate": planning.Migrate, "clocks": planning.Clocks, "versions": recovery.Versions, "torch": python.Torch, "bridge": python.Bridge}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: go run ./bench matmul|step|reduce|protect|traces|keep|control|survive|hosts|gossip|machines|soak|failslow|load|losses|model|migrate|clocks|versions|torch|bridge [flags]; see go doc ./bench")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

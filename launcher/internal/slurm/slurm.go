// Package slurm starts a run over the machines of a Slurm allocation. Each task of a job step is one host of the run; that of the lowest
// rank begins it, and the others find it by the list of nodes and by a port that follows from the numbers of job and step. Nothing
// but environment variables and munge is taken from Slurm: no shared folder, no scontrol, no MPI plugin.
package slurm

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

// Task is a task of a job step.
type Task struct {
	Job, Step string
	Rank      int    // from 0
	Tasks     int    // of the step
	First     string // node of the first task
}

// maxTasks is how many tasks a step may have that begins a run.
const maxTasks = 64

// Of returns the task that this process is, by its environment; nil where it is none, or the only one of its step.
func Of(getenv func(string) string) (*Task, error) {
	t := Task{Job: getenv("SLURM_JOB_ID"), Step: getenv("SLURM_STEP_ID")}
	rank, nodes := getenv("SLURM_PROCID"), getenv("SLURM_STEP_NODELIST")
	tasks := getenv("SLURM_STEP_NUM_TASKS")
	if tasks == "" {
		tasks = getenv("SLURM_NTASKS")
	}
	if t.Job == "" || t.Step == "" || rank == "" || nodes == "" || tasks == "" || tasks == "1" {
		return nil, nil // a batch script has no step
	}
	var err error
	if t.Rank, err = strconv.Atoi(rank); err != nil || t.Rank < 0 {
		return nil, fmt.Errorf("SLURM_PROCID is %.80q: a number is missing", rank)
	}
	if t.Tasks, err = strconv.Atoi(tasks); err != nil || t.Tasks <= t.Rank || t.Tasks > maxTasks {
		return nil, fmt.Errorf("SLURM_NTASKS is %.80q with SLURM_PROCID %d: a run takes at most %d tasks, one for each machine; use srun --ntasks-per-node 1", tasks, t.Rank, maxTasks)
	}
	all, err := Nodes(nodes)
	if err != nil {
		return nil, fmt.Errorf("SLURM_STEP_NODELIST: %w", err)
	}
	t.First = all[0]
	return &t, nil
}

// Ports are those at which the first task listens, the first free one of them. They are below the range that systems choose from.
func (t *Task) Ports() (ports []int) {
	sum := sha256.Sum256([]byte(t.context()))
	for i := range 4 {
		ports = append(ports, lowest+int(binary.BigEndian.Uint32(sum[4*i:])%width))
	}
	return ports
}

const (
	lowest = 20000
	width  = 10000
)

// context tells the proofs of this step from those of others.
func (t *Task) context() string { return fmt.Sprintf("slurm job %q step %q ", t.Job, t.Step) }

// Listen returns the listener of the first task.
func (t *Task) Listen() (net.Listener, error) {
	var causes []error
	for _, port := range t.Ports() {
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
		if err == nil {
			return l, nil
		}
		causes = append(causes, err)
	}
	return nil, errors.Join(causes...)
}

// Addrs are the addresses at which the other tasks look for the first one.
func (t *Task) Addrs() (addrs []string) {
	for _, port := range t.Ports() {
		addrs = append(addrs, net.JoinHostPort(t.First, strconv.Itoa(port)))
	}
	return addrs
}

// Batch reports whether this process is in an allocation of several nodes but in no step of it, as a batch script is.
func Batch(getenv func(string) string) (nodes int, ok bool) {
	nodes, err := strconv.Atoi(getenv("SLURM_JOB_NUM_NODES"))
	return nodes, err == nil && nodes > 1 && getenv("SLURM_JOB_ID") != "" && getenv("SLURM_STEP_NODELIST") == ""
}

// Srun replaces this process by srun, which runs the same command once on each node.
func Srun(nodes int, own string, args []string) error {
	srun, err := exec.LookPath("srun")
	if err != nil {
		return fmt.Errorf("this is an allocation of %d nodes, and srun is not in PATH: %w", nodes, err)
	}
	return syscall.Exec(srun, append(srunArgs(nodes, own), args...), os.Environ())
}

func srunArgs(nodes int, own string) []string {
	n := strconv.Itoa(nodes)
	// The step survives its nodes and tasks: those that are left continue the run.
	return []string{"srun", "--nodes", n, "--ntasks", n, "--ntasks-per-node", "1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", own}
}

// NodeLoss is what users are told of Slurm's way with lost nodes; "" where the environment shows that the job survives them. Slurm
// does not tell its jobs.
func NodeLoss(getenv func(string) string) string {
	for _, name := range []string{"SBATCH_NO_KILL", "SALLOC_NO_KILL", "SLURM_NO_KILL"} {
		if getenv(name) != "" {
			return ""
		}
	}
	return "if a node fails, Slurm ends the job unless sbatch or salloc, and srun, were given --no-kill"
}

// Prover proves that a process is of the same user on a machine with the same munge key.
type Prover struct {
	task *Task
	uid  int
	run  func(ctx context.Context, input []byte, name string, args ...string) ([]byte, error)
}

// Prover returns the prover of a task.
func (t *Task) Prover() Prover { return Prover{t, os.Getuid(), pipe} }

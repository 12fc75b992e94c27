package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/machines"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// slurmNode starts Slurm's daemons on a test machine: munged and slurmd, and on the first one slurmctld.
const slurmNode = `set -eu
mkdir -p /run/munge /run/slurm/ctld /run/slurm/d /etc/slurm
mount -t tmpfs none /var/log; mkdir -p /var/log/munge; mount -t tmpfs none /etc/slurm
cp /tmp/munge.key /run/munge.key; chown munge /run/munge /run/munge.key /var/log/munge; chmod 711 /run/munge; chmod 400 /run/munge.key
mount -t sysfs none /sys; mount -t tmpfs none /sys/fs/cgroup
for c in freezer cpuset memory cpu cpuacct devices; do
	mkdir -p /sys/fs/cgroup/$c; mount -t cgroup -o $c none /sys/fs/cgroup/$c 2>/dev/null || true
done
echo CgroupPlugin=cgroup/v1 >/etc/slurm/cgroup.conf
cat >/etc/slurm/slurm.conf <<C
ClusterName=test
SlurmctldHost=m1
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/slurm/ctld
SlurmdSpoolDir=/run/slurm/d
SlurmctldPidFile=/run/slurm/ctld.pid
SlurmdPidFile=/run/slurm/d.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=m[1-3] CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
C
setpriv --reuid munge --regid munge --clear-groups munged --key-file=/run/munge.key --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/pid --log-file=/run/munge/log --seed-file=/run/munge/seed --force
[ "$(hostname)" != m1 ] || slurmctld
slurmd -N "$(hostname)"
`

// In allocations of a real Slurm, srun launcher run trains one job on all nodes, to the bits of an undisturbed run: it stops when the job ends,
// resumes when the job is requeued, and grows when another job joins.
func TestSlurm(t *testing.T) {
	for _, tool := range []string{"srun", "slurmctld", "slurmd", "munged", "setpriv"} {
		_, err := exec.LookPath(tool)
		require.Tool(t, "slurm", err == nil, fmt.Sprint(err))
	}
	built(t)
	ms := machines.Up(t, 3)
	for _, m := range ms {
		if err := os.WriteFile(m.Path("/tmp/munge.key"), []byte(strings.Repeat("k", 1024)), 0o600); err != nil {
			t.Fatal(err)
		}
		m.CopyIn(binary)
		out, err := m.Command("bash", "-c", slurmNode).CombinedOutput()
		require.Tool(t, "slurm", err == nil, fmt.Sprintf("Slurm does not start on %s: %v\n%s", m.Name, err, out))
	}
	await(t, "all nodes", func() bool {
		out, err := ms[0].Command("sinfo", "--noheader", "--states", "idle", "--format", "%D").CombinedOutput()
		return err == nil && strings.TrimSpace(string(out)) == "3"
	})
	want := cutWant(t)
	command, program := ms[0].CopyIn(binary), append([]string{ms[0].CopyIn(emulated), "--layer-ms", "8"}, cutJob...)
	var all []*output
	defer func() {
		for _, out := range all {
			if t.Failed() {
				t.Log(out)
			}
		}
	}()
	srun := func(args ...string) *machines.Cmd {
		cmd, out := ms[0].Command("srun", args...), new(output)
		cmd.Stdout, cmd.Stderr = out, out
		all = append(all, out)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	trains := append([]string{"--no-kill", "--export=ALL", command, "run", "--run-dir", "/tmp/run", "--workers", "2", "--threads", "1"}, program...)
	steps := func() int {
		text, _ := os.ReadFile(ms[0].Path("/tmp/run/metrics.jsonl"))
		return bytes.Count(text, []byte("\n"))
	}

	// Slurm tells the job that it ends: it stops with a checkpoint.
	job := srun(append([]string{"-N3"}, trains...)...)
	await(t, "10 steps", func() bool { return steps() >= 10 })
	if out, err := ms[0].Command("bash", "-c", "scancel --signal=TERM $(squeue --noheader --format %A)").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := job.Wait(); err == nil {
		t.Fatal("the job has not ended early")
	}
	stopped := steps()
	if stopped >= want.Steps {
		t.Fatal("all steps were done before the job was requeued")
	}

	// It is requeued, and two of the nodes have what is needed to resume. The third joins from another job.
	job = srun(append([]string{"-N2", "-w", "m1,m2", "--export=ALL,SLURM_RESTART_COUNT=1"}, slices.DeleteFunc(trains, func(arg string) bool { return arg == "--export=ALL" })...)...)
	await(t, "steps of the job that was requeued", func() bool { return steps() > stopped })
	second := srun("-N1", "-w", "m3", command, "join", "--run-dir", "/tmp/run-joined", "--workers", "2")
	if err := errors.Join(job.Wait(), second.Wait()); err != nil {
		t.Fatal(err)
	}
	if n := steps(); n != want.Steps {
		t.Errorf("%d steps were recorded, of %d: the job began again", n, want.Steps)
	}
	for i, path := range []string{"/tmp/run", "/tmp/run-1", "/tmp/run-joined"} {
		var sum rundir.Summary
		readJSON(t, ms[i].Path(path+"/summary.json"), &sum)
		if sum.ParamsSHA256 != want.ParamsSHA256 || sum.StateSHA256 != want.StateSHA256 || sum.WorkersLost > 0 || sum.WorkersJoined != 2 || sum.ModelHost != "m1" {
			t.Errorf("machine %d: %+v", i, sum)
		}
	}
}

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// In an allocation of a real Slurm, srun launcher run trains one job on all of its nodes, to the bits of an undisturbed run.
func TestSlurm(t *testing.T) {
	for _, tool := range []string{"srun", "slurmctld", "slurmd", "munged", "setpriv"} {
		_, err := exec.LookPath(tool)
		require.Tool(t, "slurm", err == nil, fmt.Sprint(err))
	}
	built(t)
	hostPeace.Do(func() { hostPeace.sum, _ = trainOnHosts(t, "--workers", "1") })
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
	command, program := ms[0].CopyIn(binary), ms[0].CopyIn(mlp)
	out, err := ms[0].Command("srun", "-N3", "--no-kill", command, "run", "--run-dir", "/tmp/run", "--workers", "2", "--threads", "1",
		program, "--steps", "150", "--micro-batch", "4", "--eval-every", "0").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for i, m := range ms {
		runs, _ := filepath.Glob(m.Path("/tmp/run*"))
		if len(runs) != 1 {
			t.Fatalf("%s: %v\n%s", m.Name, runs, out)
		}
		var sum rundir.Summary
		readJSON(t, filepath.Join(runs[0], "summary.json"), &sum)
		if sum.ParamsSHA256 != hostPeace.sum.ParamsSHA256 || sum.StateSHA256 != hostPeace.sum.StateSHA256 || sum.WorkersLost > 0 || len(sum.Workers) != 6 {
			t.Errorf("machine %d: %+v", i, sum)
		}
	}
}

package main

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// rings returns what the ring believes of each worker of a run under way.
func (r *underWay) rings() map[int]string {
	all := make(map[int]string)
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		return all // not yet
	}
	for _, p := range run.Workers {
		all[p.ID] = p.Ring
	}
	return all
}

// formed waits until all workers are members of the ring.
func (r *underWay) formed(n int) {
	r.t.Helper()
	until(r.t, func() bool {
		all := r.rings()
		alive := 0
		for _, state := range all {
			if state == "alive" {
				alive++
			}
		}
		return alive == n || len(r.events("end"))+len(r.events("failed")) > 0
	})
	if got := r.rings(); len(got) != n || got[0] != "alive" {
		r.t.Fatalf("the ring says %v, want %d alive", got, n)
	}
}

// A worker that is frozen is suspected by the others before its agent gives it up, and the cause says
// Who joins later becomes a member, too, and so do the workers of several hosts, by way of the
// agent that leads.
func TestRingForms(t *testing.T) {
	built(t)
	t.Parallel()
	t.Run("respawned", func(t *testing.T) {
		r := begin(t, "--workers", "3", "--respawn")
		r.formed(3)
		r.kill(2)
		r.until("joined", 1)
		r.formed(3)
		r.end()
	})
	t.Run("on hosts", func(t *testing.T) {
		r := begin(t, "--workers", "3", "--emulate-hosts", "3", "--detect", "3s")
		r.formed(3)
		r.end()
	})
}

// A job that is stopped as a whole, and woken, loses no worker.
func TestStoppedJobWakes(t *testing.T) {
	built(t)
	t.Parallel()
	r := begin(t, "--workers", "4", "--detect", "1s")
	r.formed(4)
	run, err := rundir.ReadWorkers(r.dir)
	if err != nil {
		t.Fatal(err)
	}
	pids := []int{r.cmd.Process.Pid}
	for _, p := range run.Workers {
		pids = append(pids, p.PID)
	}
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
		for _, pid := range pids {
			if err := syscall.Kill(pid, sig); err != nil {
				t.Fatal(err)
			}
		}
		if sig == syscall.SIGSTOP {
			<-time.After(5 * time.Second) // that is how long it stands still, not something to wait for
		}
	}
	sum := r.end()
	for _, x := range sum.Recoveries {
		// A link that was being made as all stopped is made again.
		if !strings.HasPrefix(x.Cause, "the link between") {
			t.Errorf("%+v", x)
		}
	}
	if sum.WorkersLost != 0 {
		t.Errorf("%d workers were lost", sum.WorkersLost)
	}
}

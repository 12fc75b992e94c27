package require

import (
	"fmt"
	"runtime"
	"testing"
)

// recorder notes how a test would have ended.
type recorder struct {
	testing.TB
	outcome string
}

func (r *recorder) Helper() {}

func (r *recorder) Fatalf(format string, args ...any) {
	r.outcome = "fail: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Skipf(format string, args ...any) {
	r.outcome = "skip: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestTool(t *testing.T) {
	for _, c := range []struct {
		env, tool string
		ok        bool
		want      string
	}{
		{"", "torch", true, ""},
		{"torch", "torch", true, ""},
		{"", "torch", false, "skip: needs torch: no python3"},
		{"mpi,netns", "torch", false, "skip: needs torch: no python3"},
		{"mpi,torch", "torch", false, "fail: torch is required by SOLITON_REQUIRE, but: no python3"},
		{"pytorch", "torch", false, `fail: SOLITON_REQUIRE names "pytorch"; it may name azurite, browser, cma, cut, gcs, machines, mpi, netns, portable, qemu, slurm, ssh, tmpfs, torch, torchvision`},
		{"", "abacus", true, `fail: require.Tool: "abacus" is none of azurite, browser, cma, cut, gcs, machines, mpi, netns, portable, qemu, slurm, ssh, tmpfs, torch, torchvision`},
	} {
		t.Setenv(variable, c.env)
		r := &recorder{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			Tool(r, c.tool, c.ok, "no python3")
		}()
		<-done
		if r.outcome != c.want {
			t.Errorf("with %s=%q, Tool(%q, %v) gave %q, want %q", variable, c.env, c.tool, c.ok, r.outcome, c.want)
		}
	}
}

func TestAsked(t *testing.T) {
	for env, want := range map[string]string{"": "skip: takes long: SOLITON_REQUIRE=torch runs it", "mpi": "skip: takes long: SOLITON_REQUIRE=torch runs it", "mpi,torch": ""} {
		t.Setenv(variable, env)
		r := &recorder{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			Asked(r, "torch")
		}()
		<-done
		if r.outcome != want {
			t.Errorf("with %s=%q, Asked gave %q, want %q", variable, env, r.outcome, want)
		}
	}
}

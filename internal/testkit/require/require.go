// Package require lets tests depend on things that not every machine has: PyTorch, a browser, Azurite, a server of Google Cloud Storage (gcs, in a module of its own), network namespaces, the time to build with what other systems get (portable), separate test machines, sshd (ssh), MPI, QEMU, Slurm,
// the right to keep packets from other processes (cut), to read their memory (cma) and to mount a small disk (tmpfs).
//
// Without the thing a test is skipped and says what is missing. Where it must not be, the environment variable SOLITON_REQUIRE
// names the things, separated by commas, and the test fails instead:
//
//	SOLITON_REQUIRE=torch,netns go test ./...
package require

import (
	"flag"
	"os"
	"slices"
	"strings"
	"testing"
)

// variable is the environment variable that turns skips into failures.
const variable = "SOLITON_REQUIRE"

var all = flag.Bool("all", false, "run sweeps over every worker and every moment in full")

// All reports whether sweeps that CI runs a part of are to be run in full: go test PACKAGE -args -all.
func All() bool { return *all }

// tools are the names that tests may ask for. The list is closed, so that a mistyped name is an error and no silent skip.
var tools = []string{"azurite", "browser", "cma", "cut", "gcs", "machines", "mpi", "netns", "portable", "qemu", "slurm", "ssh", "tmpfs", "torch", "torchvision"}

// Tool returns when ok is true. Otherwise it skips the test with reason, which says what was looked for and not found, or fails
// it when SOLITON_REQUIRE names tool.
func Tool(t testing.TB, tool string, ok bool, reason string) {
	t.Helper()
	if !slices.Contains(tools, tool) {
		t.Fatalf("require.Tool: %q is none of %s", tool, strings.Join(tools, ", "))
	}
	required := split(os.Getenv(variable))
	for _, name := range required {
		if !slices.Contains(tools, name) {
			t.Fatalf("%s names %q; it may name %s", variable, name, strings.Join(tools, ", "))
		}
	}
	if ok {
		return
	}
	if slices.Contains(required, tool) {
		t.Fatalf("%s is required by %s, but: %s", tool, variable, reason)
	}
	t.Skipf("needs %s: %s", tool, reason)
}

// Asked skips a test that takes long, unless SOLITON_REQUIRE names the tool that it needs.
func Asked(t testing.TB, tool string) {
	t.Helper()
	Tool(t, tool, true, "")
	if !slices.Contains(split(os.Getenv(variable)), tool) {
		t.Skipf("takes long: %s=%s runs it", variable, tool)
	}
}

func split(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}

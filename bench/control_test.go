package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/bench/internal/lab"
)

// TestMain lets the processes that the control benchmark starts be this binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "control" && os.Args[2] == "-role" {
		if err := controlLatency(os.Args[2:], nil); err != nil {
			fmt.Fprintln(os.Stderr, "control:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// A few rounds of it run to their end and leave no process behind.
func TestControl(t *testing.T) {
	for _, how := range []threading{moving, keeping, yielding} {
		if err := roundTrips(2, 1, 1, how, 3, 1, nil); err != nil {
			t.Error(err)
		}
	}
	if err := underBulk(20, 1, nil); err != nil {
		t.Error(err)
	}
}

func TestSpread(t *testing.T) {
	var x []float64
	for i := range 200 {
		x = append(x, float64(200-i))
	}
	if s := lab.Spread(x); !strings.HasPrefix(s, "median 100.000, mean 100.500, p90 180.000, p99 198.000, max 200.000") {
		t.Error(s)
	}
}

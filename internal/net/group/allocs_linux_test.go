//go:build linux && !portable && !race

package group_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/commtest"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// In steady state, collectives of a host allocate nothing.
func TestHostAllocatesNothing(t *testing.T) {
	require.Reads(t)
	allocatesNothing(t, 2, onHost(t))
}

// Nor do those on lines.
func TestLinesAllocateNothing(t *testing.T) {
	allocatesNothing(t, 2, inTCP)
	allocatesNothing(t, 4, inTCP) // by halves
}

func allocatesNothing(t *testing.T, members int, network commtest.Network) {
	_, gs, v := team(t, members, network)
	const runs = 200
	for _, length := range []int{100, 10_000, 100_000} {
		step := uint64(0)
		run := func(g *group.Group, step uint64, x []float32) error {
			call := group.Call{Version: v, Step: step, Tag: uint16(length / 100), Priority: comm.Bulk}
			return errors.Join(g.Barrier(context.Background(), call), g.AllReduce(context.Background(), call, x))
		}
		var wg sync.WaitGroup
		for _, g := range gs[1:] {
			wg.Go(func() {
				x := make([]float32, length)
				for i := range uint64(2*runs + 1) {
					if err := run(g, i+1, x); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		x := make([]float32, length)
		f := func() {
			step++
			if err := run(gs[0], step, x); err != nil {
				t.Error(err)
			}
		}
		for range runs {
			f()
		}
		if n := testing.AllocsPerRun(runs, f); n >= 1 {
			t.Errorf("%d numbers: %v allocations for each barrier and all-reduce of %d members", length, n, members)
		}
		wg.Wait()
	}
}

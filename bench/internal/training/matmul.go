package training

import (
	"flag"
	"fmt"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// shape is one matrix product of a training step: m x k times k x n, with
// either operand stored transposed.
type shape struct {
	name           string
	m, k, n        int
	transA, transB bool
}

// gptShapes returns the products of one micro-batch of the GPT of width 256
// (context 128, 256 classes): forward, the gradient of the input and that of
// the weight, for each of its linear layers.
func gptShapes(microBatch int) []shape {
	rows := 128 * microBatch
	var all []shape
	for _, l := range []struct {
		name    string
		in, out int
	}{{"qkv", 256, 768}, {"projection", 256, 256}, {"mlp up", 256, 1024}, {"mlp down", 1024, 256}, {"head", 256, 256}} {
		all = append(all,
			shape{l.name + " forward", rows, l.in, l.out, false, false},
			shape{l.name + " input gradient", rows, l.out, l.in, false, true},
			shape{l.name + " weight gradient", l.in, rows, l.out, true, false})
	}
	return all
}

// attentionShapes returns the products of one head of attention on the second
// chunk of 64 positions: 128 positions of 32 elements.
func attentionShapes() []shape {
	return []shape{
		{"scores", 64, 32, 128, false, true},
		{"values", 64, 128, 32, false, false},
		{"probability gradient", 64, 32, 128, false, true},
		{"query gradient", 64, 128, 32, false, false},
		{"key and value gradient", 64, 128, 32, true, false},
	}
}

// Matmul compares kernel.MatMul with OpenBLAS, one thread each, shape by
// shape and turn by turn.
func Matmul(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("matmul", flag.ExitOnError)
	rounds := f.Int("rounds", 5, "turns of each side for a shape")
	seconds := f.Float64("seconds", 0.1, "length of a turn")
	if err := f.Parse(args); err != nil {
		return err
	}
	peer, err := peers.StartPeer("openblas.py", "OPENBLAS_NUM_THREADS=1")
	if err != nil {
		return err
	}
	defer peer.Close()
	fmt.Printf("peer: %s\nours: kernel path %v, one thread\n", peer.Hello, kernel.Active())
	fmt.Printf("%-32s %18s %10s %10s %7s  (GFLOP/s, best of %d turns of %gs; ratio: median over turns)\n",
		"product", "m x k x n", "ours", "OpenBLAS", "ratio", *rounds, *seconds)
	for _, set := range []struct {
		name   string
		shapes []shape
	}{{"micro-batch 8", gptShapes(8)}, {"micro-batch 2", gptShapes(2)}, {"attention, one head", attentionShapes()}} {
		fmt.Println(set.name)
		var oursTime, peerTime float64 // for one of each product, at the best rates
		oursTurn, peerTurn := make([]float64, *rounds), make([]float64, *rounds)
		for _, s := range set.shapes {
			var ours, theirs, ratios []float64
			row := report.Row{
				Comparison: "matmul", Case: fmt.Sprintf("%s, %s, %d x %d x %d", set.name, s.name, s.m, s.k, s.n), Threads: 1,
				Ours: "kernel.MatMul", Theirs: "OpenBLAS", Unit: "GFLOP/s", Kind: report.Rate,
			}
			flops := 2e-9 * float64(s.m*s.k*s.n)
			for turn := range *rounds {
				o := timeMatMul(s, time.Duration(*seconds*float64(time.Second)))
				p, err := peer.Ask("%d %d %d %s %s %g", s.m, s.k, s.n, letter(s.transA), letter(s.transB), *seconds)
				if err != nil {
					return err
				}
				ours, theirs, ratios = append(ours, o), append(theirs, p[0]), append(ratios, o/p[0])
				row.Add(o, p[0])
				oursTurn[turn] += 1e3 * flops / o
				peerTurn[turn] += 1e3 * flops / p[0]
			}
			rec.Add(row)
			o, p := lab.Best(ours), lab.Best(theirs)
			oursTime += flops / o
			peerTime += flops / p
			fmt.Printf("%-32s %18s %10.1f %10.1f %7.3f\n", s.name, fmt.Sprintf("%d x %d x %d", s.m, s.k, s.n), o, p, lab.Median(ratios))
		}
		all := report.Row{
			Comparison: "matmul", Case: set.name + ", one of each product", Threads: 1, Ours: "kernel.MatMul", Theirs: "OpenBLAS", Unit: "ms", Kind: report.Time,
		}
		for turn, o := range oursTurn {
			all.Add(o, peerTurn[turn])
		}
		rec.Add(all)
		fmt.Printf("%-32s %18s %10.2f %10.2f %7.3f  (ms for one of each; ratio of speeds)\n", "all", "", oursTime*1e3, peerTime*1e3, peerTime/oursTime)
	}
	return nil
}

func letter(trans bool) string {
	if trans {
		return "t"
	}
	return "n"
}

// timeMatMul returns the best GFLOP/s of the calls that fit into d.
func timeMatMul(s shape, d time.Duration) float64 {
	view := func(rows, cols int, trans bool) kernel.Mat {
		x := make([]float32, rows*cols)
		for i := range x {
			x[i] = float32(i%17) - 8
		}
		if trans {
			return kernel.Matrix(x, cols, rows).T()
		}
		return kernel.Matrix(x, rows, cols)
	}
	a, b, c := view(s.m, s.k, s.transA), view(s.k, s.n, s.transB), view(s.m, s.n, false)
	fastest := time.Duration(1 << 62)
	for end := time.Now().Add(d); time.Now().Before(end); {
		start := time.Now()
		kernel.MatMul(nil, c, a, b)
		fastest = min(fastest, time.Since(start))
	}
	return 2e-9 * float64(s.m*s.k*s.n) / fastest.Seconds()
}

package training

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/compute/kernel"
)

// Traces tells what traces and metrics cost: whole training steps of the default GPT with them, and
// the same with OTEL_SDK_DISABLED=true. Runs take turns; the figure is the median over pairs of
// the ratio of a step's median time. The bound is 1 %.
func Traces(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("traces", flag.ExitOnError)
	pairs := f.Int("pairs", 7, "pairs of runs")
	steps := f.Int("steps", 22, "steps of a run, of which the first two warm up")
	workers := f.Int("workers", 4, "worker processes, of one compute thread each")
	stages := f.Int("stages", 2, "pipeline stages")
	collector := f.Bool("collector", false, "spans and measures also go to a collector in this process, which reads and drops them")
	model := f.String("model", "", "flags of examples/gpt, such as \"--layers 2 --width 64\"")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *steps < 3 || *pairs < 1 || *workers < 1 || *stages < 1 || *stages > *workers {
		return fmt.Errorf("-steps %d, -pairs %d, -workers %d, -stages %d: give at least 3, 1, 1 and 1, and not more stages than workers", *steps, *pairs, *workers, *stages)
	}
	fmt.Printf("%s, kernel path %v, %d cores; %d workers, %d stages, GPT %s\n", runtime.Version(), kernel.Active(), runtime.NumCPU(), *workers, *stages, *model)
	dir, err := os.MkdirTemp("", "soliton-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := lab.TrainingBench{Dir: dir, Steps: *steps}
	if err := b.Build(); err != nil {
		return err
	}
	on, off, what := []string{"OTEL_SDK_DISABLED=false"}, []string{"OTEL_SDK_DISABLED=true"}, "traces.jsonl"
	if *collector {
		s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
		}))
		defer s.Close()
		on, what = append(on, "OTEL_EXPORTER_OTLP_ENDPOINT="+s.URL), "traces.jsonl and a collector"
	}
	flags := []string{"--stages", fmt.Sprint(*stages)}
	fmt.Printf("\n%s against none: ms of each step\n", what)
	var ratios, sums []float64
	row := report.Row{
		Comparison: "traces", Case: strings.TrimSpace(fmt.Sprintf("median step of the GPT %s", *model)) + fmt.Sprintf(", %d stages", *stages), Workers: *workers, Threads: 1,
		Ours: what, Theirs: "none", Unit: "ms", Kind: report.Cost, Goal: 1.01,
	}
	whole := row
	whole.Case = strings.Replace(row.Case, "median step", "all steps", 1)
	hash := ""
	for i := range *pairs {
		var with, without lab.Training
		for turn := range 2 {
			into, env := &with, on
			if (turn == 0) != (i%2 == 0) {
				into, env = &without, off
			}
			if *into, err = b.Run(*workers, flags, strings.Fields(*model), env...); err != nil {
				return err
			}
			if hash != "" && into.Hash != hash {
				return fmt.Errorf("runs ended with params_sha256 %s and %s", hash, into.Hash)
			}
			hash = into.Hash
		}
		ratios = append(ratios, lab.Median(with.Ms)/lab.Median(without.Ms))
		sums = append(sums, lab.Sum(with.Ms)/lab.Sum(without.Ms))
		row.Add(lab.Median(with.Ms), lab.Median(without.Ms))
		whole.Add(lab.Sum(with.Ms), lab.Sum(without.Ms))
		fmt.Printf("  pair %d  with %s  without %s\n", i, lab.List(with.Ms), lab.List(without.Ms))
		fmt.Printf("          with %.2f s of processor time, without %.2f s\n", with.CPU, without.CPU)
	}
	rec.Add(row, whole)
	fmt.Printf("  time of a step with them by that of one without, medians, median over pairs: %.3f of %s\n", lab.Median(ratios), lab.Fractions(ratios))
	// One step in four is traced in full, which a median may not show.
	fmt.Printf("  time of all steps with them by that of all without, median over pairs: %.3f of %s\n", lab.Median(sums), lab.Fractions(sums))
	return nil
}

package trainer_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/nn"
	"github.com/soliton-train/soliton/trainer"
)

// measured is a job with metrics: one of whole numbers, one whose sum depends on its order, and one that never counts.
func measured() trainer.Job {
	job := smallJob()
	job.Model = nn.Classifier(nn.ClassifierConfig{Inputs: 2, Hidden: []int{8, 8}, Classes: 2})
	job.Eval, job.EvalEvery = counts{n: 30}, 2
	job.Model.Metrics = []trainer.Metric{nn.Accuracy(), {Name: "mean output", Of: func(_ *trainer.Context, out, _ trainer.Tensor) (sum float64, n int64) {
		for _, x := range out.F {
			sum += float64(x) / 3
		}
		return sum, int64(len(out.F))
	}}, {Name: "none", Of: func(*trainer.Context, trainer.Tensor, trainer.Tensor) (float64, int64) { return 0, 0 }}}
	return job
}

// OnStep and metrics.jsonl have the same metrics of steps and evaluations. A metric without a mean is missing. Metrics do not change the result.
func TestMetrics(t *testing.T) {
	job := measured()
	var steps []trainer.StepInfo
	job.OnStep = func(s trainer.StepInfo) error { steps = append(steps, s); return nil }
	job.RunDir = filepath.Join(t.TempDir(), "run")
	sum := run(t, job)
	plain := measured()
	plain.Model.Metrics = nil
	if want := run(t, plain); want.StateSHA256 != sum.StateSHA256 || want.Loss != sum.Loss || *want.ValLoss != *sum.ValLoss {
		t.Errorf("%+v, want %+v", sum, want)
	}
	text, err := os.ReadFile(filepath.Join(job.RunDir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) != len(steps) || len(steps) != job.Steps {
		t.Fatalf("%d lines, %d steps", len(lines), len(steps))
	}
	for i, s := range steps {
		var m rundir.Metrics
		if err := json.Unmarshal([]byte(lines[i]), &m); err != nil {
			t.Fatal(err)
		}
		evaluated := s.Step%2 == 0 || s.Step == job.Steps
		if !maps.Equal(m.TrainMetrics, s.TrainMetrics) || len(s.TrainMetrics) != 2 {
			t.Errorf("step %d: %v, metrics.jsonl has %v", s.Step, s.TrainMetrics, m.TrainMetrics)
		}
		if !maps.Equal(m.Metrics, s.Metrics) || evaluated != (len(s.Metrics) == 2) || evaluated != (s.ValLoss != nil) {
			t.Errorf("step %d: %v, metrics.jsonl has %v", s.Step, s.Metrics, m.Metrics)
		}
		for of, metrics := range map[float64]map[string]float64{float64(job.GlobalBatch): s.TrainMetrics, 30: s.Metrics} {
			if right := metrics["accuracy"] * of; math.Abs(right-math.Round(right)) > 1e-9 || right < 0 || right > of {
				t.Errorf("step %d: accuracy %v of %v samples", s.Step, metrics["accuracy"], of)
			}
		}
	}
}

// Metrics have the same bits on any number of workers and stages.
func TestMetricsSameBits(t *testing.T) {
	job := func() trainer.Job {
		j := measured()
		j.MicroBatch = 1
		return j
	}
	want := trainer.RunWorkers(t, 1, 1, exact, job)[0]
	if len(want.Steps) < 2 || len(want.Steps[1].Metrics) != 2 || len(want.Steps[0].TrainMetrics) != 2 {
		t.Fatalf("%+v", want.Steps)
	}
	for _, c := range []struct{ workers, stages int }{{2, 1}, {3, 3}, {4, 2}} {
		for w, got := range trainer.RunWorkers(t, c.workers, c.stages, exact, job) {
			if !slices.EqualFunc(got.Steps, want.Steps, func(a, b control.Step) bool {
				return maps.Equal(a.Metrics, b.Metrics) && maps.Equal(a.TrainMetrics, b.TrainMetrics)
			}) {
				t.Errorf("%d workers, %d stages: worker %d has other metrics", c.workers, c.stages, w)
			}
		}
	}
}

func TestMetricFaults(t *testing.T) {
	of := func(*trainer.Context, trainer.Tensor, trainer.Tensor) (float64, int64) { return 0, 0 }
	for want, metrics := range map[string][]trainer.Metric{
		"Job.Model.Metrics has 9 metrics; at most 8 are supported": slices.Repeat([]trainer.Metric{{Name: "x", Of: of}}, 9),
		`has "x" at 1; names must be unique`:                       {{Name: "x", Of: of}, {Name: "x", Of: of}},
		`has "" at 0`:                                              {{Of: of}},
		`has "a\n" at 0`:                                           {{Name: "a\n", Of: of}},
		`has no function Of at 0 ("x")`:                            {{Name: "x"}},
	} {
		job := smallJob()
		job.Model.Metrics = metrics
		_, err := trainer.Run(t.Context(), job)
		if !errors.As(err, new(*trainer.ValidationError)) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// The file has an event for each step, in the format of TensorBoard's files, whose first bytes are always the same.
func TestTensorBoard(t *testing.T) {
	dir := t.TempDir()
	job := measured()
	board := trainer.TensorBoard{Dir: dir}
	if err := board.Write(trainer.StepInfo{Step: 1}); err == nil {
		t.Error("a step is written outside of a run")
	}
	var steps []trainer.StepInfo
	job.OnStep = func(s trainer.StepInfo) error {
		steps = append(steps, s)
		return board.Write(s)
	}
	run(t, job)
	file, err := os.ReadFile(filepath.Join(dir, "events.out.tfevents.0.soliton"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7f\x4b\x22\x09"; !strings.HasPrefix(string(file), want) {
		t.Errorf("the file begins with %q, want %q", file[:min(13, len(file))], want)
	}
	var events [][]byte
	for len(file) > 0 {
		n := binary.LittleEndian.Uint64(file)
		for _, part := range [][]byte{file[:12], file[12:][:n+4]} {
			body, sum := part[:len(part)-4], binary.LittleEndian.Uint32(part[len(part)-4:])
			crc := crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli))
			if (crc>>15|crc<<17)+0xa282ead8 != sum {
				t.Fatal("a checksum is wrong")
			}
		}
		events, file = append(events, file[12:12+n]), file[16+n:]
	}
	if len(events) != len(steps)+1 {
		t.Fatalf("%d events for %d steps", len(events), len(steps))
	}
	for i, e := range events[1:] {
		s, got := steps[i], map[string]float32{}
		step, last := uint64(0), events[i]
		fields(t, e, func(number protowire.Number, x uint64, b []byte) {
			switch number {
			case 1:
				if at := math.Float64frombits(x); at < 1e9 || i > 0 && at < math.Float64frombits(binary.LittleEndian.Uint64(last[1:])) {
					t.Errorf("event %d is of second %v", i, at)
				}
			case 2:
				step = x
			case 5:
				fields(t, b, func(_ protowire.Number, _ uint64, b []byte) {
					var tag string
					fields(t, b, func(number protowire.Number, x uint64, b []byte) {
						if number == 1 {
							tag = string(b)
						} else {
							got[tag] = math.Float32frombits(uint32(x))
						}
					})
				})
			}
		})
		want := map[string]float32{
			"loss/train": float32(s.Loss), "lr": float32(s.LR), "grad_norm": float32(s.GradNorm), "step_seconds": float32(s.Duration.Seconds()),
			"accuracy/train": float32(s.TrainMetrics["accuracy"]), "mean output/train": float32(s.TrainMetrics["mean output"]),
		}
		if s.ValLoss != nil {
			want["loss/val"] = float32(*s.ValLoss)
			want["accuracy/val"], want["mean output/val"] = float32(s.Metrics["accuracy"]), float32(s.Metrics["mean output"])
		}
		if int(step) != s.Step || !maps.Equal(got, want) {
			t.Errorf("event of step %d: %v, want %v of step %d", step, got, want, s.Step)
		}
	}
}

// fields reads a protocol buffer.
func fields(t *testing.T, b []byte, take func(number protowire.Number, x uint64, b []byte)) {
	t.Helper()
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		b = b[n:]
		var x uint64
		var content []byte
		switch kind {
		case protowire.VarintType:
			x, n = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			x, n = protowire.ConsumeFixed64(b)
		case protowire.Fixed32Type:
			var v uint32
			v, n = protowire.ConsumeFixed32(b)
			x = uint64(v)
		case protowire.BytesType:
			content, n = protowire.ConsumeBytes(b)
		default:
			t.Fatal(fmt.Sprint("type ", kind))
		}
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		take(number, x, content)
		b = b[n:]
	}
}

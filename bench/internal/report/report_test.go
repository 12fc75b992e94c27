package report

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the golden files")

var blas, torch = Tool{"OpenBLAS", "apt install libopenblas0-pthread", "0.3.21"}, Tool{"PyTorch", "apt install python3-torch", ""}

var compared = []Comparison{
	{Name: "matmul", About: "The matrix product with OpenBLAS", Needs: []string{"OpenBLAS"}, Quick: []string{"-rounds", "1"}, Takes: time.Minute},
	{Name: "step", About: "The training step with PyTorch", Needs: []string{"PyTorch"}, Takes: 2 * time.Minute},
	{Name: "survive", About: "Recovery with torchrun", Uses: []string{"PyTorch"}, Flags: []string{"-seed", "{round}"}, Takes: 3 * time.Minute},
}

func sample() *Page {
	product := Row{Comparison: "matmul", Case: "1024 x 256 | 768", Threads: 1, Ours: "kernel.MatMul", Theirs: "OpenBLAS", Unit: "GFLOP/s", Kind: Rate, Goal: 1}
	product.Add(110, 100)
	product.Add(120, 100)
	cost := Row{Comparison: "matmul", Case: "a step", Workers: 4, Threads: 1, Ours: "mirrors", Theirs: "none", Unit: "ms", Kind: Cost, Goal: 1.01}
	cost.Add(103, 100)
	again := product
	again.Samples = []Sample{{130, 100}}
	total := Row{Comparison: "survive", Case: "SIGKILL", Workers: 8, Ours: "total_ms", Theirs: "torchrun", Unit: "ms", Kind: Time, Goal: 300}
	total.Add(10, 4000)
	total.Add(0, 4000) // without a ratio
	total.Add(8, 1600)
	stall := Row{Comparison: "survive", Case: "SIGKILL", Workers: 8, Ours: "stall_ms", Unit: "ms"}
	for _, x := range []float64{0.123, 36, 1035} {
		stall.Add(x, 0)
	}
	began := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	can, skipped := Split(compared, []Tool{blas, torch})
	return &Page{
		Machine: Machine{CPU: "Example CPU", OS: "Debian 12", Kernel: "Linux 6.1", Go: "go1.26", Path: "avx512", Cores: 2, MemoryGB: 16.4},
		Commit:  "0123456789ab", MaxLoad: 0.05, Rounds: 2, Tools: []Tool{blas, torch}, Compared: can, Skipped: skipped,
		Runs: []Run{
			{Comparison: "matmul", Round: 1, Command: "go run ./bench matmul", Began: began, Seconds: 40, Others: 0.01, Rows: []Row{product, cost}},
			{Comparison: "survive", Round: 1, Command: "go run ./bench survive -seed 1", Began: began.Add(time.Hour), Seconds: 400, Others: 0.002, Rows: []Row{total, stall}},
			{Comparison: "matmul", Round: 2, Command: "go run ./bench matmul", Began: began.Add(2 * time.Hour), Seconds: 44, Others: 0, Rows: []Row{again}},
		},
	}
}

// golden compares a text with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs; go test ./bench/internal/report -update writes it:\n%s", file, got)
	}
}

func TestMarkdown(t *testing.T) {
	golden(t, "page.md", sample().Markdown("../bench/results/all", "benchmarks"))
}

// What a page is not, it says on top.
func TestMarkdownOfForced(t *testing.T) {
	p := sample()
	p.Quick, p.Dirty = true, true
	p.Runs[0].Others, p.Runs[1].Others = 0.4, -1
	page := p.Markdown("raw", "plots")
	for _, w := range []string{"**A trial", "**The work tree had changes", "**Other programs used more than 5 % of the processors during matmul round 1 (40 %).", "is not known", "others used unknown"} {
		if !strings.Contains(page, w) {
			t.Errorf("the page does not say %q:\n%s", w, page)
		}
	}
	if w := sample().Warnings(); len(w) != 0 {
		t.Errorf("a page of a commit on an idle machine warns: %q", w)
	}
}

func TestText(t *testing.T) {
	p, text := sample(), ""
	for _, s := range p.Sections() {
		text += s.Text()
	}
	golden(t, "text.txt", Peers(p.Tools, p.Skipped)+text)
}

// The JSON of plots is what the module bench/plots reads.
func TestPlots(t *testing.T) {
	var plots []Plot
	p := sample()
	for _, s := range p.Sections() {
		plots = append(plots, s.Plots()...)
	}
	text, err := json.MarshalIndent(plots, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "plots.json", string(text)+"\n")
}

// Rows survive JSON, and those of several runs become one.
func TestMerge(t *testing.T) {
	runs := sample().Runs
	text, err := json.Marshal(runs)
	if err != nil {
		t.Fatal(err)
	}
	var back []Run
	if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(back, runs) {
		t.Errorf("%v: %+v", err, back)
	}
	rows := Merge([]Run{back[0], back[2]})
	if len(rows) != 2 || len(rows[0].Samples) != 3 || len(rows[1].Samples) != 1 {
		t.Errorf("%+v", rows)
	}
	var none *Recorder
	none.Add(rows...) // drops them
	rec := Recorder{}
	if rec.Add(Row{}, rows[0]); len(rec.Rows) != 1 {
		t.Errorf("a row without samples is recorded: %+v", rec.Rows)
	}
}

// What is measured is not measured again, and what comes next is the round with the smallest number.
func TestTasks(t *testing.T) {
	can, skipped := Split(compared, []Tool{blas, torch})
	if len(can) != 2 || len(skipped) != 2 || !skipped[0].Whole || skipped[1].Whole {
		t.Fatalf("%+v %+v", can, skipped)
	}
	done := []Run{{Comparison: "matmul", Round: 1, Seconds: 30, Peers: []string{"OpenBLAS"}}, {Comparison: "survive", Round: 1, Seconds: 100, Peers: []string{}}}
	tasks := Tasks(can, 2, done[:1])
	got := ""
	for _, x := range tasks {
		got += strings.Join(x.Comparison.Args("9", false), " ") + "; "
	}
	if got != "survive -seed 9; matmul; survive -seed 9; " {
		t.Errorf("left: %s", got)
	}
	if took := Takes(tasks, done[:1]); took != 30*time.Second+2*3*time.Minute {
		t.Errorf("it takes %v", took)
	}
	if left := Incomplete(can, 1, done); left != nil {
		t.Errorf("incomplete: %v", left)
	}
	if left := Incomplete(can, 2, done); !reflect.DeepEqual(left, []string{"matmul", "survive"}) {
		t.Errorf("incomplete: %v", left)
	}
	found := torch
	found.Found = "2.0"
	if !done[1].Current(can, []Tool{blas, torch}) || done[1].Current(can, []Tool{blas, found}) || !done[0].Current(can, []Tool{blas, found}) {
		t.Error("a run counts although a peer was installed since, or does not although none was")
	}
	if args := compared[0].Args("1", true); !reflect.DeepEqual(args, []string{"matmul", "-rounds", "1"}) {
		t.Errorf("quick: %v", args)
	}
}

func TestChoose(t *testing.T) {
	chosen, err := Choose(compared, "survive,matmul")
	if err != nil || len(chosen) != 2 || chosen[0].Name != "matmul" {
		t.Errorf("%v %v", chosen, err)
	}
	if all, err := Choose(compared, ""); err != nil || len(all) != 3 {
		t.Errorf("%v %v", all, err)
	}
	if _, err := Choose(compared, "matmul,nothing"); err == nil || !strings.Contains(err.Error(), `"nothing" is no comparison; give some of matmul,step,survive`) {
		t.Errorf("%v", err)
	}
}

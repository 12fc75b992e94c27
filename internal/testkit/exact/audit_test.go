package exact

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/store/safetensors"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

var (
	schedules = flag.Int("schedules", 1, "random schedules of TestSamplesOfRandomChaos")
	schedule  = flag.Uint64("schedule", 1, "number of the first")
)

// What testdata/audit trains: numbers, and documents of one letter each that are packed.
const (
	auditSteps, auditBatch, auditStride      = 20, 8, 512
	auditContext, auditLetters, auditSamples = 8, 30, 38 + auditLetters
	loneSample                               = 34 // that one process cannot read
)

// numbered is a data set whose samples are their own numbers. Sample bad cannot be read in its second epoch.
type numbered struct{ n, base, bad int }

var errBad = errors.New("bad sector")

func (d numbered) Len() int { return d.n }

func (d numbered) Sample(s trainer.Sample, in, _ trainer.Tensor) error {
	if s.Index == d.bad && s.Epoch == 1 {
		return errBad
	}
	for i := range in.I {
		in.I[i] = int32(d.base + s.Index)
	}
	return nil
}

// auditFiles writes what testdata/audit reads.
func auditFiles(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	text, err := os.ReadFile("../../../data/testdata/gpt2.json")
	if err != nil {
		t.Fatal(err)
	}
	var k map[string]any
	if err := json.Unmarshal(text, &k); err != nil {
		t.Fatal(err)
	}
	m := k["model"].(map[string]any)
	m["merges"] = []any{} // each byte is a token
	maps.DeleteFunc(m["vocab"].(map[string]any), func(_ string, id any) bool { return id.(float64) >= 256 })
	k["added_tokens"].([]any)[0].(map[string]any)["id"] = 256
	if text, err = json.Marshal(k); err != nil {
		t.Fatal(err)
	}
	var lines []byte
	for i := range auditLetters {
		lines = fmt.Appendf(lines, "{\"text\": %q}\n", strings.Repeat(string(rune('A'+i)), 1+i*i%7))
	}
	for name, content := range map[string][]byte{"tokenizer.json": text, "documents.jsonl": lines} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// audited is a step of an undisturbed run.
type audited struct {
	samples []int
	total   int // of their numbers
}

// auditOrder returns the steps of an undisturbed run that skips the samples of a ledger. What it skips must be unreadable, and nothing else.
func auditOrder(t *testing.T, dir string, bad, lone bool, ledger []uint64) (steps [auditSteps]audited) {
	t.Helper()
	k, err := data.ReadTokenizer(filepath.Join(dir, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	documents, err := data.JSONL("text", filepath.Join(dir, "documents.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := data.Tokenize(k, "<|endoftext|>", documents)
	if err != nil {
		t.Fatal(err)
	}
	packed, err := tokens.Pack()
	if err != nil {
		t.Fatal(err)
	}
	unreadable := -1
	if bad {
		unreadable = 4
	}
	one := trainer.Spec{Shape: []int{auditContext}, Kind: trainer.Int32}
	mix, err := trainer.Bind(data.Mix{Seed: 5, Parts: []data.Part{
		{Data: numbered{31, 0, unreadable}, Weight: 0.5}, {Data: numbered{7, 31, -1}, Weight: 0.2}, {Data: packed, Weight: 0.3},
	}, Samples: 41}, one, one)
	if err != nil {
		t.Fatal(err)
	}
	skipped := make(map[int]int)
	for _, i := range ledger {
		skipped[int(i)]++
	}
	in, target, n := trainer.NewTensor(trainer.Int32, auditContext), trainer.NewTensor(trainer.Int32, auditContext), mix.Len()
	for i := range auditSteps * auditBatch {
		at := int(rng.NewPerm(9, uint64(i/n), uint64(n)).At(uint64(i % n)))
		for skips := range skipped[i] + 1 {
			err := mix.Sample(trainer.Sample{Index: (at + skips) % n, Epoch: i / n, Train: true}, in, target)
			switch last := skips == skipped[i]; {
			case last && err != nil:
				t.Errorf("step %d has sample %d, place %d of the data, which cannot be read", i/auditBatch+1, i, at+skips)
			case !last && err == nil && !(lone && in.I[0] == loneSample):
				t.Errorf("step %d skips sample %d, place %d of the data, which can be read", i/auditBatch+1, i, at+skips)
			}
		}
		s := &steps[i/auditBatch]
		number := int(in.I[0])
		if number >= 'A' {
			number += auditSamples - auditLetters - 'A'
		}
		s.samples = append(s.samples, number)
		for _, x := range in.I {
			s.total += int(x)
		}
	}
	return steps
}

// audit runs testdata/audit, and counts what happens in its runs.
type audit struct {
	launcher, program, dir string // of the files

	runs, lost, rollbacks, skipped int
}

func newAudit(t *testing.T) *audit {
	t.Helper()
	a := &audit{dir: auditFiles(t)}
	a.launcher, _ = programs(t)
	a.program = filepath.Join(bin, "audit")
	if out, err := exec.Command("go", "build", "-o", a.program, "./testdata/audit").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	return a
}

// run makes a run, and compares the samples of each committed step with those of an undisturbed one.
func (a *audit) run(t *testing.T, bad, lone bool, flags ...string) trainer.Summary {
	t.Helper()
	_ = os.Remove(filepath.Join(a.dir, "first"))
	dir := filepath.Join(t.TempDir(), "run")
	name := strings.Join(flags, " ")
	program := []string{a.program, "--checkpoint-every", "4", "--dir", a.dir, fmt.Sprintf("--bad=%v", bad), fmt.Sprintf("--lone=%v", lone)}
	sum, metrics := launchIn(t, dir, a.launcher, append(append(flags, "--respawn", "--bad-samples", "skip"), program...)...)
	ledger, err := rundir.ReadSkips(dir)
	if err != nil {
		t.Fatal(err)
	}
	if bad && len(ledger) == 0 {
		t.Errorf("%s: no sample is skipped", name)
	}
	a.runs, a.lost, a.rollbacks, a.skipped = a.runs+1, a.lost+sum.WorkersLost, a.rollbacks+sum.Rollbacks, a.skipped+len(ledger)
	steps := auditOrder(t, a.dir, bad, lone, ledger)
	var want [auditSamples]float32
	for s, step := range steps {
		for _, i := range step.samples {
			want[i] += (2 - float32(uint32(1)<<s)/(1<<(auditSteps-1))) / auditBatch
		}
	}
	written := make(map[int]bool) // after a rollback, steps are written again
	for _, line := range metrics {
		var m struct {
			Step int
			Loss float64
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil || m.Step < 1 || m.Step > auditSteps {
			t.Fatal(line, err)
		}
		if total := steps[m.Step-1].total; m.Loss != float64(total)/auditBatch {
			t.Errorf("%s: the loss of step %d is %v, want %v", name, m.Step, m.Loss, float64(total)/auditBatch)
		}
		written[m.Step] = true
	}
	if len(written) != auditSteps {
		t.Errorf("%s: metrics of %d steps", name, len(written))
	}
	file, err := safetensors.Open(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for layer := range 3 {
		got := make([]float32, auditSamples*auditStride)
		if err := file.Read(fmt.Sprintf("%d.count", layer), got); err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if i%auditStride == 0 && got[i] != want[i/auditStride] || i%auditStride != 0 && got[i] != 0 {
				t.Errorf("%s: layer %d: sample %d had a part in steps %v, want %v", name, layer, i/auditStride, stepsOf(got[i]), stepsOf(want[i/auditStride]))
			}
		}
	}
	return sum
}

// The parameters of a run say which sample had a part in which step: while workers are killed, frozen and replaced, join and leave, and
// after a rollback, each step has the samples of an undisturbed run, none lost and none repeated. The data are mixed and packed.
func TestSamplesOfChaos(t *testing.T) {
	a := newAudit(t)
	for _, c := range []struct {
		chaos, mirrors string
	}{
		{"kill:1@3/backward,join@5,kill:0@9/commit,leave:3@12,kill:4@15/gather", "1"},
		{"kill:2@6+1,kill:0@11/reduce,kill:3@11/reduce", "0"},
	} {
		sum := a.run(t, false, false, "--workers", "4", "--stages", "2", "--mirrors", c.mirrors, "--chaos", c.chaos)
		if sum.WorkersLost == 0 || c.mirrors == "0" && sum.Rollbacks == 0 {
			t.Errorf("%s: %d workers lost and %d rollbacks", c.chaos, sum.WorkersLost, sum.Rollbacks)
		}
	}
}

// The same holds under random faults, while one sample cannot be read by any worker. In every other schedule, another one cannot be read by
// one worker, which fails; then no worker is asked to leave, since draws count on those that they spare.
//
//	go test ./internal/testkit/exact -run SamplesOfRandomChaos -v -timeout 2h -schedules 200
func TestSamplesOfRandomChaos(t *testing.T) {
	a := newAudit(t)
	for i := *schedule; i < *schedule+uint64(*schedules) && !t.Failed(); i++ {
		r := rand.New(rand.NewPCG(i, 0))
		workers, lone, kinds := 3+r.IntN(3), i%2 == 1, ""
		if lone {
			kinds = ":kill+freeze+flip+slow+join"
		}
		a.run(t, true, lone, "--workers", fmt.Sprint(workers), "--stages", fmt.Sprint(1+r.IntN(2)), "--mirrors", fmt.Sprint(1+r.IntN(2)),
			"--chaos", fmt.Sprintf("random:%d:0.2%s", i, kinds))
	}
	t.Logf("%d schedules commit %d samples, with %d workers lost and %d rollbacks; %d are skipped", a.runs, a.runs*auditSteps*auditBatch, a.lost, a.rollbacks, a.skipped)
}

// stepsOf are the steps that a parameter says.
func stepsOf(x float32) (steps []int) {
	bits := -int(x*auditBatch*(1<<(auditSteps-1))) & (1<<auditSteps - 1)
	for s := range auditSteps {
		if bits>>s&1 == 1 {
			steps = append(steps, s+1)
		}
	}
	return steps
}

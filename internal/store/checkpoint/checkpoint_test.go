package checkpoint

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/store/safetensors"
)

const writerEnv = "SOLITON_CHECKPOINT_TEST_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerEnv); dir != "" {
		writeForever(dir)
	}
	goleak.VerifyTestMain(m)
}

const job = "job-1"

var layers = []int{13295, 0, 4096, 1, 30000}

// bitsOf returns the state of a range: any bits, those of NaNs too.
func bitsOf(step, part int, r id.Range) []float32 {
	x := make([]float32, r.Hi-r.Lo)
	for i := range x {
		h := uint32(step*7919+part*104729+r.Layer*1299709+r.Lo+i) * 2654435761
		x[i] = math.Float32frombits(h ^ h>>15)
	}
	return x
}

// deal splits each layer over n owners.
func deal(n int) [][]id.Range {
	owned := make([][]id.Range, n)
	for l, size := range layers {
		for w := range n {
			owned[w] = append(owned[w], id.Range{Layer: l, Lo: size * w / n, Hi: size * (w + 1) / n})
		}
	}
	return owned
}

func moments(rule string) int { return len(rules[rule]) }

func part(step, worker int, plan id.Version, rule string, ranges []id.Range) Part {
	p := Part{Job: job, Step: step, Plan: plan, Worker: worker, Rule: rule}
	for _, r := range ranges {
		s := Shard{Range: r, Params: bitsOf(step, 0, r)}
		for i := range moments(rule) {
			s.Moments = append(s.Moments, bitsOf(step, i+1, r))
		}
		p.Shards = append(p.Shards, s)
	}
	return p
}

// writeParts writes the files of n owners side by side and returns the manifest that would commit them.
func writeParts(t testing.TB, dir string, step, n int, rule string) Manifest {
	t.Helper()
	m := Manifest{Job: job, Step: step, Plan: id.Version{Generation: 2, N: step}, Rule: rule, Layers: layers, Files: make([]File, n)}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for w, ranges := range deal(n) {
		wg.Go(func() { m.Files[w], errs[w] = Write(context.Background(), dir, part(step, w, m.Plan, rule, ranges)) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return m
}

func save(t testing.TB, dir string, step, n int) Manifest {
	t.Helper()
	m := writeParts(t, dir, step, n, "adamw")
	if err := Commit(dir, m); err != nil {
		t.Fatal(err)
	}
	return m
}

// compareAll reads a whole checkpoint under a layout of n workers.
func compareAll(t testing.TB, r *Reader, n int) {
	t.Helper()
	step := r.Manifest().Step
	for _, ranges := range deal(n) {
		for _, rg := range ranges {
			got := make([][]float32, 1+len(r.Moments()))
			for i := range got {
				got[i] = make([]float32, rg.Hi-rg.Lo)
			}
			if err := r.Read(t.Context(), rg.Layer, rg.Lo, rg.Hi, got[0], got[1:]); err != nil {
				t.Fatal(err)
			}
			for i := range got {
				if !sameBits(got[i], bitsOf(step, i, rg)) {
					t.Errorf("step %d, part %d of %v, read by %d: other bits", step, i, rg, n)
				}
			}
		}
	}
}

func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// wantNewest checks which checkpoint is used and what is refused, each "path: kind".
func wantNewest(t testing.TB, dir string, step int, refused ...string) {
	t.Helper()
	r, faults, err := Newest(t.Context(), dir, rundir.Only(job))
	switch {
	case step < 0:
		if !errors.Is(err, ErrNone) || r != nil {
			t.Errorf("Newest: %v, want none", err)
		}
	case err != nil:
		t.Errorf("Newest: %v (refused: %v)", err, faults)
	default:
		if r.Manifest().Step != step {
			t.Errorf("Newest is of step %d, want %d (refused: %v)", r.Manifest().Step, step, faults)
		}
		compareAll(t, r, 3)
		r.Close()
	}
	var got []string
	for _, f := range faults {
		got = append(got, fmt.Sprintf("%s: %v", strings.TrimPrefix(f.Path, "checkpoints/"), f.Kind))
	}
	if !slices.Equal(got, refused) {
		t.Errorf("refused %q, want %q", got, refused)
	}
}

func files(t testing.TB, dir string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			name, _ := filepath.Rel(filepath.Join(dir, folder), path)
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func TestAnyLayout(t *testing.T) {
	for _, rule := range []string{"adamw", "sgd"} {
		dir := t.TempDir()
		m := writeParts(t, dir, 12, 4, rule)
		if err := Commit(dir, m); err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{1, 3, 4, 7} {
			r, refused, err := Newest(t.Context(), dir, rundir.Only(job))
			if err != nil || refused != nil {
				t.Fatal(err, refused)
			}
			compareAll(t, r, n)
			if got := r.Manifest(); got.Plan != m.Plan {
				t.Errorf("manifest %+v, want %+v", got, m)
			}
			r.Close()
		}
		// Any borders and parts do.
		r, err := Open(dir, m.Step)
		if err != nil {
			t.Fatal(err)
		}
		for _, rg := range []id.Range{{Layer: 0, Lo: 0, Hi: 1}, {Layer: 0, Lo: 3322, Hi: 3325}, {Layer: 0, Lo: 13294, Hi: 13295}, {Layer: 4, Lo: 7499, Hi: 22501}, {Layer: 0, Lo: 5, Hi: 5}, {Layer: 1, Lo: 0, Hi: 0}} {
			got := make([]float32, rg.Hi-rg.Lo)
			if err := r.Read(t.Context(), rg.Layer, rg.Lo, rg.Hi, nil, [][]float32{got}); err != nil || !sameBits(got, bitsOf(12, 1, rg)) {
				t.Errorf("reading a moment of %v: %v", rg, err)
			}
			if err := r.Read(t.Context(), rg.Layer, rg.Lo, rg.Hi, got, nil); err != nil || !sameBits(got, bitsOf(12, 0, rg)) {
				t.Errorf("reading parameters of %v: %v", rg, err)
			}
		}
		for _, rg := range []id.Range{{Layer: 0, Lo: -1, Hi: 0}, {Layer: 0, Lo: 2, Hi: 1}, {Layer: 0, Lo: 13295, Hi: 13296}, {Layer: 5, Lo: 0, Hi: 1}, {Layer: -1, Lo: 0, Hi: 1}, {Layer: 1, Lo: 0, Hi: 1}} {
			if err := r.Read(t.Context(), rg.Layer, rg.Lo, rg.Hi, nil, nil); err == nil {
				t.Errorf("%v was read", rg)
			}
		}
		if err := r.Read(t.Context(), 0, 0, 3, make([]float32, 2), nil); err == nil {
			t.Error("too small a slice was filled")
		}
		if err := r.Read(t.Context(), 0, 0, 3, nil, make([][]float32, 3)); err == nil {
			t.Error("more moments were read than there are")
		}
		r.Close()
		if err := r.Read(t.Context(), 0, 0, 3, nil, nil); err == nil {
			t.Error("a closed reader read")
		}
	}
}

// Anybody's safetensors library finds the tensors by their names.
func TestNamesOfTensors(t *testing.T) {
	dir := t.TempDir()
	p := part(3, 5, id.Version{Generation: 1, N: 2}, "adamw", []id.Range{{Layer: 3, Lo: 0, Hi: 1}, {Layer: 1, Lo: 0, Hi: 0}, {Layer: 4, Lo: 4096, Hi: 8192}})
	file, err := Write(t.Context(), dir, p)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "checkpoints", "step-00000003", "plan-1.2-worker-5.safetensors")
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var names []string
	for _, info := range f.Tensors {
		names = append(names, info.Name)
	}
	want := []string{
		"layer.3/params[0:1]", "layer.3/exp_avg[0:1]", "layer.3/exp_avg_sq[0:1]",
		"layer.4/params[4096:8192]", "layer.4/exp_avg[4096:8192]", "layer.4/exp_avg_sq[4096:8192]",
	}
	if !slices.Equal(names, want) {
		t.Errorf("tensors %q, want %q", names, want)
	}
	if f.Metadata["job"] != job || f.Metadata["step"] != "3" || f.Metadata["plan"] != "1.2" || f.Metadata["rule"] != "adamw" {
		t.Errorf("metadata %v", f.Metadata)
	}
	st, err := os.Stat(path)
	sum, err2 := f.SHA256()
	if err != nil || err2 != nil || file.Size != st.Size() || file.SHA256 != sum || !slices.Equal(file.Ranges, []id.Range{{Layer: 3, Lo: 0, Hi: 1}, {Layer: 4, Lo: 4096, Hi: 8192}}) {
		t.Errorf("Write returned %+v; the file has %d bytes and hash %s", file, st.Size(), sum)
	}
}

func TestDamageIsRefusedByName(t *testing.T) {
	const shards = "plan-2.20-worker-2.safetensors"
	change := func(name string, f func([]byte) []byte) func(*testing.T, string) {
		return func(t *testing.T, step string) {
			path := filepath.Join(step, name)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, f(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	flip := func(at int) func([]byte) []byte {
		return func(b []byte) []byte {
			b[(at+len(b))%len(b)] ^= 1
			return b
		}
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, step string)
		want   string
	}{
		{"cut file", change(shards, func(b []byte) []byte { return b[:len(b)-1] }), shards + ": truncated"},
		{"empty file", change(shards, func([]byte) []byte { return nil }), shards + ": truncated"},
		{"longer file", change(shards, func(b []byte) []byte { return append(b, 0) }), shards + ": altered"},
		{"bit in data", change(shards, flip(-1000)), shards + ": altered"},
		{"bit in header", change(shards, flip(20)), shards + ": altered"},
		{"missing file", func(t *testing.T, step string) { os.Remove(filepath.Join(step, shards)) }, shards + ": missing"},
		{"another's file", func(t *testing.T, step string) {
			os.Rename(filepath.Join(step, "plan-2.20-worker-1.safetensors"), filepath.Join(step, shards))
		}, "plan-2.20-worker-1.safetensors: missing"},
		{"directory for a file", func(t *testing.T, step string) {
			os.Remove(filepath.Join(step, shards))
			os.Mkdir(filepath.Join(step, shards), 0o755)
		}, shards + ": malformed"},
		{"link for a file", func(t *testing.T, step string) {
			os.Rename(filepath.Join(step, shards), filepath.Join(step, "x"))
			os.Symlink("x", filepath.Join(step, shards))
		}, shards + ": malformed"},
		{"missing manifest", func(t *testing.T, step string) { os.Remove(filepath.Join(step, manifestName)) }, manifestName + ": unfinished"},
		{"cut manifest", change(manifestName, func(b []byte) []byte { return b[:len(b)/2] }), manifestName + ": malformed"},
		{"empty manifest", change(manifestName, func([]byte) []byte { return nil }), manifestName + ": malformed"},
		{"spaces in manifest", change(manifestName, func(b []byte) []byte { return append(b, ' ') }), manifestName + ": altered"},
		{"edited manifest", change(manifestName, func(b []byte) []byte {
			return []byte(strings.Replace(string(b), `"job":"`, `"job":"x`, 1))
		}), manifestName + ": altered"},
		{"unknown field", change(manifestName, func(b []byte) []byte {
			return []byte(strings.Replace(string(b), `"rule"`, `"ruler":1,"rule"`, 1))
		}), manifestName + ": altered"},
		{"other format", change(manifestName, func(b []byte) []byte {
			return []byte(strings.Replace(string(b), `"format":2`, `"format":3`, 1))
		}), manifestName + ": foreign"},
		{"manifest of another step", func(t *testing.T, step string) {
			b, err := os.ReadFile(filepath.Join(filepath.Dir(step), "step-00000010", manifestName))
			if err != nil {
				t.Fatal(err)
			}
			os.WriteFile(filepath.Join(step, manifestName), b, 0o600)
		}, manifestName + ": foreign"},
		{"another job", func(t *testing.T, step string) {
			dir := filepath.Dir(filepath.Dir(step))
			r, _, err := Newest(t.Context(), dir, rundir.Only(job))
			if err != nil {
				t.Fatal(err)
			}
			m := r.Manifest()
			r.Close()
			m.Job = "job-2"
			if err := Commit(dir, m); err != nil {
				t.Fatal(err)
			}
		}, manifestName + ": foreign"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			save(t, dir, 10, 3)
			save(t, dir, 20, 4)
			c.damage(t, filepath.Join(dir, "checkpoints", "step-00000020"))
			wantNewest(t, dir, 10, "step-00000020/"+c.want)
		})
	}
}

// Only what a reader needs is verified, and a fault stays.
func TestVerifyOnce(t *testing.T) {
	dir := t.TempDir()
	m := save(t, dir, 1, 2)
	path := filepath.Join(dir, stepDir(1), m.Files[1].Name)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := Open(dir, m.Step)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.Read(t.Context(), 0, 0, 10, make([]float32, 10), nil); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that is done: %v", err)
	}
	for range 2 {
		err := r.Verify(t.Context())
		var e *Error
		if !errors.As(err, &e) || !errors.Is(err, ErrAltered) || !strings.HasSuffix(e.Path, m.Files[1].Name) || !strings.Contains(err.Error(), e.Path) {
			t.Errorf("Verify: %v", err)
		}
	}
}

// TestEveryPointOfWriting goes through what lies on disk between any two steps of writing a checkpoint, as a crash
// leaves it.
func TestEveryPointOfWriting(t *testing.T) {
	whole := t.TempDir()
	m := save(t, whole, 20, 4)
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(whole, stepDir(20), name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	dir := t.TempDir()
	save(t, dir, 10, 3)
	older := files(t, dir)
	step := filepath.Join(dir, stepDir(20))
	if err := os.Mkdir(step, 0o755); err != nil {
		t.Fatal(err)
	}
	unfinished := "step-00000020/manifest.json: unfinished"
	wantNewest(t, dir, 10, unfinished)
	names := []string{}
	for _, f := range m.Files {
		names = append(names, f.Name)
	}
	for _, name := range append(names, manifestName) {
		content := read(name)
		temp := filepath.Join(step, "."+name+".77.0"+tempSuffix)
		for _, n := range []int{0, 1, len(content) / 2, len(content)} {
			if err := os.WriteFile(temp, content[:n], 0o600); err != nil {
				t.Fatal(err)
			}
			wantNewest(t, dir, 10, unfinished)
			if name == manifestName {
				continue
			}
			if err := Commit(dir, m); !errors.Is(err, ErrMissing) {
				t.Errorf("Commit without %s: %v", name, err)
			}
		}
		if name == m.Files[2].Name { // an unfinished checkpoint is removed once no worker writes it
			if err := Prune(t.Context(), dir, Keep{}, 20); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(temp); err != nil {
				t.Errorf("pruned while it is written: %v", err)
			}
			other := t.TempDir()
			if err := os.CopyFS(other, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			if err := Prune(t.Context(), other, Keep{}, 21); err != nil {
				t.Error(err)
			}
			if got := files(t, other); !slices.Equal(got, older) {
				t.Errorf("left %q, want %q", got, older)
			}
		}
		if err := os.Rename(temp, filepath.Join(step, name)); err != nil {
			t.Fatal(err)
		}
	}
	wantNewest(t, dir, 20)
}

func TestFailedWriteLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Write(ctx, dir, part(1, 0, id.Version{}, "sgd", deal(1)[0])); !errors.Is(err, context.Canceled) {
		t.Errorf("Write: %v", err)
	}
	if left := files(t, dir); left != nil {
		t.Errorf("left %q", left)
	}
	if _, err := Write(t.Context(), filepath.Join(dir, "none"), part(1, 0, id.Version{}, "sgd", nil)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a run directory: %v", err)
	}
	wantNewest(t, dir, -1, "step-00000001/manifest.json: unfinished")
}

func steps(t testing.TB, dir string) (all []int) {
	t.Helper()
	entries, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Step)
		if (e.Manifest == nil) != (e.Err != nil) || e.Manifest != nil && e.Manifest.Step != e.Step {
			t.Errorf("entry %+v", e)
		}
	}
	return all
}

func TestPrune(t *testing.T) {
	dir := t.TempDir()
	prune := func(keep, writing int, want ...int) {
		t.Helper()
		if err := Prune(t.Context(), dir, Keep{Newest: keep}, writing); err != nil {
			t.Fatal(err)
		}
		if got := steps(t, dir); !slices.Equal(got, want) {
			t.Errorf("steps %v, want %v", got, want)
		}
	}
	prune(0, 100)
	for step := 1; step <= 6; step++ {
		save(t, dir, step, 2)
	}
	flip := func(step int) {
		path := filepath.Join(dir, stepDir(step), fmt.Sprintf("plan-2.%d-worker-1.safetensors", step))
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 4
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	writeParts(t, dir, 7, 2, "adamw")
	// What another layout left behind goes; what is not ours stays.
	stray := filepath.Join(dir, stepDir(6), "plan-1.6-worker-9.safetensors")
	note := filepath.Join(dir, folder, "note")
	for _, path := range []string{stray, note} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	prune(5, 7, 7, 6, 5, 4, 3, 2)
	if _, err := os.Stat(stray); err == nil {
		t.Error("a stray file was left")
	}
	prune(DefaultKeep, 7, 7, 6, 5, 4)
	flip(6)
	flip(5)
	prune(1, 7, 7, 4) // 4 is the only whole one
	wantNewest(t, dir, 4, "step-00000007/manifest.json: unfinished")
	flip(4)
	prune(1, 8, 4) // none is whole: evidence stays, what was never finished goes
	save(t, dir, 8, 3)
	prune(1, 9, 8)
	if _, err := os.Stat(note); err != nil {
		t.Error(err)
	}
	wantNewest(t, dir, 8)
}

// After going back, a step is written again under another plan. Until its manifest is there, the old one counts.
func TestSameStepAgain(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 5, 4)
	m := Manifest{Job: job, Step: 5, Plan: id.Version{Generation: 3, N: 1}, Rule: "adamw", Layers: layers}
	for w, ranges := range deal(2) {
		f, err := Write(t.Context(), dir, part(5, w, m.Plan, "adamw", ranges))
		if err != nil {
			t.Fatal(err)
		}
		m.Files = append(m.Files, f)
		wantNewest(t, dir, 5)
	}
	if err := Commit(dir, m); err != nil {
		t.Fatal(err)
	}
	if err := Prune(t.Context(), dir, Keep{}, 6); err != nil {
		t.Fatal(err)
	}
	wantNewest(t, dir, 5)
	want := []string{"step-00000005/manifest.json", "step-00000005/plan-3.1-worker-0.safetensors", "step-00000005/plan-3.1-worker-1.safetensors"}
	if got := files(t, dir); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
}

// writeForever is the process that TestKilledWriter kills.
func writeForever(dir string) {
	check := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	for step := 1; ; step++ {
		m := Manifest{Job: job, Step: step, Plan: id.Version{Generation: 2, N: step}, Rule: "sgd", Layers: layers}
		for w, ranges := range deal(3) {
			f, err := Write(context.Background(), dir, part(step, w, m.Plan, "sgd", ranges))
			check(err)
			m.Files = append(m.Files, f)
		}
		check(Commit(dir, m))
		fmt.Println(step)
		check(Prune(context.Background(), dir, Keep{Newest: 2}, step+1))
	}
}

// A process that does nothing but write, commit and prune is killed wherever it happens to be.
func TestKilledWriter(t *testing.T) {
	for _, lines := range []int{1, 2, 5, 9} {
		dir := t.TempDir()
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), writerEnv+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		scan := bufio.NewScanner(out)
		committed := 0
		for range lines {
			if scan.Scan(); scan.Text() != strconv.Itoa(committed+1) {
				t.Fatalf("the writer says %q", scan.Text())
			}
			committed++
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, out)
		cmd.Wait()

		r, refused, err := Newest(t.Context(), dir, rundir.Only(job))
		if err != nil {
			t.Fatal(err)
		}
		if step := r.Manifest().Step; step < committed {
			t.Errorf("step %d is the newest, and %d was committed", step, committed)
		}
		for _, e := range refused {
			if !errors.Is(e, ErrUnfinished) {
				t.Error(e)
			}
		}
		compareAll(t, r, 2)
		want := r.Manifest().Step
		r.Close()
		if err := Prune(t.Context(), dir, Keep{Newest: 1}, math.MaxInt); err != nil {
			t.Error(err)
		}
		if got := files(t, dir); len(got) != 4 || !slices.Equal(steps(t, dir), []int{want}) {
			t.Errorf("left %q, want one checkpoint of 3 files", got)
		}
	}
}

func TestManifestFaultsTogether(t *testing.T) {
	good := writeParts(t, t.TempDir(), 1, 2, "sgd")
	for _, c := range []struct {
		name   string
		change func(*Manifest)
		want   []string
	}{
		{"fields", func(m *Manifest) {
			*m = Manifest{Step: -1, Plan: id.Version{Generation: -1, N: 0}, Rule: "lion"}
		}, []string{"job:", "step:", "plan:", `"lion" is none of adamw, sgd`, "layers:", "files:"}},
		{"files", func(m *Manifest) {
			m.Files[0].Name, m.Files[0].SHA256, m.Files[1].Size = "../x.safetensors", "", 7
		}, []string{`"../x.safetensors"`, "64 digits", "7 bytes"}},
		{"twice", func(m *Manifest) { m.Files[1] = m.Files[0] }, []string{
			"plan-2.1-worker-0.safetensors is there twice", "of which another has a part", "none has [6647,13295) of layer 0", "none has [0,1) of layer 3",
		}},
		{"hole", func(m *Manifest) { m.Files[0].Ranges[0].Lo = 7 }, []string{"none has [0,7) of layer 0"}},
		{"last layer", func(m *Manifest) { m.Layers = append(slices.Clone(m.Layers), 9) }, []string{"none has [0,9) of layer 5"}},
		{"range", func(m *Manifest) { m.Files[0].Ranges[0].Hi = math.MaxInt }, []string{"impossible range [0,9223372036854775807) of layer 0"}},
		{"layer", func(m *Manifest) { m.Layers = []int{-1, math.MaxInt} }, []string{"layers[0]", "layers[1]"}},
		{"job", func(m *Manifest) { m.Job = "\xff" }, []string{"UTF-8"}},
	} {
		m := good
		m.Files = slices.Clone(good.Files)
		for i := range m.Files {
			m.Files[i].Ranges = slices.Clone(m.Files[i].Ranges)
		}
		c.change(&m)
		_, err := m.Encode()
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v, want %q in it", c.name, err, want)
			}
		}
		m.Format = Format
		b, err := json.Marshal(&m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseManifest(b); err == nil {
			t.Errorf("%s: it is read", c.name)
		}
	}
}

func TestPartFaultsTogether(t *testing.T) {
	r := id.Range{Layer: 0, Lo: 0, Hi: 4}
	x := make([]float32, 4)
	for _, c := range []struct {
		part Part
		want []string
	}{
		{Part{Worker: -1, Step: -1}, []string{"job:", "step:", "rule:", "worker:"}},
		{Part{Job: job, Rule: "sgd", Shards: []Shard{
			{id.Range{Layer: -1, Lo: 0, Hi: 4}, x, [][]float32{x}}, {id.Range{Layer: 0, Lo: 4, Hi: 0}, nil, nil}, {r, x[:3], nil}, {r, x, nil}, {r, x, [][]float32{x[:3]}},
		}}, []string{"shards[0]: [0,4) of layer -1 is no range", "shards[1]: [4,0)", "shards[2]: 3 parameters", "shards[3]: 0 moments; sgd has 1", "shards[4]: a moment", "overlap"}},
	} {
		_, err := Write(t.Context(), t.TempDir(), c.part)
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q in it", err, want)
			}
		}
	}
}

// One reader serves several goroutines.
func TestReadSideBySide(t *testing.T) {
	dir := t.TempDir()
	r, err := Open(dir, save(t, dir, 1, 4).Step)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { compareAll(t, r, 3) })
	}
	wg.Wait()
}

// Whatever the bytes, they are refused or are what Encode writes.
func FuzzManifest(f *testing.F) {
	m := writeParts(f, f.TempDir(), 1, 2, "sgd")
	b, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:len(b)-1])
	f.Add([]byte(`{"format":1,"layers":[1],"files":[{"ranges":[{}]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseManifest(b)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Kind == nil {
				t.Fatalf("error %v is not typed", err)
			}
			return
		}
		if again, err := m.Encode(); err != nil || string(again) != string(b) {
			t.Fatalf("%q was read, and written as %q, %v", b, again, err)
		}
	})
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Even a file whose manifest vouches for it may hold anything.
func FuzzReader(f *testing.F) {
	dir := f.TempDir()
	ranges := []id.Range{{Layer: 0, Lo: 0, Hi: 2}, {Layer: 1, Lo: 0, Hi: 1}}
	file, err := Write(context.Background(), dir, part(1, 0, id.Version{}, "sgd", ranges))
	if err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(filepath.Join(dir, stepDir(1), file.Name))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)-4])
	f.Add(binary.LittleEndian.AppendUint64(nil, 2))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &source{file: File{Name: file.Name, Size: int64(len(b)), SHA256: hash(b), Ranges: ranges}, rule: "sgd"}
		tensors, err := s.verify(t.Context(), bytes.NewReader(b))
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || !errors.Is(err, ErrMalformed) {
				t.Fatalf("error %v, want one of a malformed file", err)
			}
			return
		}
		s.open = tensors
		r := &Reader{manifest: Manifest{Rule: "sgd", Layers: []int{2, 1}}, layers: [][]piece{{{ranges[0], s}}, {{ranges[1], s}}}}
		for _, rg := range ranges {
			x := make([]float32, rg.Hi-rg.Lo)
			if err := r.Read(t.Context(), rg.Layer, rg.Lo, rg.Hi, x, [][]float32{x}); err != nil {
				t.Fatalf("reading %v of a file that was verified: %v", rg, err)
			}
		}
	})
}

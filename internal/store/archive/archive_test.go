package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

var job = rundir.Job{Program: "gpt", Model: "gpt", Steps: 90}.Plain()

// valueOf is a parameter of the state after a step.
func valueOf(step, i int) float32 { return float32(step) + float32(i)/1000 }

// save makes a checkpoint of two owners in a run directory.
func save(t *testing.T, dir string, step int) {
	t.Helper()
	m := checkpoint.Manifest{Job: job.ID(), Step: step, Plan: id.Version{Generation: 1, N: 1}, Rule: "sgd", Layers: []int{100}}
	for w := range 2 {
		s := checkpoint.Shard{Range: id.Range{Lo: 50 * w, Hi: 50 * (w + 1)}, Moments: [][]float32{make([]float32, 50)}}
		for i := s.Lo; i < s.Hi; i++ {
			s.Params = append(s.Params, valueOf(step, i))
		}
		f, err := checkpoint.Write(t.Context(), dir, checkpoint.Part{Job: m.Job, Step: step, Plan: m.Plan, Worker: w, Rule: m.Rule, Shards: []checkpoint.Shard{s}})
		if err != nil {
			t.Fatal(err)
		}
		m.Files = append(m.Files, f)
	}
	if err := checkpoint.Commit(dir, m); err != nil {
		t.Fatal(err)
	}
}

// wantStep fetches the newest checkpoint and checks it.
func wantStep(t *testing.T, b Bucket, step int) {
	t.Helper()
	c, err := Newest(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	got, err := Fetch(t.Context(), b, c, dir, 0)
	if err != nil || got.Step != step {
		t.Fatalf("%+v, %v; want step %d", got, err, step)
	}
	if step == 0 {
		return
	}
	r, _, err := checkpoint.Newest(t.Context(), dir, job.Eras())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	x := make([]float32, 100)
	if err := r.Read(t.Context(), 0, 0, 100, x, nil); err != nil {
		t.Fatal(err)
	}
	for i := range x {
		if math.Float32bits(x[i]) != math.Float32bits(valueOf(step, i)) {
			t.Fatalf("step %d: parameter %d is %v", step, i, x[i])
		}
	}
}

// The samples that were skipped are there with each checkpoint. An older one that is used comes with those of the newest; one
// whose own are damaged is not used.
func TestSkips(t *testing.T) {
	dir, b := t.TempDir(), Folder{t.TempDir()}
	a := New(b, claimOf("x", 0))
	const first, second = `{"sample":7,"time":"2026-01-02T03:04:05Z"}` + "\n", `{"sample":47,"time":"2026-01-02T03:04:06Z"}` + "\n"
	var prefixes []string
	for i, skips := range []string{"", first + "torn", first + second} {
		step := 10 * (i + 1)
		save(t, dir, step)
		err := os.WriteFile(filepath.Join(dir, "skips.jsonl"), []byte(skips), 0o600)
		if err := errors.Join(err, a.Save(t.Context(), dir, step, checkpoint.Keep{})); err != nil {
			t.Fatal(err)
		}
		found, err := filepath.Glob(filepath.Join(b.Path, "shards", fmt.Sprintf("step-%08d", step), "*"))
		if err != nil || len(found) != 1 {
			t.Fatal(found, err)
		}
		prefixes = append(prefixes, found[0])
	}
	want := func(step int, skips, refused string) {
		t.Helper()
		wantStep(t, b, step)
		c, err := Newest(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Fetch(t.Context(), b, c, t.TempDir(), 0)
		if err != nil || string(got.Skips) != skips || !strings.Contains(strings.Join(got.Refused, "\n"), refused) {
			t.Errorf("%q, refused %q: %v; want %q, refused %q", got.Skips, got.Refused, err, skips, refused)
		}
	}
	overwrite := func(path string) {
		t.Helper()
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want(30, first+second, "")
	shards, err := filepath.Glob(filepath.Join(prefixes[2], "*.safetensors"))
	if err != nil || len(shards) == 0 {
		t.Fatal(shards, err)
	}
	overwrite(shards[0])
	want(20, first+second, "step-00000030")
	overwrite(filepath.Join(prefixes[2], "skips.jsonl"))
	want(20, first, "skips.jsonl: it has not the digest of the manifest")
	if err := os.Remove(filepath.Join(prefixes[1], "skips.jsonl")); err != nil {
		t.Fatal(err)
	}
	want(10, "", "skips.jsonl: ")
}

func claimOf(owner string, after int) Claim {
	return Claim{Owner: owner, After: after, Job: job, Data: []rundir.DataFile{{Path: "a", Size: 3}}}
}

// What is saved is there, on another machine as well, and what the rule does not keep is removed.
func TestSaveAndFetch(t *testing.T) {
	dir, b := t.TempDir(), Folder{filepath.Join(t.TempDir(), "place")}
	if _, err := Newest(t.Context(), b); !errors.Is(err, ErrNoRun) {
		t.Fatal(err)
	}
	a := New(b, claimOf("x", 0))
	if err := a.Own(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantStep(t, b, 0)
	for step := 10; step <= 50; step += 10 {
		save(t, dir, step)
		if err := a.Save(t.Context(), dir, step, checkpoint.Keep{Newest: 2}); err != nil {
			t.Fatal(err)
		}
		wantStep(t, b, step)
	}
	if err := a.Save(t.Context(), dir, 50, checkpoint.Keep{Newest: 2}); err != nil {
		t.Errorf("once more: %v", err)
	}
	manifests, _ := b.List(t.Context(), "manifests/")
	shards, _ := b.List(t.Context(), "shards/")
	if len(manifests) != 2 || len(shards) != 4 {
		t.Errorf("left are %q and %q", manifests, shards)
	}
	c, err := Newest(t.Context(), b)
	if err != nil || c.Job.ID() != job.ID() || len(c.Data) != 1 || c.Data[0].Path != "a" || c.Generation != 1 {
		t.Errorf("%+v, %v", c, err)
	}

	// A file that is altered or missing is found, and the checkpoint before is used.
	if err := os.WriteFile(filepath.Join(b.Path, shards[2]), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	wantStep(t, b, 40)
	if err := b.Delete(t.Context(), shards[2]); err != nil {
		t.Fatal(err)
	}
	wantStep(t, b, 40)
}

// Of two starts of a run, the one that claimed last publishes. What the other one publishes meanwhile does not count.
func TestStaleGeneration(t *testing.T) {
	dir, b := t.TempDir(), Folder{t.TempDir()}
	for _, step := range []int{10, 20, 30, 40} {
		save(t, dir, step)
	}
	old := New(b, claimOf("old", 0))
	for _, step := range []int{10, 20} {
		if err := old.Save(t.Context(), dir, step, checkpoint.Keep{}); err != nil {
			t.Fatal(err)
		}
	}
	next := New(b, claimOf("next", 20))
	if err := next.Own(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantStep(t, b, 20)
	if err := old.Save(t.Context(), dir, 30, checkpoint.Keep{}); !errors.Is(err, ErrStale) {
		t.Errorf("the old start publishes: %v", err)
	}
	// It checked its claim just before the other one was made.
	text, err := os.ReadFile(filepath.Join(b.Path, "manifests", "step-00000020.00000001.json"))
	if err == nil {
		err = b.Create(t.Context(), "manifests/step-00000040.00000001.json", bytes.ReplaceAll(text, []byte("step-00000020"), []byte("step-00000040")))
	}
	if err != nil {
		t.Fatal(err)
	}
	wantStep(t, b, 20)
	if err := next.Save(t.Context(), dir, 30, checkpoint.Keep{}); err != nil {
		t.Fatal(err)
	}
	wantStep(t, b, 30)
	if again := New(b, claimOf("next", 20)); again.Own(t.Context()) != nil || again.at != 2 {
		t.Errorf("another host of the same start has generation %d", again.at)
	}
	// Many that claim at once get one each.
	got := make(chan int)
	for i := range 5 {
		go func() {
			a := New(b, claimOf(fmt.Sprint("start", i), 30))
			if err := a.Own(t.Context()); err != nil && !errors.Is(err, ErrStale) {
				t.Error(err)
			}
			got <- a.claim.Generation
		}()
	}
	var all []int
	for range 5 {
		all = append(all, <-got)
	}
	if slices.Sort(all); !slices.Equal(all, []int{3, 4, 5, 6, 7}) {
		t.Errorf("claimed %v", all)
	}
}

// First values are copied once for all generations. What has become of them at the target is not used.
func TestFirstValues(t *testing.T) {
	dir, b := t.TempDir(), Folder{t.TempDir()}
	file, there := filepath.Join(dir, "values"), filepath.Join(dir, "fetched")
	own := func(owner string) Claim {
		claim := claimOf(owner, 0)
		claim.FirstFile = file
		if err := New(b, claim).Own(t.Context()); err != nil {
			t.Fatal(err)
		}
		c, err := Newest(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	fetch := func(c Claim) (text, refused string) {
		_ = os.Remove(there)
		refused, err := FetchFirst(t.Context(), b, c, there)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := os.ReadFile(there)
		return string(got), refused
	}
	if c := own("another program"); c.First != "" {
		t.Errorf("first values %q, and there are none", c.First)
	}
	if err := os.WriteFile(file, []byte("values"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := own("x")
	at := filepath.Join(b.Path, firstName(c.First))
	was, err := os.Stat(at)
	if err != nil {
		t.Fatal(err)
	}
	c = own("y")
	if now, err := os.Stat(at); err != nil || !os.SameFile(now, was) {
		t.Errorf("they were copied again: %v", err)
	}
	if text, refused := fetch(c); text != "values" || refused != "" {
		t.Errorf("fetched %q, %s", text, refused)
	}
	for _, change := range []func(){
		func() { c.FirstSize-- },
		func() { _ = os.WriteFile(at, []byte("valueS"), 0o600) },
		func() { _ = os.WriteFile(at, nil, 0o600) },
		func() { _ = os.Remove(at) },
		func() { c.FirstSize = -1 },
		func() { c.First = "../claims/00000001" },
	} {
		before := c
		change()
		if text, refused := fetch(c); text != "" || !strings.HasPrefix(refused, "first/") {
			t.Errorf("fetched %q, %s", text, refused)
		}
		c = before
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("%d files are left", len(left))
	}
}

// faulty fails at its n-th write, after a part of it, and at all later ones.
type faulty struct {
	Bucket
	left int
	lost bool // what was written is there all the same
}

var errFault = errors.New("the target has gone")

func (f *faulty) fails() bool { f.left--; return f.left < 0 }

func (f *faulty) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	if f.fails() {
		if f.lost && f.left == -1 {
			_ = f.Bucket.Put(ctx, name, content, size)
		}
		return errFault
	}
	return f.Bucket.Put(ctx, name, content, size)
}

func (f *faulty) Create(ctx context.Context, name string, content []byte) error {
	if f.fails() {
		if f.lost && f.left == -1 {
			_ = f.Bucket.Create(ctx, name, content)
		}
		return errFault
	}
	return f.Bucket.Create(ctx, name, content)
}

func (f *faulty) Delete(ctx context.Context, name string) error {
	if f.fails() {
		return errFault
	}
	return f.Bucket.Delete(ctx, name)
}

// A target that fails at any write leaves a whole checkpoint, and the next try succeeds.
func TestEveryFault(t *testing.T) {
	dir := t.TempDir()
	for _, step := range []int{10, 20} {
		save(t, dir, step)
	}
	for _, lost := range []bool{false, true} {
		for n := 0; ; n++ {
			b := &faulty{Bucket: Folder{t.TempDir()}, left: math.MaxInt, lost: lost}
			a := New(b, claimOf("x", 0))
			if err := a.Save(t.Context(), dir, 10, checkpoint.Keep{Newest: 1}); err != nil {
				t.Fatal(err)
			}
			b.left = n
			err := a.Save(t.Context(), dir, 20, checkpoint.Keep{Newest: 1})
			if err == nil {
				if n < 5 {
					t.Errorf("a checkpoint took %d writes", n)
				}
				break
			}
			published := n > 2 || n == 2 && lost // after two files and the manifest
			if !errors.Is(err, errFault) {
				t.Fatal(err)
			}
			if published {
				wantStep(t, b, 20)
			} else {
				wantStep(t, b, 10)
			}
			b.left = math.MaxInt
			if err := a.Save(t.Context(), dir, 20, checkpoint.Keep{Newest: 1}); err != nil {
				t.Fatalf("fault %d, then: %v", n, err)
			}
			wantStep(t, b, 20)
			if left, _ := b.List(t.Context(), "shards/"); len(left) != 2 {
				t.Errorf("fault %d leaves %q", n, left)
			}
		}
	}
}

// What lies at a target is not trusted.
func TestHostileTarget(t *testing.T) {
	dir, b := t.TempDir(), Folder{t.TempDir()}
	save(t, dir, 10)
	if err := New(b, claimOf("x", 0)).Save(t.Context(), dir, 10, checkpoint.Keep{}); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"manifests/step-00000020.00000001.json": "{}",
		"manifests/step-00000030.00000001.json": `{"prefix":"../../etc/","manifest":"e30="}`,
		"manifests/step-00000040.00000009.json": `{}`, // a generation without a claim
		"manifests/x":                           "",
		"claims/1.json":                         "",
	} {
		if err := b.Create(t.Context(), name, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	wantStep(t, b, 10)
	for _, name := range []string{"../x", "/x", ""} {
		if _, err := b.Get(t.Context(), name); err == nil {
			t.Errorf("%q was opened", name)
		}
	}
	if err := b.Create(t.Context(), claimName(2), []byte(strings.Repeat("x", 100))); err != nil {
		t.Fatal(err)
	}
	if _, err := Newest(t.Context(), b); err == nil || !strings.Contains(err.Error(), "claims/00000002.json") {
		t.Errorf("%v", err)
	}
}

// What has the place of a claim and is no file ends a try with its name: it is neither claimed for ever nor waited for.
func TestClaimIsNoFile(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 10)
	for name, put := range map[string]func(path string) error{
		"fifo":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"loop":      func(path string) error { return os.Symlink(path, path) },
	} {
		t.Run(name, func(t *testing.T) {
			b := Folder{t.TempDir()}
			if err := errors.Join(os.Mkdir(filepath.Join(b.Path, "claims"), 0o700), put(filepath.Join(b.Path, claimName(1)))); err != nil {
				t.Fatal(err)
			}
			err := New(b, claimOf("x", 0)).Save(t.Context(), dir, 10, checkpoint.Keep{})
			if err == nil || !strings.Contains(err.Error(), claimName(1)) {
				t.Errorf("saved: %v", err)
			}
			if _, err := Newest(t.Context(), b); err == nil || name != "directory" && !strings.Contains(err.Error(), claimName(1)) {
				t.Errorf("newest: %v", err)
			}
		})
	}
}

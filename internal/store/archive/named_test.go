package archive

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// owned returns the archive of a start of the run with data and first values of its own.
func owned(t *testing.T, b Bucket, owner string, after int, data, first string) *Archive {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values")
	if err := os.WriteFile(file, []byte(first), 0o600); err != nil {
		t.Fatal(err)
	}
	claim := claimOf(owner, after)
	claim.Data, claim.FirstFile = []rundir.DataFile{{Path: data, Size: 3}}, file
	a := New(b, claim)
	if err := a.Own(t.Context()); err != nil {
		t.Fatal(err)
	}
	return a
}

// Lists of data files and first values go with the last checkpoint of the generations that name them. What is no such object stays.
func TestPruneNamed(t *testing.T) {
	dir, b := t.TempDir(), Folder{t.TempDir()}
	for _, step := range []int{10, 20, 30} {
		save(t, dir, step)
	}
	want := func(when string, data, first int) {
		t.Helper()
		for folder, n := range map[string]int{"data/": data, "first/": first} {
			if names, err := b.List(t.Context(), folder); err != nil || len(names) != n {
				t.Errorf("%s: %q, %v; want %d of %s", when, names, err, n, folder)
			}
		}
	}
	const users = "data/notes.json"
	if err := b.Create(t.Context(), users, nil); err != nil {
		t.Fatal(err)
	}
	keep := checkpoint.Keep{Newest: 2}
	if err := owned(t, b, "one", 0, "a", "first").Save(t.Context(), dir, 10, keep); err != nil {
		t.Fatal(err)
	}
	want("one generation", 1+1, 1)
	if err := owned(t, b, "two", 10, "b", "first").Save(t.Context(), dir, 20, keep); err != nil {
		t.Fatal(err)
	}
	want("a checkpoint of each is kept", 2+1, 1)
	third := owned(t, b, "three", 20, "b", "other")
	want("a third one is claimed", 2+1, 2)
	if err := third.Save(t.Context(), dir, 30, keep); err != nil {
		t.Fatal(err)
	}
	want("the first one has no checkpoint", 1+1, 2)
	keep.Newest = 1
	if err := third.Save(t.Context(), dir, 30, keep); err != nil {
		t.Fatal(err)
	}
	want("nor has the second one", 1+1, 1)
	if _, err := b.Get(t.Context(), users); err != nil {
		t.Error(err)
	}
	wantStep(t, b, 30)
	c, err := Newest(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	if refused, err := FetchFirst(t.Context(), b, c, filepath.Join(t.TempDir(), "values")); err != nil || refused != "" {
		t.Errorf("%s, %v", refused, err)
	}
}

// during is a bucket at which something happens just before an object is removed.
type during struct {
	Bucket
	deletes func(name string)
}

func (d *during) Delete(ctx context.Context, name string) error {
	d.deletes(name)
	return d.Bucket.Delete(ctx, name)
}

// A generation is claimed with a list that the one before is removing at this moment: the next checkpoint brings the list back.
func TestClaimWhilePruning(t *testing.T) {
	dir, b := t.TempDir(), Folder{t.TempDir()}
	for _, step := range []int{10, 20, 30} {
		save(t, dir, step)
	}
	keep := checkpoint.Keep{Newest: 1}
	if err := owned(t, b, "one", 0, "a", "first").Save(t.Context(), dir, 10, keep); err != nil {
		t.Fatal(err)
	}
	var third *Archive
	busy := &during{Bucket: b, deletes: func(name string) {
		if third == nil && strings.HasPrefix(name, "data/") {
			third = owned(t, b, "three", 20, "a", "first")
		}
	}}
	if err := owned(t, busy, "two", 10, "b", "other").Save(t.Context(), dir, 20, keep); !errors.Is(err, ErrStale) || third == nil {
		t.Fatalf("%v: it goes on removing", err)
	}
	if names, err := b.List(t.Context(), "first/"); err != nil || len(names) != 2 {
		t.Errorf("%q, %v", names, err)
	}
	if err := third.Save(t.Context(), dir, 30, keep); err != nil {
		t.Fatal(err)
	}
	wantStep(t, b, 30)
}

// A claim may name anything, and only what this package has written is removed.
func TestPruneHostileNames(t *testing.T) {
	dir, b := t.TempDir(), Folder{t.TempDir()}
	save(t, dir, 10)
	other := strings.Repeat("ab", 32)
	names := []string{"data/x.json", "data/sub/" + other + ".json", "data/" + other + ".pt", "first/" + other + ".json", "first/" + other}
	for _, name := range names {
		if err := b.Put(t.Context(), name, bytes.NewReader(nil), 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Put(t.Context(), "data/"+other+".json", bytes.NewReader(nil), 0); err != nil {
		t.Fatal(err)
	}
	if err := New(b, claimOf("x", 0)).Save(t.Context(), dir, 10, checkpoint.Keep{}); err != nil {
		t.Fatal(err)
	}
	left, _ := b.List(t.Context(), "data/")
	first, _ := b.List(t.Context(), "first/")
	left = append(left, first...)
	for _, name := range names {
		if !slices.Contains(left, name) {
			t.Errorf("%s is gone", name)
		}
	}
	if slices.Contains(left, "data/"+other+".json") {
		t.Error("a list that no claim names is left")
	}
}

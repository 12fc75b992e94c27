// Package archivetest has the test that every kind of archive.Bucket passes.
package archivetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/store/archive"
)

// Bucket tests that an empty bucket does what an archive relies on.
func Bucket(t *testing.T, b archive.Bucket) {
	t.Helper()
	ctx := t.Context()
	if names, err := b.List(ctx, "x/"); err != nil || len(names) != 0 {
		t.Fatalf("%q, %v", names, err)
	}
	put := func(name string, content []byte) {
		t.Helper()
		if err := b.Put(ctx, name, bytes.NewReader(content), int64(len(content))); err != nil {
			t.Fatal(name, err)
		}
		r, err := b.Get(ctx, name)
		if err != nil {
			t.Fatal(name, err)
		}
		got, err := io.ReadAll(r)
		if r.Close(); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: %d bytes of %d, %v", name, len(got), len(content), err)
		}
	}
	put("x/1", []byte("one"))
	put("x/1", []byte("another one"))
	put("x/2", nil)
	put("x/deeper/3", []byte("three"))
	put("xy/4", []byte("of another folder"))
	put("y/large", bytes.Repeat([]byte("0123456789abcdef"), 1<<20+1)) // in several parts
	names, err := b.List(ctx, "x/")
	if slices.Sort(names); err != nil || !slices.Equal(names, []string{"x/1", "x/2", "x/deeper/3"}) {
		t.Errorf("%q, %v", names, err)
	}
	if _, err := b.Get(ctx, "x/3"); !errors.Is(err, archive.ErrMissing) {
		t.Errorf("of nothing: %v", err)
	}
	if err := errors.Join(b.Delete(ctx, "x/1"), b.Delete(ctx, "x/1")); err != nil {
		t.Error(err)
	}
	if _, err := b.Get(ctx, "x/1"); !errors.Is(err, archive.ErrMissing) {
		t.Errorf("of what was removed: %v", err)
	}
	const claim = "claims/00000001.json"
	won := make(chan int, 8)
	var all sync.WaitGroup
	for i := range cap(won) {
		all.Go(func() {
			err := b.Create(ctx, claim, fmt.Append(nil, i))
			if err == nil {
				won <- i
			} else if !errors.Is(err, archive.ErrExists) {
				t.Log(err) // a conflict, which is tried again
			}
		})
	}
	all.Wait()
	if len(won) != 1 {
		t.Errorf("%d of %d created it", len(won), cap(won))
	}
	if err := b.Create(ctx, claim, nil); !errors.Is(err, archive.ErrExists) {
		t.Errorf("once more: %v", err)
	}
	if r, err := b.Get(ctx, claim); err != nil {
		t.Error(err)
	} else {
		got, err := io.ReadAll(r)
		if r.Close(); err != nil || len(won) == 1 && string(got) != fmt.Sprint(<-won) {
			t.Errorf("%q is there, %v", got, err)
		}
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if err := b.Put(over, "x/5", bytes.NewReader([]byte("five")), 4); err == nil {
		t.Error("it was written after the context had ended")
	}
}

package archive

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
)

// Others are the machines of a run that have files of its checkpoints, and the keys of its target.
type Others struct {
	Self string // name of this machine
	// Put has a machine put files of a checkpoint below a prefix, and returns those that are there then. ctx bounds it.
	Put func(ctx context.Context, machine, prefix string, m *checkpoint.Manifest, files []int) []int
	// Fetch gets files of a checkpoint from others into the run directory.
	Fetch func(ctx context.Context, m *checkpoint.Manifest, files []int) error
}

// prefixOf returns the prefix of an attempt to copy a checkpoint, which no other attempt has.
func prefixOf(step, generation int) string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails
	return fmt.Sprintf("shards/step-%08d/%08d-%s/", step, generation, hex.EncodeToString(b[:]))
}

var prefixForm = regexp.MustCompile(`^shards/step-[0-9]{8,10}/[0-9]{8,10}-[0-9a-f]{16}/$`)

// PutFile copies a file of the checkpoint that r reads below the prefix of an attempt that another machine makes.
func PutFile(ctx context.Context, b Bucket, r *checkpoint.Reader, prefix string, file int) error {
	if !prefixForm.MatchString(prefix) {
		return fmt.Errorf("archive: %q is no place for files of a checkpoint", prefix)
	}
	return putFile(ctx, b, r, prefix, file)
}

func putFile(ctx context.Context, b Bucket, r *checkpoint.Reader, prefix string, file int) error {
	f := r.Manifest().Files[file]
	if err := r.VerifyFile(ctx, file); err != nil {
		return err
	}
	if err := b.Put(ctx, prefix+f.Name, r.Content(file), f.Size); err != nil {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	return nil
}

// putFiles copies all files of a checkpoint below a prefix. Each machine that has some copies its share, all at the same time; what
// another machine could not copy comes here first.
func (a *Archive) putFiles(ctx context.Context, dir string, r *checkpoint.Reader, prefix string) error {
	m := r.Manifest()
	there := make([]bool, len(m.Files)) // each element is written by one goroutine
	put := func(files []int) error {
		for _, i := range files {
			if err := r.VerifyFile(ctx, i); err != nil { // and so all of these stay open
				return err
			}
		}
		for _, i := range files {
			if err := putFile(ctx, a.bucket, r, prefix, i); err != nil {
				return err
			}
			there[i] = true
		}
		return nil
	}
	if a.Others == nil {
		return put(indices(len(m.Files)))
	}
	sharing, cancel := context.WithCancel(ctx)
	defer cancel()
	shares := share(m.Files, a.Others.Self)
	var work sync.WaitGroup
	for machine, files := range shares {
		if machine != a.Others.Self {
			work.Go(func() {
				for _, i := range a.Others.Put(sharing, machine, prefix, &m, files) {
					there[i] = true
				}
			})
		}
	}
	err := put(slices.DeleteFunc(shares[a.Others.Self], func(i int) bool {
		has, _ := checkpoint.Has(ctx, dir, &m, i, false)
		return !has // it was removed, and is fetched again
	}))
	if err != nil {
		cancel()
	}
	if work.Wait(); err != nil {
		return err
	}
	if left := slices.DeleteFunc(indices(len(m.Files)), func(i int) bool { return there[i] }); len(left) > 0 {
		if err := a.Others.Fetch(ctx, &m, left); err != nil {
			return err
		}
		return put(left)
	}
	return nil
}

func indices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// share returns which machine is to copy which files: of those that have a file, the one with the fewest bytes so far, and of these the
// first, which has written it. Files that are only here are self's.
func share(files []checkpoint.File, self string) map[string][]int {
	shares := make(map[string][]int)
	bytes := make(map[string]int64)
	for i, f := range files {
		to := self
		for k, h := range f.Hosts {
			if k == 0 || bytes[h] < bytes[to] {
				to = h
			}
		}
		shares[to] = append(shares[to], i)
		bytes[to] += f.Size
	}
	return shares
}

package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// name gives the claim the names of what it needs.
func (a *Archive) name(ctx context.Context) error {
	list, err := json.Marshal(a.claim.Data)
	if err != nil {
		return err
	}
	a.claim.DataList = fmt.Sprintf("data/%s.json", sumOf(list))
	return a.describeFirst(ctx)
}

// names adds the names of what the claim needs.
func (c Claim) names(to map[string]bool) {
	to[c.DataList] = true
	if c.First != "" {
		to[firstName(c.First)] = true
	}
}

// place copies what the claim needs to the bucket, unless it is there.
func (a *Archive) place(ctx context.Context) error {
	there, err := a.bucket.List(ctx, "data/")
	if err != nil {
		return err
	}
	if !slices.Contains(there, a.claim.DataList) {
		list, err := json.Marshal(a.claim.Data)
		if err != nil {
			return err
		}
		if err := a.bucket.Put(ctx, a.claim.DataList, bytes.NewReader(list), int64(len(list))); err != nil {
			return err
		}
	}
	if a.claim.First == "" {
		return nil
	}
	if there, err = a.bucket.List(ctx, "first/"); err != nil || slices.Contains(there, firstName(a.claim.First)) {
		return err
	}
	return a.putFirst(ctx)
}

// pruneNamed removes the lists of data files and the first values that are not named.
func (a *Archive) pruneNamed(ctx context.Context, named map[string]bool) error {
	for _, kind := range []struct{ folder, suffix string }{{"data/", ".json"}, {"first/", ".pt"}} {
		names, err := a.bucket.List(ctx, kind.folder)
		if err != nil {
			return err
		}
		for _, name := range names {
			sum := strings.TrimSuffix(strings.TrimPrefix(name, kind.folder), kind.suffix)
			if b, err := hex.DecodeString(sum); err != nil || len(b) != sha256.Size || kind.folder+sum+kind.suffix != name || named[name] {
				continue // not this package's, or needed
			}
			if err := a.own(ctx); err != nil { // a newer claim may name it
				return err
			}
			if err := a.bucket.Delete(ctx, name); err != nil {
				return err
			}
		}
	}
	return nil
}

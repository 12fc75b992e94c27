package archive

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/soliton-train/soliton/internal/store/rundir"
)

// describeFirst describes the first values in the claim, if the run has any.
func (a *Archive) describeFirst(ctx context.Context) error {
	if a.claim.FirstFile == "" {
		return nil
	}
	file, err := rundir.Open(a.claim.FirstFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	sum := sha256.New()
	if a.claim.FirstSize, err = io.Copy(sum, rundir.WithContext(ctx, file)); err != nil {
		return err
	}
	a.claim.First = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// putFirst copies the first values to the bucket, if this host has them.
func (a *Archive) putFirst(ctx context.Context) error {
	file, err := rundir.Open(a.claim.FirstFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	return a.bucket.Put(ctx, firstName(a.claim.First), file, a.claim.FirstSize)
}

func firstName(sum string) string { return fmt.Sprintf("first/%s.pt", sum) }

// errAltered means that first values are not those of the claim.
var errAltered = errors.New("it is not what the run has saved")

// FetchFirst copies the first values of the run of a claim, if it has any, to a path, and returns why they cannot be used.
func FetchFirst(ctx context.Context, b Bucket, c Claim, path string) (refused string, err error) {
	if c.First == "" {
		return "", nil
	}
	name := firstName(c.First)
	if sum, wrong := hex.DecodeString(c.First); wrong != nil || len(sum) != sha256.Size || c.FirstSize < 0 {
		err = errAltered
	} else {
		err = c.fetchFirst(ctx, b, name, path)
	}
	if errors.Is(err, errAltered) || errors.Is(err, ErrMissing) {
		return fmt.Sprintf("%s: %v", name, err), nil
	}
	if err != nil {
		err = fmt.Errorf("%s: %s: %w", b, name, err)
	}
	return "", err
}

func (c *Claim) fetchFirst(ctx context.Context, b Bucket, name, path string) error {
	from, err := b.Get(ctx, name)
	if err != nil {
		return err
	}
	defer from.Close()
	file, err := rundir.NewFile(path)
	if err != nil {
		return err
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(file, sum), rundir.WithContext(ctx, io.LimitReader(from, c.FirstSize+1)))
	if err == nil && (n != c.FirstSize || hex.EncodeToString(sum.Sum(nil)) != c.First) {
		err = errAltered
	}
	if err != nil {
		file.Discard()
		return err
	}
	return file.Commit()
}

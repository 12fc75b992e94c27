// Package archive keeps the checkpoints of a run in a place outside of its run directory: a folder, or a bucket of an object store. What
// is there is enough to resume the run on an empty machine.
//
// Below the place:
//
//	claims/00000003.json                          generation 3 of the run: its job, and the step after which it began
//	data/SHA256.json                              the list of data files, of the claims that name it
//	first/SHA256.pt                               first values of a Python program, of the claims that name them
//	shards/step-00000040/00000003-ab12…/NAME      files of a checkpoint, in one attempt to copy it, and skips.jsonl as it was then
//	manifests/step-00000040.00000003.json         the checkpoint: its manifest, which attempt, and the digest of skips.jsonl
//
// A claim and a manifest are created only if they are not there, so each has one author. Every start of a run claims the next generation.
// A manifest comes last, after all files of its attempt, so what it names is whole. A generation that finds a newer claim publishes no
// more; what it publishes at the same moment does not count: of an older generation, only steps up to those after which all newer
// ones began do. Whatever is read is checked as a checkpoint on disk is, by package checkpoint.
//
// What is kept of data/ and first/ is what the newest claim names, and the claims under which the kept checkpoints were made. A machine
// may claim a generation with a list that is being removed by the one before, so a claim's author looks for what the claim names
// once it is made, and again with each checkpoint.
package archive

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Bucket is a place for objects, which have names with slashes. Its methods are safe for concurrent use, and end soon after ctx does.
type Bucket interface {
	// Put writes an object of size bytes. It appears only when it is whole.
	Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error
	// Create writes an object only if there is none of that name: the error wraps [ErrExists] if there is.
	Create(ctx context.Context, name string, content []byte) error
	// Get opens an object. The error wraps [ErrMissing] if there is none.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
	// List returns the names of the objects below a folder, whose name ends with a slash.
	List(ctx context.Context, folder string) ([]string, error)
	// Delete removes an object, if it is there.
	Delete(ctx context.Context, name string) error
	// String returns the place as the user knows it.
	String() string
}

// Errors of a [Bucket], and of an [Archive].
var (
	ErrExists  = errors.New("it is there already")
	ErrMissing = errors.New("it is not there")
	ErrStale   = errors.New("the run was resumed elsewhere, which publishes now")
	ErrNoRun   = errors.New("holds no run")
)

// Bounds of what is read.
const (
	maxClaim    = 16 << 20
	maxList     = 64 << 20
	maxManifest = checkpoint.MaxManifest + 64<<10
	maxNames    = 1 << 20
)

// Claim is a generation of a run.
type Claim struct {
	Generation int        `json:"generation"`
	Owner      string     `json:"owner"` // start of a run that has claimed it
	After      int        `json:"after"` // step after which it began
	Job        rundir.Job `json:"job"`
	DataList   string     `json:"data"` // name of the object with what data.json has

	// Of a Python program: SHA-256 and size of its first values. First is "" for another program.
	First     string `json:"first,omitempty"`
	FirstSize int64  `json:"first_size,omitempty"`

	Data      []rundir.DataFile `json:"-"`
	FirstFile string            `json:"-"` // path of the first values, which need not be there
}

// published is an object of manifests/.
type published struct {
	Prefix   string  `json:"prefix"` // of the names of the files
	Manifest []byte  `json:"manifest"`
	Skips    *ledger `json:"skips,omitempty"` // nil where the run had skipped no sample

	name       string
	generation int
	manifest   *checkpoint.Manifest
}

// ledger describes the object with the samples that the run had skipped when the checkpoint was copied: lines of [rundir.Skip].
type ledger struct {
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// skipsName ends the name of that object.
const skipsName = "skips.jsonl"

// Archive publishes the checkpoints of one start of a run. Its methods are called by one goroutine at a time.
type Archive struct {
	// Others are the machines that have files of the checkpoints as well. Nil where all files are in the run directory.
	Others *Others

	bucket Bucket
	claim  Claim
	at     int  // generation; 0 before it is claimed
	stale  bool // for ever
}

// New returns the archive of a start of a run, which claim describes without its generation.
func New(b Bucket, claim Claim) *Archive { return &Archive{bucket: b, claim: claim} }

// Save copies the checkpoint of a step, which is whole in the run directory dir, and removes those that keep does not choose. The error
// wraps [ErrStale] when another start of the run has claimed a newer generation: then no try can succeed.
func (a *Archive) Save(ctx context.Context, dir string, step int, keep checkpoint.Keep) error {
	err := a.save(ctx, dir, step, keep)
	if err != nil {
		return fmt.Errorf("%s: %w", a.bucket, err)
	}
	return nil
}

func (a *Archive) save(ctx context.Context, dir string, step int, keep checkpoint.Keep) error {
	if err := a.own(ctx); err != nil {
		return err
	}
	name := fmt.Sprintf("manifests/step-%08d.%08d.json", step, a.at)
	r, err := checkpoint.At(dir, a.claim.Job.Eras(), step)
	if err != nil {
		return err
	}
	defer r.Close()
	m := r.Manifest()
	p := published{Prefix: prefixOf(step, a.at)}
	if p.Manifest, err = m.Encode(); err != nil {
		return err
	}
	if err := a.putFiles(ctx, dir, r, p.Prefix); err != nil {
		return err
	}
	skips, err := rundir.SkipLines(dir)
	if err != nil {
		return err
	}
	if len(skips) > 0 {
		p.Skips = &ledger{Size: int64(len(skips)), SHA256: sumOf(skips)}
		if err := a.bucket.Put(ctx, p.Prefix+skipsName, bytes.NewReader(skips), p.Skips.Size); err != nil {
			return fmt.Errorf("%s: %w", skipsName, err)
		}
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := a.own(ctx); err != nil {
		return err
	}
	if err := a.bucket.Create(ctx, name, text); err != nil && !errors.Is(err, ErrExists) { // it may be this one's, whose answer was lost
		return err
	}
	return a.prune(ctx, step, keep)
}

// Own claims a generation for this start of the run, unless it has one. It is what [Archive.Save] begins with.
func (a *Archive) Own(ctx context.Context) error {
	if err := a.own(ctx); err != nil {
		return fmt.Errorf("%s: %w", a.bucket, err)
	}
	return nil
}

// own claims a generation, or checks that no newer one is claimed.
func (a *Archive) own(ctx context.Context) error {
	if a.stale {
		return ErrStale
	}
	taken := 0 // a generation that could not be claimed because it is there
	for {
		all, err := generations(ctx, a.bucket)
		if err != nil {
			return err
		}
		newest := 0
		if len(all) > 0 {
			newest = all[len(all)-1]
		}
		switch {
		case a.at > 0 && newest > a.at:
			a.stale = true
			return ErrStale
		case a.at > 0:
			return nil
		case newest < taken:
			return fmt.Errorf("%s is there, and is no file: remove it, or give another target", claimName(taken))
		}
		// Another host of this run may have claimed for it.
		for _, g := range slices.Backward(all) {
			c, err := readClaim(ctx, a.bucket, g)
			if err != nil {
				return err
			}
			if c.Owner == a.claim.Owner {
				a.at = g
				a.claim.DataList, a.claim.First, a.claim.FirstSize = c.DataList, c.First, c.FirstSize
				break
			}
			if g <= newest-maxOwners {
				break
			}
		}
		if a.at > 0 {
			continue
		}
		a.claim.Generation = newest + 1
		if err := a.name(ctx); err != nil {
			return fmt.Errorf("claim: %w", err)
		}
		if err := a.place(ctx); err != nil {
			return fmt.Errorf("claim: %w", err)
		}
		text, err := json.Marshal(a.claim)
		if err != nil {
			return err
		}
		err = a.bucket.Create(ctx, claimName(a.claim.Generation), text)
		if err == nil {
			a.at = a.claim.Generation
			err = a.place(ctx) // once more: see the package comment
		} else if errors.Is(err, ErrExists) {
			taken, err = a.claim.Generation, nil
		}
		if err != nil {
			return fmt.Errorf("claim: %w", err)
		}
	}
}

// maxOwners is how many claims are read to find this run's.
const maxOwners = 8

// prune removes what is not needed any more. Of the newest generation, which this is, another attempt may not be under way.
func (a *Archive) prune(ctx context.Context, step int, keep checkpoint.Keep) error {
	claims, err := generations(ctx, a.bucket)
	if err != nil {
		return err
	}
	all, by, _, err := manifests(ctx, a.bucket, claims)
	if err != nil {
		return err
	}
	var whole []checkpoint.Manifest
	for _, p := range all {
		whole = append(whole, *p.manifest)
	}
	kept := make(map[string]bool)  // prefixes
	named := make(map[string]bool) // what the claims of these name
	for i, stays := range keep.Choose(whole) {
		if stays {
			kept[all[i].Prefix] = true
			by[all[i].generation].names(named)
		} else if err := a.bucket.Delete(ctx, all[i].name); err != nil {
			return err
		}
	}
	names, err := a.bucket.List(ctx, "shards/")
	if err != nil {
		return err
	}
	for _, name := range names {
		var at, generation int
		prefix := path.Dir(name) + "/"
		if _, err := fmt.Sscanf(prefix, "shards/step-%d/%d-", &at, &generation); err != nil || kept[prefix] || generation > a.at {
			continue
		}
		if err := a.bucket.Delete(ctx, name); err != nil {
			return err
		}
	}
	for g, c := range by {
		if g >= a.at {
			c.names(named)
		}
	}
	if err := a.pruneNamed(ctx, named); err != nil {
		return err
	}
	return a.place(ctx)
}

// Newest returns the newest claim of a place. The error wraps [ErrNoRun] if there is none.
func Newest(ctx context.Context, b Bucket) (Claim, error) {
	all, err := generations(ctx, b)
	if err != nil {
		return Claim{}, fmt.Errorf("%s: %w", b, err)
	}
	if len(all) == 0 {
		return Claim{}, fmt.Errorf("%s: %w", b, ErrNoRun)
	}
	c, err := readClaim(ctx, b, all[len(all)-1])
	if err != nil {
		return Claim{}, fmt.Errorf("%s: %w", b, err)
	}
	list, err := read(ctx, b, c.DataList, maxList)
	if err == nil {
		err = json.Unmarshal(list, &c.Data)
	}
	if err != nil {
		return Claim{}, fmt.Errorf("%s: %s: %w", b, c.DataList, err)
	}
	return c, nil
}

// Fetched is what [Fetch] has found.
type Fetched struct {
	Step    int      // of the checkpoint; 0 if there is none
	Refused []string // why newer ones were not used

	// Skips are the lines of the samples that the run has skipped: as the newest checkpoint has them, even if its files are damaged and
	// an older one is used.
	Skips []byte
}

// Fetch copies the newest whole checkpoint of the run of a claim into the run directory dir, or that of a step above 0.
func Fetch(ctx context.Context, b Bucket, c Claim, dir string, step int) (f Fetched, err error) {
	claims, err := generations(ctx, b)
	if err != nil {
		return f, fmt.Errorf("%s: %w", b, err)
	}
	all, _, refused, err := manifests(ctx, b, claims)
	if f.Refused = refused; err != nil {
		return f, fmt.Errorf("%s: %w", b, err)
	}
	for _, p := range all {
		m := p.manifest
		if step > 0 && m.Step != step {
			continue
		}
		if !c.Job.Eras().Has(m.Job, m.Step) {
			f.Refused = append(f.Refused, fmt.Sprintf("%s: %v", p.name, errForeign))
			continue
		}
		if f.Skips == nil {
			f.Skips, err = p.skips(ctx, b)
		}
		if err == nil {
			err = p.fetch(ctx, b, dir)
		}
		if err == nil {
			f.Step = m.Step
			return f, nil
		}
		if ctx.Err() != nil {
			return f, err
		}
		var bad *checkpoint.Error
		if !errors.As(err, &bad) && !errors.Is(err, ErrMissing) && !errors.Is(err, errDigest) {
			return f, fmt.Errorf("%s: %w", b, err)
		}
		f.Refused = append(f.Refused, fmt.Sprintf("%s: %v", p.name, err))
		err = nil
	}
	return f, nil
}

// errForeign says that a checkpoint is not of the run of the newest claim.
var errForeign = errors.New("it is of another job")

// errDigest says that skips.jsonl is not what the manifest says.
var errDigest = errors.New("it has not the digest of the manifest")

// skips reads the lines of the skipped samples, nil for none.
func (p *published) skips(ctx context.Context, b Bucket) ([]byte, error) {
	if p.Skips == nil {
		return nil, nil
	}
	lines, err := read(ctx, b, p.Prefix+skipsName, rundir.MaxSkipLines)
	if err == nil && (int64(len(lines)) != p.Skips.Size || sumOf(lines) != p.Skips.SHA256) {
		err = errDigest
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", skipsName, err)
	}
	return lines, nil
}

func sumOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// fetch copies a checkpoint.
func (p *published) fetch(ctx context.Context, b Bucket, dir string) error {
	m := *p.manifest
	m.Files = slices.Clone(m.Files)
	for i := range m.Files {
		m.Files[i].Hosts = nil // all are here
		from, err := b.Get(ctx, p.Prefix+m.Files[i].Name)
		if err != nil {
			return fmt.Errorf("%s: %w", m.Files[i].Name, err)
		}
		err = checkpoint.Receive(ctx, dir, &m, i, from)
		if err := errors.Join(err, from.Close()); err != nil {
			return err
		}
	}
	return checkpoint.Commit(dir, m)
}

func claimName(generation int) string { return fmt.Sprintf("claims/%08d.json", generation) }

// generations returns the claimed ones, in ascending order.
func generations(ctx context.Context, b Bucket) (all []int, err error) {
	names, err := b.List(ctx, "claims/")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		var g int
		if _, err := fmt.Sscanf(name, "claims/%d.json", &g); err == nil && g > 0 && name == claimName(g) {
			all = append(all, g)
		}
	}
	slices.Sort(all)
	return all, nil
}

func readClaim(ctx context.Context, b Bucket, generation int) (c Claim, err error) {
	text, err := read(ctx, b, claimName(generation), maxClaim)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err == nil && c.Generation != generation {
		err = fmt.Errorf("it is of generation %d", c.Generation)
	}
	if err != nil {
		return c, fmt.Errorf("%s: %w", claimName(generation), err)
	}
	c.Job = c.Job.Plain()
	return c, nil
}

// manifests returns the checkpoints that count, the newest first, the claims by generation, and what is wrong with other checkpoints.
func manifests(ctx context.Context, b Bucket, claims []int) (all []published, by map[int]Claim, refused []string, err error) {
	names, err := b.List(ctx, "manifests/")
	if err != nil {
		return nil, nil, nil, err
	}
	by = make(map[int]Claim)
	limit := make(map[int]int) // newest step of a generation that counts, where there is a limit
	least := -1
	for _, g := range slices.Backward(claims) {
		if least >= 0 {
			limit[g] = least
		}
		c, err := readClaim(ctx, b, g)
		if err != nil {
			return nil, nil, nil, err
		}
		by[g] = c
		if least < 0 || c.After < least {
			least = c.After
		}
	}
	for _, name := range names {
		var step, generation int
		if _, err := fmt.Sscanf(name, "manifests/step-%d.%d.json", &step, &generation); err != nil || !slices.Contains(claims, generation) {
			continue
		}
		if most, limited := limit[generation]; limited && step > most {
			continue // published by a run that was resumed elsewhere
		}
		text, err := read(ctx, b, name, maxManifest)
		if errors.Is(err, ErrMissing) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, nil, nil, err
		}
		p := published{name: name, generation: generation}
		if err = json.Unmarshal(text, &p); err == nil {
			p.manifest, err = checkpoint.ParseManifest(p.Manifest)
		}
		if err == nil && (p.manifest.Step != step || !strings.HasPrefix(p.Prefix, fmt.Sprintf("shards/step-%08d/", step)) || path.Clean(p.Prefix)+"/" != p.Prefix) {
			err = errors.New("it is of another step")
		}
		if err != nil {
			refused = append(refused, fmt.Sprintf("%s: %v", name, err))
			continue
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b published) int { return cmp.Or(b.manifest.Step-a.manifest.Step, b.generation-a.generation) })
	return all, by, refused, nil
}

// read reads a small object.
func read(ctx context.Context, b Bucket, name string, most int64) ([]byte, error) {
	r, err := b.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var text bytes.Buffer
	if n, err := io.Copy(&text, io.LimitReader(r, most+1)); err != nil || n > most {
		return nil, cmp.Or(err, fmt.Errorf("%s has more than %d bytes", name, most))
	}
	return text.Bytes(), nil
}
